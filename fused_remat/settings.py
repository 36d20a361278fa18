"""Checks of the settings that modules, conversion and functional calls share: one message per mistake."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fused_remat.activations import ACTIVATIONS

Keep = tuple[str, ...] | float


@dataclass(frozen=True)
class Norm:
    """A norm over the last dim that a fused op applies to its input, and rebuilds in backward instead of keeping.

    `kind`: "layer_norm" (Ba et al. 2016) or "rms_norm" (Zhang and Sennrich 2019, no bias); `weight` and `bias` [D] or
    None; `eps` is added to the variance or mean square.
    """

    kind: Literal["layer_norm", "rms_norm"]
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5


@dataclass(frozen=True)
class LowRank:
    """A low-rank adapter of a linear layer: its weight [out, in] acts as `weight + scale b a` (LoRA, Hu et al. 2021).

    `a` [r, in] and `b` [out, r] may have another floating dtype than the weight. The products take them in the compute
    dtype; their gradients come back in their own.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0


# The pre-activations an MLP may keep for backward, by whether it is gated.
RESIDUALS = {False: ("up",), True: ("up", "gate")}


def check_size(name: str, value: int) -> int:
    """`value` if it is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
    return value


def check_activation(name: str) -> str:
    """`name` if it is a known activation."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {name!r}")
    return name


def check_dropout(p: float, name: str = "dropout") -> float:
    """`p` as a float if it is in [0, 1)."""
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0.0 <= p < 1.0:
        raise ValueError(f"{name} must be a number in [0, 1), got {p!r}")
    return float(p)


def check_norm(norm: Norm | None) -> Norm | None:
    """`norm` if it is None or a Norm of a known kind with a sensible eps."""
    if norm is None:
        return None
    if not isinstance(norm, Norm):
        raise TypeError(f"norm must be a fused_remat.Norm or None, got {type(norm).__name__}")
    if norm.kind not in ("layer_norm", "rms_norm"):
        raise ValueError(f"norm.kind must be 'layer_norm' or 'rms_norm', got {norm.kind!r}")
    if norm.kind == "rms_norm" and norm.bias is not None:
        raise ValueError("norm.bias was given with kind 'rms_norm', which has none; pass None")
    check_eps("norm.eps", norm.eps)
    return norm


def check_low_rank(name: str, adapter: LowRank | None) -> LowRank | None:
    """`adapter` if it is None or a LowRank of two matrices and a finite scale."""
    if adapter is None:
        return None
    if not isinstance(adapter, LowRank):
        raise TypeError(f"{name} must be a fused_remat.LowRank or None, got {type(adapter).__name__}")
    for factor in ("a", "b"):
        if not isinstance(getattr(adapter, factor), Tensor):
            raise TypeError(f"{name}.{factor} must be a tensor, got {type(getattr(adapter, factor)).__name__}")
    if not is_finite(adapter.scale):
        raise ValueError(f"{name}.scale must be a finite number, got {adapter.scale!r}")
    return adapter


def check_eps(name: str, eps: float) -> float:
    """`eps` as a float if it is a finite number of at least 0."""
    if not is_finite(eps) or eps < 0:
        raise ValueError(f"{name} must be a finite number of at least 0, got {eps!r}")
    return float(eps)


def is_finite(value: object) -> bool:
    """Whether `value` is a number that a float holds."""
    return not isinstance(value, bool) and isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def check_flags(**flags: bool) -> None:
    """Raises TypeError for one that is not a bool."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {value!r}")


def check_residuals(keep: tuple[str, ...], known: tuple[str, ...], op: str) -> tuple[str, ...]:
    """`keep` as a tuple of residual names in the op's order, if `op` can keep these."""
    if not isinstance(keep, (tuple, list)):
        raise TypeError(f"keep must be a tuple of residual names, got {keep!r}")
    unknown = [name for name in keep if name not in known]
    if unknown:
        raise ValueError(f"keep names {unknown!r}, but {op} can keep {', '.join(map(repr, known))}")
    return tuple(name for name in known if name in keep)


def check_keep(keep: Keep, *, gated: bool) -> Keep:
    """`keep` as a tuple of residual names in the op's order, or as a float, if an MLP can keep that."""
    if isinstance(keep, (int, float)) and not isinstance(keep, bool):
        if not 0.0 <= keep <= 1.0:
            raise ValueError(f"keep as a fraction must be in [0, 1], got {keep!r}")
        return float(keep)
    if not isinstance(keep, (tuple, list)):
        raise TypeError(f"keep must be a tuple of residual names or a float in [0, 1], got {keep!r}")
    return check_residuals(keep, RESIDUALS[gated], "a gated MLP" if gated else "a plain MLP")
