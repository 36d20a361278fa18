"""Tensors inside larger storages whose surroundings must not change, of any strides and alignment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

GUARD = 24  # elements on either side


class Guards:
    """Makes such tensors and remembers what lies around them."""

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, Tensor]] = []

    def place(self, values: Tensor, *, offset: int = 0, gap: int = 0, step: int = 1, last: int = -1) -> Tensor:
        """`values` with `gap` elements between rows of the dim `last`, in which neighbours lie `step` apart."""
        moved = values.movedim(last, -1)
        shape = list(moved.shape)
        width = max(shape[-1] * step, 1) + gap
        strides = [step]
        for size in reversed(shape[:-1]):
            strides.insert(0, width)
            width *= max(size, 1)
        storage = torch.full((width + 2 * GUARD + offset,), 7.0, dtype=values.dtype)
        view = storage.as_strided(shape, strides, GUARD + offset).movedim(-1, last)
        view.copy_(values)
        outside = torch.ones(storage.shape, dtype=torch.bool)
        outside.as_strided(shape, strides, GUARD + offset).fill_(False)
        self._made.append((storage, outside))
        return view

    def check(self) -> None:
        for storage, outside in self._made:
            assert (storage[outside] == 7).all(), "a kernel wrote beside its output"


@contextmanager
def guards() -> Iterator[Guards]:
    made = Guards()
    yield made
    made.check()
