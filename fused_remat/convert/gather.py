"""Which layers of a model can run fused, and which norms they can apply: found, not changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fused_remat.convert.attention import FusedAttention, examine_attention
from fused_remat.convert.attention_examine import examine_attention_layer
from fused_remat.convert.attention_layer import FusedAttentionLayer
from fused_remat.convert.callers import discards_weights
from fused_remat.convert.examine import Known, examine, why_already
from fused_remat.convert.fingerprint import fingerprint
from fused_remat.convert.fused import Fused
from fused_remat.convert.keep import Keeps
from fused_remat.convert.norm_examine import examine_norm
from fused_remat.convert.norms import FusedNorm
from fused_remat.convert.promises import InlineMLP
from fused_remat.convert.rebind import Record, records_of
from fused_remat.convert.report import Entry

Found = tuple[Entry, nn.Module, Record]


def verdicts(
    chosen: list[tuple[str, nn.Module]], keeps: Keeps, need_weights: bool
) -> Iterator[tuple[str, nn.Module, Record | str]]:
    """The record or the reason for every layer that looks like an MLP or attention."""
    known_mlps = Known()
    known_attentions: dict[Any, Any] = {}
    for name, layer in chosen:
        already = why_already(layer)
        if already is not None:
            yield name, layer, already
            continue
        attention = examine_attention(layer, keeps.attention, need_weights)
        if attention is None:
            attention = examine_attention_layer(layer, keeps.attention, known_attentions)
        verdict = examine(layer, keeps.mlp, known_mlps) if attention is None else attention
        if verdict is not None:
            yield name, layer, verdict


def with_norms(model: nn.Module, chosen: list[tuple[str, nn.Module]], found: list[Found]) -> list[Found]:
    """`found` and the norms beside these layers, which the fused calls can apply themselves; in model order."""
    norms = [item for item, _ in norms_beside(model, chosen, found) if not records_of(item[1])]
    order = {layer: i for i, (_, layer) in enumerate(chosen)}
    return sorted([*norms, *found], key=lambda item: order[item[1]])


def norms_beside(
    model: nn.Module, chosen: list[tuple[str, nn.Module]], found: list[Found]
) -> Iterator[tuple[Found, tuple[str, ...]]]:
    """The norms beside `found`, or first in them, that fused calls can apply, each with the names of the layers that
    may read it."""
    modules = dict(model.named_modules())
    # The code that hands a norm's result to a fused layer is that of the layer itself, where a method of it is fused,
    # of its parent, or of the parent of a container around it.
    callers: dict[nn.Module, list[str]] = {}
    first: dict[str, str] = {}  # norms that a fused layer itself runs on its input, and that layer
    for entry, layer, record in found:
        if isinstance(record, Fused) and record.layout.before:
            first[".".join(filter(None, (entry.name, *record.layout.before[-1])))] = entry.name
        if not record.takes_norm:
            continue
        above = entry.name.rpartition(".")[0]
        if record.method != "forward" or isinstance(record, InlineMLP):
            callers.setdefault(layer, []).append(entry.name)
            continue
        callers.setdefault(modules[above], []).append(entry.name)
        if isinstance(modules[above], (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            callers.setdefault(modules[above.rpartition(".")[0]], []).append(entry.name)
    known: dict[Any, FusedNorm | None] = {}
    for name, layer in chosen:
        parent = modules.get(name.rpartition(".")[0])
        if name not in first and (not name or parent not in callers):
            continue
        bound = records_of(layer).get("forward")
        if bound is not None:
            record = bound if isinstance(bound, FusedNorm) else None
        else:
            likeness = fingerprint(layer), "forward" in vars(layer), type(parent)
            if likeness not in known:
                known[likeness] = examine_norm(layer, parent)
            record = known[likeness]
        if record is not None:
            entry = Entry(name, type(layer).__name__, kind=record.kind, became=record.describe())
            yield (entry, layer, record), (first[name],) if name in first else tuple(callers[parent])


def uncovered(skipped: list[Entry], found: list[Found]) -> list[Entry]:
    """`skipped` without modules whose work the fused call of a module above them does."""
    covered = {
        ".".join(filter(None, (entry.name, *path)))
        for entry, _, record in found
        if isinstance(record, FusedAttentionLayer)
        for path in record.covers
    }
    return [entry for entry in skipped if entry.name not in covered]


def note_on(model: nn.Module, name: str, record: Record) -> str:
    if not isinstance(record, FusedAttention) or not record.need_weights or not name:
        return ""
    parent, _, child = name.rpartition(".")
    caller = model.get_submodule(parent)
    if not discards_weights(caller, child):
        return ""
    return f"makes weights that {type(caller).__name__} throws away; convert(..., need_weights=False) leaves them out"
