"""What the tests on a GPU share."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fused_remat import dispatch, ops

# By name, so that a run without a device says what it did not do.
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(ops.ready() is not None, reason=f"the compiled extension is not available: {ops.ready()}"),
]
FAST = [name for name in dispatch.BACKENDS if name not in ("cpp", "reference")]
GIB = 2**30


@contextmanager
def alone(gib: float) -> Iterator[None]:
    """Holds the device's large memory against tests of other processes; skips where less than that is free then."""
    with open(Path(tempfile.gettempdir()) / "fused_remat_large_tests.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        free = torch.cuda.mem_get_info()[0] / GIB
        if free < gib:
            pytest.skip(f"needs {gib:.0f} GiB of GPU memory, {free:.0f} GiB are free")
        try:
            yield
        finally:
            torch.cuda.empty_cache()
