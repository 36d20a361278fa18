"""A recorded step in few numbers: what its pictures need, for a file that they are drawn from later."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from fused_remat.recording import KINDS, Recording
from fused_remat.show.lives import STATES, Life, Row, Segment, lives, rows

SPANS = 120  # that a step is cut into; of each the lowest and the highest moment stay
ROWS = 12  # of lives, those with the most bytes
LANES = 12  # lives that a row keeps, evenly chosen

Timeline = Sequence[tuple[float, Mapping[str, int]]]


@dataclass(frozen=True)
class Sketch:
    """One optimizer step.

    Moments are numbers of events: event 0 is the state before the step, every other one a change of what is allocated.

    Attributes:
        device, source, peak_bytes, peak_phase, peak_module, kept_bytes: as in `Recording`.
        starts: the first event of each phase that ran, in order.
        events: those of which bytes are known, in order: the lowest and the highest of every stretch, the highest of
            each phase with the events around its borders, and the last of all.
        levels: bytes of each kind at each of `events`; kinds that never have any are left out.
        rows: lives of activations, equal ones of equal layers together.
        left_out: how many more rows there are; `left_out_bytes` are those of all of them together.
    """

    device: str
    source: str
    peak_bytes: int
    peak_phase: str
    peak_module: str
    kept_bytes: int
    starts: Mapping[str, int]
    events: tuple[int, ...]
    levels: Mapping[str, tuple[int, ...]]
    rows: tuple[Row, ...] = ()
    left_out: int = 0
    left_out_bytes: int = 0

    @classmethod
    def of(
        cls, recording: Recording, regions: Iterable[Sequence[str]] = (), timeline: Timeline | None = None
    ) -> Sketch:
        """Of a recording; `regions` as in `Assignment.regions`, `timeline` in the place of `recording.timeline()`."""
        moments, levels = zip(*(recording.timeline() if timeline is None else timeline), strict=True)
        totals = [sum(level.values()) for level in levels]

        def event(moment: float) -> int:
            return min(bisect.bisect_left(moments, moment, 1), len(moments))

        order = sorted(recording.phases, key=lambda phase: recording.phases[phase][0])
        starts = {phase: event(recording.phases[phase][0]) if place else 0 for place, phase in enumerate(order)}
        chosen = _chosen(totals, starts.values())
        shown, rest = rows(lives(recording, regions), ROWS, LANES)
        return cls(
            device=recording.device,
            source=recording.source,
            peak_bytes=max(totals),
            peak_phase=recording.peak_phase,
            peak_module=recording.peak_module,
            kept_bytes=recording.kept_bytes,
            starts=starts,
            events=tuple(chosen),
            levels={
                kind: tuple(levels[i].get(kind, 0) for i in chosen)
                for kind in KINDS
                if any(level.get(kind, 0) for level in levels)
            },
            rows=tuple(_in_events(row, event) for row in shown),
            left_out=len(rest),
            left_out_bytes=sum(row.nbytes for row in rest),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, for JSON."""
        return {
            "device": self.device, "source": self.source, "peak_bytes": self.peak_bytes, "peak_phase": self.peak_phase,
            "peak_module": self.peak_module, "kept_bytes": self.kept_bytes, "starts": dict(self.starts),
            "events": list(self.events), "bytes": {kind: list(level) for kind, level in self.levels.items()},
            "lives": [
                row.to_dict() | {
                    "shown": [
                        {"name": life.name, "rebuilt_from": life.rebuilt_from,
                         "segments": [[segment.first, segment.last, segment.state] for segment in life.segments]}
                        for life in row.lives
                    ]
                }
                for row in self.rows
            ],
            "left_out_lives": self.left_out, "left_out_bytes": self.left_out_bytes,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sketch:
        """From the form of `to_dict`. Raises KeyError, TypeError or ValueError where it is none."""
        events = tuple(map(int, data["events"]))
        levels = {kind: tuple(map(int, level)) for kind, level in data["bytes"].items()}
        starts = {str(phase): int(event) for phase, event in data["starts"].items()}
        if not starts or not events or events[0] != 0 or any(a >= b for a, b in pairwise(events)):
            raise ValueError("the events of its picture are not in order")
        if not levels or any(len(level) != len(events) for level in levels.values()) or not set(levels) <= set(KINDS):
            raise ValueError(f"its picture must have bytes of kinds among {', '.join(KINDS)} at {len(events)} events")
        return cls(
            data["device"], data["source"], int(data["peak_bytes"]), data["peak_phase"], data["peak_module"],
            int(data["kept_bytes"]), starts, events, levels, tuple(map(_row, data["lives"])),
            int(data["left_out_lives"]), int(data["left_out_bytes"]),
        )  # fmt: skip


def _chosen(totals: Sequence[int], starts: Iterable[int]) -> list[int]:
    count = len(totals)
    borders = [start for start in starts if start < count] + [count]
    found = {0, count - 1}
    for first, last in pairwise(borders):
        found |= {max(first - 1, 0), first, max(range(first, last), key=totals.__getitem__, default=first)}
    size = -(-count // SPANS)
    for first in range(0, count, size):
        part = range(first, min(first + size, count))
        found |= {min(part, key=totals.__getitem__), max(part, key=totals.__getitem__)}
    return sorted(found)


def _in_events(row: Row, event: Any) -> Row:
    moved = (
        replace(life, segments=tuple(Segment(event(s.first), event(s.last), s.state) for s in life.segments))
        for life in row.lives
    )
    return replace(row, lives=tuple(moved))


def _row(data: dict[str, Any]) -> Row:
    nbytes = int(data["bytes_each"])
    made = []
    for life in data["shown"]:
        segments = tuple(Segment(int(first), int(last), state) for first, last, state in life["segments"])
        if not segments or not all(segment.state in STATES for segment in segments):
            raise ValueError(f"the lives of its picture must have states among {', '.join(STATES)}")
        made.append(Life(str(life["name"]), nbytes, segments, str(life["rebuilt_from"])))
    return Row(str(data["name"]), nbytes, int(data["values"]), int(data["rebuilt"]), tuple(made))
