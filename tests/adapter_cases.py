"""What the tests of adapters on the MLP op share: operands with factors, and calls with and without them."""

from __future__ import annotations

from collections.abc import Iterable

import mlp_cases as cases
import torch
from torch import Tensor

from fused_remat import LowRank, reference

# Of each adapter: its rank, and its scale. All different, so that a mix-up changes numbers.
RANKS = {"up": 2, "gate": 3, "down": 1}
SCALES = {"up": 2.0, "gate": 0.5, "down": 1.5}
PLAIN = (("up",), ("down",), ("up", "down"))
GATED = (("up",), ("gate",), ("up", "gate"), ("down",), ("up", "gate", "down"))
SUBSETS = [(False, names) for names in PLAIN] + [(True, names) for names in GATED]


def operands(
    rows, width: int, hidden: int, out: int | None = None, *, adapted: Iterable[str], frozen: bool = False,
    factor_dtype: torch.dtype | None = None, ranks: dict[str, int] = RANKS, dtype: torch.dtype = torch.float64,
    **settings,
) -> dict[str, Tensor]:  # fmt: skip
    """`mlp_cases.operands` and the factors `up_a`, `up_b`, ... of the adapters named; `frozen` base weights."""
    made = cases.operands(rows, width, hidden, out, dtype=dtype, **settings)
    if frozen:
        for name, value in made.items():
            value.requires_grad_(name == "x")
    for name in adapted:
        fan_out, fan_in = made[f"w_{name}"].shape
        for factor, shape in (("a", (ranks[name], fan_in)), ("b", (fan_out, ranks[name]))):
            values = torch.randn(shape, dtype=torch.float64) * shape[1] ** -0.5
            made[f"{name}_{factor}"] = values.to(factor_dtype or dtype).requires_grad_()
    return made


def layer(values: dict[str, Tensor]) -> dict:
    """The same as arguments of `fused_remat.mlp`."""
    given = {name: value for name, value in values.items() if name[-2:] not in ("_a", "_b")}
    for name, scale in SCALES.items():
        if f"{name}_a" in values:
            given[f"{name}_adapter"] = LowRank(values[f"{name}_a"], values[f"{name}_b"], scale)
    return given


def run(values: dict[str, Tensor], **settings) -> Tensor:
    return cases.run(layer(values), **settings)


def run_reference(values: dict[str, Tensor], *, seed: int = 0, **settings) -> Tensor:
    torch.manual_seed(seed)
    return reference.mlp(**layer(values), **settings)


def trainable(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if value.requires_grad}


def gradients(y: Tensor, values: dict[str, Tensor], dy: Tensor) -> dict[str, Tensor]:
    """Of all that is trainable."""
    return cases.gradients(y, trainable(values), dy)


def weight_flop(values: dict[str, Tensor]) -> int:
    """FLOP of one product of all rows with w_up."""
    return 2 * values["x"].shape[:-1].numel() * values["w_up"].numel()
