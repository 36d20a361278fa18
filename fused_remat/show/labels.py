"""Texts in pictures: only what the font can draw, no longer than there is room; axes in bytes and FLOP."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from fused_remat.show.theme import FONT

_UNITS = (("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_FLOP_UNITS = (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3), ("FLOP", 1.0))
_ROLLS_OVER = 0.9995  # of a unit: what "%.3g" prints as 1 of it
_SECOND_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def byte_unit(highest: float) -> tuple[str, int]:
    """(name, bytes) of the binary unit that an axis up to `highest` is best written in."""
    return next(((name, size) for name, size in _UNITS if highest >= size), _UNITS[-1])


def cost_unit(kind: str, highest: float) -> tuple[str, float]:
    """(name, size) of the unit for a cost "flop" or "seconds" up to `highest`."""
    units = _FLOP_UNITS if kind == "flop" else _SECOND_UNITS
    return next(((name, size) for name, size in units if highest >= size), units[-1])


def format_cost(kind: str, value: float) -> str:
    """`value` in FLOP or seconds as text: "6.40 GFLOP", "12.5 ms"."""
    name, size = cost_unit(kind, abs(value) / _ROLLS_OVER)
    return f"{value / size:.3g} {name}"


def drawable(text: str, longest: int = 48) -> str:
    """`text` with what the font lacks written as escapes, its middle cut out beyond `longest` characters."""
    known = _characters()
    text = "".join(c if ord(c) in known else c.encode("unicode_escape").decode() for c in text)
    if len(text) <= longest:
        return text
    head = (longest - 1) // 2
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head) :]}"


def thinned(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` (at least 2) of the items, evenly, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


@functools.cache
def _characters() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(code for code in get_font(findfont(FONT)).get_charmap() if code >= 32)
