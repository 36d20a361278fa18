"""What the tests on a GPU share."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fused_remat import _extension, dispatch, ops
from fused_remat.check.cases import Case, Sizes

# By name, so that a run without a device says what it did not do.
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(ops.ready() is not None, reason=f"the compiled extension is not available: {ops.ready()}"),
]
if torch.cuda.is_available():
    _extension.load_cuda()  # may compile; where it cannot, the backend "cuda" has its reason
FAST = [name for name in dispatch.BACKENDS if name not in ("cpp", "reference")]
GIB = 2**30


def step(case: Case, tensors: dict[str, torch.Tensor], sizes: Sizes) -> list[torch.Tensor]:
    """Outputs and gradients."""
    outputs = case.function(**case.arguments(tensors, sizes))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [t for t in tensors.values() if t.requires_grad]
    gradients = torch.autograd.grad(outputs, wanted, [torch.ones_like(o) for o in outputs])
    return [*(o.detach() for o in outputs), *gradients]


def captured(call: Callable[[], list[torch.Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """A graph of what `call` does, and its results, which a replay writes. Runs it once before, on another stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def kernels_of(call: Callable[[], object]) -> list[str]:
    """Names of the kernels that `call()` ran, compiled by now; skips where the driver tells of none."""
    torch.zeros(8, device="cuda")
    names = _traced(lambda: (torch.ones(8, device="cuda").add_(1), call()))
    if not names:
        pytest.skip("torch.profiler sees no kernels here: CUPTI is missing or may not be used")
    return names[2:]


def _traced(call: Callable[[], object]) -> list[str]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as trace:
        call()
        torch.cuda.synchronize()
    events = sorted(trace.events(), key=lambda event: event.time_range.start)
    return [
        event.name
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    ]


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
