"""Equal layers as one: groups of neighbours, paths with stars for indices, and names such as "blocks.0-11 (x12)"."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

MODEL = "(the model)"  # what the path "" is called

# A whole part of a path, or of one that is followed by the number of a value: "layers.3.mlp [2]".
_INDEX = re.compile(r"(?<![^.])\d+(?=\.| \[|\Z)")

T = TypeVar("T")


def starred(path: str) -> str:
    """`path` with stars for its indices: the same for equal layers of one chain ("layers.*.mlp")."""
    return _INDEX.sub("*", path)


def order_of(path: str) -> tuple[tuple[int, str], ...]:
    """A key that sorts paths as layers run: indices by value, "layers.9" before "layers.10"."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in path.split("."))


def neighbours(items: Iterable[T], alike: Callable[[T, T], bool]) -> list[list[T]]:
    """The items in groups: one that is `alike` to the one before it shares its group."""
    groups: list[list[T]] = []
    for item in items:
        if groups and alike(groups[-1][-1], item):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def name_of(paths: Sequence[str]) -> str:
    """What a row of these layers is called.

    One: its path. Several that differ in one index alone: "layers.0-3,8.mlp (x5)". Others: "stem ... head (x2)".
    """
    if len(paths) == 1:
        return paths[0] or MODEL
    parts = list(zip(*(path.split(".") for path in paths), strict=False))
    differ = [place for place, part in enumerate(parts) if len(set(part)) > 1]
    same_length = len({path.count(".") for path in paths}) == 1
    if same_length and len(differ) == 1 and all(part.isdecimal() for part in parts[differ[0]]):
        own = [part[0] for part in parts]
        own[differ[0]] = _runs(sorted(map(int, parts[differ[0]])))
        return f"{'.'.join(own)} (x{len(paths)})"
    return f"{paths[0] or MODEL} ... {paths[-1] or MODEL} (x{len(paths)})"


def _runs(numbers: Sequence[int]) -> str:
    """ "0-3,8" of 0, 1, 2, 3, 8."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
