"""The three ways to train one model: every variant starts from the same weights and computes the same function."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass

from torch import nn
from torch.utils.checkpoint import checkpoint

from fused_remat.compare.workload import Workload
from fused_remat.convert import convert

STOCK, CHECKPOINT, FUSED = "stock", "checkpoint", "fused_remat"

EXPLANATIONS = {
    STOCK: "the model as its library ships it: every MLP keeps its activations for backward",
    CHECKPOINT: "torch.utils.checkpoint (non-reentrant) around each MLP: activations go, backward rebuilds them whole",
    FUSED: "fused_remat.convert(model): backward rebuilds the activations piece by piece",
}


@dataclass(frozen=True)
class Variant:
    """A model made ready to train one way; `mlps` of its MLPs were changed, `skipped` says why others were not."""

    name: str
    model: nn.Module
    mlps: int
    skipped: tuple[str, ...] = ()


def make_variants(workload: Workload) -> dict[str, Variant]:
    """The three variants by name, stock first, each with its own copy of the same parameters."""
    stock = workload.build()
    checkpointed, fused = copy.deepcopy(stock), copy.deepcopy(stock)
    report = convert(fused)
    return {
        STOCK: Variant(STOCK, stock, 0),
        CHECKPOINT: Variant(CHECKPOINT, checkpointed, _checkpoint_mlps(checkpointed, workload.mlp_class)),
        FUSED: Variant(
            FUSED,
            fused,
            len(report.converted),
            tuple(f"{entry.name}: {entry.reason}" for entry in report.skipped),
        ),
    }


def _checkpoint_mlps(model: nn.Module, mlp_class: type[nn.Module]) -> int:
    """Checkpoints each call of each MLP of `model`, as users do by hand; returns how many. Parameters stay."""
    mlps = [module for module in model.modules() if isinstance(module, mlp_class)]
    for mlp in mlps:
        mlp.forward = functools.partial(checkpoint, mlp.forward, use_reentrant=False)
    return len(mlps)
