"""What a plan says about each unit, and about what lies outside of them."""

from __future__ import annotations

from fused_remat.plan.numbers import Numbers
from fused_remat.plan.places import AS_IT_IS, Doing, Place
from fused_remat.plan.plan import UnitRow
from fused_remat.policy import Assignment
from fused_remat.recording import Recording


def rows_of(
    numbers: Numbers, assignment: Assignment, predicted: Recording | None, measured: Recording | None
) -> tuple[UnitRow, ...]:
    """A row per unit, in order of forward."""
    places = [place for place in numbers.places if place is not None]
    paths = [place.path for place in places]
    regions = {path: i for i, region in enumerate(assignment.regions) for path in region}
    kept_predicted = _by_unit(predicted.kept_by_module(), paths) if predicted else {}
    kept_measured = _by_unit(measured.kept_by_module(), paths) if measured else {}
    source = predicted or measured
    redone = _by_unit(source.redone, paths) if source else {}
    rows = []
    for place in places:
        doing = doing_of(place, assignment)
        region = regions.get(place.path)
        size = len(assignment.regions[region]) if region is not None else 0
        again = f"run again with {size - 1} others" if size > 1 else "run again"
        rows.append(
            UnitRow(
                path=place.path,
                letter=doing.letter if region is None else "R",
                does=place.says(doing) if region is None else again if doing == AS_IT_IS else f"{again}, {doing.name}",
                region=region,
                predicted_kept=kept_predicted.get(place.path) if predicted else None,
                measured_kept=kept_measured.get(place.path) if measured else None,
                redone=redone.get(place.path, 0),
                layers={path: doing.letter_of(info.kind) for path, info in place.layers.items() if doing.fused},
            )
        )
    return tuple(rows)


def doing_of(place: Place, assignment: Assignment) -> Doing:
    """What the assignment makes of a unit."""
    for doing in place.doings():
        if all(assignment.layers.get(path) == keep for path, keep in place.keeps(doing)) and (
            doing.fused or all(assignment.layers.get(path) is None for path in place.layers)
        ):
            return doing
    return AS_IT_IS


def outside_of(numbers: Numbers) -> tuple[tuple[str, int], ...]:
    """(what, bytes) that no plan changes: there before the step, and the highest before, after and beside the units."""
    static = [(f"{kind}, there before the step", n) for kind, n in numbers.base.static.items() if n]
    first, last = numbers.parts.before[0], numbers.parts.before[-1]
    gradients = sum(a.nbytes for a in numbers.base.allocations if a.kind == "gradients")
    highest = [
        ("gradients", gradients),
        ("what comes before the units, at its highest", max(first.forward, first.backward)),
        ("what follows the units (head, loss), at its highest", max(last.forward, last.backward)),
        ("the optimizer's step, gradients included", numbers.parts.optimizer),
    ]
    return (*static, *((name, n) for name, n in highest if n > 0))


def _by_unit(by_module: dict[str, int], paths: list[str]) -> dict[str, int]:
    total = dict.fromkeys(paths, 0)
    for module, value in by_module.items():
        path = module
        while path not in total and path:
            path = path.rpartition(".")[0]
        if path in total:
            total[path] += value
    return total
