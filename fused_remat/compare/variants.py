"""The three ways to train one model: every variant starts from the same weights and computes the same function."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass

from torch import nn
from torch.utils.checkpoint import checkpoint

from fused_remat.compare.blocks import repeated_blocks
from fused_remat.compare.workload import Workload
from fused_remat.convert import Report, convert

STOCK, CHECKPOINT, FUSED = "stock", "checkpoint", "fused_remat"

EXPLANATIONS = {
    STOCK: "the model as its library ships it: every layer keeps its activations for backward",
    CHECKPOINT: "torch.utils.checkpoint (non-reentrant) around each MLP and each attention: activations go, "
    "backward rebuilds them whole",
    FUSED: "fused_remat.convert(model): backward rebuilds the activations piece by piece",
}


@dataclass(frozen=True)
class Variant:
    """A model made ready to train one way: how many of its MLPs, attentions or whole blocks were changed.

    `explanation` says how, `converted` what they became, a line for each kind, `skipped` why others were left alone.
    """

    name: str
    model: nn.Module
    explanation: str
    mlps: int = 0
    attentions: int = 0
    blocks: int = 0
    converted: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


def make_variants(workload: Workload) -> dict[str, Variant]:
    """The variants by name, stock first, each with its own copy of the same parameters.

    The checkpointed one is left out where the workload has it find blocks and the model has none that repeat.
    """
    stock = workload.build()
    checkpointed, fused = _checkpointed(copy.deepcopy(stock), workload), copy.deepcopy(stock)
    report = convert(fused)
    made = [
        Variant(STOCK, stock, EXPLANATIONS[STOCK]),
        *([] if checkpointed is None else [checkpointed]),
        Variant(
            FUSED,
            fused,
            EXPLANATIONS[FUSED],
            report.count("mlp"),
            report.count("attention"),
            converted=_by_kind(report),
            skipped=tuple(f"{entry.name}: {entry.reason}" for entry in report.skipped),
        ),
    ]
    return {variant.name: variant for variant in made}


def _checkpointed(model: nn.Module, workload: Workload) -> Variant | None:
    """`model` with checkpoints around its MLPs and attentions, or around its blocks if no class of MLPs is named."""
    if workload.mlp_class is not None:
        mlps, attentions = (
            [module for module in model.modules() if isinstance(module, cls)]
            for cls in (workload.mlp_class, workload.attention_class)
        )
        _checkpoint([*mlps, *attentions])
        return Variant(CHECKPOINT, model, EXPLANATIONS[CHECKPOINT], len(mlps), len(attentions))
    blocks = repeated_blocks(model)
    if not blocks:
        return None
    _checkpoint(blocks)
    explanation = (
        f"torch.utils.checkpoint (non-reentrant) around each of {len(blocks)} {type(blocks[0]).__name__}: activations "
        "go, backward rebuilds a whole block's"
    )
    return Variant(CHECKPOINT, model, explanation, blocks=len(blocks))


def _checkpoint(layers: list[nn.Module]) -> None:
    """Checkpoints each call of each layer, as users do by hand. Parameters and their names stay."""
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def _by_kind(report: Report) -> tuple[str, ...]:
    """One line per class and what it became: how many there are, and the first of them by name."""
    names: dict[tuple[str, str], list[str]] = {}
    for entry in report.converted:
        names.setdefault((entry.class_name, entry.became), []).append(entry.name)
    return tuple(
        f"{len(found)} x {class_name} ({found[0]}{', ...' if len(found) > 1 else ''}): {became}"
        for (class_name, became), found in names.items()
    )
