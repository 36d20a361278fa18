"""What oneDNN, to which torch hands much of its work on the CPU, does on this processor.

It has kernels for several sets of instructions and takes the first of its list that fits a call. Their blocks are read
off what it says of itself (ONEDNN_VERBOSE=1).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from fused_remat.recording._torch import processor_knows


@dataclass(frozen=True)
class Kernels:
    """What convolutions in fp32 take."""

    block: int  # channels
    blocks_in_groups: tuple[int, ...]  # channels, of which those of every group must be a multiple
    widest: int  # kernel of the weights' gradient that works on blocks


AVX2 = Kernels(8, (8,), widest=13)
AVX512 = Kernels(16, (16, 8, 4), widest=14)


def kernels() -> Kernels | None:
    """Of this processor, within oneDNN's limit in the environment; None where they are not known here."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    if limit in ("SSE41", "AVX") or not processor_knows("avx2"):
        return None
    return AVX512 if processor_knows("avx512") and not limit.startswith("AVX2") else AVX2


def is_on() -> bool:
    """Whether torch has it and uses it."""
    return bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)


def computes(dtype: torch.dtype) -> bool:
    """Whether torch gives it work in this dtype, as far as the processor is concerned."""
    if dtype in (torch.bfloat16, torch.float16):
        half = "bf16" if dtype == torch.bfloat16 else "fp16"
        return is_on() and bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{half}_supported")())
    return is_on() and dtype == torch.float32
