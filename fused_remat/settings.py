"""Checks of the settings that modules, conversion and functional calls share: one message per mistake."""

from __future__ import annotations

from fused_remat.activations import ACTIVATIONS

Keep = tuple[str, ...] | float

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


def check_keep(keep: Keep, *, gated: bool) -> Keep:
    """`keep` as a tuple of residual names in the op's order, or as a float, if an MLP can keep that."""
    if isinstance(keep, (int, float)) and not isinstance(keep, bool):
        if not 0.0 <= keep <= 1.0:
            raise ValueError(f"keep as a fraction must be in [0, 1], got {keep!r}")
        return float(keep)
    if not isinstance(keep, (tuple, list)):
        raise TypeError(f"keep must be a tuple of residual names or a float in [0, 1], got {keep!r}")
    known = RESIDUALS[gated]
    unknown = [name for name in keep if name not in known]
    if unknown:
        kind = "a gated MLP" if gated else "a plain MLP"
        raise ValueError(f"keep names {unknown!r}, but {kind} can keep {', '.join(map(repr, known))}")
    return tuple(name for name in known if name in keep)
