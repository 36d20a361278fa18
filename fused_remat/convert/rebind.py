"""Giving one layer the fused forward: its class becomes a subclass of the class it had.

Only `module.__class__` and one attribute change. Parameters, children, hooks, names, `state_dict`, the `training` flag
and every other attribute stay in place, `isinstance` and the class's name still answer as before, other instances of
the class are untouched, and a copy or pickle carries the class along: it is rebuilt from the original class, in
another process too. (A forward bound to the instance would break copies and pickles: it stays bound to the old one.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from fused_remat.convert.fused import Fused, run

_RECORD = "_fused_remat"  # the instance attribute with the layer's Fused record
_ORIGINAL = "_fused_remat_original"  # on a fused class: the class it replaces
_METHOD = "_fused_remat_method"  # on a fused class: the name of the method it overrides


def fused_class(original: type[nn.Module], method: str) -> type[nn.Module]:
    """The subclass of `original` whose `method` runs fused where the instance has a record and is still plain."""
    return _fused_class(original, method, getattr(original, method))


@functools.cache
def _fused_class(original: type[nn.Module], method: str, stock: Callable[..., Any]) -> type[nn.Module]:
    """`stock` is what `original.method` was when it was found to be an MLP; patched later, the patch runs instead."""

    @functools.wraps(stock)
    def fused(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        current = getattr(original, method)
        record = getattr(self, _RECORD, None)
        if record is None or current is not stock or len(args) + len(kwargs) != 1:
            return current(self, *args, **kwargs)
        (x,) = args or kwargs.values()
        return run(self, record, x, lambda: current(self, *args, **kwargs))

    # A code object of its own: torch.compile counts recompilations per code object, and classes are not recompilations.
    fused.__code__ = fused.__code__.replace(co_name=method)

    def extra_repr(self: nn.Module) -> str:
        record = getattr(self, _RECORD, None)
        own = original.extra_repr(self)
        return own if record is None else ", ".join(filter(None, [own, f"fused_remat: {describe(record)}"]))

    def reduce_ex(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        make, args, *rest = original.__reduce_ex__(self, protocol)
        cls = type(self)
        if _ORIGINAL not in vars(cls):  # a further subclass, whose pickling is its own affair
            return (make, args, *rest)
        return (_rebuild, (method, make, tuple(original if arg is cls else arg for arg in args)), *rest)

    namespace = {
        method: fused,
        "extra_repr": extra_repr,
        "__reduce_ex__": reduce_ex,
        "__doc__": original.__doc__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        _ORIGINAL: original,
        _METHOD: method,
    }
    return type(original)(original.__name__, (original,), namespace)


def _rebuild(method: str, make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    layer = make(*args)
    layer.__class__ = fused_class(type(layer), method)
    return layer


def describe(fused: Fused) -> str:
    """What a layer became, in words: kind, activation and what it keeps."""
    kind = "gated mlp" if fused.layout.gate else "mlp"
    return f"{kind}, {fused.layout.activation}, keep={fused.keep}"


def bind(layer: nn.Module, fused: Fused) -> None:
    """Make `layer` run fused."""
    layer.__class__ = fused_class(type(layer), fused.layout.method)
    layer.__dict__[_RECORD] = fused


def unbind(layer: nn.Module) -> bool:
    """Give `layer` its original class back; False if it was not fused.

    A class made on top of the fused one since (FSDP2 does that) stays, and runs the original code from now on.
    """
    if layer.__dict__.pop(_RECORD, None) is None:
        return False
    original = vars(type(layer)).get(_ORIGINAL)
    if original is not None:
        layer.__class__ = original
    return True


def record_of(layer: nn.Module) -> Fused | None:
    """The record of a fused layer; None for any other module."""
    return layer.__dict__.get(_RECORD)
