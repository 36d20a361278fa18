"""Tile configurations: one choice per (op, width, dtype, architecture, variant), never by trial runs.

The tables are in `attention_configs.py` and `mlp_configs.py`; `fused_remat.tune` may replace rows on one machine
(`tuning.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, TypeVar

import torch

from fused_remat._triton import allows_tf32

F = TypeVar("F", bound=Callable)


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
    key = (op, bucket, dtype_class(dtype), architecture_row(arch), variant)
    for seen in _askers:
        seen[key] = None
    return choose_row(key)


def choose_row(key: Key) -> Config:
    """The row that is in force for `key`: one being tried, one measured on this machine, or the table's."""
    op, bucket, precision, row, variant = key
    if key in _forced:
        return _forced[key]
    if row == 86 and key not in rows():
        key = (op, bucket, precision, 80, variant)
    return rows()[key]


@cache
def rows() -> dict[Key, Config]:
    """The tables, and over them what was measured on this machine."""
    # Not at the top: tables and measured rows are made of what this module defines.
    from fused_remat.triton import attention_configs, mlp_configs, tuning

    return attention_configs.TABLE | mlp_configs.TABLE | tuning.load()


@cache
def _buckets() -> dict[str, tuple[int, ...]]:
    widths: dict[str, set[int]] = {}
    for op, width, *_ in rows():
        widths.setdefault(op, set()).add(width)
    return {op: tuple(sorted(found)) for op, found in widths.items()}


_forced: dict[Key, Config] = {}
_askers: list[dict[Key, None]] = []
# Host functions cache their plans; each cache is here, to be cleared when other rows come into force.
_plans: list[Any] = []


def plan_cache(function: F) -> F:
    """`functools.lru_cache` for what depends on the rows in force."""
    cached = lru_cache(maxsize=4096)(function)
    _plans.append(cached)
    return cached


def _forget_plans() -> None:
    for plan in _plans:
        plan.cache_clear()


@contextmanager
def asked() -> Iterator[dict[Key, None]]:
    """The rows that are chosen inside the `with` block, in order, as keys of the dict."""
    keys: dict[Key, None] = {}
    _forget_plans()
    _askers.append(keys)
    try:
        yield keys
    finally:
        _askers.remove(keys)


@contextmanager
def forced(others: dict[Key, Config]) -> Iterator[None]:
    """Put these rows in force inside the `with` block."""
    global _forced
    before, _forced = _forced, others
    _forget_plans()
    try:
        yield
    finally:
        _forced = before
        _forget_plans()


def reload() -> None:
    """Read the measured rows again."""
    rows.cache_clear()
    _buckets.cache_clear()
    _forget_plans()
