"""Plain containers that modules hold, with what is nested in them: copied, and compared by what they hold."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

CONTAINERS = frozenset((list, dict, set, deque, OrderedDict, Counter, defaultdict))
ITEMS = 256  # containers that hold more are not looked into for what is nested in them
_DEPTH = 4  # containers within one another


def can_change(value: Any) -> bool:
    """Whether `value` is a plain container, or a tuple that holds one."""
    kind = type(value)
    return kind in CONTAINERS or (kind is tuple and len(value) <= ITEMS and any(map(can_change, value)))


def without_graph(value: Any) -> Any:
    """`value`, or the same numbers without the graph that made them: that would live as long as we hold it."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


def as_it_is(value: Any) -> Any:
    return value


def copied(container: Any, of: Callable[[Any], Any] = as_it_is, depth: int = 0) -> Any:
    """A container of its own with `of` each item, and with copies of the containers inside."""
    if isinstance(container, tuple):
        return tuple(_item(value, of, depth) for value in container)
    made = copy.copy(container)
    if of is as_it_is and len(made) > ITEMS:
        return made
    if isinstance(made, dict):
        for key, value in made.items():
            dict.__setitem__(made, key, _item(value, of, depth))
    elif not isinstance(made, set):
        for number, value in enumerate(made):
            made[number] = _item(value, of, depth)
    return made


def _item(value: Any, of: Callable[[Any], Any], depth: int) -> Any:
    kind = type(value)
    return copied(value, of, depth + 1) if depth < _DEPTH and (kind in CONTAINERS or kind is tuple) else of(value)


def emptied(container: Any) -> Any:
    """An empty one of its kind."""
    kind = type(container)
    return kind(container.default_factory) if kind is defaultdict else kind()


def same_items(a: Any, b: Any, depth: int = 0) -> bool:
    """Whether two containers hold the same objects in the same places, looking into those inside."""
    if len(a) != len(b):
        return False
    if isinstance(a, set):
        return a == b
    if isinstance(a, dict):
        return all(key in b and _same(value, b[key], depth) for key, value in a.items())
    return all(_same(x, y, depth) for x, y in zip(a, b, strict=True))


def _same(x: Any, y: Any, depth: int) -> bool:
    if x is y:
        return True
    kind = type(x)
    if kind is not type(y) or depth >= _DEPTH or (kind not in CONTAINERS and kind is not tuple):
        return False
    return same_items(x, y, depth + 1)
