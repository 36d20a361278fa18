"""Recompute a function in backward instead of keeping what it saves, and be told where gradients could differ."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fused_remat.guards import _torch
from fused_remat.guards.caches import refuse_caches
from fused_remat.guards.call import Call
from fused_remat.guards.errors import RematWarning
from fused_remat.guards.seen import name_of

VERIFY = ("off", "once", "always")


def region(fn: Callable[..., Any], *args: Any, verify: str = "off", name: str | None = None, **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)`, of which only the inputs are kept for backward: the rest is recomputed there.

    For code that is no transformer layer: convolution stages, a U-Net. Torch's non-reentrant checkpoint recomputes, and
    stops at the last tensor that backward needs. The gradients are those of the plain call, bit for bit, as far as the
    guards see; what they see to be otherwise is an error:

    - Inputs (nested ones and keyword arguments too), tensors in closures and parameters must not be changed in place,
      nor parameters replaced, before backward is done.
    - Buffers, plain attributes and containers, hooks and training flags of the modules inside are for the replay what
      they were before the forward, and afterwards what they were before the replay: running statistics and counters
      move once.
    - Other state that `fn` reaches must not change, neither in the forward nor before backward is done: numbers,
      strings, functions and tensors in closures, defaults, globals and attributes of classes that the code names, in
      containers there, and in objects that arguments or modules hold. Lists that are only appended to count as changed;
      tensors that are added to a dict do not (tables that are made once).
    - Python's and NumPy's generators, `torch.Generator`s that `fn` reaches, and torch's on every device are replayed.
      So are torch's settings of precision, kernels and determinism, and `fused_remat.workspace` and `backend`.
    - Key-value caches are refused while gradients are on, and iterators that `fn` reaches. Device moves are told: those
      of the first call, in training and in evaluation apart; with `verify`, those of each call that it compares.

    Not seen: writes through `.data` or by other libraries into a tensor's memory (also into tensors of inference mode)
    and NumPy arrays; state more than two objects deep, in containers of more than 256 items, in objects of torch, NumPy
    and the standard library, or in modules that only an object holds; attributes that a helper function reads of a
    class that it is handed; iterators inside objects; environment variables, files and time. `verify` sees what of
    these changes a tensor that is saved.

    Without gradients (`torch.no_grad`, `torch.inference_mode`) this is the plain call; so it is, with a RematWarning,
    under transforms of `torch.func` and forward-mode differentiation, which cannot go through a replay. Under
    `torch.compile` it is torch's own checkpoint, without the guards.

    Args:
        fn: a function or module. Modules that it reaches by its closure, or as the object of a method, are found.
        *args, **kwargs: its arguments. For arguments called `verify` or `name`, use `functools.partial`.
        verify: compare the values of what the replay rebuilds with what the forward saved, by checksums of 16 bytes:
            "off", in the first backward of each region only ("once"), or "always".
        name: what errors call the region; the function's or class's name by default.

    Raises:
        RematError: of one of its subclasses, in forward or backward, when a guard sees that the gradient could differ.
        ValueError: `verify` is none of the three.
        TypeError: `fn` is not callable.
    """
    return run_region(name, fn, args, kwargs, verify=verify)


def as_region(fn: Callable[..., Any] | None = None, *, verify: str = "off", name: str | None = None) -> Any:
    """Makes a function that runs as a `region` whenever it is called: `@as_region`, `@as_region(verify="once")`."""
    if fn is None:
        return functools.partial(as_region, verify=verify, name=name)
    _check(fn, verify)

    @functools.wraps(fn)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return run_region(name, fn, args, kwargs, verify=verify)

    return recomputed


def run_region(
    name: str | None,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    verify: str = "off",
    module: nn.Module | None = None,
) -> Any:
    """As `region`; `module` is what runs inside where `fn` does not show it."""
    if torch.compiler.is_compiling():
        _say_unguarded()
        return checkpoint(fn, *args, use_reentrant=False, **kwargs)
    _check(fn, verify)
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    if module is None and isinstance(fn, nn.Module):
        module = fn
    name = name or name_of(fn, module)
    reason = _torch.why_not_replayed()
    if reason is not None:
        _say_not_replayed(reason)
        return fn(*args, **kwargs)
    refuse_caches(f"region {name!r}", args, kwargs)
    return Call(name, fn, module, args, kwargs, verify).run()


def _check(fn: Any, verify: Any) -> None:
    if not callable(fn):
        raise TypeError(f"fn must be a function or module, got {type(fn).__name__}")
    if verify not in VERIFY:
        raise ValueError(f"verify must be one of {', '.join(map(repr, VERIFY))}, got {verify!r}")


def _say_not_replayed(reason: str) -> None:
    warnings.warn(
        f"fused_remat regions are plain calls under {reason}, which cannot go through a replay: they keep everything",
        RematWarning,
        stacklevel=2,
    )


@_torch.while_tracing
def _say_unguarded() -> None:
    """Runs while torch.compile traces, once for each trace."""
    warnings.warn(
        "a fused_remat region under torch.compile is torch's own checkpoint: its guards and verify are off",
        RematWarning,
        stacklevel=2,
    )
