"""Tests of the CUDA C++ backend without a GPU: its sources, compiled for the host, run CPU tensors (`tests/simt`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from simt import build as simt_build

from fused_remat import _cuda, ops


@cache
def simt_library() -> ctypes.CDLL:
    """The library, loaded: its operators are registered for CPU tensors."""
    assert ops.ready() is None, ops.ready()
    path = simt_build.library()
    torch.ops.load_library(path)
    return ctypes.CDLL(str(path))


@pytest.fixture(autouse=True)
def cuda_on_cpu(monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """In these tests alone the backend "cuda" takes CPU tensors."""
    if (reason := simt_build.why_not()) is not None:
        pytest.skip(reason)
    library = simt_library()
    monkeypatch.setattr(_cuda, "on_cpu", True)
    return library


@pytest.fixture
def thread_order(cuda_on_cpu: ctypes.CDLL) -> Iterator[Callable[[int], None]]:
    """`thread_order(seed)` shuffles the order in which blocks and threads run; 0 is ascending, as without it."""
    set_order = cuda_on_cpu.simt_set_thread_order
    set_order.argtypes, set_order.restype = (ctypes.c_uint64,), None
    yield set_order
    set_order(0)


@pytest.fixture
def capability(cuda_on_cpu: ctypes.CDLL) -> Iterator[Callable[[int], None]]:
    """`capability(80)` makes host code see compute capability 8.0; without it, one that no CUTLASS kernel is for."""
    set_capability = cuda_on_cpu.simt_set_capability
    set_capability.argtypes, set_capability.restype = (ctypes.c_int,), None
    yield set_capability
    set_capability(0)


@pytest.fixture
def own_attention() -> Iterator[None]:
    """Attention by our own kernels, also where torch has some for the call."""
    cuda = torch.backends.cuda
    switches = ("flash_sdp", "mem_efficient_sdp", "cudnn_sdp")
    before = {name: getattr(cuda, f"{name}_enabled")() for name in switches}
    for name in switches:
        getattr(cuda, f"enable_{name}")(False)
    yield
    for name, enabled in before.items():
        getattr(cuda, f"enable_{name}")(enabled)
