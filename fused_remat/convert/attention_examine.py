"""One attention layer's verdict: how it can run fused, why it cannot, or that it is no attention at all."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fused_remat.convert.adapters import base_of
from fused_remat.convert.attention_call import (
    ALONE,
    IMPLEMENTATIONS,
    OTHER_KEYS,
    changed_defaults,
    implementation,
    parameter_names,
)
from fused_remat.convert.attention_layer import FusedAttentionLayer
from fused_remat.convert.attention_layout import AttentionLayout, layouts, named_parts
from fused_remat.convert.attention_probe import BASE, FEATURES, LONGEST, Probe, longest_attribute, takes
from fused_remat.convert.fingerprint import COUNTED, PLACE, VALUES, fingerprint
from fused_remat.convert.fused import Path, child_names, find, why_changed
from fused_remat.convert.norm_examine import examine_norm
from fused_remat.convert.norms import FusedNorm
from fused_remat.convert.patterns import features, is_conv1d
from fused_remat.convert.rebind import why_no_subclass

_WORDS = (
    "softmax",
    "scaled_dot_product_attention",
    "attention_interface",
    "attention_function",
    "flex_attention",
    "self.self(",
)


def examine_attention_layer(layer: nn.Module, keep: tuple[str, ...], known: dict[Any, Any]) -> Any:
    """The record with which `layer` can run fused, the reason why it cannot, or None if it is no attention.

    `known` collects verdicts: models repeat their layers, and equal ones need to be tried once.
    """
    if isinstance(layer, (nn.MultiheadAttention, torch.jit.ScriptModule)):
        return None
    if not _computes_attention(type(layer)) and not named_parts(layer):
        return None
    if "forward" in vars(layer):
        return "has a forward of its own on the instance"
    likeness = fingerprint(layer)
    if likeness not in known:
        known[likeness] = _examine(layer, keep)
    verdict = known[likeness]
    if not isinstance(verdict, FusedAttentionLayer):
        return verdict
    return why_changed(layer, verdict) or why_no_subclass(type(layer), "forward") or verdict


def _examine(layer: nn.Module, keep: tuple[str, ...]) -> FusedAttentionLayer | str | None:
    proposals = list(layouts(layer))
    if not proposals:
        return _why_no_layout(layer)
    function = implementation(layer, proposals[0].core)
    if function is not None and function not in IMPLEMENTATIONS:
        return f"its attention function is {function!r}; fused calls can stand for {', '.join(IMPLEMENTATIONS)}"
    name, far = longest_attribute(layer, find(layer, proposals[0].core))
    if far >= LONGEST and function is None:
        return f"its {name} of {far} is beyond the {LONGEST} tokens on which its code is tried"
    reason, probes = None, {}
    for layout in proposals:
        verdict = _settle(layer, layout, keep, probes)
        if not isinstance(verdict, str):
            return verdict
        reason = reason or verdict
    return reason


@functools.cache
def _computes_attention(cls: type[nn.Module]) -> bool:
    """Whether the code of `cls` looks like an attention, or calls one in a child: by words in its source."""
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):  # made at run time, or in a prompt
            source = "softmax" if "attention" in base.__name__.lower() else ""
        if any(word in source for word in _WORDS):
            return True
    return False


def _why_no_layout(layer: nn.Module) -> str | None:
    linears = [name for name, child in layer._modules.items() if isinstance(child, nn.Linear) or is_conv1d(child)]
    if len(linears) < 2 or "attention" not in type(layer).__name__.lower():
        return None
    return f"its linears ({', '.join(linears)}) do not look like q, k, v and an output projection of equal heads"


def _settle(
    layer: nn.Module, layout: AttentionLayout, keep: tuple[str, ...], probes: dict[Any, Probe]
) -> FusedAttentionLayer | str:
    linears = [base_of(find(layer, path)) for path in layout.linears]
    linear = next((type(part) for part in linears if is_conv1d(part)), nn.Linear)
    norms = _head_norms(layer, layout)
    if isinstance(norms, str):
        return norms
    if linear not in probes:
        probes[linear] = Probe(layer, linear, norms)
    probe, base = probes[linear], [scenario for scenario in BASE if layout.dropout or not scenario.dropped]
    alone = next(filter(None, (probe.why_not(layout, scenario) for scenario in base)), None)
    crossed = "it takes no other keys"
    if takes(layer, "keys"):
        crossed = next(filter(None, (probe.why_not(layout, replace(s, crossed=True)) for s in base)), None)
    contexts = {False: alone, True: crossed}
    if None not in contexts.values():
        return alone
    passed = [is_crossed for is_crossed, reason in contexts.items() if reason is None]
    forms = {probe.observe(layout, replace(s, crossed=passed[0])).returns for s in base}
    if len(forms) > 1:
        return f"it returns {' or '.join(sorted(forms))}, by the mode"
    return FusedAttentionLayer(
        layout=replace(layout, accepts=frozenset(_accepted(layer, layout, probe, passed))),
        keep=keep,
        names=parameter_names(type(layer)),
        meaningful=changed_defaults(type(layer)),
        returns=forms.pop(),
        linear=linear,
        parts=tuple(_parts(layer, layout)),
        settings=tuple(_settings(layer, layout)),
        children=tuple((path, child_names(find(layer, path))) for path in dict.fromkeys(((), layout.core))),
        head_norms=norms or None,
    )


def _accepted(layer: nn.Module, layout: AttentionLayout, probe: Probe, passed: list[bool]) -> Iterator[str]:
    """What calls may use: a feature counts if it does with and without other keys, as far as the layer takes those."""
    yield from (OTHER_KEYS if crossed else ALONE for crossed in passed)
    for feature in FEATURES:
        roles = ("mask", "keys_mask") if feature.mask else ("causal",) if feature.causal else ("bias",)
        if takes(layer, *roles) and all(
            probe.why_not(layout, replace(feature, crossed=crossed)) is None for crossed in passed
        ):
            yield feature.name


def _head_norms(layer: nn.Module, layout: AttentionLayout) -> tuple[FusedNorm, ...] | str:
    """How q and k are normalised, head by head; () if they are not."""
    if not layout.q_norm and not layout.k_norm:
        return ()
    found = []
    out = base_of(find(layer, layout.out))
    for path in (layout.q_norm, layout.k_norm):
        norm = find(layer, path) if path else None
        record = None if norm is None else examine_norm(norm, layer)
        name = ".".join(path) or "q or k"
        if record is None or record.form != "rms_norm" or norm._parameters.get("weight") is None:
            return f"{name} is no RMSNorm with a weight, which a fused call could apply to every head"
        rows, columns = norm.weight.numel(), features(out)[0] // layout.num_heads
        if rows != columns:
            return f"{name} normalises {rows} features and heads are {columns} wide"
        found.append((record, getattr(norm, record.eps)))
    if found[0][1] != found[1][1]:
        return f"its norms of q and k have different eps, {found[0][1]} and {found[1][1]}"
    return tuple(record for record, _ in found)


def _parts(layer: nn.Module, layout: AttentionLayout) -> Iterator[tuple[Path, type[nn.Module]]]:
    """The modules that the replaced code calls besides linears, and those that are called after it anyway."""
    called = {*layout.linears, *layout.after, layout.norm}
    for path in dict.fromkeys((layout.core, (), *layout.through)):
        for name, child in find(layer, path)._modules.items():
            if child is not None and (*path, name) not in called and not child._modules:
                yield (*path, name), type(child)
    yield from ((path, type(find(layer, path))) for path in layout.through)


def _settings(layer: nn.Module, layout: AttentionLayout) -> Iterator[tuple[Path, str, Any]]:
    """Numbers, flags and names that the replaced code may read and a user may change later."""
    called = [path for path, _ in _parts(layer, layout) if path != layout.dropout]
    for path in dict.fromkeys((layout.core, (), *called)):
        for name, value in vars(find(layer, path)).items():
            simple = value is None or type(value) in VALUES
            if simple and name not in PLACE | COUNTED and (*path, name) != layout.dropout:
                yield path, name, value
