"""The plan as a table that a person reads."""

from __future__ import annotations

import re
import textwrap

from fused_remat._about import trained
from fused_remat._columns import aligned
from fused_remat._folding import name_of, neighbours
from fused_remat.plan.peak import Peak
from fused_remat.plan.plan import FrontPoint, Plan, UnitRow
from fused_remat.show.labels import format_cost
from fused_remat.show.layer_strip import strip
from fused_remat.sizes import format_bytes

WIDTH = 110


def explain(plan: Plan) -> str:
    """See `Plan.explain`."""
    lines = [
        *_heading(plan),
        "",
        *([strip(plan), ""] if plan.units else []),
        *_table(plan.units),
        "",
        *_peaks(plan),
        *_neighbours(plan),
        "",
        "outside of the units above, the same in every plan (predicted):",
        *(f"  {line}" for line in _outside(plan.outside)),
        *(f"note: {note}" for note in plan.notes),
        "kept: bytes that forward leaves for backward, each storage once. Not in it: inputs, the loss, gradients and "
        "what lives within one pass only; the peak has all of them.",
    ]
    return "\n".join(part for line in lines for part in _within(line)) + "\n"


def _within(line: str) -> list[str]:
    """In as many lines as it takes; numbers stay with their units."""
    if len(line) <= WIDTH:
        return [line]
    line = re.sub(r"(?<![\w.])(\d[\d.,]*) (?=[A-Za-zµ])", "\\1\u00a0", line)
    parts = textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return [part.replace("\u00a0", " ") for part in parts]


def _outside(items: tuple[tuple[str, int], ...]) -> list[str]:
    rows = [(f"{format_bytes(nbytes):>10}", what) for what, nbytes in items]
    return aligned(rows, width=WIDTH - 2, wrap=(1,)) if rows else []


def _heading(plan: Plan) -> list[str]:
    budget = plan.budget if plan.budget_bytes is None else f"{plan.budget} = {format_bytes(plan.budget_bytes)}"
    lines = [
        f"plan for a peak of {budget}" if plan.budget_bytes is not None else f'plan for the budget "{plan.budget}"'
    ]
    where = f"device {plan.device}"
    where += f" with {format_bytes(plan.device_bytes)}" if plan.device_bytes else ""
    lines.append(
        f"{where}; inputs {', '.join(plan.inputs) or 'none'}; torch {plan.versions['torch']}, fused_remat "
        f"{plan.versions['fused_remat']}; fewest {'seconds' if plan.minimise == 'time' else 'FLOP redone'}"
    )
    lines.append(f"{plan.about['model']}; {trained(plan.about)}")
    if plan.assignment.workspace is not None:
        workspace = format_bytes(plan.assignment.workspace)
        lines.append(f"fused layers have a workspace of {workspace}, whatever is in force around them")
    if plan.in_flight > 1:
        lines.append(f"a pipeline stage with {plan.in_flight} micro-batches between forward and backward (1F1B)")
    return lines


def _table(units: tuple[UnitRow, ...]) -> list[str]:
    """Equal neighbours folded."""
    rows = [("units", "what they do", "kept each, predicted", "kept each, measured", "redone each")]
    for group in neighbours(units, _same):
        first = group[0]
        rows.append(
            (
                name_of([unit.path for unit in group]),
                f"{first.letter}  {first.does}",
                _bytes(first.predicted_kept),
                _bytes(first.measured_kept),
                format_cost("flop", first.redone),
            )
        )
    return aligned(rows, right=(2, 3, 4), width=WIDTH, wrap=(0, 1))


def _same(one: UnitRow, other: UnitRow) -> bool:
    same_region = (one.region is None) == (other.region is None) and (
        one.region == other.region or "with" not in one.does
    )
    fields = ("letter", "does", "predicted_kept", "measured_kept", "redone")
    same_parent = one.path.rpartition(".")[0] == other.path.rpartition(".")[0]
    return same_region and same_parent and all(getattr(one, f) == getattr(other, f) for f in fields)


def _peaks(plan: Plan) -> list[str]:
    rows = [("", "predicted", "measured")]
    pairs = (plan.predicted, plan.measured)

    def row(name: str, of) -> None:
        rows.append(
            (
                name,
                *(
                    "not measured" if i and p is None else "not predicted" if p is None else of(p)
                    for i, p in enumerate(pairs)
                ),
            )
        )

    row("peak", lambda p: format_bytes(p.peak))
    row("  at", lambda p: p.moment)
    row("kept after forward", lambda p: format_bytes(p.kept))
    row("redone in backward", lambda p: format_cost("flop", p.redone))
    rows.append(("peak with everything as it is", format_bytes(plan.everything_kept), ""))
    lines = aligned(rows, width=WIDTH, wrap=(1, 2))
    shown: Peak | None = plan.measured or plan.predicted
    lines.append(f"the peak ({shown.source}) consists of: {shown.held_by()}")
    if plan.passed_over:
        points = [plan.front[i] for i in plan.passed_over]
        ran_out = sum(p.ran_out for p in points)
        peaks = ", ".join(
            [format_bytes(p.measured or p.peak) for p in points if not p.ran_out]
            + ([f"{ran_out} ran out of memory"] if ran_out else [])
        )
        lines.append(
            f"passed over, since their peak was above the budget when they were run: {len(plan.passed_over)} ({peaks})"
        )
    return lines


def _neighbours(plan: Plan) -> list[str]:
    lines = []
    if plan.chosen > 0:
        lines.append(f"next faster plan: {_point(plan, plan.front[plan.chosen - 1])}")
    if plan.chosen + 1 < len(plan.front):
        lines.append(f"next smaller plan: {_point(plan, plan.front[plan.chosen + 1])}")
    return lines


def _point(plan: Plan, point: FrontPoint) -> str:
    own = plan.front[plan.chosen]
    more = point.cost - own.cost
    cost = format_cost("seconds", abs(more) / 1e9) if plan.minimise == "time" else format_cost("flop", abs(more))
    measured = f", measured {format_bytes(point.measured)}" if point.measured is not None else ""
    measured = ", out of memory when it was run" if point.ran_out else measured
    return f"peak {format_bytes(point.peak)} predicted{measured}, {cost} {'more' if more > 0 else 'less'}"


def _bytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)
