"""The model of a step, moment by moment, as the head of `fused_remat/plan/timeline.py` says it: what the solver is
checked against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fused_remat.plan.timeline import Choice, Unit, kept_by


@dataclass(frozen=True)
class Moment:
    """The highest of one unit in one pass: bytes above what is there before the step."""

    unit: int
    phase: str  # "forward", "again" (run once more in backward) or "backward"
    nbytes: int


def moments(units: Sequence[Unit], choices: Sequence[Choice], in_flight: int = 1) -> Iterator[Moment]:
    """Every moment of the step, in its order of forward, backward moments beside their unit; `in_flight` as there."""
    total = sum(kept_by(units, choice) for choice in choices)
    every = sum(unit.gradient for unit in units)
    others = (in_flight - 1) * total
    behind = [0] * len(units)
    for i in range(len(units) - 2, -1, -1):
        behind[i] = behind[i + 1] + units[i + 1].gradient
    prefix = others
    for choice in choices:
        for unit, phase, nbytes in _within(units, choice):
            made = every if in_flight > 1 else behind[unit] if phase == "backward" else 0
            if in_flight == 1 and phase == "again":
                made = behind[choice.last]
            yield Moment(unit, phase, prefix + made + nbytes)
        prefix += kept_by(units, choice)


def _within(units: Sequence[Unit], choice: Choice) -> Iterator[tuple[int, str, int]]:
    """(unit, phase, bytes above what the units before the choice keep and the gradients made before)."""
    if not choice.region:
        option = units[choice.first].options[choice.options[0]]
        yield choice.first, "forward", option.forward
        yield choice.first, "backward", option.backward
        return
    yield from (
        (unit, "forward", units[unit].passing + (units[unit - 1].output if unit > choice.first else 0))
        for unit in range(choice.first, choice.last + 1)
    )
    last, inside = units[choice.last], 0
    for unit, index in zip(range(choice.first, choice.last), choice.options, strict=False):
        option = units[unit].options[index]
        yield unit, "again", last.waiting + inside + option.forward
        yield unit, "backward", inside + option.backward
        inside += option.kept
    yield choice.last, "backward", inside + last.options[choice.options[-1]].again


def cost_of(units: Sequence[Unit], choice: Choice) -> int:
    """What a choice costs above running its units as they are."""
    own = [units[choice.first + i].options[index] for i, index in enumerate(choice.options)]
    if not choice.region:
        return own[0].cost
    replayed = sum(units[choice.first + i].replay + option.cost for i, option in enumerate(own[:-1]))
    return replayed + own[-1].again_cost


def changes_of(units: Sequence[Unit], choice: Choice) -> int:
    """How much a choice changes: its layers that run otherwise, and 1 for a region."""
    inside = sum(units[choice.first + i].options[index].changes for i, index in enumerate(choice.options))
    return inside + (1 if choice.region else 0)
