"""The peak of a recorded step under the terms of a plan, and what it consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fused_remat.recording import Recording
from fused_remat.sizes import format_bytes
from fused_remat.training_step import BACKWARD, FORWARD, OPTIMIZER

_LARGEST = 3
_OUTSIDE = "the loss and other code outside of layers"


@dataclass(frozen=True)
class Peak:
    """Numbers of one recording. Bytes.

    `peak`: the highest sum; of a pipeline stage with the other micro-batches (see `of`). `kinds`: of what it consists.
    `largest`: (what, bytes) of the modules that hold most of it, besides what is there before the step.
    """

    source: str  # "measured" or "predicted"
    peak: int
    phase: str
    module: str
    kept: int
    redone: int
    kinds: dict[str, int]
    largest: tuple[tuple[str, int], ...]

    @property
    def moment(self) -> str:
        """Where the peak is, in words."""
        where = {FORWARD: "forward of ", BACKWARD: "backward of ", OPTIMIZER: "the optimizer's step"}[self.phase]
        return where if self.phase == OPTIMIZER else f"{where}{self.module or _OUTSIDE}"

    @classmethod
    def of(cls, recording: Recording, in_flight: int = 1) -> Peak:
        """The peak of the step; with `in_flight` = k > 1 that of a pipeline stage.

        A stage under 1F1B holds, beside the micro-batch at work, what k - 1 further ones keep and their inputs, and,
        from its second micro-batch on, the gradients of all parameters:

            peak = max(static + sum of gradients + (k - 1) (kept + inputs) + the rest of forward or backward,
                       static + the optimizer's step)
        """
        if in_flight == 1:
            moment, nbytes, kinds = recording.peak_moment, recording.peak_bytes, None
        else:
            moment, nbytes, kinds = _stage_peak(recording, in_flight)
        alive = [a for a in recording.allocations if a.born <= moment < a.died]
        if kinds is None:
            kinds = dict(recording.static)
            for a in alive:
                kinds[a.kind] = kinds.get(a.kind, 0) + a.nbytes
        last = max((a for a in alive), key=lambda a: a.born, default=None)
        by_place: dict[str, int] = {}
        for a in alive:
            name = f"{a.kind} of {a.module or _OUTSIDE}"
            by_place[name] = by_place.get(name, 0) + a.nbytes
        largest = sorted(by_place.items(), key=lambda item: (-item[1], item[0]))[:_LARGEST]
        return cls(
            source=recording.source,
            peak=nbytes,
            phase=_phase_at(recording, moment),
            module=last.module if last else "",
            kept=recording.kept_bytes,
            redone=recording.redone_flop,
            kinds={kind: size for kind, size in kinds.items() if size},
            largest=tuple(largest),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, for JSON."""
        return {
            "source": self.source, "peak_bytes": self.peak, "phase": self.phase, "module": self.module,
            "kept_bytes": self.kept, "redone_flop": self.redone, "kinds": dict(self.kinds),
            "largest": [list(item) for item in self.largest],
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Peak:
        """From the form of `to_dict`."""
        return cls(
            data["source"], data["peak_bytes"], data["phase"], data["module"], data["kept_bytes"], data["redone_flop"],
            dict(data["kinds"]), tuple((name, nbytes) for name, nbytes in data["largest"]),
        )  # fmt: skip

    def held_by(self) -> str:
        """What the peak consists of, in words, the largest first."""
        kinds = sorted(self.kinds.items(), key=lambda item: -item[1])
        return ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in kinds)


def _phase_at(recording: Recording, moment: float) -> str:
    phases = [(first, name) for name, (first, _) in recording.phases.items() if first <= moment]
    return max(phases, default=(0, FORWARD))[1]


def stage_timeline(recording: Recording, in_flight: int) -> list[tuple[float, dict[str, int]]]:
    """`recording.timeline()` with what a pipeline stage holds beside the micro-batch at work (see `Peak.of`)."""
    if in_flight == 1:
        return recording.timeline()
    made = sum(a.nbytes for a in recording.allocations if a.kind == "gradients")
    start = recording.phases.get(OPTIMIZER, (float("inf"), 0.0))[0]
    others = in_flight - 1
    steps = recording.timeline()
    for moment, kinds in steps:
        if moment < start:
            kinds["gradients"] = recording.static.get("gradients", 0) + made
            kinds["kept"] += others * recording.kept_bytes
            kinds["inputs"] += others * recording.static.get("inputs", 0)
    return steps


def _stage_peak(recording: Recording, in_flight: int) -> tuple[float, int, dict[str, int]]:
    moment, kinds = max(stage_timeline(recording, in_flight), key=lambda step: sum(step[1].values()))
    return moment, sum(kinds.values()), kinds
