"""Which machine the kernels are made for, and what an interpreter there can do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import triton
import triton.language as tl

from fused_remat import _triton

INTERPRETER = 0  # the arch of CPU tensors: an interpreter runs the kernels there

_pretended: int | None = None


def arch_of(tensor: torch.Tensor) -> int:
    """80, 90, 100, ...: ten times the compute capability of the tensor's device; `INTERPRETER` for a CPU tensor."""
    if _pretended is not None:
        return _pretended
    return _triton.arch_of(tensor.device) or INTERPRETER


def interpreted() -> bool:
    """Whether this process runs kernels on CPU tensors: TRITON_INTERPRET=1 was set before Triton was imported."""
    return not isinstance(tl.sum, triton.JITFunction)


@cache
def interpreter_multiplies(dtype: torch.dtype) -> bool:
    """Whether the interpreter's matrix products are right in that dtype: found by one product of small integers."""
    a, out = torch.arange(16 * 16).remainder(5).sub(2).view(16, 16), torch.empty(16, 16)
    _product[(1,)](a.to(dtype), a.to(dtype), out, SIZE=16)
    return torch.equal(out, (a @ a).float())


@triton.jit
def _product(a, b, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@contextmanager
def pretending(arch: int) -> Iterator[None]:
    """Choose tiles as on that architecture, whatever the tensors are on: to compile for it, or to test its tiles."""
    global _pretended
    before, _pretended = _pretended, arch
    try:
        yield
    finally:
        _pretended = before
