"""Recordings made by hand for the tests of pictures: a chain of equal layers, everything kept or in regions."""

from __future__ import annotations

import math

from fused_remat.recording import Allocation, Recording

UNIT = 2**20


def chain(layers: int = 6, *, segment: int = 0, source: str = "measured") -> Recording:
    """`layers` equal layers of one unit each; `segment > 0`: recomputed in regions of so many layers."""
    events, clock = [], iter(range(10**9))

    def allocate(units: float, kind: str, module: str, phase: str) -> list:
        events.append([int(units * UNIT), next(clock), math.inf, kind, module, phase])
        return events[-1]

    def free(event: list) -> None:
        event[2] = next(clock)

    names = [f"layers.{i}" for i in range(layers)]
    held: dict[int, list] = {}
    before = next(clock)
    for i, name in enumerate(names):
        dropped = segment and (i + 1) % segment
        held[i] = allocate(1, "temporary" if dropped else "kept", name, "forward")
        scratch = allocate(0.5, "temporary", name, "forward")
        free(scratch)
        if segment > 1 and i % segment:  # what only the inside of a region needed
            free(held.pop(i - 1))
    loss = allocate(0.01, "output", "", "forward")
    middle = next(clock)
    for i in reversed(range(layers)):
        if i not in held:
            first = i - i % segment
            for j in range(first, i + 1):
                held[j] = allocate(1, "rebuilt", names[j], "backward")
        gradient = allocate(1, "temporary", names[i], "backward")
        allocate(0.25, "gradients", names[i], "backward")
        free(gradient)
        free(held.pop(i))
    free(loss)
    late = next(clock)
    for name in names[:2]:
        free(allocate(0.3, "temporary", name, "optimizer"))
    end = next(clock)
    return Recording(
        "cpu",
        source,
        {"parameters": UNIT, "buffers": UNIT // 8, "optimizer": 2 * UNIT, "inputs": UNIT // 2, "gradients": 0},
        tuple(Allocation(*event) for event in events),
        (),
        {"forward": (before, middle), "backward": (middle, late), "optimizer": (late, end)},
    )
