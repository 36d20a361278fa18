"""Tables as plain text: aligned columns, two spaces apart."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest

_GAP = "  "
_NARROWEST = 16  # of a column whose cells go on in further lines


def aligned(
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[int] = (),
    width: int | None = None,
    squeeze: Mapping[int, int] | None = None,
    ends: Collection[int] = (),
    wrap: Collection[int] = (),
) -> list[str]:
    """The lines of a table; the first row is its head.

    Args:
        rows: cells, as many in each row.
        right: columns whose cells are aligned to the right.
        width: of the table, in characters; None: as wide as its cells are.
        squeeze: where that is too wide, these columns shrink in this order, each to its least width, and what does not
            fit is cut off, in the columns `ends` at the beginning. A line that is still too long is cut at its end.
        wrap: where it is too wide, the cells of these columns go on in further lines; nothing is cut.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is not None:
        _squeeze(widths, width, squeeze or {})
        _share(widths, width, wrap)
    lines = []
    for row in rows:
        cells = []
        for column, (cell, wide) in enumerate(zip(row, widths, strict=True)):
            parts = textwrap.wrap(cell, wide) or [""] if column in wrap else [_cut(cell, wide, column in ends)]
            cells.append([part.rjust(wide) if column in right else part.ljust(wide) for part in parts])
        for parts in zip_longest(*cells):
            padded = (" " * wide if part is None else part for part, wide in zip(parts, widths, strict=True))
            line = _GAP.join(padded).rstrip()
            lines.append(line if width is None or wrap else _cut(line, width, False))
    return lines


def _excess(widths: Sequence[int], width: int) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1) - width


def _squeeze(widths: list[int], width: int, squeeze: Mapping[int, int]) -> None:
    for column, least in squeeze.items():
        widths[column] -= max(0, min(_excess(widths, width), widths[column] - least))


def _share(widths: list[int], width: int, wrap: Collection[int]) -> None:
    """The room that the other columns leave, shared by these; what one needs less than its share is the others'."""
    wrapped = sorted(wrap, key=lambda column: widths[column])
    left = sum(widths[column] for column in wrapped) - max(0, _excess(widths, width))
    for position, column in enumerate(wrapped):
        widths[column] = min(widths[column], max(_NARROWEST, left // (len(wrapped) - position)))
        left -= widths[column]


def _cut(text: str, width: int, keep_end: bool) -> str:
    if len(text) <= width:
        return text
    return f"..{text[len(text) - width + 2 :]}" if keep_end else f"{text[: width - 2]}.."
