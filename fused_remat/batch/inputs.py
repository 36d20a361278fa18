"""What `make_batch` returns: how it goes into the model, and whether it has the rows that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

MakeBatch = Callable[[int], Any]
Shapes = tuple[tuple[int, ...], ...]


def arguments(batch: Any, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`batch` as args and kwargs of the model: a mapping goes in by keyword, a tuple or list by position.

    Raises TypeError where it holds no tensor.
    """
    if isinstance(batch, Mapping):
        args, kwargs = (), dict(batch)
    elif isinstance(batch, (tuple, list)):
        args, kwargs = tuple(batch), {}
    else:
        args, kwargs = (batch,), {}
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves([args, kwargs])):
        raise TypeError(
            f"make_batch({size}) returned a {type(batch).__name__} without tensors; expected a tensor, a tuple of the "
            "model's inputs, or a dict of them by name"
        )
    return args, kwargs


def shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    return tuple(tuple(leaf.shape) for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor))


class Rows:
    """Compares the shapes of batches of several sizes: which dims follow the size, and which change by themselves."""

    def __init__(self) -> None:
        self._seen: dict[int, Shapes] = {}
        self.varying = False  # dims changed that are no rows: sequence lengths, image sizes, numbers of objects

    def missing(self, size: int, shapes: Shapes) -> int | None:
        """The rows of a batch that is too small for `size`, where earlier ones tell; None if it has what was asked for.

        A batch is too small if dims that grew so far grow by less than the size now, none of them by as much.
        """
        again = self._seen.setdefault(size, shapes)
        self.varying = self.varying or _outline(again) != _outline(shapes) or again != shapes
        smaller = [known for known in self._seen if known < size]
        if not smaller:
            return None
        before = max(smaller)
        if _outline(self._seen[before]) != _outline(shapes):
            self.varying = True
            return None
        pairs = [
            (old, new)
            for old_shape, new_shape in zip(self._seen[before], shapes, strict=True)
            for old, new in zip(old_shape, new_shape, strict=True)
        ]
        if any(new * before == old * size and old for old, new in pairs):
            self.varying = self.varying or any(new != old and new * before != old * size for old, new in pairs)
            return None
        del self._seen[size]
        candidates = [new * before // old for old, new in pairs if old and new > old and new * before % old == 0]
        return min(candidates, default=before)


def _outline(shapes: Shapes) -> tuple[int, ...]:
    return tuple(map(len, shapes))


def device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Of the first tensor."""
    return next((leaf.device for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor)), None)
