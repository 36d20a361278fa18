"""The blocks of a recorded run, from the allocator's events: pure bookkeeping, the same for every device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fused_remat._trace import Change


@dataclass(eq=False)
class Block:
    """One allocation, made at `born` and freed at `died` (ns; inf where the record ends before)."""

    address: int
    nbytes: int
    born: float
    died: float = math.inf


def blocks_of(changes: Iterable[Change]) -> list[Block]:
    """The blocks made during the record, whose `changes` are in time order.

    The release of a block made before is left out: torch reports it on CUDA, not at all on the CPU, or there with the
    size of an older block at the same address. A release that went unseen is dated by the next use of the address.
    """
    blocks: list[Block] = []
    alive: dict[int, Block] = {}
    for change in changes:
        previous = alive.pop(change.address, None)
        if previous is not None:
            previous.died = change.time_ns
        if change.nbytes > 0:
            alive[change.address] = Block(change.address, change.nbytes, change.time_ns)
            blocks.append(alive[change.address])
    return blocks


def levels(blocks: Iterable[Block], start: float) -> list[tuple[float, int]]:
    """(time, bytes alive from then on) at every change from `start` on, relative to the bytes alive just before it."""
    deltas = [(b.born, b.nbytes) for b in blocks] + [(b.died, -b.nbytes) for b in blocks]
    steps, level = [], 0
    # At the same moment a release comes first: it is the one that was dated by the next use of its address.
    for time_ns, delta in sorted(d for d in deltas if start <= d[0] < math.inf):
        level += delta
        steps.append((time_ns, level))
    return steps


def peak(blocks: Iterable[Block], start: float, phase: tuple[float, float]) -> int:
    """The highest level within `phase` (first and last ns, after `start`), the level at its beginning included."""
    first, last = phase
    entry, inside = 0, []
    for time_ns, level in levels(blocks, start):
        if time_ns < first:
            entry = level
        elif time_ns <= last:
            inside.append(level)
    return max(entry, *inside) if inside else entry


def total(blocks: Iterable[Block]) -> int:
    """Bytes of all `blocks` together."""
    return sum(block.nbytes for block in blocks)
