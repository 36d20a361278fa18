"""What earlier calls of a region have shown."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass
class Seen:
    """Of one function or module under one name.

    `watched`: a first forward was looked at call by call. `settled`: a call has passed, and `moved` names the buffers
    that calls changed in place. `runs_on`, `generators`: what the watched forward showed. `verified`: values agreed.
    """

    watched: bool = False
    runs_on: bool = False
    verified: bool = False
    settled: bool = False
    moved: set[str] = field(default_factory=set)
    generators: list[weakref.ref[torch.Generator]] = field(default_factory=list)


_seen: weakref.WeakKeyDictionary[Any, dict[Any, Seen]] = weakref.WeakKeyDictionary()


def name_of(fn: Callable[..., Any], module: nn.Module | None = None) -> str:
    """What to call a region whose caller gave it no name."""
    if module is not None:
        return type(module).__name__
    if isinstance(fn, functools.partial):
        return name_of(fn.func)
    return getattr(fn, "__qualname__", None) or type(fn).__name__


def seen_of(name: str, fn: Callable[..., Any], root: nn.Module | None) -> Seen:
    """The same object for each call of the same code with the same module, in training and in evaluation apart."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = getattr(fn, "__func__", fn)
    code = fn.__code__ if isinstance(fn, types.FunctionType) else type(fn)
    try:
        of_root = _seen.setdefault(code if root is None else root, {})
    except TypeError:  # an object that takes no weak references is new each time
        return Seen()
    return of_root.setdefault((name, code, root is not None and root.training), Seen())
