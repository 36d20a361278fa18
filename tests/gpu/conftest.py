"""Tests on a GPU that run on each backend with kernels of its own for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fused_remat
from benchmarks.gpu_cases import GPU_BACKENDS
from fused_remat import dispatch
from fused_remat._triton import arch_of


@pytest.fixture(params=GPU_BACKENDS)
def each_gpu_backend(request) -> Iterator[str]:
    """Names the backend for the test; skips where it can run nothing."""
    arch = arch_of(torch.device("cuda"))
    call = dispatch.Call("mlp", "cuda", torch.bfloat16, "gelu", arch=arch)
    if reasons := dispatch.why_not(request.param, call):
        pytest.skip(f"{request.param}: {'; '.join(reasons)}")
    with fused_remat.backend(request.param):
        yield request.param
