"""The exact choice for a chain: every trade of peak against cost that nothing beats.

A dynamic programme from the last unit to the first. What a suffix of units needs above the bytes kept before it is one
number, its `peak`: putting an option in front gives

    peak(option, suffix) = max(own moments of the option, kept of the option + peak(suffix))

so of all suffixes only those matter that no other beats in both peak and cost (in all of peak, kept and cost for a
pipeline stage, where what the whole stage keeps counts once more per further micro-batch). A region is put in front as
an option of several units; what goes on inside of it is the same recursion, solved once for equal runs of units.

Everything is in integers, and the order of the options decides what is left of a tie: the same units give the same
plans everywhere.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from fused_remat.plan.timeline import Choice, Option, Unit, kept_by

MOST = 400  # points of a front
_PARTS = 1 << 13  # the least difference in cost, as a part of it, that two points of a longer front have
_CHANGES = 1 << 24  # cost and changes in one integer: cost first, then fewest changes


class _Point(NamedTuple):
    """One way to do a suffix (or the inside of a region): what it needs and how it begins."""

    peak: int
    kept: int
    rank: int  # cost * _CHANGES + changes
    choice: Any
    rest: _Point | None


@dataclass(frozen=True)
class Solution:
    """A point of the front: highest bytes above what is there before the step, cost, and what the units do."""

    peak: int
    cost: int
    changes: int
    choices: tuple[Choice, ...]


def solve(units: Sequence[Unit], *, floor: int = 0, in_flight: int = 1, regions: bool = True) -> list[Solution]:
    """The whole front, cheapest first: the peak falls, and the cost (of equals the changes) rises.

    Args:
        units: in the order of forward.
        floor: bytes that the step reaches whatever the units do (its optimizer's phase).
        in_flight: micro-batches between forward and backward, as `timeline.moments` counts them.
        regions: whether units may be run again as regions.

    Of all ways with the least cost for a peak the front has one with the fewest changes; where fewer changes cost the
    same and peak higher, both are in it: a model that fits as it is stays as it is.
    """
    solver = _Solver(units, in_flight, regions)
    suffixes = {len(units): [_Point(0, 0, 0, None, None)]}
    for first in range(len(units) - 1, -1, -1):
        suffixes[first] = solver.front(first, suffixes)
    every = [
        _Point(max(floor, point.peak + (in_flight - 1) * point.kept), 0, point.rank, point, None)
        for point in suffixes[0]
    ]
    return [_solution(point.peak, point.choice) for point in reversed(_lowest(every))]


def _solution(peak: int, point: _Point) -> Solution:
    cost, changes = divmod(point.rank, _CHANGES)
    choices = []
    while point.choice is not None:
        choices.append(_choice(point.choice))
        point = point.rest
    return Solution(peak, cost, changes, tuple(choices))


def _choice(made: Choice | tuple[int, int, _Point]) -> Choice:
    if isinstance(made, Choice):
        return made
    first, last, inside = made
    options = []
    while inside is not None:
        options.append(inside.choice)
        inside = inside.rest
    return Choice(first, last, tuple(options), region=True)


class _Solver:
    def __init__(self, units: Sequence[Unit], in_flight: int, regions: bool):
        self.units, self.in_flight, self.regions = units, in_flight, regions
        self.kinds = _kinds(units)
        self.insides: dict[tuple[int, ...], list[_Point]] = {}
        every = sum(unit.gradient for unit in units)
        self.behind, seen = [0] * len(units), 0
        for i in range(len(units) - 1, -1, -1):
            self.behind[i] = every if in_flight > 1 else seen
            seen += units[i].gradient
        self.before = every if in_flight > 1 else 0  # gradients that are there during forward

    def front(self, first: int, suffixes: dict[int, list[_Point]]) -> list[_Point]:
        """Of all ways to do the units from `first` on those that no other beats."""
        lowest = _lowest if self.in_flight == 1 else _lowest_of_three
        alone = lowest(self._alone(first, suffixes[first + 1]))
        if not self.regions or self.units[first].chain < 0:
            return alone
        return lowest([*alone, *self._regions(first, suffixes, alone)])

    def _alone(self, first: int, suffix: list[_Point]) -> Iterable[_Point]:
        """Every way that does not begin with a region."""
        for index, option in enumerate(self.units[first].options):
            own = max(option.forward + self.before, option.backward + self.behind[first])
            choice, kept, rank = Choice(first, first, (index,)), option.kept, _rank(option)
            for rest in suffix:
                yield _Point(max(own, kept + rest.peak), kept + rest.kept, rest.rank + rank, choice, rest)

    def _regions(self, first: int, suffixes: dict[int, list[_Point]], others: list[_Point]) -> Iterable[_Point]:
        """The ways that begin with a region, most of those that `others` beat left out."""
        peaks, ranks = [point.peak for point in others], [point.rank for point in others]
        passing, last = 0, first
        while last < len(self.units) and self.units[last].chain == self.units[first].chain:
            carried = self.units[last - 1].output if last > first else 0
            passing = max(passing, carried + self.units[last].passing)
            inside, suffix = self._inside(first, last), suffixes[last + 1]
            kept, forward = kept_by(self.units, Choice(first, last, (), True)), passing + self.before
            if self.in_flight > 1:
                yield from self._pairs(first, last, kept, forward, suffix)
            else:
                for peak, i, j in _joined(inside, self.behind[last], suffix, kept, forward):
                    rank = inside[i].rank + suffix[j].rank + 1
                    at = bisect_right(peaks, peak) - 1
                    if at < 0 or rank < ranks[at]:
                        yield _Point(peak, 0, rank, (first, last, inside[i]), suffix[j])
            last += 1

    def _pairs(self, first: int, last: int, kept: int, forward: int, suffix: list[_Point]) -> Iterable[_Point]:
        """Every inside with every rest, but of the insides that fit below the rest the cheapest alone."""
        inside, behind = self._inside(first, last), self.behind[last]
        for rest in suffix:
            fits = max(forward, kept + rest.peak)
            start = bisect_left(inside, fits - behind + 1, key=lambda point: point.peak)
            for own in inside[max(start - 1, 0) :]:
                peak, rank = max(fits, own.peak + behind), rest.rank + own.rank + 1
                yield _Point(peak, kept + rest.kept, rank, (first, last, own), rest)

    def _inside(self, first: int, last: int) -> list[_Point]:
        """The front of a region's units, relative to its beginning and to the gradients behind the region."""
        key = tuple(self.kinds[first : last + 1])
        if key not in self.insides:
            unit, end = self.units[first], self.units[last]
            if first == last:
                points = [_Point(o.again, 0, _rank(o, o.again_cost), i, None) for i, o in _allowed(unit)]
            else:
                behind = 0 if self.in_flight > 1 else sum(u.gradient for u in self.units[first + 1 : last + 1])
                points = []
                for i, option in _allowed(unit):
                    own = max(end.waiting + option.forward, behind + option.backward)
                    rank = _rank(option, option.cost + unit.replay)
                    points += [
                        _Point(max(own, option.kept + rest.peak), 0, rank + rest.rank, i, rest)
                        for rest in self._inside(first + 1, last)
                    ]
            self.insides[key] = _lowest(points)
        return self.insides[key]


def _kinds(units: Sequence[Unit]) -> list[int]:
    """A number per unit, the same for units that have the same numbers."""
    known: dict[Any, int] = {}
    keys = [(u.options, u.gradient, u.output, u.waiting, u.passing, u.replay, u.overhead) for u in units]
    return [known.setdefault(key, len(known)) for key in keys]


def _allowed(unit: Unit) -> list[tuple[int, Option]]:
    """The options that a unit may have inside a region."""
    return [(i, option) for i, option in enumerate(unit.options) if option.again >= 0]


def _rank(option: Option, cost: int | None = None) -> int:
    return (option.cost if cost is None else cost) * _CHANGES + option.changes


def _joined(
    inside: list[_Point], behind: int, suffix: list[_Point], kept: int, forward: int
) -> Iterable[tuple[int, int, int]]:
    """(peak, index in `inside`, index in `suffix`) for every common peak, from the lowest on.

    Both lists fall in rank as their peak rises: below a common peak the last of each is the cheapest.
    """
    if not inside:
        return
    own, rest = [point.peak + behind for point in inside], [point.peak + kept for point in suffix]
    i, j, peak = 0, 0, max(forward, own[0], rest[0])
    while True:
        while i + 1 < len(own) and own[i + 1] <= peak:
            i += 1
        while j + 1 < len(rest) and rest[j + 1] <= peak:
            j += 1
        yield peak, i, j
        if i + 1 == len(own) and j + 1 == len(rest):
            return
        peak = min(own[i + 1] if i + 1 < len(own) else rest[j + 1], rest[j + 1] if j + 1 < len(rest) else own[i + 1])


def _lowest(points: Iterable[_Point]) -> list[_Point]:
    """Those that no other beats in peak and rank; peak rising, rank falling. Of equal ones the first."""
    front: list[_Point] = []
    for point in sorted(points, key=itemgetter(0, 2)):
        if not front or point.rank < front[-1].rank:
            front.append(point)
    return _thinned(front)


def _lowest_of_three(points: Iterable[_Point]) -> list[_Point]:
    """Those that no other beats in peak, kept and rank; peak rising. Of equal ones the first."""
    front: list[_Point] = []
    kept: list[int] = []  # a staircase: kept rising, rank falling
    rank: list[int] = []
    for point in sorted(points, key=lambda point: (point.peak, point.kept, point.rank)):
        at = bisect_left(kept, point.kept + 1)
        if at and rank[at - 1] <= point.rank:
            continue
        front.append(point)
        at = bisect_left(kept, point.kept)
        end = at
        while end < len(rank) and rank[end] >= point.rank:
            end += 1
        kept[at:end], rank[at:end] = [point.kept], [point.rank]
    return _thinned_by_slices(front)


def _thinned(front: list[_Point]) -> list[_Point]:
    """At most `MOST` of the points (peak rising, rank falling), its ends among them.

    Before each that is left out there is one, with a lower peak, that costs little more: by as small a part as `MOST`
    points allow. So a thinned front has no higher peaks, only costs that are a little higher.
    """
    part, left = 1, front
    while len(left) > MOST:
        left = front[:1]
        for point in front[1:-1]:
            if (left[-1].rank - point.rank) * _PARTS > part * abs(point.rank):
                left.append(point)
        left.append(front[-1])
        part *= 2
    return left


def _thinned_by_slices(front: list[_Point]) -> list[_Point]:
    """At most `MOST` of the points, in their order: of equal slices of the range of ranks the first."""
    if len(front) <= MOST:
        return front
    low, high = min(point.rank for point in front), max(point.rank for point in front)
    slices: dict[int, _Point] = {}
    for point in front:
        slices.setdefault((point.rank - low) * (MOST - 2) // (high - low), point)
    return [*slices.values(), *([] if front[-1] in slices.values() else front[-1:])]


def knee(front: Sequence[tuple[int, int]]) -> int:
    """The index of the point of a front (peak, cost; cheapest first) where a saving begins to get dear.

    With peak and cost scaled so that the ends are (1, 0) and (0, 1), it is the point farthest below the straight line
    between them; of equals the cheapest.
    """
    (high, least), (low, most) = front[0], front[-1]
    if high == low or most == least:
        return 0
    return min(
        range(len(front)), key=lambda i: (front[i][0] - low) * (most - least) + (front[i][1] - least) * (high - low)
    )
