"""Which machine the kernels are made for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import triton

INTERPRETER = 0  # the arch of CPU tensors: an interpreter runs the kernels there

_pretended: int | None = None


def arch_of(tensor: torch.Tensor) -> int:
    """80, 90, 100, ...: ten times the compute capability of the tensor's device; `INTERPRETER` for a CPU tensor."""
    if _pretended is not None:
        return _pretended
    return _capability(tensor.device) if tensor.is_cuda else INTERPRETER


@cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def interpreted() -> bool:
    """Whether this process runs kernels on CPU tensors: TRITON_INTERPRET=1 was set before Triton was imported."""
    return not isinstance(triton.language.sum, triton.JITFunction)


@contextmanager
def pretending(arch: int) -> Iterator[None]:
    """Choose tiles as on that architecture, whatever the tensors are on: to compile for it, or to test its tiles."""
    global _pretended
    before, _pretended = _pretended, arch
    try:
        yield
    finally:
        _pretended = before
