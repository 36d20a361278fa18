"""The tensors that a forward keeps for backward: which storage, saved by which module, operation and source line.

Everything that autograd saves passes through `torch.autograd.graph.saved_tensors_hooks`, in C++ nodes too. What is held
elsewhere (by checkpointing, on a `ctx`) does not; `Inventory.nbytes` is then below what the allocator counts.
"""

from __future__ import annotations

import linecache
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import fused_remat

LOSS = "(the loss)"  # the module of what is saved outside of the model's forward
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(fused_remat.__file__) + os.sep
_CHECKPOINT = os.path.join(_TORCH, "utils", "checkpoint.py")
_GENERATED = ("<frozen", "<string", "<eval_with_key")  # not "<stdin>" and "<ipython-input ...>", which people write
_NO_OP = "(unknown)"
REGION_INPUT = "checkpoint input"


@dataclass(frozen=True)
class Saver:
    """One operation that saves a tensor for its backward.

    `op` is the name of its node in the graph; "checkpoint input" where torch.utils.checkpoint holds the input of a
    region. `source` is "file.py:line", the innermost line outside of torch and of fused_remat that led to it; where a
    model has none (stock modules in an nn.Sequential), the line of torch's module. `code` is that line.
    """

    module: str
    op: str
    source: str
    code: str
    path: str  # of the source file

    def to_dict(self) -> dict[str, str]:
        """Plain strings, for JSON; the file by its name alone."""
        return {"module": self.module, "op": self.op, "source": self.source, "code": self.code}


@dataclass(frozen=True)
class KeptTensor:
    """One storage that is alive after forward because backward needs it, counted once however many save it.

    Attributes:
        nbytes: of the storage.
        shape, dtype: of the largest tensor saved of it.
        savers: every operation that saves it, the first in forward first; those that repeat another are left out.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    savers: tuple[Saver, ...]

    @property
    def module(self) -> str:
        """Path of the module whose operation saves it first; "" is the model itself, "(the loss)" what follows it."""
        return self.savers[0].module

    @property
    def op(self) -> str:
        """Name of the graph node that saves it first."""
        return self.savers[0].op

    @property
    def source(self) -> str:
        """The line that keeps it, "file.py:line" (see `Saver`)."""
        return self.savers[0].source

    @property
    def shared_with(self) -> tuple[str, ...]:
        """The other modules that save it too, in order of forward."""
        return tuple(dict.fromkeys(saver.module for saver in self.savers[1:] if saver.module != self.module))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "nbytes": self.nbytes,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "module": self.module,
            "op": self.op,
            "source": self.source,
            "code": self.savers[0].code,
            "shared_with": list(self.shared_with),
            "saved_by": [saver.to_dict() for saver in self.savers],
        }


class _Saved:
    """A tensor saved for backward, for as long as the graph holds it; detached, since one with a graph is a cycle."""

    __slots__ = ("__weakref__", "frame", "module", "node", "order", "tensor")

    def __init__(self, tensor: Tensor, order: int, module: str):
        self.tensor = tensor.detach()
        self.order = order
        self.module = module
        self.node = latest_node()
        self.frame = _line_that_saves()


def latest_node() -> int:
    """The sequence number of the autograd node made last on this thread.

    An operation makes its node first and saves its tensors then, so that this is the node that saves.
    """
    return torch._C._autograd._get_sequence_nr() - 1


def kept_tensors(
    forward: Callable[[], Tensor], running: Callable[[], str | None], existing: Iterable[Tensor]
) -> list[KeptTensor]:
    """Runs `forward`, which returns the loss, and lists what is kept for its backward, largest first.

    Args:
        running: the path of the module that runs at the moment, None outside of the model.
        existing: tensors whose storages are not counted: parameters, buffers, inputs and whatever there was before.
    """
    known = list(existing)  # held, so that no new storage takes the address of one of them
    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()
    count = 0

    def pack(tensor: Tensor) -> _Saved:
        nonlocal count
        count += 1
        module = running()
        entry = _Saved(tensor, count, LOSS if module is None else module)
        saved.add(entry)
        return entry

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda entry: entry.tensor):
        loss = run_forward(forward)
    ops = _names_of_nodes(loss)
    left_out = {key for tensor in (*known, loss) for key, _ in storages(tensor)}
    found: dict[int, tuple[int, list[_Saved]]] = {}
    for entry in sorted(saved, key=lambda entry: entry.order):
        for key, nbytes in storages(entry.tensor):
            if key not in left_out and nbytes:
                found.setdefault(key, (nbytes, []))[1].append(entry)
    kept = [_kept(nbytes, entries, ops) for nbytes, entries in found.values()]
    return sorted(kept, key=lambda tensor: -tensor.nbytes)  # stable: equal ones in order of forward


def run_forward(forward: Callable[[], Tensor]) -> Tensor:
    """`forward()`. Frames outside of this one are not the model's."""
    return forward()


def storages(tensor: Tensor) -> list[tuple[int, int]]:
    """(identity, bytes) of a tensor's storage; of its parts' for a wrapper; none for a tensor without one (sparse)."""
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is not None:
        parts = (getattr(tensor, name) for name in flatten(tensor)[0])  # a DTensor's mesh among them
        return [pair for part in parts if isinstance(part, Tensor) for pair in storages(part)]
    try:
        storage = tensor.untyped_storage()
        return [(storage._cdata, storage.nbytes())]
    except (NotImplementedError, RuntimeError, ValueError):
        return []


def _kept(nbytes: int, entries: list[_Saved], ops: dict[int, str]) -> KeptTensor:
    largest = max((entry.tensor for entry in entries), key=Tensor.numel)
    savers = []
    for entry in entries:
        source, path, code, is_region = entry.frame
        op = REGION_INPUT if is_region else ops.get(entry.node, _NO_OP)
        savers.append(Saver(entry.module, op, source, code, path))
    return KeptTensor(
        nbytes, tuple(largest.shape), str(largest.dtype).removeprefix("torch."), tuple(dict.fromkeys(savers))
    )


def _names_of_nodes(loss: Tensor) -> dict[int, str]:
    """The nodes of the graph of `loss`: sequence number -> name."""
    names: dict[int, str] = {}
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names[node._sequence_nr()] = node.name().rpartition("::")[2]
        waiting += [following for following, _ in node.next_functions]
    return names


def _line_that_saves() -> tuple[str, str, str, bool]:
    """("file.py:line", path, code, whether checkpointing holds a region's input) of the tensor being saved now."""
    frame: FrameType | None = sys._getframe(2)
    innermost, is_region = None, False
    while frame is not None and frame.f_code is not run_forward.__code__:
        path = frame.f_code.co_filename
        if path == _CHECKPOINT:
            is_region = True
        elif not path.startswith((_TORCH, _OURS, *_GENERATED)):
            return *_line(frame), is_region
        elif innermost is None and path.startswith(os.path.join(_TORCH, "nn", "modules")):
            innermost = frame
        frame = frame.f_back
    return (*_line(innermost), is_region) if innermost is not None else ("", "", "", is_region)


def _line(frame: FrameType) -> tuple[str, str, str]:
    path, number = frame.f_code.co_filename, frame.f_lineno
    return f"{os.path.basename(path)}:{number}", path, linecache.getline(path, number).strip()
