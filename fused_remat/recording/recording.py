"""What a recorded step looked like: its allocations, where they were made, and the peak that follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

KINDS = ("parameters", "buffers", "optimizer", "inputs", "gradients", "kept", "rebuilt", "temporary", "output")


@dataclass(frozen=True)
class Allocation:
    """One block of memory made in the step.

    Attributes:
        nbytes: its size; CUDA's allocator rounds up to 512 bytes.
        born, died: moments of `Recording`'s clock; `died` is inf for what is alive when the step ends.
        kind: one of `KINDS`; see `Recording`.
        module: path of the innermost module of the model that ran, or whose backward ran; "" outside of all children.
        phase: "forward", "backward" or "optimizer", of its birth.
    """

    nbytes: int
    born: float
    died: float
    kind: str
    module: str
    phase: str


@dataclass(frozen=True)
class Span:
    """One call of a module in forward, the evaluation of its graph in backward, or its replay in backward."""

    module: str
    phase: str
    first: float
    last: float


@dataclass(frozen=True)
class Recording:
    """One optimizer step, from gradients that are None to the end of `optimizer.step()`.

    Kinds of allocations, by when they were made and freed:

    - *kept*: made in forward, alive at its end, gone once backward has run and the loss is dropped;
    - *output*: made in forward, alive even then (what the model holds on to), and the loss;
    - *gradients*: made in backward, alive at its end;
    - *rebuilt*: made by a recomputed forward inside backward, and alive when that ends;
    - *optimizer*: made by the optimizer, alive when the step ends;
    - *temporary*: everything else, workspaces inside operators included.

    Attributes:
        device: whose memory this is.
        source: "measured" (allocator events of a real step) or "predicted" (fake tensors, nothing was computed).
        static: bytes of distinct storages alive before the step, by kind: parameters, buffers, the optimizer's state as
            it is after a first step, inputs, gradients (0: they are None).
        allocations: those of the step, in order of birth.
        spans: of modules of the model, in order of their beginning.
        phases: first and last moment of "forward", "backward" and (with an optimizer) "optimizer". Moments are seconds
            since the beginning of forward where measured (under the profiler: shapes compare, speeds do not), and
            numbers of events where predicted.
        flop: FLOP by (phase, module), by the formulas that are registered with torch and those of fused operators.
        redone: those of `flop` that backward spent on values which forward had made before, by module.
        flop_source: how `flop` was found.
        blind: names of the operators that ran, whose inner memory a prediction does not know and leaves out, sorted;
            () where measured.
    """

    device: str
    source: str
    static: Mapping[str, int]
    allocations: tuple[Allocation, ...]
    spans: tuple[Span, ...]
    phases: Mapping[str, tuple[float, float]]
    flop: Mapping[tuple[str, str], int] = field(default_factory=dict)
    redone: Mapping[str, int] = field(default_factory=dict)
    flop_source: str = ""
    blind: tuple[str, ...] = ()

    @property
    def static_bytes(self) -> int:
        """Bytes alive before the step."""
        return sum(self.static.values())

    @property
    def peak_bytes(self) -> int:
        """The highest sum of all that is alive, `static` included."""
        return self._peak[0]

    @property
    def peak_moment(self) -> float:
        """When `peak_bytes` is reached first."""
        return self._peak[1]

    @property
    def peak_phase(self) -> str:
        """The phase of the allocation that reaches the peak."""
        return self._peak[2].phase if self._peak[2] else "forward"

    @property
    def peak_module(self) -> str:
        """The module of the allocation that reaches the peak."""
        return self._peak[2].module if self._peak[2] else ""

    @property
    def kept_bytes(self) -> int:
        """Bytes of the kind *kept*: the activations that forward leaves for backward."""
        return sum(a.nbytes for a in self.allocations if a.kind == "kept")

    def kept_by_module(self) -> dict[str, int]:
        """`kept_bytes` by the module that made them, in order of the first."""
        kept: dict[str, int] = {}
        for a in self.allocations:
            if a.kind == "kept":
                kept[a.module] = kept.get(a.module, 0) + a.nbytes
        return kept

    @property
    def redone_flop(self) -> int:
        """FLOP that backward spent on what forward had computed before. The scores that every fused attention rebuilds
        in its backward are not in it: no attention keeps them."""
        return sum(self.redone.values())

    @property
    def blind_note(self) -> str:
        """What to tell of `blind` beside predicted numbers; "" if there is nothing."""
        if not self.blind:
            return ""
        return f"predicted numbers leave out what {', '.join(self.blind)} take and keep inside themselves"

    def timeline(self) -> list[tuple[float, dict[str, int]]]:
        """(moment, bytes alive from then on by kind, static ones included) at the start and at every change."""
        alive = {kind: self.static.get(kind, 0) for kind in KINDS}
        steps = [(min((first for first, _ in self.phases.values()), default=0.0), dict(alive))]
        for moment, delta, allocation in self._changes:
            alive[allocation.kind] += delta
            if steps[-1][0] == moment:
                steps[-1] = (moment, dict(alive))
            else:
                steps.append((moment, dict(alive)))
        return steps

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON takes it: `died` is None for what is alive at the end."""
        return {
            "device": self.device,
            "source": self.source,
            "static": dict(self.static),
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.peak_phase,
            "peak_module": self.peak_module,
            "kept_bytes": self.kept_bytes,
            "redone_flop": self.redone_flop,
            "phases": {name: list(span) for name, span in self.phases.items()},
            "flop_source": self.flop_source,
            "blind": list(self.blind),
            "flop": [{"phase": p, "module": m, "flop": flop} for (p, m), flop in self.flop.items()],
            "redone": dict(self.redone),
            "spans": [vars(span) for span in self.spans],
            "allocations": [vars(a) | {"died": None if a.died == math.inf else a.died} for a in self.allocations],
        }

    @cached_property
    def _changes(self) -> list[tuple[float, int, Allocation]]:
        """(moment, bytes, allocation); at one moment releases come first."""
        born = [(a.born, a.nbytes, a) for a in self.allocations]
        died = [(a.died, -a.nbytes, a) for a in self.allocations if a.died < math.inf]
        return sorted(born + died, key=lambda change: (change[0], change[1] > 0))

    @cached_property
    def _peak(self) -> tuple[int, float, Allocation | None]:
        level = highest = self.static_bytes
        moment, highest_by = 0.0, None
        for time, delta, allocation in self._changes:
            level += delta
            if level > highest:
                highest, moment, highest_by = level, time, allocation
        return highest, moment, highest_by
