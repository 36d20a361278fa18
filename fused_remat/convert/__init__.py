"""`convert` and `revert`: let the layers of an existing model drop their activations, without changing the model.

How it works, in reading order: `select` picks modules; for MLPs, `patterns` proposes where the parts might be,
`behaviour` proves a proposal by running the layer's code on a tiny copy, `inline` finds MLPs written in a block's
forward, which `promises` runs, `near_misses` says why not where no layer or method is the MLP; `attention` recognises
nn.MultiheadAttention, `attention_examine` the attentions of other libraries (`attention_layout` proposes,
`attention_probe` and `attention_judge` prove, `attention_call` reads their arguments); `norm_examine` the norms in
front of these layers; `adapters` says what a linear contributes; `rebind` gives a layer a subclass of its own class,
which runs the records that `fused`, `promises`, `attention`, `attention_layer` and `norms` define.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from fused_remat.convert.attention import FusedAttention, examine_attention
from fused_remat.convert.attention_examine import examine_attention_layer
from fused_remat.convert.attention_layer import FusedAttentionLayer
from fused_remat.convert.callers import discards_weights
from fused_remat.convert.examine import examine, why_already
from fused_remat.convert.fused import Layout
from fused_remat.convert.keep import Keeps, check_keeps
from fused_remat.convert.norm_examine import examine_norm
from fused_remat.convert.promises import InlineMLP
from fused_remat.convert.rebind import Record, bind, records_of, unbind
from fused_remat.convert.report import Entry, Report
from fused_remat.convert.select import Selector, select
from fused_remat.settings import Keep

__all__ = ["Entry", "Report", "convert", "revert"]


def convert(
    model: nn.Module,
    *,
    keep: Keep | Mapping[str, Keep] | None = None,
    need_weights: bool = True,
    include: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] | None = None,
    dry_run: bool = False,
    strict: bool = False,
) -> Report:
    """Make the MLPs and attentions of `model` keep less for backward, in place; everything else stays as it was.

    An MLP or attention is converted if its own code, run on a small copy with random weights, computes what
    `fused_remat.mlp` or `fused_remat.multi_head_attention` computes; nn.MultiheadAttention then follows the rules of
    `fused_remat.MultiheadAttention`. LayerNorms and RMSNorms in front of these layers are applied by the fused calls
    that read their results, so that the residual stream alone is kept. Every part has to be plain, or PEFT's LoRA
    around a plain linear (no other adapter, hook, parametrisation or quantised weight); tensor-parallel plans of
    torch.distributed stay fused. docs/models.md has the rules.

    A converted layer keeps its name, parameters, `state_dict`, hooks, flags and attributes; only its class becomes a
    subclass of the one it had (and an attention gets a forward pre-hook that does nothing: without one,
    nn.TransformerEncoderLayer passes it by in evaluation). Whenever a part stops being plain later, the layer runs its
    own code again. `fused_remat.revert(model)` undoes it all.

    Args:
        model: any module; modules reachable by several paths are converted once and stay shared.
        keep: what backward does not have to rebuild. None: nothing in an MLP, "out" in an attention. A tuple: exactly
            these residuals, wherever a layer has them: "up" and "gate" of an MLP (a plain one has no "gate"), "q",
            "k", "v" and "out" of an attention; () is nothing at all. A float in [0, 1]: the fraction of hidden features
            of an MLP whose up and gate are kept, and "out". A mapping chooses for each kind: {"mlp": a tuple or float,
            "attention": a tuple}.
        need_weights: False: attentions return None instead of weights, even where a call asks for them, as
            nn.MultiheadAttention's default does. The report names the attentions whose caller throws them away.
        include: which modules to look at; None for all. A module path as in `named_modules` (with everything below
            it), a glob pattern for one (`*` also matches dots), a module class, a function of (path, module), or a
            list of these.
        exclude: which modules not to look at; as `include`, and it wins over it.
        dry_run: only report what would happen.
        strict: raise, before anything is changed, if something that looks like an MLP or attention cannot be
            converted. Layers that are fused already do not count.

    Returns:
        A report with `converted` and `skipped` entries; it prints as a table, and `report.revert()` undoes this call.
        Converting again changes nothing: layers that are fused already are among the skipped.

    Raises:
        TypeError: `model` is not a module; `keep`, `need_weights`, `include` or `exclude` of another kind than above.
        ValueError: `keep` out of range or with an unknown name; a name in `include` or `exclude` that matches nothing;
            with `strict`, the layers that cannot be converted and why.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if not isinstance(need_weights, bool):
        raise TypeError(f"need_weights must be a bool, got {need_weights!r}")
    keeps = check_keeps(keep)
    chosen = select(model, include, exclude)
    found: list[tuple[Entry, nn.Module, Record]] = []
    report, refused = Report(dry_run=dry_run), []
    for name, layer, verdict in _verdicts(chosen, keeps, need_weights):
        entry = Entry(name, type(layer).__name__)
        if isinstance(verdict, str):
            report.skipped.append(replace(entry, reason=verdict))
            refused += [report.skipped[-1]] if why_already(layer) is None else []
        else:
            entry = replace(entry, kind=verdict.kind, became=verdict.describe(), note=_note(model, name, verdict))
            found.append((entry, layer, verdict))
    found = _with_norms(model, chosen, found)
    report.skipped, refused = _uncovered(report.skipped, found), _uncovered(refused, found)
    if strict and refused:
        lines = "".join(f"\n  {entry.name or '(the model)'} ({entry.class_name}): {entry.reason}" for entry in refused)
        raise ValueError(f"strict=True, and these layers cannot be converted (nothing was changed):{lines}")
    report.converted = [entry for entry, _, _ in found]
    if not dry_run:
        for _, layer, record in found:
            bind(layer, record)
        report.bound = [(entry.name, layer, record.method) for entry, layer, record in found]
        for entry, layer, record in found:
            for part, its_record in record.parts(layer) if isinstance(record, InlineMLP) else ():
                bind(part, its_record)
                report.bound.append((entry.name, part, its_record.method))
    return report


def _verdicts(
    chosen: list[tuple[str, nn.Module]], keeps: Keeps, need_weights: bool
) -> Iterator[tuple[str, nn.Module, Record | str]]:
    """The record or the reason for every layer that looks like an MLP or attention."""
    known_mlps: set[Layout] = set()
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


def _with_norms(
    model: nn.Module, chosen: list[tuple[str, nn.Module]], found: list[tuple[Entry, nn.Module, Record]]
) -> list[tuple[Entry, nn.Module, Record]]:
    """`found` and the norms beside these layers, which the fused calls can apply themselves; in model order."""
    modules = dict(model.named_modules())
    # The code that hands a norm's result to a fused layer is that of the layer itself, where a method of it is fused,
    # of its parent, or of the parent of a container around it.
    callers = {}
    for entry, layer, record in found:
        if not record.takes_norm:
            continue
        above = entry.name.rpartition(".")[0]
        if record.method != "forward" or isinstance(record, InlineMLP):
            callers[layer] = None
            continue
        callers[modules[above]] = None
        if isinstance(modules[above], (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            callers[modules[above.rpartition(".")[0]]] = None
    norms = []
    for name, layer in chosen:
        parent = modules.get(name.rpartition(".")[0])
        if name and parent in callers and not records_of(layer):
            record = examine_norm(layer, parent)
            if record is not None:
                entry = Entry(name, type(layer).__name__, kind=record.kind, became=record.describe())
                norms.append((entry, layer, record))
    order = {layer: i for i, (_, layer) in enumerate(chosen)}
    return sorted([*norms, *found], key=lambda item: order[item[1]])


def _uncovered(skipped: list[Entry], found: list[tuple[Entry, nn.Module, Record]]) -> list[Entry]:
    """`skipped` without modules whose work the fused call of a module above them does."""
    covered = {
        ".".join(filter(None, (entry.name, *path)))
        for entry, _, record in found
        if isinstance(record, FusedAttentionLayer)
        for path in record.covers
    }
    return [entry for entry in skipped if entry.name not in covered]


def _note(model: nn.Module, name: str, record: Record) -> str:
    if not isinstance(record, FusedAttention) or not record.need_weights or not name:
        return ""
    parent, _, child = name.rpartition(".")
    caller = model.get_submodule(parent)
    if not discards_weights(caller, child):
        return ""
    return f"makes weights that {type(caller).__name__} throws away; convert(..., need_weights=False) leaves them out"


def revert(model: nn.Module) -> list[str]:
    """Give every converted layer of `model` its original class back; returns the names of these layers.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    return [name for name, layer in model.named_modules() if unbind(layer)]
