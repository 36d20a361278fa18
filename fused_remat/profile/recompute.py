"""How far recompute could lower a peak: a bound from a recording, and the peak of the model as `convert` makes it."""

from __future__ import annotations

import bisect
import math
from dataclasses import asdict, dataclass
from typing import Any

from fused_remat.convert import convert
from fused_remat.recording import Allocation, Recording, record_step
from fused_remat.training_step import TrainingStep


@dataclass(frozen=True)
class Recompute:
    """What dropping activations could do to the peak.

    Attributes:
        peak_bytes: as it is now.
        bound_bytes: no choice of what to drop and rebuild goes below this: the peak if every kept activation existed
            only while it is made and while backward uses it. Where `convert` finds layers, whose activations never
            exist as a whole, it is the lower of this for the model as it is and for the model converted.
        converted_layers: how many layers `fused_remat.convert(model)` would convert.
        converted_peak_bytes: the *predicted* peak of the model converted like that; None where there is none.
        converted_redone_flop: the FLOP that it would spend on values made before, predicted with it.
        note: why it was not predicted.
        blind_note: what the prediction leaves out, of operators whose inner memory is not known.
    """

    peak_bytes: int
    bound_bytes: int
    converted_layers: int = 0
    converted_peak_bytes: int | None = None
    note: str = ""
    blind_note: str = ""
    converted_redone_flop: int | None = None

    @property
    def saving(self) -> float:
        """The share of the peak that recompute could take away at most, 0 to 1."""
        return max(0.0, 1 - self.bound_bytes / self.peak_bytes) if self.peak_bytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "saving": self.saving}


def recompute_of(step: TrainingStep, recording: Recording) -> Recompute:
    """The bounds for a step and its recording. Converts the model for a moment where it can, on fake tensors."""
    bound = bound_without_kept(recording)
    report = convert(step.model)
    found = len(report.converted)
    try:
        if not found:
            return Recompute(recording.peak_bytes, bound)
        converted = record_step(step, fake=True)
    except Exception as error:  # the model's code may raise anything on fake tensors
        first_line = str(error).partition("\n")[0]
        note = f"the converted model could not be run on fake tensors: {type(error).__name__}: {first_line}"
        return Recompute(recording.peak_bytes, bound, found, None, note)
    finally:
        report.revert()
    bound = min(bound, bound_without_kept(converted))
    return Recompute(
        recording.peak_bytes, bound, found, converted.peak_bytes, blind_note=converted.blind_note,
        converted_redone_flop=converted.redone_flop,
    )  # fmt: skip


def bound_without_kept(recording: Recording) -> int:
    """The peak of `recording` if each kept activation existed only when it is made and while the operation of backward
    runs that frees it."""
    moments = sorted({moment for a in recording.allocations for moment in (a.born, a.died) if moment < math.inf})
    uses = _Uses(recording)
    intervals: list[tuple[float, float, int]] = []
    for a in recording.allocations:
        if a.kind != "kept":
            intervals.append((a.born, a.died, a.nbytes))
            continue
        made, used = _next_after(moments, a.born), uses.beginning(a.died)
        if made >= used:  # nothing happens between the two
            intervals.append((a.born, a.died, a.nbytes))
        else:
            intervals += [(a.born, made, a.nbytes), (used, a.died, a.nbytes)]
    return min(recording.peak_bytes, recording.static_bytes + highest_sum(intervals))


class _Uses:
    """When backward began to use what it frees at a moment: when the operation that does so began.

    An operation makes its gradients and then frees what it saved. So it began after the last release of kept memory
    that has an allocation between it and this one.
    """

    def __init__(self, recording: Recording):
        self._births = sorted(a.born for a in recording.allocations)
        self._releases = sorted(a.died for a in recording.allocations if a.kind == "kept")
        self._start = recording.phases["backward"][0]

    def beginning(self, freed: float) -> float:
        made = _last_before(self._births, freed)
        return max(self._start, _last_before(self._releases, made))


def highest_sum(intervals: list[tuple[float, float, int]]) -> int:
    """The highest sum of bytes of the intervals (first moment, moment past the last, bytes) that hold at one moment."""
    changes = [(first, nbytes) for first, last, nbytes in intervals if first < last]
    changes += [(last, -nbytes) for first, last, nbytes in intervals if first < last]
    level = highest = 0
    for _, delta in sorted(changes):  # at one moment releases come first
        level += delta
        highest = max(highest, level)
    return highest


def alive_at_peak(recording: Recording) -> dict[str, int]:
    """Bytes by kind, static ones included, at the moment of the peak."""
    alive = dict(recording.static)
    for a in recording.allocations:
        if _is_alive(a, recording.peak_moment):
            alive[a.kind] = alive.get(a.kind, 0) + a.nbytes
    return alive


def _is_alive(allocation: Allocation, moment: float) -> bool:
    return allocation.born <= moment < allocation.died


def _last_before(moments: list[float], moment: float) -> float:
    """The last of the sorted `moments` before `moment`; -inf if there is none."""
    position = bisect.bisect_left(moments, moment)
    return moments[position - 1] if position else -math.inf


def _next_after(moments: list[float], moment: float) -> float:
    position = bisect.bisect_right(moments, moment)
    return moments[position] if position < len(moments) else math.inf
