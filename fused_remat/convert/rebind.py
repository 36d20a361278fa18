"""Giving one layer a fused method: its class becomes a subclass of the class it had.

Only `module.__class__` and one attribute change (and an attention gets the hook of `nn.attend.forbid_bypass`).
Parameters, children, hooks, names, `state_dict`, the `training` flag and every other attribute stay in place,
`isinstance` and the class's name still answer as before, other instances of the class are untouched, and a copy or
pickle carries the class along: it is rebuilt from the original class, in another process too. (A forward bound to the
instance would break copies and pickles: it stays bound to the old one.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from fused_remat import last_calls
from fused_remat.nn.attend import allow_bypass, forbid_bypass
from fused_remat.nn.attention import MultiheadAttention

RECORDS = "_fused_remat"  # the instance attribute with the layer's records by method
_ORIGINAL = "_fused_remat_original"  # on a fused class: the class it replaces
_SELF = "_fused_remat_self"  # on a fused class: the class
_STOCKS = "_fused_remat_stocks"  # on a fused class: the methods it overrides, as they were when it was made


class Record(Protocol):
    """What a conversion found out about one method of a layer, and how to run it fused. It holds no module."""

    method: str
    kind: str  # what the report calls it
    takes_norm: bool  # whether its fused call can apply a norm to its input first

    def run(self, layer: nn.Module, stock: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Any:
        """The method's result for these arguments; `stock()` runs the layer's own code on them."""

    def describe(self) -> str:
        """What the layer became, in words."""


def fused_class(original: type[nn.Module], methods: Iterable[str]) -> type[nn.Module]:
    """The subclass of `original` whose `methods` run fused where the instance has a record of them."""
    methods = tuple(sorted(methods))
    return _fused_class(original, methods, tuple(getattr(original, method) for method in methods))


def why_no_subclass(cls: type[nn.Module], method: str) -> str | None:
    """Why `cls` cannot have a subclass whose `method` runs fused; None if it can."""
    try:
        fused_class(cls, (method,))
    except TypeError as error:  # a class that refuses subclasses, or wants arguments for them
        return f"its class cannot be subclassed: {error}"
    return None


@functools.cache
def _fused_class(
    original: type[nn.Module], methods: tuple[str, ...], stocks: tuple[Callable[..., Any], ...]
) -> type[nn.Module]:
    """`stocks` is what the methods were when they were examined; patched later, the patch runs instead."""

    def extra_repr(self: nn.Module) -> str:
        became = "; ".join(record.describe() for record in records_of(self).values())
        return ", ".join(filter(None, [original.extra_repr(self), became and f"fused_remat: {became}"]))

    def reduce_ex(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        make, args, *rest = original.__reduce_ex__(self, protocol)
        cls = type(self)
        if _ORIGINAL not in vars(cls):  # a further subclass, whose pickling is its own affair
            return (make, args, *rest)
        return (_rebuild, (methods, make, tuple(original if arg is cls else arg for arg in args)), *rest)

    namespace = {
        **{method: _fused_method(original, method, stock) for method, stock in zip(methods, stocks, strict=True)},
        "extra_repr": extra_repr,
        "__reduce_ex__": reduce_ex,
        "__doc__": original.__doc__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        _ORIGINAL: original,
        _STOCKS: dict(zip(methods, stocks, strict=True)),
    }
    cls = type(original)(original.__name__, (original,), namespace)
    setattr(cls, _SELF, cls)
    return cls


def is_fused_class(cls: type[nn.Module]) -> bool:
    """Whether `cls` was made here; not so a class that something else made on top of one."""
    return getattr(cls, _SELF, None) is cls


def _fused_method(original: type[nn.Module], method: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def fused(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        current = getattr(original, method)
        record = records_of(self).get(method)
        if record is None or current is not stock:
            if record is not None:
                last_calls.note_own(self, f"{method} of its class was replaced after the conversion", method)
            return current(self, *args, **kwargs)
        if torch.compiler.is_compiling() or last_calls.watcher is None:
            return record.run(self, lambda: current(self, *args, **kwargs), *args, **kwargs)
        with last_calls.watched(self, method, args, kwargs):
            return record.run(self, lambda: current(self, *args, **kwargs), *args, **kwargs)

    # A code object of its own: torch.compile counts recompilations per code object, and classes are not recompilations.
    fused.__code__ = fused.__code__.replace(co_name=method)
    return fused


def _rebuild(methods: tuple[str, ...], make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    layer = make(*args)
    layer.__class__ = fused_class(type(layer), methods)
    return layer


def original_class(layer: nn.Module) -> type[nn.Module]:
    """The class of `layer`, or the one it had before it was converted."""
    return vars(type(layer)).get(_ORIGINAL, type(layer))


def records_of(layer: nn.Module) -> dict[str, Record]:
    """The records of a converted layer by method; empty for any other module."""
    return layer.__dict__.get(RECORDS, {})


def own_method(layer: nn.Module, method: str) -> Callable[..., Any]:
    """The code, as a function of the layer and its arguments, that a converted `layer` runs when it runs its own."""
    cls = type(layer)
    return getattr(getattr(cls, _ORIGINAL, cls), method)


def rebind(layer: nn.Module, records: Mapping[str, Record]) -> None:
    """Make `layer` run these records and no others, by method; its own code where there is none."""
    if not records:
        unbind(layer)
    elif set(records) == set(records_of(layer)) and set(records) <= set(getattr(type(layer), _STOCKS, ())):
        layer.__dict__[RECORDS] = dict(records)  # the class has these methods
        last_calls.forget_calls(layer)
    else:
        unbind(layer, set(records_of(layer)) - set(records))
        for record in records.values():
            bind(layer, record)


def bind(layer: nn.Module, record: Record) -> None:
    """Make `layer` run the record's method fused, besides those it runs fused already."""
    records = {**records_of(layer), record.method: record}
    last_calls.forget_calls(layer)
    layer.__class__ = fused_class(original_class(layer), records)
    layer.__dict__[RECORDS] = records
    if _needs_hook(layer):
        forbid_bypass(layer)


def _needs_hook(layer: nn.Module) -> bool:
    """Whether nn.TransformerEncoderLayer may pass `layer` by; ours sees to that itself."""
    return isinstance(layer, nn.MultiheadAttention) and not isinstance(layer, MultiheadAttention)


def unbind(layer: nn.Module, methods: Iterable[str] | None = None) -> bool:
    """Give `layer` its own code back, for these methods or for all; False if none of them was fused.

    A class made on top of the fused one since (FSDP2 does that) stays, and runs the original code from now on.
    """
    records = records_of(layer)
    removed = set(records) if methods is None else set(records) & set(methods)
    if not removed:
        return False
    remaining = {method: record for method, record in records.items() if method not in removed}
    last_calls.forget_calls(layer)
    is_fused = _ORIGINAL in vars(type(layer))
    if remaining:
        layer.__dict__[RECORDS] = remaining
    else:
        del layer.__dict__[RECORDS]
    if is_fused:
        original = original_class(layer)
        layer.__class__ = fused_class(original, remaining) if remaining else original
    if _needs_hook(layer):
        allow_bypass(layer)
    return True
