"""Tile configurations: one choice per (op, width, dtype, architecture, variant), never by trial runs.

The tables are in `attention_configs.py` and `mlp_configs.py`; `fused_remat.tune` may override rows for one machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Config:
    """Tile sizes and launch options of a kernel. Which axes the blocks cut is said by the kernel."""

    block_m: int
    block_n: int
    block_k: int = 0
    num_warps: int = 8
    num_stages: int = 2
    tma: bool = False
    warp_specialize: bool = False


# (op, width bucket, dtype class, architecture, variant)
Key = tuple[str, int, str, int, str]


def dtype_class(dtype: torch.dtype) -> str:
    """ "half" has tensor cores, "tf32" too where it is allowed, "ieee" has none."""
    if dtype in (torch.float16, torch.bfloat16):
        return "half"
    return "tf32" if dtype == torch.float32 and allows_tf32() else "ieee"


def allows_tf32() -> bool:
    """Whether the user lets float32 products be rounded to TF32, by either of torch's switches."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def architecture_row(arch: int) -> int:
    """The architecture whose rows are used for `arch`: 0, 80, 86, 90 or 100.

    86 stands for GPUs with 99 KiB of shared memory a block and the tensor cores of 80, the newest of them included;
    what it has no row for fits it from 80.
    """
    if arch in (86, 89) or arch >= 120:
        return 86
    return max(row for row in (0, 80, 90, 100) if row <= arch)


def choose(op: str, width: int, dtype: torch.dtype, arch: int, variant: str) -> Config:
    """The tiles of a kernel: the row of the least width bucket that holds `width`; the same for the same arguments."""
    buckets = _buckets()[op]
    bucket = next((bucket for bucket in buckets if width <= bucket), buckets[-1])
    row, precision = architecture_row(arch), dtype_class(dtype)
    config = _table().get((op, bucket, precision, row, variant)) if row == 86 else None
    return config or _table()[op, bucket, precision, 80 if row == 86 else row, variant]


@cache
def _table() -> dict[Key, Config]:
    # Not at the top: the tables are made of this module's rows.
    from fused_remat.triton import attention_configs, mlp_configs

    return attention_configs.TABLE | mlp_configs.TABLE


@cache
def _buckets() -> dict[str, tuple[int, ...]]:
    widths: dict[str, set[int]] = {}
    for op, width, *_ in _table():
        widths.setdefault(op, set()).add(width)
    return {op: tuple(sorted(found)) for op, found in widths.items()}
