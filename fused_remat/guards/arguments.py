"""The arguments of a region: its tensors, wherever they are nested, and how to build the arguments anew from them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def version(x: Tensor) -> int:
    """How often `x` was changed in place; -1 for a tensor that does not count (inference mode, lazy modules)."""
    return -1 if isinstance(x, UninitializedTensorMixin) or x.is_inference() else x._version


def in_words(x: Tensor) -> str:
    """Its dtype and shape."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Stands for a tensor of the arguments."""

    index: int


@dataclasses.dataclass(frozen=True)
class _Nest:
    """Stands for a container of the arguments."""

    make: Callable[[list[Any]], Any]  # from what it holds
    items: tuple[Any, ...]


class Arguments:
    """The arguments of one call, as they are now.

    Lists, tuples, dicts and dataclasses are taken apart: a replay gets containers of its own, which hold what the
    caller's held before the forward. Any other object is passed on as it is.

    Attributes:
        tensors: the distinct tensors, in order of appearance.
        others: what is neither tensor nor container, with its path; numbers and strings left out.
        paths: what the caller calls each of them: "args[0]", "kwargs['mask']", "args[1].q".
        versions: how often each was changed in place so far.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.tensors: list[Tensor] = []
        self.others: list[tuple[str, Any]] = []
        self.paths: list[str] = []
        self._index: dict[int, int] = {}
        self._args = tuple(self._take(value, f"args[{number}]") for number, value in enumerate(args))
        self._kwargs = {key: self._take(value, f"kwargs[{key!r}]") for key, value in kwargs.items()}
        self.versions = [version(x) for x in self.tensors]
        self.words = [in_words(x) for x in self.tensors]

    def build(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments again, with these in the places of `tensors`."""
        args = tuple(_build(value, tensors) for value in self._args)
        return args, {key: _build(value, tensors) for key, value in self._kwargs.items()}

    def forget_tensors(self) -> None:
        """From here on only the autograd graph keeps them, in sight of whoever offloads what it keeps."""
        self.tensors = []
        self._index = {}

    def _take(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in self._index:
                self._index[id(value)] = len(self.tensors)
                self.tensors.append(value)
                self.paths.append(path)
            return _Slot(self._index[id(value)])
        if isinstance(value, dict):
            items = tuple(self._take(item, f"{path}[{key!r}]") for key, item in value.items())
            return _Nest(_dict_maker(value), items)
        if isinstance(value, list):
            return _Nest(_list_maker(value), self._take_all(value, path))
        if isinstance(value, tuple) and not isinstance(value, torch.Size):
            items = self._take_all(value, path)
            return _Nest(getattr(type(value), "_make", type(value)), items) if value else value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
            items = tuple(self._take(getattr(value, name), f"{path}.{name}") for name in names)
            return _Nest(_dataclass_maker(value, names), items)
        if not isinstance(value, _PLAIN):
            self.others.append((path, value))
        return value

    def _take_all(self, values: Sequence[Any], path: str) -> tuple[Any, ...]:
        return tuple(self._take(item, f"{path}[{number}]") for number, item in enumerate(values))


def _build(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, _Slot):
        return tensors[value.index]
    if isinstance(value, _Nest):
        return value.make([_build(item, tensors) for item in value.items])
    return value


def _dict_maker(value: dict) -> Callable[[list[Any]], dict]:
    keys = list(value)
    if type(value) is dict:
        return lambda items: dict(zip(keys, items, strict=True))
    empty = copy.copy(value)
    dict.clear(empty)

    def make(items: list[Any]) -> dict:
        made = copy.copy(empty)
        for key, item in zip(keys, items, strict=True):
            made[key] = item
        return made

    return make


def _list_maker(value: list) -> Callable[[list[Any]], list]:
    if type(value) is list:
        return list
    empty = copy.copy(value)
    empty.clear()

    def make(items: list[Any]) -> list:
        made = copy.copy(empty)
        made.extend(items)
        return made

    return make


def _dataclass_maker(value: Any, names: list[str]) -> Callable[[list[Any]], Any]:
    empty = copy.copy(value)
    for name in names:
        object.__setattr__(empty, name, None)

    def make(items: list[Any]) -> Any:
        made = copy.copy(empty)
        for name, item in zip(names, items, strict=True):
            object.__setattr__(made, name, item)
        return made

    return make


class _Kept(torch.autograd.Function):
    """A node of the graph whose saved tensors are the inputs of a region: version-checked, in sight of hooks."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        raise AssertionError("nothing follows this node")


def keep(tensors: Sequence[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Saves them for backward as any operation would; what is returned gives them back, or raises RuntimeError.

    Tensors made in inference mode, which no operation may save, are held as they are.
    """
    held = [x if x.is_inference() else None for x in tensors]
    saved = [x for x, inference in zip(tensors, held, strict=True) if inference is None]
    if not saved:
        return lambda: tuple(held)
    node = _Kept.apply(torch.empty(0, device="cpu", requires_grad=True), *saved).grad_fn

    def given_back() -> tuple[Tensor, ...]:
        tensors = iter(node.saved_tensors)
        return tuple(next(tensors) if x is None else x for x in held)

    return given_back
