"""The shapes that benchmarks and tests share, and the goals set for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.operation import CHECKPOINT, EAGER, Bar

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OURS = "fused_remat"


@dataclass(frozen=True)
class MLPCase:
    """`rows` token rows M, `width` D, `hidden` F. Plain MLPs have biases, gated ones have none."""

    rows: int
    width: int
    hidden: int
    gated: bool = False
    dtype: torch.dtype = torch.float32
    activation: str = "gelu"
    bars: Sequence[Bar] = ()

    @property
    def name(self) -> str:
        kind = "gated" if self.gated else "plain"
        dtype = next(name for name, dtype in DTYPES.items() if dtype == self.dtype)
        return f"{kind}-{self.rows}x{self.width}x{self.hidden}-{self.activation}-{dtype}"

    @property
    def gemm_flop(self) -> int:
        """2 M D F."""
        return 2 * self.rows * self.width * self.hidden

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one [M, F] tensor."""
        return self.rows * self.hidden * self.dtype.itemsize

    def with_dtype(self, dtype: torch.dtype) -> MLPCase:
        return replace(self, dtype=dtype, bars=self.bars if dtype == self.dtype else ())

    def config(self) -> dict[str, Any]:
        return {
            "M": self.rows,
            "D": self.width,
            "F": self.hidden,
            "gated": self.gated,
            "activation": self.activation,
            "dtype": str(self.dtype).removeprefix("torch."),
        }


# Goals for two cores at the default workspace.
MLP_CASES = (
    MLPCase(4096, 768, 3072, bars=(Bar(OURS, EAGER, 1.10), Bar(OURS, CHECKPOINT, 0.95))),
    MLPCase(8192, 256, 1024, bars=(Bar(OURS, EAGER, 1.00), Bar(OURS, CHECKPOINT, 0.95))),
    MLPCase(4096, 512, 1408, gated=True, activation="silu", bars=(Bar(OURS, EAGER, 1.25), Bar(OURS, CHECKPOINT, 1.00))),
    # For a CPU without bf16 units, where the library's bf16 product is 25 times slower than its fp32 one.
    MLPCase(1024, 256, 1024, dtype=torch.bfloat16, bars=(Bar(OURS, EAGER, 0.10),)),
)
MLP_QUICK_CASES = (
    MLPCase(512, 128, 512),
    MLPCase(512, 128, 352, gated=True, activation="silu"),
)


def parse_mlp(text: str, dtype: torch.dtype | None, activation: str | None) -> MLPCase:
    """`M,D,F` or `gated:M,D,F` as a case. A shape of `MLP_CASES` brings its goals along unless something else differs.

    Raises:
        ValueError: the text is not of that form.
    """
    sizes, gated = text.removeprefix("gated:"), text.startswith("gated:")
    parts = sizes.split(",")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"expected M,D,F or gated:M,D,F with three whole numbers above 0, got {text!r}")
    case = MLPCase(
        *map(int, parts),
        gated=gated,
        dtype=dtype or torch.float32,
        activation=activation or ("silu" if gated else "gelu"),
    )
    return next((known for known in MLP_CASES if replace(known, bars=()) == case), case)
