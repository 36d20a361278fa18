"""What a step holds from moment to moment, as sums of what its units keep: the model that the solver optimises.

A *unit* is a module of a chain (a block, a layer) or a fixed part between two of them (embedding, head and loss); the
units of a step are in the order of its forward, and backward visits them in the opposite order. With `kept` of the
units before it (prefix), and the gradients of the parameters of the units behind it, a unit is at its highest

    forward:   prefix + option.forward
    backward:  prefix + gradients behind it + option.backward

bytes above what is there before the step. A *region* (a segment of consecutive units that backward runs again as one)
keeps what its last unit puts out; its forward holds nothing else but the unit at work and its input. Its backward runs
the units forward again, the waiting gradient of the region's output beside them, then backward:

    again:     prefix + gradients behind the region + waiting + kept of the region's units before it + option.forward
    backward:  prefix + gradients behind the unit   + kept of the region's units before it + option.backward

The last unit of a region is both at once, since what it rebuilds stops where nothing more is needed: `option.again` is
its highest, the waiting gradient included.

Under a 1F1B schedule (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", section 2.2) a pipeline stage holds `in_flight` = k > 1 micro-batches: k - 1 further ones are between
their forward and their backward, each with everything that the stage keeps, and the gradients of all parameters are
there from the second micro-batch on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """What one unit may do, and what that takes. Bytes are above what was alive when the unit began.

    `cost` and the costs of `again` are in whole numbers of what the plan minimises (FLOP, or nanoseconds) above running
    the unit as it is; they may be negative.
    """

    name: str
    kept: int  # made in its forward and alive at the end of it
    forward: int  # highest during its forward
    backward: int  # highest during its backward, without the gradients of parameters of the units behind it
    cost: int = 0
    changes: int = 0  # layers that do not run as they are
    again: int = -1  # highest during its backward as the last unit of a region, what is rebuilt included; -1: in none
    again_cost: int = 0  # cost as the last unit of a region, everything included


@dataclass(frozen=True)
class Unit:
    """One module of a chain, or a fixed part (`chain` -1: in no region, one option)."""

    path: str
    options: tuple[Option, ...]
    gradient: int = 0  # bytes of gradients of parameters made in its backward
    chain: int = -1  # units of the same chain that follow each other may form a region; -1: it is in none
    output: int = 0  # kept by a region that ends with this unit
    waiting: int = 0  # of `output`, what has a gradient that waits while a region is run again
    passing: int = 0  # highest during its forward within a region
    replay: int = 0  # cost of running it forward again, as it is
    overhead: int = 0  # bytes that a region keeps beside `output`, whatever its length (random state)


@dataclass(frozen=True)
class Choice:
    """Units `first` to `last` (both included) with one option each: a region, or (`region` False) one unit alone."""

    first: int
    last: int
    options: tuple[int, ...]
    region: bool = False


def kept_by(units: Sequence[Unit], choice: Choice) -> int:
    """Bytes that the units of a choice keep from forward to backward."""
    last = units[choice.last]
    return last.output + last.overhead if choice.region else last.options[choice.options[0]].kept
