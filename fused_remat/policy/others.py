"""The arguments that blocks of a chain get beside their stream: whether they still are what they were."""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor

_FIXED = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


class Note:
    """What some arguments are now: tensors with their versions, and what tuples, lists and dicts hold.

    Raises TypeError for any other object: what is inside it might change unseen.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        self._version = -1
        self._items: list[tuple[Any, Note]] = []
        if isinstance(value, Tensor):
            self._version = _version(value)
        elif type(value) in (list, dict) or isinstance(value, tuple):
            self._items = [(key, Note(item)) for key, item in _items(value)]
        elif not isinstance(value, _FIXED):
            raise TypeError(f"a {type(value).__name__} may change unseen")

    def changed(self, now: Any) -> str | None:
        """How `now` differs, as what follows its name in a sentence; None if it does not."""
        if isinstance(self._value, Tensor):
            if now is not self._value:
                return " is another"
            return " was changed in place" if _version(now) != self._version else None
        if type(now) is not type(self._value):
            return " is another"
        if isinstance(now, (tuple, list, dict)):
            if not isinstance(now, tuple) and now is not self._value:
                return " is another"
            items = _items(now)
            if [key for key, _ in items] != [key for key, _ in self._items]:
                return " holds more, less or something else"
            parts = ((key, note.changed(item)) for (key, item), (_, note) in zip(items, self._items, strict=True))
            return next((f"[{key!r}]{how}" for key, how in parts if how), None)
        return None if now is self._value or now == self._value else " is another"


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, dict) else list(enumerate(value))


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
