"""What lies in memory over one step, by kind: the numbers behind the memory picture and its table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fused_remat.recording import Recording
from fused_remat.show.sketch import Sketch
from fused_remat.show.theme import HATCHES
from fused_remat.sizes import format_bytes

ORDER = tuple(HATCHES)
PHASES = ("forward", "backward", "optimizer")

_BUCKETS = 300  # columns that a picture is decimated to, two events each
_NARROWEST = 0.12  # share of the width that a phase gets at least, so that its name fits
_WIDEST = {"optimizer": 0.16}  # at most: an optimizer allocates little, in very many events


@dataclass(frozen=True, eq=False)
class Stack:
    """Bytes by kind after allocator events: after every one of a recording, after those that a sketch has.

    Attributes:
        kinds: those that ever have bytes, in stacking order.
        times: moment of each event, in the clock of what it was made from `[N]`; the first is the state before the
            step.
        events: the number of each event `[N]`; in the stack of a recording 0, 1, 2, ...
        levels: bytes of each kind after each event, `[N, len(kinds)]`, int64.
        totals: their sums `[N]`.
        starts: index of the first event of each phase that ran, in order.
    """

    kinds: tuple[str, ...]
    times: np.ndarray
    events: np.ndarray
    levels: np.ndarray
    totals: np.ndarray
    starts: Mapping[str, int]

    @property
    def top(self) -> int:
        """Index of the first event with the highest total."""
        return int(self.totals.argmax())

    def count(self, phase: str) -> int:
        """How many events the phase has, those that a sketch leaves out included."""
        first, last = self.span(phase)
        end = self.events[last] if last < len(self.events) else self.events[-1] + 1
        return int(end - self.events[first]) if first < len(self.events) else 0

    def span(self, phase: str) -> tuple[int, int]:
        """First index of the phase and the one after its last."""
        names = list(self.starts)
        following = names[names.index(phase) + 1 :]
        return self.starts[phase], self.starts[following[0]] if following else len(self.times)


def check_recording(recording: Any, name: str = "recording") -> None:
    """Raises TypeError if it is no recording and no sketch, and ValueError if it holds no allocation or no phase."""
    if isinstance(recording, Sketch):
        return
    if not isinstance(recording, Recording):
        raise TypeError(
            f"{name} must be a Recording (fused_remat.recording.record_step makes one), got {type(recording).__name__}"
        )
    if not recording.allocations or not recording.phases:
        raise ValueError(
            f"{name} is empty: {len(recording.allocations)} allocations in {len(recording.phases)} phases, so there is "
            "nothing to draw; record a whole step with fused_remat.recording.record_step"
        )


def stack(recording: Recording | Sketch) -> Stack:
    """The stack of a recording; at one moment releases come before allocations, as in the peak. O(N log N)."""
    if isinstance(recording, Sketch):
        return _of_sketch(recording)
    born = np.array([a.born for a in recording.allocations], dtype=np.float64)
    died = np.array([a.died for a in recording.allocations], dtype=np.float64)
    nbytes = np.array([a.nbytes for a in recording.allocations], dtype=np.int64)
    kind = np.array([ORDER.index(a.kind) for a in recording.allocations])
    freed = np.isfinite(died)
    moments = np.concatenate([born, died[freed]])
    deltas = np.concatenate([nbytes, -nbytes[freed]])
    kinds = np.concatenate([kind, kind[freed]])
    order = np.lexsort((deltas > 0, moments))
    moments, deltas, kinds = moments[order], deltas[order], kinds[order]
    levels = np.empty((len(moments) + 1, len(ORDER)), dtype=np.int64)
    for column, name in enumerate(ORDER):
        levels[0, column] = recording.static.get(name, 0)
        levels[1:, column] = levels[0, column] + np.cumsum(np.where(kinds == column, deltas, 0))
    used = levels.any(axis=0)
    phases = [phase for phase in PHASES if phase in recording.phases]
    first = np.searchsorted(moments, [recording.phases[phase][0] for phase in phases[1:]], side="left") + 1
    return Stack(
        tuple(name for name, is_used in zip(ORDER, used, strict=True) if is_used),
        np.concatenate([moments[:1], moments]),
        np.arange(len(moments) + 1),
        levels[:, used],
        levels.sum(axis=1),
        dict(zip(phases, (0, *map(int, first)), strict=True)),
    )


def _of_sketch(sketch: Sketch) -> Stack:
    kinds = tuple(kind for kind in ORDER if kind in sketch.levels)
    levels = np.array([sketch.levels[kind] for kind in kinds], dtype=np.int64).T
    events = np.array(sketch.events)
    starts = {phase: int(np.searchsorted(events, start)) for phase, start in sketch.starts.items()}
    return Stack(kinds, events, events, levels, levels.sum(axis=1), starts)


def positions(made: Stack, counts: Mapping[str, int], widths: Mapping[str, float]) -> np.ndarray:
    """Where each event lies on an axis from 0 to 1 `[N]`: phase after phase, within one by events before it.

    `counts` and `widths` (of `layout`) may be those of several stacks, which are then drawn to the same scale. Phases
    that `widths` leaves out lie at the right end.
    """
    where, left = np.ones(len(made.times)), 0.0
    for phase, width in widths.items():
        if phase in made.starts:
            first, last = made.span(phase)
            where[first:last] = left + width * (made.events[first:last] - made.events[first:][:1]) / counts[phase]
        left += width
    return where


def layout(stacks: Iterable[Stack], phases: Sequence[str] = PHASES) -> tuple[dict[str, int], dict[str, float]]:
    """Events of each phase (the most of any stack) and its share of the width, none below what its name needs."""
    counts: dict[str, int] = {}
    for made in stacks:
        for phase in (phase for phase in phases if phase in made.starts):
            counts[phase] = max(counts.get(phase, 1), made.count(phase))
    counts = {phase: counts[phase] for phase in phases if phase in counts}
    capped = {p: min(n / sum(counts.values()), _WIDEST[p]) for p, n in counts.items() if p in _WIDEST}
    capped = {p: max(share, _NARROWEST) for p, share in capped.items()} if len(counts) > 1 else {}
    others = {p: n for p, n in counts.items() if p not in capped}
    shares = {p: max(n / sum(others.values()), _NARROWEST) for p, n in others.items()}
    rest = (1 - sum(capped.values())) / sum(shares.values())
    return counts, {p: capped[p] if p in capped else rest * shares[p] for p in counts}


def decimate(made: Stack, buckets: int = _BUCKETS) -> np.ndarray:
    """Indices of the events to draw: the lowest and the highest of each bucket, the first of each phase and the peak.

    What is drawn is exact, and nothing higher or lower than what is drawn was left out of any bucket.
    """
    count = len(made.times)
    if count <= 2 * buckets:
        return np.arange(count)
    chosen = {0, count - 1, made.top, *made.starts.values()}
    edges = np.linspace(0, count, buckets + 1).astype(int)
    for first, last in pairwise(edges):
        part = made.totals[first:last]
        chosen |= {int(first + part.argmin()), int(first + part.argmax())}
    return np.array(sorted(i for i in chosen if i < count))


def numbers(recording: Recording | Sketch, made: Stack, budget: int | None = None) -> dict[str, Any]:
    """The numbers that the picture, its text alternative and its table all show; bytes are ints."""
    at_peak = dict(zip(made.kinds, map(int, made.levels[made.top]), strict=True))
    return {
        "device": recording.device,
        "source": recording.source,
        "peak_bytes": recording.peak_bytes,
        "peak_phase": recording.peak_phase,
        "peak_module": recording.peak_module,
        "kept_bytes": recording.kept_bytes,
        "budget_bytes": budget,
        "bytes_at_peak": at_peak,
        "highest_bytes": dict(zip(made.kinds, map(int, made.levels.max(axis=0)), strict=True)),
        "phase_peak_bytes": {phase: _highest(made, phase) for phase in made.starts},
        "events": int(made.events[-1]),
    }


def place(phase: str, module: str) -> str:
    """A moment in words: "backward of layers.3", "optimizer" (outside of any module)."""
    return f"{phase} of {module}" if module else phase


def sentence(values: Mapping[str, Any]) -> str:
    """`numbers` in words, for those who do not see the picture."""
    parts = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in values["bytes_at_peak"].items() if n)
    budget = values["budget_bytes"]
    against = ""
    if budget is not None:
        over = values["peak_bytes"] - budget
        verdict = f"over it by {format_bytes(over)}" if over > 0 else f"{format_bytes(-over)} below it"
        against = f" The budget is {format_bytes(budget)}, the peak is {verdict}."
    return (
        f"Memory over one step, {values['source']} on {values['device']}: peak {format_bytes(values['peak_bytes'])} in "
        f"{place(values['peak_phase'], values['peak_module'])}, made up of {parts}; "
        f"kept for backward {format_bytes(values['kept_bytes'])}.{against}"
    )


def _highest(made: Stack, phase: str) -> int:
    first, last = made.span(phase)
    # The level a phase begins with counts: it is that after the last event before.
    return int(made.totals[max(first - 1, 0) : max(last, 1)].max())
