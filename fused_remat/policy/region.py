"""A module whose forward is recomputed in backward: the record that runs it so.

A region keeps what it was called with; everything inside is made again, layer by layer, when backward comes to it. Its
own code runs unchanged, under the module's hooks: those run once.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from fused_remat import last_calls
from fused_remat.convert.attention_call import ROLES
from fused_remat.convert.norms import forget
from fused_remat.convert.rebind import Record, original_class, own_method, why_no_subclass
from fused_remat.guards import run_region
from fused_remat.guards._torch import why_not_replayed
from fused_remat.guards.caches import is_cache

_CACHED = (
    "a recomputed region got a cache of keys and values while gradients are recorded; it runs as if it were none, and "
    "keeps every activation. Pass use_cache=False (or set model.config.use_cache = False) while training"
)


@dataclass(frozen=True)
class Region:
    """Runs a module's forward, fused where `inner` says how, inside one recomputed region."""

    path: str  # of the module in its model, for messages
    names: tuple[str, ...]  # of the arguments of its forward
    inner: Record | None = None  # what the module's forward is besides
    verify: str = "off"  # see `fused_remat.guards`
    method: ClassVar[str] = "forward"
    kind: ClassVar[str] = "region"
    takes_norm: ClassVar[bool] = False

    def describe(self) -> str:
        return "; ".join(filter(None, ["recomputed region", self.inner and self.inner.describe()]))

    def run(self, layer: nn.Module, stock: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Any:
        return run_alone(layer, self, args, kwargs)


def why_no_region(module: nn.Module) -> str | None:
    """Why `module` cannot be recomputed as a whole; None if it can."""
    cls = original_class(module)
    if isinstance(module, torch.jit.ScriptModule) or cls.forward is nn.Module.forward:
        return f"which is a {cls.__name__} and runs no forward that could be run again"
    if "forward" in vars(module):
        return "which has a forward of its own on the instance"
    reason = why_no_subclass(cls, "forward")
    return None if reason is None else f"but {reason}"


def run_alone(layer: nn.Module, region: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `layer` makes of these arguments, recomputed in backward if there is a backward, and no cache."""
    body = functools.partial(run_body, layer, region.inner)
    if not torch.is_grad_enabled() or has_cache(region.names, args, kwargs):
        last_calls.note_own(layer, "it got a cache of keys and values, which recomputing would fill twice")
        return body(*args, **kwargs)
    reason = why_not_replayed()
    if reason is None:
        last_calls.note_fused(layer)
    else:
        last_calls.note_own(layer, f"{reason} was active, which cannot go through a replay")
    return recompute(body, args, kwargs, name=region.path, verify=region.verify, module=layer)


def run_body(layer: nn.Module, inner: Record | None, /, *args: Any, **kwargs: Any) -> Any:
    """The forward of `layer` without its region."""
    own = own_method(layer, "forward")
    if inner is None:
        return own(layer, *args, **kwargs)
    return inner.run(layer, lambda: own(layer, *args, **kwargs), *args, **kwargs)


def recompute(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str, verify: str, module: nn.Module
) -> Any:
    """`fn(*args, **kwargs)`, which runs `module`; backward keeps the arguments and makes the rest again."""
    for leaf in _pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            forget(leaf)
    return run_region(name, fn, args, kwargs, verify=verify, module=module)


def has_cache(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a cache that a forward would fill is among its arguments, by their names or classes.

    Says so where gradients are recorded: recomputing would fill it twice.
    """
    named = dict(zip(names, args, strict=False)) | kwargs
    cached = any(is_cache(v) or (ROLES.get(name) == "cache" and v is not None) for name, v in named.items())
    if cached and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        warnings.warn(_CACHED, stacklevel=2)
    return cached
