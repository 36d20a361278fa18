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
from fused_remat.convert.attention_call import IMPLEMENTATIONS, implementation, parameter_names
from fused_remat.convert.attention_layer import FusedAttentionLayer
from fused_remat.convert.attention_layout import AttentionLayout, layouts
from fused_remat.convert.attention_probe import (
    CROSSING,
    SCENARIOS,
    Observation,
    observe,
    takes_keys,
    why_not_attention,
)
from fused_remat.convert.fused import Path, find, why_changed
from fused_remat.convert.norm_examine import examine_norm
from fused_remat.convert.norms import FusedNorm
from fused_remat.convert.patterns import is_conv1d
from fused_remat.convert.rebind import fused_class

_WORDS = (
    "softmax",
    "scaled_dot_product_attention",
    "attention_interface",
    "attention_function",
    "flex_attention",
    "self.self(",
)

# What says where a module is, or what state it is in, instead of what it computes; and the containers of nn.Module.
_PLACE = frozenset(("layer_idx", "layer_id", "training", *vars(nn.Module())))
_VALUES = (str, int, float, bool, tuple)

Seen = dict[tuple[Path, ...], tuple[list[Observation] | str, list[Observation] | str]]


def examine_attention_layer(layer: nn.Module, keep: tuple[str, ...], known: dict[Any, Any]) -> Any:
    """The record with which `layer` can run fused, the reason why it cannot, or None if it is no attention.

    `known` collects verdicts: models repeat their layers, and equal ones need to be tried once.
    """
    if isinstance(layer, (nn.MultiheadAttention, torch.jit.ScriptModule)) or not _computes_attention(type(layer)):
        return None
    if "forward" in vars(layer):
        return "has a forward of its own on the instance"
    likeness = fingerprint(layer)
    if likeness not in known:
        known[likeness] = _examine(layer, keep)
    verdict = known[likeness]
    if not isinstance(verdict, FusedAttentionLayer):
        return verdict
    return why_changed(layer, verdict) or _why_no_subclass(layer) or verdict


def fingerprint(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules that differ in nothing but the values of tensors and their place in a model."""
    own = tuple(
        (n, v if v is None or isinstance(v, _VALUES) else id(v)) for n, v in vars(module).items() if n not in _PLACE
    )
    tensors = tuple(
        (n, None if t is None else tuple(t.shape)) for n, t in (module._parameters | module._buffers).items()
    )
    children = tuple((n, None if c is None else fingerprint(c)) for n, c in module._modules.items())
    return type(module), type(module).forward, own, tensors, children


def _examine(layer: nn.Module, keep: tuple[str, ...]) -> FusedAttentionLayer | str | None:
    proposals = list(layouts(layer))
    if not proposals:
        return _why_no_layout(layer)
    function = implementation(layer, proposals[0].core)
    if function is not None and function not in IMPLEMENTATIONS:
        return f"its attention function is {function!r}; fused calls can stand for {', '.join(IMPLEMENTATIONS)}"
    reason, seen = None, {}
    for layout in proposals:
        verdict = _settle(layer, layout, keep, seen)
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


def _settle(layer: nn.Module, layout: AttentionLayout, keep: tuple[str, ...], seen: Seen) -> FusedAttentionLayer | str:
    linear = next(
        (type(part) for part in (base_of(find(layer, p)) for p in layout.linears) if is_conv1d(part)), nn.Linear
    )
    norms = _head_norms(layer, layout)
    if isinstance(norms, str):
        return norms
    key = (*layout.linears, layout.dropout)
    if key not in seen:
        alone = observe(layer, layout, linear, norms, SCENARIOS)
        crossed = observe(layer, layout, linear, norms, CROSSING) if takes_keys(layer) else "it takes no other keys"
        seen[key] = alone, crossed
    reasons = [found if isinstance(found, str) else why_not_attention(layout, found) for found in seen[key]]
    if all(reasons):
        return reasons[0]
    ran = next(found for found, reason in zip(seen[key], reasons, strict=True) if reason is None)
    return FusedAttentionLayer(
        layout=replace(layout, alone=reasons[0] is None, crosses=reasons[1] is None),
        keep=keep,
        names=parameter_names(type(layer)),
        returns=ran[0].returns,
        linear=linear,
        parts=tuple(_parts(layer, layout)),
        settings=tuple(_settings(layer, layout)),
        head_norms=norms or None,
    )


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
        rows, columns = norm.weight.numel(), _columns(out) // layout.num_heads
        if rows != columns:
            return f"{name} normalises {rows} features and heads are {columns} wide"
        found.append((record, getattr(norm, record.eps)))
    if found[0][1] != found[1][1]:
        return f"its norms of q and k have different eps, {found[0][1]} and {found[1][1]}"
    return tuple(record for record, _ in found)


def _columns(linear: nn.Module) -> int:
    return linear.nx if is_conv1d(linear) else linear.in_features


def _parts(layer: nn.Module, layout: AttentionLayout) -> Iterator[tuple[Path, type[nn.Module]]]:
    dropout = layout.dropout if find(layer, layout.dropout) is not None else ()
    for path in (layout.q_norm, layout.k_norm, dropout, *layout.through):
        if path:
            yield path, type(find(layer, path))


def _settings(layer: nn.Module, layout: AttentionLayout) -> Iterator[tuple[Path, str, Any]]:
    """Numbers, flags and names that the replaced code may read and a user may change later."""
    for path in dict.fromkeys((layout.core, ())):
        for name, value in vars(find(layer, path)).items():
            if type(value) in _VALUES and name not in _PLACE and (*path, name) != layout.dropout:
                yield path, name, value


def _why_no_subclass(layer: nn.Module) -> str | None:
    try:
        fused_class(type(layer), ("forward",))
    except TypeError as error:  # a class that refuses subclasses, or wants arguments for them
        return f"its class cannot be subclassed: {error}"
    return None
