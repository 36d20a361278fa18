"""What each unit of a recorded step takes: kept bytes, the heights of its forward and backward, redone FLOP."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fused_remat.recording import Recording
from fused_remat.training_step import BACKWARD, FORWARD, OPTIMIZER

STATICS = ("parameters", "buffers", "optimizer", "inputs", "gradients")  # what `count` may leave out


@dataclass(frozen=True)
class Taken:
    """One unit or fixed part in one recording, in the terms of `timeline.Option`."""

    kept: int
    forward: int
    backward: int
    gradient: int
    redone: int
    flop: int  # of its forward
    made: int  # bytes of everything made in its forward, freed there or not


@dataclass(frozen=True)
class Parts:
    """A recording taken apart: `before[i]` is the fixed part in front of unit i, the last of them follows the units."""

    units: tuple[Taken, ...]
    before: tuple[Taken, ...]
    optimizer: int  # highest of its phase above the static bytes


def counted(recording: Recording, count: Sequence[str]) -> Recording:
    """The recording without the bytes of those `STATICS` that are not in `count`."""
    left_out = set(STATICS) - set(count)
    if not left_out:
        return recording
    return replace(
        recording,
        static={kind: 0 if kind in left_out else nbytes for kind, nbytes in recording.static.items()},
        allocations=tuple(a for a in recording.allocations if a.kind not in left_out),
    )


def called_once(recording: Recording, paths: Sequence[str]) -> list[str]:
    """Of these modules those that forward calls exactly once and none inside of another; in the order of the calls."""
    calls: dict[str, list[tuple[float, float]]] = {}
    wanted = set(paths)
    for span in recording.spans:
        if span.phase == FORWARD and span.module in wanted:
            calls.setdefault(span.module, []).append((span.first, span.last))
    once = sorted((spans[0], path) for path, spans in calls.items() if len(spans) == 1)
    found, end = [], -math.inf
    for (first, last), path in once:
        if first >= end:
            found.append(path)
            end = last
    return found


def taken(recording: Recording, paths: Sequence[str]) -> Parts:
    """What the units `paths` (from `called_once`) and the fixed parts between them take."""
    return _Reader(recording, paths).parts()


class _Reader:
    def __init__(self, recording: Recording, paths: Sequence[str]):
        self.recording, self.paths = recording, list(paths)
        self.levels = _Levels(recording)
        start, self.forward_end = recording.phases[FORWARD]
        first_backward, self.backward_end = recording.phases[BACKWARD]
        forward = {s.module: (s.first, s.last) for s in reversed(recording.spans) if s.phase == FORWARD}
        self.forward = [forward[path] for path in self.paths]
        ends = [start, *(last for _, last in self.forward)]
        begins = [*(first for first, _ in self.forward), max(self.forward_end, first_backward)]
        self.gaps = list(zip(ends, begins, strict=True))
        self._set_backward(first_backward)
        stays = [a for a in recording.allocations if a.phase == FORWARD and a.died > self.forward_end]
        self.made = _Sums([(a.born, a.nbytes) for a in recording.allocations if a.phase == FORWARD])
        self.kept = _Sums([(a.born, a.nbytes) for a in stays])
        made = [a for a in recording.allocations if a.phase == BACKWARD and a.kind == "gradients"]
        self.gradients = _Sums([(a.born, a.nbytes) for a in made])
        self.redone = self._by_unit(recording.redone.items())
        self.flop = self._by_unit((m, flop) for (phase, m), flop in recording.flop.items() if phase == FORWARD)

    def _set_backward(self, first_backward: float) -> None:
        """Backward cut at the moments at which it comes to a unit and leaves it, the last unit first."""
        spans: dict[str, tuple[float, float]] = {}
        for span in self.recording.spans:
            if span.phase == BACKWARD:
                first, last = spans.get(span.module, (math.inf, -math.inf))
                spans[span.module] = min(first, span.first), max(last, span.last)
        moment, self.backward, self.gaps_back = first_backward, {}, {}
        for i in range(len(self.paths) - 1, -1, -1):
            first, last = spans.get(self.paths[i], (moment, moment))
            first = max(first, moment)
            self.gaps_back[i + 1] = moment, first
            self.backward[i] = first, max(first, last)
            moment = self.backward[i][1]
        self.gaps_back[0] = moment, self.backward_end

    def _by_unit(self, flop) -> dict[str, int]:
        total = dict.fromkeys([*self.paths, None], 0)
        for module, value in flop:
            path = module
            while path not in total and path:
                path = path.rpartition(".")[0]
            total[path if path in total else None] += value
        return total

    def parts(self) -> Parts:
        units = tuple(self._unit(i, path) for i, path in enumerate(self.paths))
        rest = self.redone[None], self.flop[None]
        before = [self._gap(i) for i in range(len(self.gaps))]
        before[-1] = replace(before[-1], redone=rest[0], flop=rest[1])
        static = self.recording.static_bytes
        optimizer = self.recording.phases.get(OPTIMIZER)
        highest = self.levels.highest(*optimizer) - static if optimizer else 0
        return Parts(units, tuple(before), highest)

    def _unit(self, i: int, path: str) -> Taken:
        (first, last), (first_back, last_back) = self.forward[i], self.backward[i]
        floor, made = self._floor(first), self.gradients.below(first_back)
        return Taken(
            kept=self.kept.upto(last) - self.kept.upto(first),
            forward=self.levels.highest(first, last) - floor,
            backward=self.levels.highest(first_back, last_back) - floor - made,
            gradient=self.gradients.upto(last_back) - made,
            redone=self.redone[path],
            flop=self.flop[path],
            made=self.made.upto(last) - self.made.below(first),
        )

    def _gap(self, i: int) -> Taken:
        """What is there at the moments at which a unit's backward begins and ends is the unit's."""
        (first, last), (first_back, last_back) = self.gaps[i], self.gaps_back[i]
        floor, made = self._floor(first), self.gradients.upto(first_back)
        until, inclusive = (last_back, False) if i else (last_back, True)
        done = self.gradients.upto(until) if inclusive else self.gradients.below(until)
        highest = self.levels.highest(first_back, until, inclusive=inclusive, after=i < len(self.paths))
        return Taken(
            kept=self.kept.upto(last) - self.kept.upto(first),
            forward=self.levels.highest(first, last) - floor,
            backward=max(highest - floor - made, 0),
            gradient=max(done - made, 0),
            redone=0,
            flop=0,
            made=self.made.below(last) - self.made.upto(first),
        )

    def _floor(self, moment: float) -> int:
        """What is there whatever happens after a moment of forward: static bytes, and what was kept before."""
        return self.recording.static_bytes + self.kept.upto(moment)


class _Levels:
    """Bytes alive over the step, static ones included."""

    def __init__(self, recording: Recording):
        steps = recording.timeline()
        self.moments = [moment for moment, _ in steps]
        self.nbytes = [sum(alive.values()) for _, alive in steps]

    def highest(self, first: float, last: float, *, inclusive: bool = True, after: bool = False) -> int:
        """From `first` to `last` (itself included or not), the level at the beginning included.

        `after`: not included; 0 where nothing changes between the two.
        """
        begin = bisect.bisect_right(self.moments, first)
        end = (bisect.bisect_right if inclusive else bisect.bisect_left)(self.moments, last)
        if after:
            return max(self.nbytes[begin:end], default=0)
        begin = max(begin - 1, 0)
        return max(self.nbytes[begin : max(end, begin + 1)])


class _Sums:
    """Sums of bytes by moment of birth."""

    def __init__(self, born: list[tuple[float, int]]):
        born.sort()
        self.moments, self.totals = [moment for moment, _ in born], [0]
        for _, nbytes in born:
            self.totals.append(self.totals[-1] + nbytes)

    def upto(self, moment: float) -> int:
        """Born at `moment` or before it."""
        return self.totals[bisect.bisect_right(self.moments, moment)]

    def below(self, moment: float) -> int:
        """Born before `moment`."""
        return self.totals[bisect.bisect_left(self.moments, moment)]
