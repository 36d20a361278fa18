"""The three ways to train one model: every variant starts from the same weights and computes the same function."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass

from torch import nn
from torch.utils.checkpoint import checkpoint

from fused_remat.compare.workload import Workload
from fused_remat.convert import Report, convert

STOCK, CHECKPOINT, FUSED = "stock", "checkpoint", "fused_remat"

EXPLANATIONS = {
    STOCK: "the model as its library ships it: every layer keeps its activations for backward",
    CHECKPOINT: "torch.utils.checkpoint (non-reentrant) around each MLP and nn.MultiheadAttention: activations go, "
    "backward rebuilds them whole",
    FUSED: "fused_remat.convert(model): backward rebuilds the activations piece by piece",
}


@dataclass(frozen=True)
class Variant:
    """A model made ready to train one way: how many of its MLPs and attentions were changed.

    `converted` says what they became, a line for each kind, and `skipped` why others were left alone.
    """

    name: str
    model: nn.Module
    mlps: int = 0
    attentions: int = 0
    converted: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


def make_variants(workload: Workload) -> dict[str, Variant]:
    """The three variants by name, stock first, each with its own copy of the same parameters."""
    stock = workload.build()
    checkpointed, fused = copy.deepcopy(stock), copy.deepcopy(stock)
    report = convert(fused)
    return {
        STOCK: Variant(STOCK, stock),
        CHECKPOINT: Variant(
            CHECKPOINT,
            checkpointed,
            _checkpoint(checkpointed, workload.mlp_class),
            _checkpoint(checkpointed, nn.MultiheadAttention),
        ),
        FUSED: Variant(
            FUSED,
            fused,
            report.count("mlp"),
            report.count("attention"),
            _by_kind(report),
            tuple(f"{entry.name}: {entry.reason}" for entry in report.skipped),
        ),
    }


def _checkpoint(model: nn.Module, cls: type[nn.Module]) -> int:
    """Checkpoints each call of each layer of that class, as users do by hand; returns how many. Parameters stay."""
    layers = [module for module in model.modules() if isinstance(module, cls)]
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    return len(layers)


def _by_kind(report: Report) -> tuple[str, ...]:
    """One line per class and what it became: how many there are, and the first of them by name."""
    names: dict[tuple[str, str], list[str]] = {}
    for entry in report.converted:
        names.setdefault((entry.class_name, entry.became), []).append(entry.name)
    return tuple(
        f"{len(found)} x {class_name} ({found[0]}{', ...' if len(found) > 1 else ''}): {became}"
        for (class_name, became), found in names.items()
    )
