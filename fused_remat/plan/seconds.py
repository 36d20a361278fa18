"""What units cost in seconds: real steps, timed against each other."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from fused_remat._progress import Progress
from fused_remat.plan.numbers import Numbers
from fused_remat.plan.places import AS_IT_IS, Doing, assignment_of
from fused_remat.plan.timeline import Unit
from fused_remat.policy import Arrangement, Assignment
from fused_remat.training_step import TrainingStep, left_untouched

ROUNDS = 5


def with_seconds(
    numbers: Numbers,
    largest: Numbers,
    step: TrainingStep,
    arrangement: Arrangement,
    device: torch.device,
    work: Progress,
) -> Numbers:
    """`numbers` with costs in nanoseconds: of every option of every group of equal units, and of running them again.

    All units of a group do the same in one step, everything else is as it is; each round times every such step once,
    in an order that rotates, and what counts is the median over the rounds of the difference to the step as it is,
    shared equally. The step as it is has the workspace of `largest`; under a smaller one, modules of `fused_remat.nn`
    are timed as they are, too.
    """
    groups: dict[tuple, list[int]] = {}
    for i, unit in enumerate(numbers.units):
        if numbers.places[i] is not None:
            groups.setdefault((numbers.doings[i], unit.options, unit.replay), []).append(i)
    variants: list[tuple[tuple, Doing, bool]] = []
    for key, members in groups.items():
        slower = numbers.places[members[0]].has_own and numbers.workspace != largest.workspace
        variants += [(key, doing, False) for doing in key[0] if doing != AS_IT_IS or slower]
        variants += [(key, AS_IT_IS, True)] if numbers.units[members[0]].chain >= 0 else []
    by_path = {p.path: p for p in numbers.places if p is not None}

    def assignment(key: tuple, doing: Doing, region: bool) -> Assignment:
        paths = [numbers.places[i].path for i in groups[key]]
        return assignment_of(
            by_path, dict.fromkeys(paths, doing), [(path,) for path in paths if region], numbers.workspace
        )

    arranged = [largest.as_it_is(), *(assignment(*variant) for variant in variants)]
    own, *others = _compared(step, arrangement, arranged, device, work)
    cost = {
        variant: round(statistics.median(b - a for a, b in zip(own, other, strict=True)) / len(groups[variant[0]]))
        for variant, other in zip(variants, others, strict=True)
    }
    units = list(numbers.units)
    for key, members in groups.items():
        for i in members:
            units[i] = _unit(units[i], key, numbers.doings[i], cost)
    return replace(numbers, units=tuple(units))


def _unit(unit: Unit, key: tuple, doings: tuple[Doing, ...], cost: dict) -> Unit:
    replay = max(cost.get((key, AS_IT_IS, True), 0), 0)
    options = []
    for option, doing in zip(unit.options, doings, strict=True):
        own = cost.get((key, doing, False), 0)
        options.append(replace(option, cost=own, again_cost=own + replay))
    return replace(unit, options=tuple(options), replay=replay)


def _compared(
    step: TrainingStep, arrangement: Arrangement, arranged: list[Assignment], device: torch.device, work: Progress
) -> list[list[int]]:
    """Nanoseconds of the step under each assignment, by round; the model ends as it was before the arrangement."""
    took: list[list[int]] = [[] for _ in arranged]
    work.expect((ROUNDS + 1) * len(arranged) + 3)
    arrangement.revert()
    with left_untouched(step), _reverted_at_last(arrangement):
        for turn in range(ROUNDS + 1):  # the first warms up
            for position in range(len(arranged)):
                which = (position + turn) % len(arranged)
                arrangement.set(arranged[which])
                gc.collect(1)
                with work.piece(f"timing steps, round {turn + 1} of {ROUNDS + 1}"):
                    nanoseconds = _timed(step.run, device)
                if turn:
                    took[which].append(nanoseconds)
    return took


@contextmanager
def _reverted_at_last(arrangement: Arrangement) -> Iterator[None]:
    """`left_untouched` puts back the attributes of the modules, records among them, and not their classes nor what the
    arrangement knows: so it leaves the model first, as it found it."""
    try:
        yield
    finally:
        arrangement.revert()


def _timed(run: Callable[[], object], device: torch.device) -> int:
    _synchronize(device)
    start = time.perf_counter_ns()
    run()
    _synchronize(device)
    return time.perf_counter_ns() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
