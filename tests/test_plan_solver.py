"""The planner's dynamic programme against every possible plan."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_timeline import changes_of, cost_of, moments

from fused_remat.plan import solver
from fused_remat.plan.choose import candidates_of
from fused_remat.plan.solver import MOST, Solution, knee, solve
from fused_remat.plan.timeline import Choice, Option, Unit
from fused_remat.policy import Assignment


def every_plan(units: list[Unit], regions: bool = True) -> Iterator[tuple[Choice, ...]]:
    """All ways to cut the units into single ones and regions, with all options."""

    def runs(first: int) -> Iterator[list[tuple[int, int, bool]]]:
        if first == len(units):
            yield []
            return
        for rest in runs(first + 1):
            yield [(first, first, False), *rest]
        last = first
        while regions and units[first].chain >= 0 and last < len(units) and units[last].chain == units[first].chain:
            for rest in runs(last + 1):
                yield [(first, last, True), *rest]
            last += 1

    for cut in runs(0):
        ranges = [range(len(unit.options)) for unit in units]
        for options in itertools.product(*ranges):
            yield tuple(Choice(first, last, options[first : last + 1], region) for first, last, region in cut)


def brute_front(units: list[Unit], floor: int, in_flight: int, regions: bool = True) -> list[tuple[int, int, int]]:
    """(peak, cost, changes) that nothing beats, cheapest first."""
    every = set()
    for plan in every_plan(units, regions):
        peak = max([floor, *(moment.nbytes for moment in moments(units, plan, in_flight))])
        every.add((peak, sum(cost_of(units, c) for c in plan), sum(changes_of(units, c) for c in plan)))
    front = []
    for peak, cost, changes in sorted(every):
        if not front or (cost, changes) < front[-1][1:]:
            front.append((peak, cost, changes))
    return front[::-1]


def told(solutions: list[Solution]) -> list[tuple[int, int, int]]:
    return [(s.peak, s.cost, s.changes) for s in solutions]


def check(units: list[Unit], floor: int = 0, in_flight: int = 1) -> None:
    solutions = solve(units, floor=floor, in_flight=in_flight)
    assert told(solutions) == brute_front(units, floor, in_flight)
    for solution in solutions:
        assert [i for c in solution.choices for i in range(c.first, c.last + 1)] == list(range(len(units)))
        peak = max([floor, *(moment.nbytes for moment in moments(units, solution.choices, in_flight))])
        assert peak == solution.peak
        assert sum(cost_of(units, choice) for choice in solution.choices) == solution.cost
        assert sum(changes_of(units, choice) for choice in solution.choices) == solution.changes


@st.composite
def options(draw: st.DrawFn, index: int) -> Option:
    kept = draw(st.integers(0, 12))
    return Option(
        name=str(index),
        kept=kept,
        forward=kept + draw(st.integers(0, 6)),
        backward=kept + draw(st.integers(0, 9)),
        cost=draw(st.integers(-2, 9)) if index else 0,
        changes=min(index, 1),
        again=kept + draw(st.integers(0, 12)),
        again_cost=draw(st.integers(0, 12)),
    )


@st.composite
def chains(draw: st.DrawFn, most: int, most_options: int) -> list[Unit]:
    units, chain = [], 0
    for i in range(draw(st.integers(1, most))):
        fixed = draw(st.integers(0, 5)) == 0
        chain += fixed or draw(st.integers(0, 9)) == 0
        count = 1 if fixed else draw(st.integers(1, most_options))
        output = draw(st.integers(0, 4))
        units.append(
            Unit(
                path=str(i),
                options=tuple(draw(options(k)) for k in range(count)),
                gradient=draw(st.integers(0, 5)),
                chain=-1 if fixed else chain,
                output=output,
                waiting=draw(st.integers(0, output)),
                passing=output + draw(st.integers(0, 5)),
                replay=draw(st.integers(0, 9)),
                overhead=draw(st.integers(0, 1)),
            )
        )
    return units


@settings(max_examples=60, deadline=None)
@given(chains(most=5, most_options=3), st.integers(0, 30), st.sampled_from([1, 2, 4]))
def test_solve_equals_brute_force(units, floor, in_flight):
    check(units, floor, in_flight)


@pytest.mark.parametrize("count", range(1, 13))
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_solve_equals_brute_force_for_every_length(count, data):
    """Regions of chains of up to 12 units, with as many options as brute force can take."""
    most = 3 if count <= 5 else 2 if count <= 7 else 1
    units = []
    while len(units) < count:
        units += data.draw(chains(most=count - len(units), most_options=most))
    check(units, floor=data.draw(st.integers(0, 20)), in_flight=data.draw(st.sampled_from([1, 3])))


def uniform(count: int) -> list[Unit]:
    """`count` layers that each keep what they put out, 1 unit of memory (tanh): 100 bytes, 10 FLOP. The input of the
    first is held by the caller, and counts as a fixed part."""
    stock = Option("as it is", kept=100, forward=100, backward=100, again=100, again_cost=10)
    first = Unit("input", (Option("fixed", kept=100, forward=100, backward=0),))
    layers = [Unit(str(i), (stock,), chain=0, output=100, waiting=0, passing=100, replay=10) for i in range(count)]
    # The last output is the loss's affair here: nothing keeps it.
    layers[-1] = Unit(str(count - 1), (stock,), chain=0, output=0, waiting=0, passing=100, replay=10)
    return [first, *layers]


def equal_segments(units: list[Unit], count: int) -> tuple[Choice, ...]:
    """The layers of `uniform` in `count` regions, as equal as their number allows."""
    length = len(units) - 1
    cuts = [1 + length * i // count for i in range(count + 1)]
    return (Choice(0, 0, (0,)), *(Choice(a, b - 1, (0,) * (b - a), True) for a, b in pairwise(cuts)))


@pytest.mark.parametrize(("segments", "peak"), [(1, 65), (2, 34), (4, 20), (8, 16), (16, 20), (32, 34), (64, 65)])
def test_equal_segments_of_a_uniform_chain_peak_at_length_plus_count(segments, peak):
    units = uniform(64)
    choices = equal_segments(units, segments)
    assert sum(choice.region for choice in choices) == segments
    assert max(moment.nbytes for moment in moments(units, choices)) == 100 * peak
    # What one region rebuilds it rebuilds once.
    assert sum(cost_of(units, choice) for choice in choices) == 64 * 10


def test_square_root_is_the_best_number_of_equal_segments_and_unequal_ones_are_better():
    units = uniform(64)
    peaks = {k: max(m.nbytes for m in moments(units, equal_segments(units, k))) for k in range(1, 65)}
    assert min(peaks, key=peaks.get) == 8 and peaks[8] == 1600
    # Segments that get shorter to the end: 11 + 10 + ... hold 64 layers within 12 units.
    lowest = solve(units)[-1]
    assert lowest.peak == 1200
    lengths = [c.last - c.first + 1 for c in lowest.choices if c.region]
    assert sum(lengths) <= 64 and max(lengths) <= 11


def unequal(count: int) -> list[Unit]:
    """MLPs of different widths, which may keep all, fractions or nothing, or run again."""
    draw, units = random.Random(count), []
    for i in range(count):
        output, hidden = draw.randrange(2_000, 9_000), draw.randrange(20_000, 90_000)
        flop = hidden * draw.randrange(50, 150)
        options = []
        for k, fraction in enumerate((1.0, 0.75, 0.5, 0.25, 0.0)):
            kept, cost = int(output + hidden * fraction), int((1 - fraction) * flop)
            again = kept + hidden // 4 if fraction in (0.0, 1.0) else -1
            options.append(
                Option(str(fraction), kept, kept + hidden // 9, kept + hidden // 5, cost, k, again, cost + 3 * flop)
            )
        passing, gradient = hidden // 4, draw.randrange(100, 500)
        units.append(Unit(str(i), tuple(options), gradient, 0, output, output, passing, 3 * flop))
    return units


def test_every_budget_gets_nearly_the_least_cost_where_fronts_are_long(monkeypatch):
    """24 unequal MLPs have a front of thousands of points: thinned on the way, and again to what may be run."""
    units = unequal(24)
    left = candidates_of([(s.peak, s.cost, Assignment()) for s in solve(units)])
    monkeypatch.setattr(solver, "MOST", 10**9)
    exact = solve(units)
    assert len(exact) > 5 * MOST and len(left) < MOST
    assert left[-1].predicted == exact[-1].peak and left[0].cost == exact[0].cost == 0
    for point in exact:
        cheapest = next(candidate for candidate in left if candidate.predicted <= point.peak)
        assert cheapest.cost <= 1.1 * point.cost


def test_front_of_many_layers_is_thinned_evenly():
    """40 layers with 12 options that share no step: the front is cut to `MOST` points and keeps its ends."""
    steps = [1009 - 83 * k - k * k for k in range(12)]
    opts = tuple(
        Option(str(k), kept, kept + 60, kept + 300, k * k * 7, min(k, 1), kept + 500 if k % 4 == 0 else -1, 900 + k * k)
        for k, kept in enumerate(steps)
    )
    units = [Unit(str(i), opts, 50, 0, 40, 40, 300, 800) for i in range(40)]
    front = solve(units)
    assert len(front) <= MOST
    assert front[0].cost == 0
    assert front[-1].peak == min(s.peak for s in front) == solve(units[:1] * 40)[-1].peak
    for one, other in pairwise(front):
        assert one.peak > other.peak and one.cost < other.cost
        assert one.peak - other.peak <= (front[0].peak - front[-1].peak) / 20


def test_ties_go_to_the_fewest_changes_and_then_to_the_first():
    same = [Option("a", 5, 5, 5), Option("b", 5, 5, 5), Option("c", 5, 5, 5, changes=1)]
    (only,) = solve([Unit("u", tuple(same)), Unit("v", tuple(same[::-1]))])
    assert told([only]) == [(10, 0, 0)]
    assert [c.options for c in only.choices] == [(0,), (1,)]


def test_a_pipeline_stage_holds_what_it_keeps_once_per_micro_batch():
    units = [Unit(str(i), (Option("as it is", 10, 12, 15),), gradient=3) for i in range(4)]
    assert solve(units)[0].peak == max(30 + 15, 20 + 15 + 3, 10 + 15 + 6, 15 + 9)
    # Two more micro-batches keep 40 bytes each, and all 12 bytes of gradients are there.
    assert solve(units, in_flight=3)[0].peak == 2 * 40 + 12 + 30 + 15


def front_of(*points: tuple[int, int]) -> list[Solution]:
    return [Solution(peak, cost, 0, ()) for peak, cost in points]


def test_knee_is_farthest_below_the_chord():
    front = front_of((100, 0), (60, 1), (40, 3), (35, 10), (30, 40))
    assert knee([(s.peak, s.cost) for s in front]) == 2
    assert knee([(7, 0)]) == 0
    assert knee([(9, 0), (8, 1)]) == 0  # both lie on the chord: the cheaper one
