"""What is reachable from some Python objects, as it was: contents of containers, values of tensors, random states."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

_CONTAINERS = (dict, list)


class Snapshot:
    """The dicts and lists reachable from `roots`, through tuples too; with `values` a copy of every tensor in them.

    Copies of tensors on a GPU are kept in the host's memory, so that taking a snapshot costs the device nothing. A
    `.grad` is set aside by `take_gradients` instead of being copied: nothing may write into it in the meantime.
    """

    def __init__(self, roots: Iterable[dict | list], *, values: bool = True):
        self._copies = values
        self._containers: dict[int, tuple[dict | list, Any]] = {}
        self._tensors: dict[int, _Value] = {}
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        for root in roots:
            self._visit(root)

    def _visit(self, root: Any) -> None:
        waiting = [root]
        while waiting:
            found = waiting.pop()
            if isinstance(found, Tensor):
                if id(found) not in self._tensors:
                    self._tensors[id(found)] = _Value(found, copied=self._copies)
            elif isinstance(found, torch.Generator):
                self._generators.setdefault(id(found), (found, found.get_state()))
            elif isinstance(found, _CONTAINERS):
                if id(found) not in self._containers:
                    keyed = isinstance(found, dict)
                    self._containers[id(found)] = found, dict(found) if keyed else list(found)
                    waiting += [*found.keys(), *found.values()] if keyed else found
                    if keyed and getattr(found, "__dict__", None):  # a dict with attributes (transformers' ModelOutput)
                        waiting.append(vars(found))
            elif isinstance(found, tuple):
                waiting += found

    @property
    def containers(self) -> list[dict | list]:
        """Every dict and list found, once."""
        return [container for container, _ in self._containers.values()]

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor found, once."""
        return [value.tensor for value in self._tensors.values()]

    def take_gradients(self) -> None:
        """Sets every `.grad` aside; `restore` gives them back, the same objects."""
        for tensor in self.tensors:
            if tensor.is_leaf:
                self._gradients.append((tensor, tensor.grad))
                tensor.grad = None

    def restore(self) -> None:
        """Everything back to what it was, the identity of objects included."""
        for container, contents in self._containers.values():
            if isinstance(container, dict):
                if not _same_items(container, contents):
                    set_items(container, contents)
            elif len(container) != len(contents) or any(a is not b for a, b in zip(container, contents, strict=True)):
                container[:] = contents
        for value in self._tensors.values():
            value.restore()
        for generator, state in self._generators.values():
            generator.set_state(state)
        for tensor, grad in self._gradients:
            tensor.grad = grad


def set_items(container: dict, items: Mapping[Any, Any]) -> None:
    """Gives `container` exactly these items, in this order, also where its class forbids to update or clear it."""
    plain = OrderedDict if isinstance(container, OrderedDict) else dict
    if len(container) != len(items) or any(a is not b for a, b in zip(container, items, strict=True)):
        plain.clear(container)
    for key, value in items.items():
        plain.__setitem__(container, key, value)


class _Value:
    """The storage, the copied values and the flag of a tensor."""

    def __init__(self, tensor: Tensor, *, copied: bool):
        self.tensor = tensor
        self._copy: Tensor | None = None
        self.requires_grad = tensor.requires_grad
        if not copied:
            return
        self._alias = tensor.detach()
        with torch.no_grad():
            distinct = _distinct(self._alias)
            self._copy = distinct.to("cpu", copy=True) if tensor.device.type == "cuda" else distinct.clone()

    def restore(self) -> None:
        if self._copy is None:
            return
        with torch.no_grad():
            if not _is_same_memory(self.tensor, self._alias):
                self.tensor.data = self._alias
            _distinct(self._alias).copy_(self._copy)
        if self.tensor.requires_grad != self.requires_grad:
            self.tensor.requires_grad_(self.requires_grad)


def _distinct(tensor: Tensor) -> Tensor:
    """Each element that exists once: an expanded tensor cannot be written to as a whole."""
    if tensor.layout != torch.strided:
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _same_items(now: dict, before: dict) -> bool:
    """The same keys in the same order with the same objects. By identity: `==` of tensors compares values."""
    return len(now) == len(before) and all(
        a is c and b is d for (a, b), (c, d) in zip(now.items(), before.items(), strict=True)
    )


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    if a.layout != torch.strided or b.layout != torch.strided:
        return a.shape == b.shape and a.layout == b.layout
    same_layout = (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    return same_layout and a.storage_offset() == b.storage_offset() and a.is_set_to(b)


class RandomStates:
    """The states of torch's generators (CPU, and CUDA where it is in use), Python's, and NumPy's if it is imported."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
