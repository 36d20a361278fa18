"""Bytes that each layer kept in a step that runs while somebody watches.

A tensor saved for backward is attributed to the innermost fused layer that runs when it is saved. No module hooks: a
hook makes a converted layer run its own code. What is alive when backward begins was kept; each storage counts once,
for the first that saved it, and weights count for nobody.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fused_remat import last_calls
from fused_remat.audit.expected import need_of
from fused_remat.audit.promises import Promise
from fused_remat.functional.operands import Prepared
from fused_remat.plain import PLAIN_TENSOR_TYPES

Key = tuple[int, str]  # id of the layer, method


class _Saved:
    """A tensor saved for backward, for as long as the graph holds it; detached, or the graph would hold itself."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@dataclass(frozen=True)
class _Entry:
    saved: weakref.ref[_Saved]
    key: Key | None  # None: outside of all fused layers
    address: int
    nbytes: int
    in_op: bool


@dataclass
class Seen:
    """What was seen of one method of a layer in one forward and backward.

    Attributes:
        calls, replays: with gradients, in forward and inside the backward.
        reasons: why calls ran their own code.
        on_reference: why fused calls ran on the reference path.
        residual_bytes: of all fused calls, by formula.
        operands: address -> bytes that the fused calls read again.
    """

    calls: int = 0
    replays: int = 0
    reasons: list[str] = field(default_factory=list)
    on_reference: list[str] = field(default_factory=list)
    residual_bytes: int = 0
    operands: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Kept:
    """Bytes alive when backward began, by owner; `owners` says who owns a storage."""

    by_layer: dict[Key, int]
    in_ops: dict[Key, int]
    outside: int
    owners: dict[int, Key | None]


class _Stack(threading.local):
    frames: tuple[Key, ...] = ()
    in_op: bool = False


class Watching:
    """A `last_calls.Watcher`. Of several passes (gradient accumulation) the last is told."""

    def __init__(self, model: nn.Module, promises: Iterable[Promise]) -> None:
        self._keeps = {(id(promise.layer), promise.method): promise.keep for promise in promises}
        tensors = [*model.parameters(), *model.buffers()]
        self._weights = {t.untyped_storage().data_ptr() for t in tensors if t.device.type != "meta"}
        self._stack = _Stack()
        self._begin()

    def _begin(self) -> None:
        self.seen: dict[Key, Seen] = {}
        self.inputs: dict[Key, dict[int, int]] = {}  # address -> bytes of what the method was called with
        self.passed = False  # whether backward has begun
        self.kept: Kept | None = None
        self._entries: list[_Entry] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Sees the calls and saved tensors of this thread.

        Raises RuntimeError where somebody watches already.
        """
        if last_calls.watcher is not None:
            raise RuntimeError("an audit is running already; let one end before the next begins")
        last_calls.watcher = self
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            last_calls.watcher = None
            self._close()

    @contextlib.contextmanager
    def running(self, layer: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        key, outer = (id(layer), method), self._stack.frames
        if not last_calls.in_backward() and torch.is_grad_enabled():
            inputs = self.inputs.setdefault(key, {})
            for leaf in tree_leaves([args, kwargs]):
                if type(leaf) in PLAIN_TENSOR_TYPES:
                    storage = leaf.untyped_storage()
                    inputs[storage.data_ptr()] = min(storage.nbytes(), leaf.numel() * leaf.element_size())
        self._stack.frames = (*outer, key)
        try:
            yield
        finally:
            self._stack.frames = outer

    def noted(self, layer: nn.Module, method: str, reason: str | None) -> None:
        if not last_calls.in_backward() and self.passed:
            self._begin()
        seen = self.seen.setdefault((id(layer), method), Seen())
        if last_calls.in_backward():
            seen.replays += 1
            return
        seen.calls += 1
        seen.reasons.append(reason or "")

    @contextlib.contextmanager
    def op(self, prepared: Prepared, backend: str) -> Iterator[None]:
        key = self._stack.frames[-1] if self._stack.frames else None
        seen = self.seen.get(key)
        if seen is not None and key in self._keeps and not last_calls.in_backward():
            need = need_of(prepared, self._keeps[key])
            seen.residual_bytes += need.residual_bytes
            for address, nbytes in need.operands.items():
                if address not in self._weights:
                    seen.operands[address] = max(nbytes, seen.operands.get(address, 0))
            if backend == "reference":
                seen.on_reference.append(prepared.call.reference_only or "no compiled operators, or it was named")
        outer, self._stack.in_op = self._stack.in_op, True
        try:
            yield
        finally:
            self._stack.in_op = outer

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor.detach())
        if last_calls.in_backward():
            return saved
        if self.passed:
            self._begin()
        try:
            storage = tensor.untyped_storage()
            address, nbytes = storage.data_ptr(), storage.nbytes()
        except (NotImplementedError, RuntimeError):  # a tensor without a storage of its own
            return saved
        if address and address not in self._weights:
            key = self._stack.frames[-1] if self._stack.frames else None
            self._entries.append(_Entry(weakref.ref(saved), key, address, nbytes, self._stack.in_op))
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        if last_calls.in_backward():
            self._close()
        return saved.tensor

    def _close(self) -> None:
        """Backward begins: what is alive now was kept."""
        if self.passed:
            return
        self.passed = True
        owners: dict[int, Key | None] = {}
        by_layer: dict[Key, int] = {}
        in_ops: dict[Key, int] = {}
        outside = 0
        for entry in self._entries:
            if entry.saved() is None or entry.address in owners:
                continue
            owners[entry.address] = entry.key
            if entry.key is None:
                outside += entry.nbytes
                continue
            by_layer[entry.key] = by_layer.get(entry.key, 0) + entry.nbytes
            if entry.in_op:
                in_ops[entry.key] = in_ops.get(entry.key, 0) + entry.nbytes
        self.kept = Kept(by_layer, in_ops, outside, owners)
        self._entries = []
