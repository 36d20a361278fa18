"""What the machine can still give."""

from __future__ import annotations

import contextlib
from pathlib import Path


def machine_bytes_free() -> int | None:
    """What the machine, or the control group of this process, can still give; None where nobody tells."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo") as lines:
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):  # version 2 of control groups; "max" is no number
        most, used = (Path("/sys/fs/cgroup", name).read_text() for name in ("memory.max", "memory.current"))
        found.append(int(most) - int(used))
    return min(found, default=None)
