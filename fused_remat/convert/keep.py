"""`keep` of a conversion: one argument for every kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fused_remat.functional.multi_head_attention import RESIDUALS as ATTENTION_RESIDUALS
from fused_remat.settings import RESIDUALS, Keep, check_keep, check_residuals
from fused_remat.sizes import format_bytes

MLP_RESIDUALS = RESIDUALS[True]


@dataclass(frozen=True)
class Keeps:
    """What backward need not rebuild, by kind of layer."""

    mlp: Keep = ()
    attention: tuple[str, ...] = ("out",)


def check_keeps(keep: Keep | Mapping[str, Keep] | None) -> Keeps:
    """`keep` of `convert` taken apart. Raises TypeError or ValueError as documented there."""
    if keep is None:
        return Keeps()
    if isinstance(keep, Mapping):
        kinds = Keeps.__dataclass_fields__
        unknown = [kind for kind in keep if kind not in kinds]
        if unknown:
            raise ValueError(f"keep has {unknown!r}, but the kinds of layers are {', '.join(map(repr, kinds))}")
        chosen = Keeps(**keep)
        attention = check_residuals(chosen.attention, ATTENTION_RESIDUALS, "an attention")
        return Keeps(check_keep(chosen.mlp, gated=True), attention)
    if isinstance(keep, (tuple, list)):
        check_residuals(keep, MLP_RESIDUALS + ATTENTION_RESIDUALS, "a converted layer")
        mlp, attention = (tuple(n for n in names if n in keep) for names in (MLP_RESIDUALS, ATTENTION_RESIDUALS))
        return Keeps(mlp, attention)
    return Keeps(check_keep(keep, gated=True))


def of_workspace(workspace: int | None) -> str:
    """What the description of a converted layer says of a workspace of its own; "" if it has none."""
    return "" if workspace is None else f", workspace {format_bytes(workspace)}"
