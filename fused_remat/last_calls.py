"""How each fused layer ran last, as far as gradients were recorded: fused, or its own code and why.

The notes lie beside the layers, keyed weakly: no layer holds one, so that copies, pickles and `state_dict` know nothing
of them. They hold names, shapes and reasons, no tensors. Nothing is noted while a compiler traces.

A `Watcher` (`fused_remat.auditing`) sees more, for as long as it is set.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from fused_remat.functional.operands import Prepared


class LastCall:
    """The last call of a method of a layer.

    Attributes:
        reason: why it ran its own code; None if it ran fused.
        sizes: elements and dtype of each of its inputs, where it ran fused.
        op: what chose the backend (`dispatch.Call`), and `backend` what was chosen, once the op was called.
        replays: how often it ran again inside a backward since: something around it recomputes it too.
        forward: whether it ran outside of any backward.
    """

    __slots__ = ("backend", "forward", "op", "reason", "replays", "sizes")

    def __init__(self) -> None:
        self.forward, self.replays = False, 0


class _Notes:
    """The calls of one layer by method. `layer` is weak, and takes the notes out of the table when the layer dies."""

    __slots__ = ("calls", "layer")

    def __init__(self, layer: nn.Module) -> None:
        key = id(layer)
        self.layer = weakref.ref(layer, lambda _: _notes.pop(key, None))
        self.calls: dict[str, LastCall] = {}


class Watcher(Protocol):
    """What sees every call of a fused layer while it is set."""

    def running(
        self, layer: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> contextlib.AbstractContextManager[Any]:
        """Entered around a call on these arguments."""

    def noted(self, layer: nn.Module, method: str, reason: str | None) -> None:
        """A call runs fused (`reason` None), or its own code."""

    def op(self, prepared: Prepared, backend: str) -> contextlib.AbstractContextManager[Any]:
        """Entered around the fused op of a call."""


class _Pending(threading.local):
    """The note of the fused call that this thread is about to make."""

    call: LastCall | None = None


watcher: Watcher | None = None
_pending = _Pending()
_notes: dict[int, _Notes] = {}  # by id: faster than a WeakKeyDictionary, and asked at every call
_is_compiling = torch.compiler.is_compiling
_backward_running = torch._C._current_graph_task_id  # at least 0 where a node of a backward runs


def in_backward() -> bool:
    """Whether this thread runs a node of a backward: what is called there is called again."""
    return _backward_running() >= 0


def note_fused(layer: nn.Module, *inputs: Tensor, method: str = "forward") -> None:
    """`layer` is about to make its fused call on `inputs`."""
    if not _is_compiling() and torch.is_grad_enabled():
        _pending.call = _note(layer, method, None, inputs)


def note_own(layer: nn.Module, reason: str, method: str = "forward") -> None:
    """`layer` is about to run its own code."""
    if not _is_compiling() and torch.is_grad_enabled():
        _pending.call = None
        _note(layer, method, reason, ())


def _note(layer: nn.Module, method: str, reason: str | None, inputs: tuple[Tensor, ...]) -> LastCall:
    if watcher is not None:
        watcher.noted(layer, method, reason)
    notes = _notes.get(id(layer))
    if notes is None:
        notes = _notes[id(layer)] = _Notes(layer)
    call = notes.calls.get(method)
    if call is None:
        call = notes.calls[method] = LastCall()
    if _backward_running() < 0:
        call.forward, call.replays = True, 0
    else:
        call.replays += 1
    call.reason, call.sizes = reason, [(x.numel(), x.dtype) for x in inputs]
    call.op, call.backend = None, ""
    return call


def note_op(prepared: Prepared, backend: str) -> None:
    """The fused op of the call noted last, if a layer makes it, runs on `backend`."""
    call = _pending.call
    if call is not None:
        _pending.call = None
        call.op, call.backend = prepared.call, backend


def last_call(layer: nn.Module, method: str) -> LastCall | None:
    """The last call with gradients of a method of `layer`; None if there was none."""
    notes = _notes.get(id(layer))
    return None if notes is None else notes.calls.get(method)


def forget_calls(layer: nn.Module) -> None:
    """As if `layer` had never been called."""
    _notes.pop(id(layer), None)


def watched(
    layer: nn.Module, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> contextlib.AbstractContextManager[Any]:
    """Entered around a call of a fused layer, while there is a watcher."""
    return contextlib.nullcontext() if watcher is None else watcher.running(layer, method, args, kwargs or {})
