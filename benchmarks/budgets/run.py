"""Start the compiling processes and collect what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def triton_version() -> str | None:
    """The version that is installed, without importing it; None without one."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None


def measure(jobs: int = 2, parts: Iterable[str] = ()) -> list[dict[str, Any]]:
    """What `compiled` prints, from that many processes, of the kernels whose key holds all `parts`.

    Raises:
        RuntimeError: a process failed; with the end of what it said.
    """
    with ThreadPoolExecutor(jobs) as pool:
        shards = pool.map(lambda shard: _run([f"{shard}/{jobs}", *parts]), range(jobs))
        rows = [row for shard in shards for row in shard]
    # In the order of the cases, whichever process had them.
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def _run(arguments: Sequence[str]) -> list[tuple[int, dict[str, Any]]]:
    # One thread: what is compiled at a time is for the number of processes to say.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    command = [sys.executable, "-m", "benchmarks.budgets.compiled", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}:\n{done.stderr[-4000:]}")
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]
