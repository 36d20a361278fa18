"""What an audit found: rows, and the table that a person reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fused_remat._about import in_words
from fused_remat._columns import aligned
from fused_remat._folding import MODEL, name_of
from fused_remat.sizes import format_bytes

Verdict = Literal["ok", "more", "less", "did not run"]


@dataclass(frozen=True)
class Row:
    """One method of a layer.

    Attributes:
        layer, method, kind: where; `kind` is "mlp", "gated mlp", "attention", "norm" or "region".
        promised: what is to be kept, in words.
        calls: with gradients; None where only the last one is known.
        expected_bytes: by formula, from the shapes of the calls (predicted); None where there is no formula: the
            layer's own code ran. What a neighbour keeps anyway (the stream) counts there, if `observed_bytes` is known.
        observed_bytes: distinct storages that the layer had saved when backward began (measured), weights left out;
            None where nobody watched.
        verdict, sentence: "more" and "less" are broken promises, and the sentence says why.
    """

    layer: str
    method: str
    kind: str
    promised: str
    calls: int | None
    expected_bytes: int | None
    observed_bytes: int | None
    verdict: Verdict
    sentence: str = ""


@dataclass
class Audit:
    """Whether the layers of a model kept in a step what they promised; one row per layer that promises something.

    `arranged`: a policy or plan was applied to the model, so that a layer without a row keeps everything on purpose.
    `measured`: the step was watched; else the rows tell what ran, and bytes are predictions. `outside_bytes`: what was
    kept outside of all these layers (measured). `about`: model, parameters, device and versions; of a `TrainingStep`
    inputs, loss and optimizer, too.
    """

    model: str
    measured: bool = False
    arranged: bool = False
    rows: list[Row] = field(default_factory=list)
    outside_bytes: int | None = None
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether no promise was broken, and there was one that could have been; of a model that a policy or plan lets
        keep everything, True."""
        if not self.rows:
            return self.arranged
        verdicts = {row.verdict for row in self.rows}
        return "ok" in verdicts and not verdicts & {"more", "less"}

    @property
    def warnings(self) -> list[str]:
        """One sentence per layer with something to say."""
        return [f"{_place(row)}: {row.sentence}" for row in self.rows if row.sentence]

    def __getitem__(self, layer: str) -> Row:
        """The first row of the layer of that path."""
        found = next((row for row in self.rows if row.layer == layer), None)
        if found is None:
            raise KeyError(
                f"no row of layer {layer!r}; there are {', '.join(row.layer for row in self.rows) or 'none'}"
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, strings and numbers, for JSON."""
        return {
            "model": self.model,
            "about": self.about,
            "measured": self.measured,
            "arranged": self.arranged,
            "ok": self.ok,
            "rows": [asdict(row) for row in self.rows],
            "outside_bytes": self.outside_bytes,
        }

    def __str__(self) -> str:
        if not self.rows and self.arranged:
            return f"{self.model}: everything is kept, as its policy or plan says; no layer promises less"
        if not self.rows:
            return f"{self.model}: no layer promises anything; convert the model first (fused_remat.convert)"
        folded = _folded(self.rows)
        cells = [["layer", "promised", "expected (predicted)", "observed (measured)", "verdict"]]
        for rows in folded:
            row = rows[0]
            cells.append([name_of([_place(row) for row in rows]), row.promised, _bytes(row.expected_bytes, "unknown"),
                          _bytes(row.observed_bytes, "not measured"), row.verdict.upper()
                          if row.verdict in ("more", "less") else row.verdict])  # fmt: skip
        lines = [in_words(self.about), *aligned(cells)] if self.about else aligned(cells)
        if self.outside_bytes is not None:
            lines.append(f"kept outside of these layers: {format_bytes(self.outside_bytes)} (measured)")
        for rows in folded:
            if rows[0].sentence:
                lines.append(f"{_place(rows[0])}{f' and {len(rows) - 1} more' * (len(rows) > 1)}: {rows[0].sentence}")
        return "\n".join(lines)


def _place(row: Row) -> str:
    path = row.layer or MODEL
    return path if row.method == "forward" else f"{path}.{row.method}"


def _folded(rows: list[Row]) -> list[list[Row]]:
    """Rows that differ in their layer alone, together, at the place of the first."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        own = asdict(row)
        own.pop("layer")
        groups.setdefault(tuple(own.values()), []).append(row)
    return list(groups.values())


def _bytes(nbytes: int | None, otherwise: str) -> str:
    return otherwise if nbytes is None else format_bytes(nbytes)
