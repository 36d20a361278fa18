"""A step on fake tensors: what would be allocated, without the memory and without the work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fused_remat._step import left_as_found
from fused_remat.recording import _torch
from fused_remat.recording.exchange import Fakes, exchanged
from fused_remat.recording.flop import Counter
from fused_remat.recording.follow import FollowedBlock, Follower
from fused_remat.recording.kinds import kind_of
from fused_remat.recording.places import ModuleCall, Places, watched
from fused_remat.recording.recording import Allocation, Recording, Span
from fused_remat.recording.static import address_of, device_of, static_bytes, static_storages
from fused_remat.training_step import BACKWARD, FORWARD, TrainingStep, tensors_in


def predicted(step: TrainingStep, device: torch.device | None) -> Recording:
    """The recording of a step on fake tensors. `device`: where they are; None: where the tensors of the step are."""
    with left_as_found(collect=False), exchanged(step, device) as (fake, fakes), fakes.mode:
        with Follower(fakes, Counter(Places({})), device_of(fake)):
            _make_optimizer_state(fake)
        return _follow(fake, fakes)


def _make_optimizer_state(step: TrainingStep) -> None:
    """By a step of the optimizer with gradients that nobody computed."""
    if step.optimizer is None:
        return
    parameters = [p for group in step.optimizer.param_groups for p in group["params"] if p.requires_grad]
    if all(p in step.optimizer.state for p in parameters):
        return
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    step.optimizer.step()
    step.zero_grad()


def _follow(step: TrainingStep, fakes: Fakes) -> Recording:
    device = device_of(step)
    clock = _Clock()
    with watched(step.model, clock.around) as places:
        counter = Counter(places)
        follower = clock.follower = Follower(fakes, counter, device)
        static = [*step.leaves(), *step.model.buffers(), *step.inputs()]
        if step.optimizer is not None:
            static += tensors_in(step.optimizer.state)
        follower.know(t for t in static if t.device == device and t.layout == torch.strided)
        storages = static_storages(step, device)
        with _torch.rng_states_seen(follower.see), follower:
            loss = step.run(lambda name: clock.phase(name, counter))
            follower.finish()
        loss_address, end = address_of(loss.untyped_storage()), follower.clock
        del loss
        step.zero_grad()
    blocks = _Blocks(follower, clock, end, loss_address)
    return Recording(
        device=str(device),
        source="predicted",
        static=static_bytes(storages.values()),
        allocations=tuple(sorted(map(blocks.allocation, follower.blocks), key=lambda a: a.born)),
        spans=tuple(sorted(blocks.spans(places), key=lambda span: (span.first, -span.last))),
        phases=clock.phases,
        flop=counter.flop,
        redone=counter.redone,
        flop_source="the fake run itself",
        blind=tuple(sorted(follower.blind)),
    )


class _Clock:
    """Moments of phases and calls of modules, by the clock of the follower."""

    def __init__(self) -> None:
        self.follower: Follower | None = None
        self.phases: dict[str, tuple[float, float]] = {}
        self.calls: list[tuple[str, ModuleCall, float, float]] = []
        self._phase = FORWARD

    @contextmanager
    def phase(self, name: str, counter: Counter) -> Iterator[None]:
        first, self._phase = self._tick(), name
        with counter.phase(name):
            yield
        self.phases[name] = first, self._tick()

    @contextmanager
    def around(self, call: ModuleCall) -> Iterator[None]:
        first, phase = self._tick(), self._phase
        try:
            yield
        finally:
            self.calls.append((phase, call, first, self._tick()))

    def _tick(self) -> int:
        self.follower.clock += 1
        return self.follower.clock


class _Blocks:
    """What the follower saw, as the parts of a recording."""

    def __init__(self, follower: Follower, clock: _Clock, end: int, loss_address: int):
        self._follower, self._clock, self._end, self._loss_address = follower, clock, end, loss_address

    def allocation(self, block: FollowedBlock) -> Allocation:
        died = math.inf if block.died > self._end else float(block.died)
        kind = kind_of(
            block.died, block.phase, self._clock.phases,
            is_loss=block.address == self._loss_address,
            outlives_replay=block.replay > 0 and block.died > self._follower.replay_ends[block.replay],
        )  # fmt: skip
        return Allocation(block.nbytes, float(block.born), died, kind, block.module, block.phase)

    def spans(self, places: Places) -> Iterator[Span]:
        for phase, call, first, last in self._clock.calls:
            yield Span(call.module, phase, float(first), float(last))
            if phase == FORWARD:
                own = self._evaluations(call)
                if own:
                    yield Span(call.module, BACKWARD, float(own[0]), float(own[-1]))

    def _evaluations(self, call: ModuleCall) -> list[int]:
        """Moments of operators in the backward of this call, in order."""
        own = (span for n, span in self._follower.evaluations.items() if call.first <= n < call.last)
        return sorted(moment for span in own for moment in span)
