"""Whether the Triton kernels can run a call, asked without importing Triton where the answer is plain."""

from __future__ import annotations

import importlib
import os
from functools import cache

import torch

from fused_remat import _extension

WIDEST_HEAD = 256  # a tile holds whole rows of q, k and v
FP64_ARCHITECTURES = (80, 90)  # for others some Tritons make no matrix instructions of float64, and spill


def arch_of(device: torch.device) -> int | None:
    """Ten times the compute capability of a CUDA device; None for another one, or where no GPU is."""
    return _capability(device.index) if device.type == "cuda" else None


@_extension.constant_when_traced
@cache
def _capability(index: int | None) -> int | None:
    # A tensor may claim to be on a GPU that is not there: a stand-in, for tracing or for estimating memory.
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


@_extension.constant_when_traced
def why_not(device: str, dtype: torch.dtype, arch: int | None) -> tuple[str, ...]:
    """The reasons against it; imports Triton only for a device that it could run on."""
    if device == "cpu" and not interpreter_wanted():
        return ("the tensors are on cpu, where only Triton's interpreter runs its kernels (TRITON_INTERPRET=1)",)
    try:
        kernels = importlib.import_module("fused_remat.triton")
    except ModuleNotFoundError as error:
        return (f"{error.name} is not installed",)
    except Exception as error:  # whatever a broken installation raises is what the user needs to read
        return (f"importing Triton fails ({type(error).__name__}: {error})",)
    return tuple(kernels.why_not(device, dtype, arch))


def allows_tf32() -> bool:
    """Whether the user lets float32 products be rounded to TF32, by either of torch's switches."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def interpreter_wanted() -> bool:
    """Whether the environment asks Triton to run its kernels on CPU tensors, by the words that Triton knows."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
