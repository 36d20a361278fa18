"""A step that really runs, seen by the allocator's own events."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable

import torch

from fused_remat._ledger import Block, blocks_of
from fused_remat._step import left_as_found, with_index
from fused_remat._trace import Trace, record, span
from fused_remat.recording.flop import counted_step
from fused_remat.recording.kinds import kind_of
from fused_remat.recording.places import Places, watched
from fused_remat.recording.recording import Allocation, Recording, Span
from fused_remat.recording.static import device_of, static_bytes, static_storages
from fused_remat.training_step import BACKWARD, FORWARD, OPTIMIZER, TrainingStep

_CALL = "module/"
_NS = 1e-9


def measured(step: TrainingStep) -> Recording:
    """The recording of the third of three real steps.

    The first creates the optimizer's state and counts FLOP (by a dispatch mode, which disturbs the allocations); the
    second shows the making of blocks that one step hands on to the next (a module's cache).
    """
    with left_as_found() as tidy:
        flop, redone = counted_step(step)
        tidy()
        device = with_index(device_of(step))
        loss_address = 0

        with watched(step.model, lambda call: span(f"{_CALL}{call.index}")) as places:

            def run() -> None:
                nonlocal loss_address, storages
                for _ in range(2):
                    storages = static_storages(step, device)
                    loss = step.run(span)
                    loss_address = loss.untyped_storage().data_ptr()
                    del loss
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
                    tidy()

            storages: dict[int, tuple[str, int]] = {}
            trace = record(run, device)
    return _Reading(trace, places, storages, loss_address).recording(str(device), flop, redone)


class _Reading:
    """The last step of a trace, its blocks sorted into kinds and places."""

    def __init__(self, trace: Trace, places: Places, storages: dict[int, tuple[str, int]], loss_address: int):
        self.phases = {name: trace.spans[name] for name in (FORWARD, BACKWARD, OPTIMIZER) if name in trace.spans}
        self.start = self.phases[FORWARD][0]
        self.end = max(last for _, last in self.phases.values())
        self.places, self.storages, self.loss_address = places, dict(storages), loss_address
        self.blocks = blocks_of(trace.changes)
        self.nodes = [node for node in trace.nodes if node.first_ns >= self.start]
        self.calls = [
            (first, last, call)
            for call in places.calls
            for first, last in [trace.spans[f"{_CALL}{call.index}"]]
            if first >= self.start
        ]
        self._running = _Running(
            [(first, last, call.module) for first, last, call in self.calls] + list(self._owned_nodes())
        )
        self._replays = sorted(node.replay for node in self.nodes if node.replay is not None)

    def recording(self, device: str, flop: dict[tuple[str, str], int], redone: dict[str, int]) -> Recording:
        allocations = [a for block in self.blocks if (a := self._allocation(block)) is not None]
        return Recording(
            device=device,
            source="measured",
            static=static_bytes(self.storages.values()),
            allocations=tuple(sorted(allocations, key=lambda a: a.born)),
            spans=tuple(sorted(self._spans(), key=lambda s: (s.first, -s.last))),
            phases={name: (self._moment(first), self._moment(last)) for name, (first, last) in self.phases.items()},
            flop=flop,
            redone=redone,
            flop_source="one more real step under a dispatch mode, where compiled code runs eagerly",
        )

    def _moment(self, time_ns: float) -> float:
        """Seconds since the start; inf past the end of the step."""
        return math.inf if time_ns > self.end else max(0.0, (time_ns - self.start) * _NS)

    def _allocation(self, block: Block) -> Allocation | None:
        if block.died <= self.start or block.born > self.end:
            return None
        if block.born < self.start:  # handed on by the step before
            if block.died > self.end:
                return None
            known = self.storages.pop(block.address, None)
            return Allocation(
                block.nbytes, 0.0, self._moment(block.died), known[0] if known else "temporary", "", FORWARD
            )
        phase = self._phase(block.born)
        return Allocation(
            block.nbytes, self._moment(block.born), self._moment(block.died), self._kind(block, phase),
            self._running.at(block.born), phase,
        )  # fmt: skip

    def _phase(self, time_ns: float) -> str:
        return next(name for name, (_, last) in self.phases.items() if time_ns <= last)

    def _kind(self, block: Block, phase: str) -> str:
        return kind_of(
            block.died, phase, self.phases,
            is_loss=block.address == self.loss_address, outlives_replay=self._outlives_replay(block),
        )  # fmt: skip

    def _outlives_replay(self, block: Block) -> bool:
        return any(first <= block.born <= last < block.died for first, last in self._replays)

    def _owned_nodes(self) -> Iterable[tuple[int, int, str]]:
        module = ""
        for node in self.nodes:
            if node.sequence >= 0:  # a leaf's gradient is accumulated right after the node that made it
                module = self.places.owner(node.sequence, nested=node.depth > 0)
            yield node.first_ns, node.last_ns, module

    def _spans(self) -> Iterable[Span]:
        for first, last, call in self.calls:
            yield Span(call.module, self._phase(first), self._moment(first), self._moment(min(last, self.end)))
            own = [n for n in self.nodes if n.depth == 0 and call.first <= n.sequence < call.last]
            if own and self._phase(first) == FORWARD:
                yield Span(
                    call.module, BACKWARD, self._moment(own[0].first_ns), self._moment(max(n.last_ns for n in own))
                )


class _Running:
    """The innermost of nested intervals at a moment."""

    def __init__(self, intervals: Iterable[tuple[int, int, str]]):
        edges: list[tuple[int, int, int, str]] = []
        for first, last, module in intervals:
            # At one moment: ends before beginnings, inner ends first, outer beginnings first.
            edges.append((first, 1, -last, module))
            edges.append((last, 0, -first, module))
        self._times: list[int] = []
        self._modules: list[str] = []
        stack: list[str] = []
        for time_ns, begins, _, module in sorted(edges):
            if begins:
                stack.append(module)
            else:
                stack.reverse()
                stack.remove(module)
                stack.reverse()
            self._times.append(time_ns)
            self._modules.append(stack[-1] if stack else "")

    def at(self, time_ns: float) -> str:
        position = bisect.bisect_right(self._times, time_ns) - 1
        return self._modules[position] if position >= 0 else ""
