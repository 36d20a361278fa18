"""What a conversion did: entries, and the table that a person reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from fused_remat._columns import aligned
from fused_remat._folding import MODEL
from fused_remat.convert.rebind import unbind

_WIDTH = 140  # of the table
_COLUMNS = ("layer", "class", "became", "note", "left alone because")


@dataclass(frozen=True)
class Entry:
    """One layer: where it is, its class, and either what it `became` or the `reason` why it was left alone."""

    name: str  # as in model.named_modules(); "" is the model itself
    class_name: str
    kind: str = ""  # of what was converted: "mlp", "gated mlp", "attention", "norm" or "region"
    became: str = ""
    note: str = ""  # what could be better
    reason: str = ""


@dataclass
class Report:
    """`converted` and `skipped` layers in model order; `skipped` holds whatever looks like an MLP or attention.

    A layer has one entry for each thing that it became. `notes` are sentences about the whole.
    """

    converted: list[Entry] = field(default_factory=list)
    skipped: list[Entry] = field(default_factory=list)
    dry_run: bool = False
    notes: list[str] = field(default_factory=list)
    # (name in `converted`, layer or a part of it, method)
    bound: list[tuple[str, nn.Module, str]] = field(default_factory=list, repr=False)
    undo: Callable[[], list[str]] | None = field(default=None, repr=False)  # where more than unbinding is to be done

    def revert(self) -> list[str]:
        """Undo this conversion; the names of the layers that got code of their own back."""
        if self.undo is not None:
            return self.undo()
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
            "notes": list(self.notes),
        }

    def summary(self) -> str:
        """One line: how many layers were converted and how many left alone."""
        verb = "would be converted" if self.dry_run else "converted"
        return f"{len(self.converted)} {verb}, {len(self.skipped)} left alone"

    def __str__(self) -> str:
        rows = [
            (entry.name or MODEL, entry.class_name, entry.became, entry.note, entry.reason)
            for entry in (*self.converted, *self.skipped)
        ]
        columns = [i for i in range(len(_COLUMNS)) if any(row[i] for row in rows)]
        if not columns:
            return "\n".join([self.summary(), *self.notes])
        cells = [tuple(row[i] for i in columns) for row in (_COLUMNS, *rows)]
        table = aligned(cells, width=_WIDTH, wrap=range(1, len(columns)))
        return "\n".join([self.summary(), *table, *self.notes])
