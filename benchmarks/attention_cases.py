"""The shapes of the attention benchmarks and the goals set for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar

import torch

from benchmarks.cases import DTYPES, OURS
from benchmarks.operation import CHECKPOINT, EAGER, Bar

STOCK, STOCK_WEIGHTS = "nn.MHA", "nn.MHA-weights"


@dataclass(frozen=True)
class CoreCase:
    """Attention from q, k and v [`batch` B, `heads` H, `length` L, `width` E]."""

    batch: int
    heads: int
    length: int
    width: int
    causal: bool = False
    dropout_p: float = 0.0
    dtype: torch.dtype = torch.float32
    bars: Sequence[Bar] = ()

    @property
    def name(self) -> str:
        return _name(self, (self.batch, self.heads, self.length, self.width))

    @property
    def gemm_flop(self) -> int:
        """2 B H L L E."""
        return 2 * self.batch * self.heads * self.length**2 * self.width

    def with_dtype(self, dtype: torch.dtype) -> CoreCase:
        return _with_dtype(self, dtype)

    def config(self) -> dict[str, Any]:
        return {"B": self.batch, "H": self.heads, "L": self.length, "E": self.width, **_config(self)}


@dataclass(frozen=True)
class BlockCase:
    """Self-attention from x [`batch` B, `length` L, `model` D] with `heads` H and biases, as nn.MultiheadAttention."""

    batch: int
    length: int
    model: int
    heads: int
    causal: bool = False
    dropout_p: float = 0.0
    dtype: torch.dtype = torch.float32
    bars: Sequence[Bar] = ()

    @property
    def name(self) -> str:
        return _name(self, (self.batch, self.length, self.model, self.heads))

    @property
    def gemm_flop(self) -> int:
        """2 B L D D."""
        return 2 * self.batch * self.length * self.model**2

    @property
    def unit_bytes(self) -> int:
        """U: bytes of one [B, L, D] tensor."""
        return self.batch * self.length * self.model * self.dtype.itemsize

    def with_dtype(self, dtype: torch.dtype) -> BlockCase:
        return _with_dtype(self, dtype)

    def config(self) -> dict[str, Any]:
        return {"B": self.batch, "L": self.length, "D": self.model, "H": self.heads, **_config(self)}


Case = TypeVar("Case", CoreCase, BlockCase)


def _name(case: CoreCase | BlockCase, sizes: Iterable[int]) -> str:
    dtype = next(name for name, dtype in DTYPES.items() if dtype == case.dtype)
    dropout = f"-p{case.dropout_p:g}" if case.dropout_p else ""
    return f"{'causal' if case.causal else 'full'}-{'x'.join(map(str, sizes))}{dropout}-{dtype}"


def _config(case: CoreCase | BlockCase) -> dict[str, Any]:
    dtype = str(case.dtype).removeprefix("torch.")
    return {"causal": case.causal, "dropout_p": case.dropout_p, "dtype": dtype}


def _with_dtype(case: Case, dtype: torch.dtype) -> Case:
    return replace(case, dtype=dtype, bars=case.bars if dtype == case.dtype else ())


def without_dropout(case: Case) -> Case:
    """The case that the gate compares: everyone draws dropout masks of their own."""
    return replace(case, dropout_p=0.0)


# Goals for two cores at the default workspace.
CORE_GOALS = {CoreCase(2, 8, 1024, 64, dropout_p=0.1): (Bar(OURS, EAGER, 0.35),)}
BLOCK_GOALS = {
    BlockCase(2, 1024, 512, 8): (Bar(OURS, EAGER, 1.10), Bar(OURS, CHECKPOINT, 0.90)),
    BlockCase(2, 1024, 512, 8, dropout_p=0.1): (Bar(OURS, STOCK, 0.50),),
}
# Twice as many tokens to a sample, half as many samples, where memory allows.
_LENGTHS = ((8, 128), (4, 512), (2, 1024), (1, 4096))
_SETTINGS = tuple(product((False, True), (0.0, 0.1)))


def _with_goals(case: Case) -> Case:
    return replace(case, bars=(CORE_GOALS if isinstance(case, CoreCase) else BLOCK_GOALS).get(case, ()))


CORE_CASES = tuple(_with_goals(CoreCase(b, 8, length, 64, *s)) for b, length in _LENGTHS for s in _SETTINGS)
BLOCK_CASES = tuple(_with_goals(BlockCase(b, length, 512, 8, *s)) for b, length in _LENGTHS for s in _SETTINGS)
CORE_QUICK_CASES = (CoreCase(1, 4, 256, 32), CoreCase(1, 4, 256, 32, causal=True, dropout_p=0.1))
BLOCK_QUICK_CASES = (BlockCase(1, 256, 128, 4), BlockCase(1, 256, 128, 4, causal=True, dropout_p=0.1))


def parse_core(text: str, dtype: torch.dtype | None, activation: str | None) -> CoreCase:
    """`[causal:]B,H,L,E[,p]` as a case, with the goals of that very case. Raises ValueError for another form."""
    return _parse(CoreCase, "B,H,L,E", text, dtype, activation)


def parse_block(text: str, dtype: torch.dtype | None, activation: str | None) -> BlockCase:
    """`[causal:]B,L,D,H[,p]` likewise; H must divide D."""
    case = _parse(BlockCase, "B,L,D,H", text, dtype, activation)
    if case.model % case.heads:
        raise ValueError(f"expected B,L,D,H with D a multiple of H, got {text!r}")
    return case


def _parse(kind: type[Case], form: str, text: str, dtype: torch.dtype | None, activation: str | None) -> Case:
    if activation is not None:
        raise ValueError(f"attention has no activation, got {activation!r}")
    causal, parts = text.startswith("causal:"), text.removeprefix("causal:").split(",")
    sizes, rest = parts[:4], parts[4:]
    whole = len(sizes) == 4 and all(part.isascii() and part.isdigit() and int(part) > 0 for part in sizes)
    if not whole or len(rest) > 1 or not 0.0 <= (p := _probability(rest)) < 1.0:
        raise ValueError(
            f"expected {form} or causal:{form} with four whole numbers above 0, and perhaps a dropout probability "
            f"below 1, got {text!r}"
        )
    return _with_goals(kind(*map(int, sizes), causal=causal, dropout_p=p, dtype=dtype or torch.float32))


def _probability(parts: Sequence[str]) -> float:
    try:
        return float(parts[0]) if parts else 0.0
    except ValueError:
        return -1.0
