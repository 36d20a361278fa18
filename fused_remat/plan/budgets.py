"""What a budget means in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fused_remat.plan.reading import STATICS
from fused_remat.sizes import parse_bytes

WORDS = ("min", "knee")


@dataclass(frozen=True)
class Budget:
    """`given`, in one spelling; `word` for "min" and "knee"; otherwise bytes, or a fraction still to be taken."""

    given: str
    word: str | None = None
    value: Any = None

    def nbytes(self, whole: int) -> int | None:
        """In bytes, fractions of `whole`; None for a word."""
        return None if self.word else parse_bytes("budget", self.value, whole=whole)


def check_budget(budget: Any) -> Budget:
    """Raises TypeError or ValueError, as `fused_remat.plan` documents."""
    if isinstance(budget, str) and budget.strip().lower() in WORDS:
        word = budget.strip().lower()
        return Budget(word, word)
    if budget is None or isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise TypeError(
            f'budget must be bytes (an int or "6GiB"), a fraction such as 0.6, "min" or "knee"; got {budget!r}'
        )
    try:
        parse_bytes("budget", budget, whole=2**62)  # the form alone: what a fraction is taken of comes later
    except ValueError as error:
        if isinstance(budget, str) and not any(c.isdigit() for c in budget):
            raise ValueError(f'budget must be bytes, a fraction, "min" or "knee"; got {budget!r}') from None
        raise error
    return Budget(str(budget), None, budget)


def check_count(count: Any) -> tuple[str, ...]:
    """The kinds that the budget includes, of `STATICS`, in that order. Raises TypeError or ValueError."""
    if count is None:
        return STATICS
    if isinstance(count, str) or not isinstance(count, Iterable):
        raise TypeError(f"count must be a list of kinds, of {', '.join(STATICS)}; got {count!r}")
    wanted = list(count)
    unknown = [kind for kind in wanted if kind not in STATICS]
    if unknown:
        raise ValueError(
            f"count has {unknown[0]!r}, but what may be left out is {', '.join(STATICS)}; activations always count"
        )
    return tuple(kind for kind in STATICS if kind in wanted)


def device_memory(device: torch.device) -> int | None:
    """All memory of a CUDA device (whether free or not: the same on every rank and at every time); None elsewhere."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(device).total_memory
