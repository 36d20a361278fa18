"""What the tests on a GPU share."""

from __future__ import annotations

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


def needs_memory(gib: float) -> None:
    """Skip the test where the device has less than that free."""
    free = torch.cuda.mem_get_info()[0] / GIB
    if free < gib:
        pytest.skip(f"needs {gib:.0f} GiB of GPU memory, {free:.0f} GiB are free")
