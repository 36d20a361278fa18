"""What a conversion did: entries, and the table that a person reads."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from fused_remat.convert.rebind import unbind

_COLUMNS = ("layer", "class", "became", "note", "left alone because")


@dataclass(frozen=True)
class Entry:
    """One layer: where it is, its class, and either what it `became` or the `reason` why it was left alone."""

    name: str  # as in model.named_modules(); "" is the model itself
    class_name: str
    kind: str = ""  # of what was converted: "mlp", "gated mlp", "attention" or "norm"
    became: str = ""
    note: str = ""  # what could be better
    reason: str = ""


@dataclass
class Report:
    """`converted` and `skipped` layers in model order; `skipped` holds whatever looks like an MLP or attention.

    A layer has one entry for each thing that it became.
    """

    converted: list[Entry] = field(default_factory=list)
    skipped: list[Entry] = field(default_factory=list)
    dry_run: bool = False
    # (name in `converted`, layer or a part of it, method)
    bound: list[tuple[str, nn.Module, str]] = field(default_factory=list, repr=False)

    def revert(self) -> list[str]:
        """Undo this conversion; the names of the layers that got code of their own back."""
        return list(dict.fromkeys(name for name, layer, method in self.bound if unbind(layer, [method])))

    def count(self, kind: str) -> int:
        """How many entries of this kind were converted; "mlp" counts the gated ones too."""
        kinds = ("mlp", "gated mlp") if kind == "mlp" else (kind,)
        return sum(entry.kind in kinds for entry in self.converted)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, strings and bools, for JSON."""
        return {
            "dry_run": self.dry_run,
            "converted": [asdict(entry) for entry in self.converted],
            "skipped": [asdict(entry) for entry in self.skipped],
        }

    def summary(self) -> str:
        """One line: how many layers were converted and how many left alone."""
        verb = "would be converted" if self.dry_run else "converted"
        return f"{len(self.converted)} {verb}, {len(self.skipped)} left alone"

    def __str__(self) -> str:
        rows = [
            (entry.name or "(the model)", entry.class_name, entry.became, entry.note, entry.reason)
            for entry in (*self.converted, *self.skipped)
        ]
        columns = [i for i in range(len(_COLUMNS)) if any(row[i] for row in rows)]
        if not columns:
            return self.summary()
        cells = [tuple(row[i] for i in columns) for row in (_COLUMNS, *rows)]
        try:
            table = _rich_table(cells)
        except ImportError:
            table = _plain_table(cells)
        return f"{self.summary()}\n{table}"


def _rich_table(rows: list[tuple[str, ...]]) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows[1:]:
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=140, color_system=None, markup=False, emoji=False).print(table)
    return text.getvalue().rstrip()


def _plain_table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
