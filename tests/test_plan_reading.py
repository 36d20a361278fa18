"""What units and fixed parts take, from a recording that was written by hand."""

from __future__ import annotations

import math
from dataclasses import replace

from fused_remat.plan.peak import Peak
from fused_remat.plan.reading import called_once, counted, taken
from fused_remat.recording import Allocation, Recording, Span

INF = math.inf
# Forward 0..50: embedding until 10, a 10..20, b 20..30, head until 50. Backward 50..90: head, b 60..70, a 70..80, rest.
BY_HAND = Recording(
    device="cpu",
    source="predicted",
    static={"parameters": 1000, "optimizer": 2000, "inputs": 10},
    allocations=(
        Allocation(5, 1.0, 85.0, "kept", "embedding", "forward"),
        Allocation(100, 11.0, 75.0, "kept", "a", "forward"),
        Allocation(40, 12.0, 13.0, "temporary", "a", "forward"),
        Allocation(200, 21.0, 65.0, "kept", "b.inner", "forward"),
        Allocation(7, 31.0, 55.0, "kept", "", "forward"),
        Allocation(1, 40.0, INF, "output", "", "forward"),
        Allocation(11, 51.0, INF, "gradients", "", "backward"),
        Allocation(30, 60.0, 66.0, "temporary", "b", "backward"),
        Allocation(13, 62.0, INF, "gradients", "b", "backward"),
        Allocation(17, 72.0, INF, "gradients", "a", "backward"),
        Allocation(50, 73.0, 74.0, "rebuilt", "a", "backward"),
        Allocation(500, 95.0, 96.0, "temporary", "", "optimizer"),
    ),
    spans=(
        Span("a", "forward", 10.0, 20.0),
        Span("b", "forward", 20.0, 30.0),
        Span("b.inner", "forward", 20.5, 29.0),
        Span("b", "backward", 60.0, 70.0),
        Span("a", "backward", 70.0, 80.0),
    ),
    phases={"forward": (0.0, 50.0), "backward": (50.0, 90.0), "optimizer": (90.0, 99.0)},
    flop={("forward", "a"): 3, ("forward", "b.inner"): 4, ("backward", "a"): 9, ("forward", ""): 2},
    redone={"a": 5, "b.inner": 6},
)


def test_units_and_fixed_parts_of_a_recording():
    assert called_once(BY_HAND, ["b", "a", "b.inner", "c"]) == ["a", "b"]
    parts = taken(BY_HAND, ["a", "b"])
    a, b = parts.units
    assert (a.kept, a.forward, a.gradient, a.redone, a.flop, a.made) == (100, 140, 17, 5, 3, 140)
    assert a.backward == 100 + 17 + 50 + 1  # the loss lives on
    assert (b.kept, b.forward, b.gradient, b.redone, b.flop, b.made) == (200, 200, 13, 6, 4, 200)
    assert b.backward == 200 + 30 + 13 + 1
    before, between, after = parts.before
    assert (before.kept, before.forward, before.gradient) == (5, 5, 0)
    assert (between.made, between.gradient) == (0, 0)
    assert (after.kept, after.forward, after.backward, after.gradient) == (8, 8, 8 + 11 - 0, 11)
    assert parts.optimizer == 500 + 1 + 11 + 13 + 17
    # The highest moment put together again.
    highest = max(sum(alive.values()) for moment, alive in BY_HAND.timeline() if moment < 90)
    assert max(5 + 100 + b.backward + 11, 5 + a.backward + 11 + 13) + 3010 == highest == 3370


def test_units_called_twice_or_inside_each_other_stay_as_they_are():
    twice = replace(BY_HAND, spans=(*BY_HAND.spans, Span("a", "forward", 41.0, 42.0)))
    assert called_once(twice, ["a", "b"]) == ["b"]


def test_what_is_not_counted_is_not_there():
    some = counted(BY_HAND, ("parameters", "gradients"))
    assert some.static_bytes == 1000 and BY_HAND.static_bytes == 3010
    assert BY_HAND.peak_bytes == 3010 + 501 + 41 and counted(BY_HAND, ()).peak_bytes == 501
    assert not [a for a in counted(BY_HAND, ()).allocations if a.kind == "gradients"]


def test_peak_of_a_stage_holds_micro_batches_and_all_gradients():
    one, three = Peak.of(BY_HAND), Peak.of(BY_HAND, in_flight=3)
    assert one.peak == 3010 + 500 + 1 + 41 and one.phase == "optimizer" and one.moment == "the optimizer's step"
    inside = 5 + 100 + 200 + 1 + 30
    assert three.peak == max(one.peak, 3010 + 41 + inside + 2 * (312 + 10))
    assert three.kinds["kept"] == 305 + 2 * 312 and three.kinds["inputs"] == 30
    assert three.moment == "backward of b"
