"""The Triton kernels. Importing this imports Triton; nothing else of the package does, and that only when wanted."""

from __future__ import annotations

import re

import torch
import triton

from fused_remat.triton import targets

OLDEST_TRITON = (3, 6)
OLDEST_ARCH = 80
_VERSION = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])


def why_not(device: str, dtype: torch.dtype, arch: int | None) -> list[str]:
    """What speaks against running these kernels, apart from what speaks against every compiled backend.

    `device` is a device type, `arch` ten times the compute capability of a CUDA device.
    """
    reasons = []
    if _VERSION < OLDEST_TRITON:
        reasons.append(f"Triton {triton.__version__} is older than {'.'.join(map(str, OLDEST_TRITON))}")
    if device == "cpu":
        reasons += _why_not_interpreted(dtype)
    elif device != "cuda" or torch.version.hip:
        reasons.append(f"the kernels are made for NVIDIA GPUs, the tensors are on {device}")
    elif targets.interpreted():
        reasons.append("TRITON_INTERPRET is set, and the interpreter is for tensors on cpu; unset it")
    elif arch is not None and arch < OLDEST_ARCH:
        reasons.append(f"compute capability {arch / 10} is below {OLDEST_ARCH / 10}")
    return reasons


def _why_not_interpreted(dtype: torch.dtype) -> list[str]:
    if not targets.interpreted():
        return ["Triton was imported before TRITON_INTERPRET=1 was set; set it before the process starts"]
    if dtype == torch.bfloat16 and not targets.interpreter_multiplies(dtype):
        return ["Triton's interpreter multiplies the bits of bfloat16 numbers instead of their values"]
    return []
