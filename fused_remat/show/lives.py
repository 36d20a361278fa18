"""The lives of activations: from birth to the last use, dropped and rebuilt on the way."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fused_remat._folding import MODEL, starred
from fused_remat.show.labels import thinned
from fused_remat.sizes import format_bytes

KEPT, DROPPED, REBUILT = STATES = ("kept", "dropped", "rebuilt")


@dataclass(frozen=True)
class Segment:
    """A time in which a value lay in memory; `state`: kept, dropped (until then it was there), or rebuilt."""

    first: float
    last: float
    state: str


@dataclass(frozen=True)
class Life:
    """One value: kept until its last use, or dropped in forward and rebuilt in backward.

    `rebuilt_from`: name of the life that it is rebuilt from; "" where that is not known.
    """

    name: str
    nbytes: int
    segments: tuple[Segment, ...]
    rebuilt_from: str = ""

    @property
    def is_rebuilt(self) -> bool:
        return any(segment.state == REBUILT for segment in self.segments)


@dataclass(frozen=True)
class Row:
    """One line of the picture: `values` equal lives of equal layers, `rebuilt` of them rebuilt; `lives` are drawn."""

    name: str
    bytes_each: int
    values: int
    rebuilt: int
    lives: tuple[Life, ...]

    @property
    def nbytes(self) -> int:
        """Of all its values together."""
        return self.values * self.bytes_each

    def to_dict(self) -> dict[str, Any]:
        """For the table of the picture."""
        return {
            "name": self.name,
            "values": self.values,
            "bytes_each": self.bytes_each,
            "bytes": self.nbytes,
            "kept": self.values - self.rebuilt,
            "rebuilt": self.rebuilt,
        }


def lives(recording: Any, regions: Iterable[Sequence[str]] = ()) -> list[Life]:
    """The kept values of a recording and those dropped and rebuilt, in order of birth.

    A rebuilt value belongs to the dropped one of the same module, size and turn: a recomputed module makes again what
    it made in forward, in the same order. A rebuilt value without such a twin starts its life in backward.

    Args:
        recording: a `fused_remat.recording.Recording`.
        regions: module paths that are recomputed together, as in `Assignment.regions`. A value rebuilt in one is
            rebuilt from the largest kept value of the last module that ran before the region, alive at the time.
    """
    allocations = sorted(recording.allocations, key=lambda a: a.born)
    end = max(last for _, last in recording.phases.values())
    kept = [a for a in allocations if a.kind == KEPT]
    twins = _twins(allocations)
    names = _names([*kept, *(twin or rebuilt for rebuilt, twin in twins)])
    made = [(a.born, Life(names[id(a)], a.nbytes, (Segment(a.born, min(a.died, end), KEPT),))) for a in kept]
    for rebuilt, twin in twins:
        again = Segment(rebuilt.born, min(rebuilt.died, end), REBUILT)
        parts = (again,) if twin is None else (Segment(twin.born, twin.died, DROPPED), again)
        source = _source(rebuilt, kept, allocations, regions)
        life = Life(names[id(twin or rebuilt)], rebuilt.nbytes, parts, "" if source is None else names[id(source)])
        made.append((parts[0].first, life))
    return [life for _, life in sorted(made, key=lambda pair: pair[0])]


def rows(values: Sequence[Life], largest: int, lanes: int) -> tuple[list[Row], list[Row]]:
    """(the `largest` rows by bytes, in order of birth; those left out).

    Equal lives of equal layers share a row where there are more than `largest`; it has at most `lanes` to draw of them.
    """
    groups: dict[tuple, list[Life]] = defaultdict(list)
    for life in values:
        groups[starred(life.name) if len(values) > largest else life.name, life.nbytes].append(life)
    made = [
        Row(name if len(same) > 1 else same[0].name, nbytes, len(same), sum(life.is_rebuilt for life in same),
            tuple(thinned(same, lanes)))
        for (name, nbytes), same in groups.items()
    ]  # fmt: skip
    ranked = sorted(made, key=lambda row: -row.nbytes)
    shown = ranked[:largest]
    return [row for row in made if row in shown], ranked[largest:]


def sentence(shown: Sequence[Row], hidden: int, source: str) -> str:
    """The rows in words; `hidden`: how many more there are."""
    every = [row.to_dict() for row in shown]
    kept, rebuilt = sum(row["kept"] for row in every), sum(row["rebuilt"] for row in every)
    largest = max(every, key=lambda row: row["bytes"])
    rest = f"; {hidden} smaller rows are left out" if hidden else ""
    return (
        f"Lives of activations over one step, {source}: {kept} values kept until backward uses them, {rebuilt} dropped "
        f"and rebuilt. Largest: {largest['name']}, {format_bytes(largest['bytes'])}{rest}."
    )


def _twins(allocations: Sequence[Any]) -> list[tuple[Any, Any | None]]:
    """(rebuilt allocation, what was dropped in forward), by module and size in turn."""
    dropped: dict[tuple[str, int], list[Any]] = defaultdict(list)
    for a in allocations:
        if a.phase == "forward" and a.kind == "temporary" and a.died < math.inf:
            dropped[a.module, a.nbytes].append(a)
    turn: dict[tuple[str, int], int] = defaultdict(int)
    made = []
    for a in allocations:
        if a.kind == REBUILT:
            key = a.module, a.nbytes
            there = dropped[key]
            made.append((a, there[turn[key]] if turn[key] < len(there) else None))
            turn[key] += 1
    return made


def _names(allocations: Iterable[Any]) -> dict[int, str]:
    """A name for each, by identity: the module, and which of its values where it has several."""
    by_module: dict[str, list[Any]] = defaultdict(list)
    for a in sorted(allocations, key=lambda a: a.born):
        by_module[a.module or MODEL].append(a)
    return {
        id(a): module if len(made) == 1 else f"{module} [{number}]"
        for module, made in by_module.items()
        for number, a in enumerate(made, start=1)
    }


def _source(rebuilt: Any, kept: Sequence[Any], allocations: Sequence[Any], regions: Iterable[Sequence[str]]) -> Any:
    inside = next((r for r in regions if any(_within(rebuilt.module, path) for path in r)), None)
    if inside is None:
        return None
    entered = min((a.born for a in allocations if a.phase == "forward" and _any_within(a.module, inside)), default=None)
    if entered is None:
        return None
    alive = [a for a in kept if a.born < entered and a.died >= rebuilt.born]
    if not alive:
        return None
    last = max(alive, key=lambda a: a.born).module
    return max((a for a in alive if a.module == last), key=lambda a: (a.nbytes, a.born))


def _any_within(module: str, paths: Sequence[str]) -> bool:
    return any(_within(module, path) for path in paths)


def _within(module: str, path: str) -> bool:
    return module == path or module.startswith(f"{path}.")
