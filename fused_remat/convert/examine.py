"""One layer's verdict: how it can run fused, why it cannot, or that it is no MLP at all."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fused_remat.convert.adapters import base_of
from fused_remat.convert.behaviour import (
    Observation,
    computes_tokens_apart,
    observe,
    overwrites_input,
    why_not_mlp,
)
from fused_remat.convert.fingerprint import fingerprint
from fused_remat.convert.fused import INTERLEAVED, Fused, Layout, Path, child_names, find, why_changed
from fused_remat.convert.inline import inline_layout
from fused_remat.convert.near_misses import NEAR_MISSES
from fused_remat.convert.patterns import PATTERNS, Proposal, attribute, is_conv1d
from fused_remat.convert.promises import InlineMLP
from fused_remat.convert.rebind import original_class, records_of, why_no_subclass
from fused_remat.nn import MLP, GatedMLP, MultiheadAttention
from fused_remat.plain import why_not_plain, why_not_plain_linear, why_weights_unfit
from fused_remat.settings import RESIDUALS, Keep

# Attribute values that can be told apart by `==` and are the same in a copy.
_SIMPLE = (str, int, float, bool, type(None), types.FunctionType, types.BuiltinFunctionType)


def why_already(layer: nn.Module) -> str | None:
    """Why there is nothing left to convert in `layer`; None if it is stock."""
    if isinstance(layer, (MLP, GatedMLP, MultiheadAttention)):
        return f"is a fused_remat.{type(layer).__name__}"
    became = "; ".join(record.describe() for record in records_of(layer).values())
    return f"already converted: {became}; revert it to choose again" if became else None


class Known:
    """What was found out about the layers of one model so far: models repeat their layers."""

    def __init__(self) -> None:
        self.layouts: set[Layout] = set()  # that fitted: they are tried first
        self.verdicts: dict[Any, Any] = {}  # by fingerprint


def examine(layer: nn.Module, keep: Keep, known: Known) -> Fused | InlineMLP | str | None:
    """The record with which `layer` can run fused, the reason why it cannot, or None if it does not look like an MLP.

    Layers that differ in nothing but weights are tried once.
    """
    if isinstance(layer, torch.jit.ScriptModule):
        return None
    proposals = [proposal for propose in PATTERNS.values() if (proposal := propose(layer)) is not None]
    if proposals:
        likeness = fingerprint(layer)
        if likeness not in known.verdicts:
            known.verdicts[likeness] = _examine(layer, proposals, keep, known.layouts)
        verdict = known.verdicts[likeness]
        if isinstance(verdict, Fused):
            return _why_not_now(layer, verdict) or verdict
        if verdict is not None:
            return verdict
    layout = inline_layout(layer)
    if layout is not None:
        return _inline(layer, layout, keep)
    return next(filter(None, (near_miss(layer) for near_miss in NEAR_MISSES)), None)


def _examine(layer: nn.Module, proposals: list[Proposal], keep: Keep, known: set[Layout]) -> Fused | str | None:
    """The first proposal that holds, or the first reason why one does not."""
    first_reason = None
    for proposal in proposals:
        verdict = _settle(layer, proposal, keep, known)
        if isinstance(verdict, Fused):
            return verdict
        first_reason = first_reason or verdict
    return first_reason


def _inline(layer: nn.Module, layout: Layout, keep: Keep) -> InlineMLP | str:
    act = find(layer, layout.act)
    settings = tuple((name, value) for path, name, value in _settings(layer, layout) if path == layout.act)
    record = InlineMLP(layout, _kept(layout, keep), act is not None and overwrites_input(act), settings)
    return _why_not_inline(layer, layout) or record


def _why_not_inline(layer: nn.Module, layout: Layout) -> str | None:
    """Why a block whose forward holds an MLP is left alone all the same."""
    if "forward" in vars(layer):
        return "has a forward of its own on the instance"
    for path in (layout.up, layout.down):
        reason = why_not_plain_linear(find(layer, path))
        if reason is not None:
            return f"{path[0]} {reason}"
    act = find(layer, layout.act)
    reason = None if act is None else why_not_plain(act, type(act))
    if reason is not None:
        return f"{layout.act[0]} {reason}"
    for part in filter(None, (layer, act)):
        reason = why_no_subclass(original_class(part), "forward")
        if reason is not None:
            return reason
    return why_weights_unfit(find(layer, layout.up).weight, find(layer, layout.down).weight)


def _settle(layer: nn.Module, proposal: Proposal, keep: Keep, known: set[Layout]) -> Fused | str | None:
    reason = proposal.near_miss
    observed: dict[tuple[Path, bool], list[Observation] | str] = {}  # by the last linear, and whether one is packed
    for layout in sorted(proposal.layouts, key=lambda layout: layout not in known):
        linears = (base_of(find(layer, path)) for path in layout.linears)
        linear = next((type(part) for part in linears if is_conv1d(part)), nn.Linear)
        key = layout.down, bool(layout.packed)
        if key not in observed:
            observed[key] = observe(layer, layout, linear)
        seen = observed[key]
        mismatch = seen if isinstance(seen, str) else why_not_mlp(layout, seen)
        if mismatch is None:
            known.add(layout)
            return _record(layer, layout, linear, keep)
        reason = reason or mismatch
    ran = [seen for seen in observed.values() if not isinstance(seen, str)]
    if not proposal.certain and not any(map(computes_tokens_apart, ran)):
        return None
    return reason or "its parts are in no order that a fused MLP has"


def _record(layer: nn.Module, layout: Layout, linear: type[nn.Module], keep: Keep) -> Fused:
    replaced = [
        path for path in (layout.act, layout.dropout, *layout.through) if path and find(layer, path) is not None
    ]
    runs_every_child = type(layer).forward is nn.Sequential.forward
    return Fused(
        layout=layout,
        keep=_kept(layout, keep),
        linear=linear,
        parts=tuple((path, type(find(layer, path))) for path in replaced),
        settings=tuple(_settings(layer, layout)),
        children=(((), child_names(layer)),) if runs_every_child else (),
    )


def _kept(layout: Layout, keep: Keep) -> Keep:
    return tuple(name for name in RESIDUALS[bool(layout.gate)] if name in keep) if isinstance(keep, tuple) else keep


def _settings(layer: nn.Module, layout: Layout) -> Iterator[tuple[Path, str, Any]]:
    """Attributes that the replaced code reads and that a user may change later: a scale, a probability, a mode."""
    for path in dict.fromkeys(((), layout.act, *layout.through)):
        part = find(layer, path)
        if part is None:
            continue
        method = layout.method if part is layer else "forward"
        code = getattr(inspect.unwrap(getattr(type(part), method)), "__code__", None)
        for name in () if code is None else code.co_names:
            value = vars(part).get(name, part)
            if isinstance(value, _SIMPLE) and name != "training":
                yield path, name, value
    if layout.act and find(layer, layout.act) is None:
        yield layout.act[:-1], layout.act[-1], attribute(layer, layout.act)


def _why_not_now(layer: nn.Module, fused: Fused) -> str | None:
    """Why a layer that computes an MLP is left alone all the same: something in it is not plain."""
    method = fused.layout.method
    if fused.layout.packed in INTERLEAVED:
        return f"{'.'.join(fused.layout.up)} holds gate and up in even and odd rows; only halves are converted"
    if method in vars(layer):
        return f"has a {method} of its own on the instance"
    return why_changed(layer, fused) or why_no_subclass(type(layer), method)
