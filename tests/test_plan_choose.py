"""How a plan is chosen among candidates, with runs that are made up."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from fused_remat._out_of_memory import RanOut
from fused_remat.plan import InfeasibleBudget
from fused_remat.plan.choose import MANY, MARGIN, NEARLY, Candidate, Chooser, Chosen, candidates_of
from fused_remat.plan.peak import Peak
from fused_remat.policy import Assignment


def peak(nbytes: int) -> Peak:
    return Peak("measured", nbytes, "backward", "layers.1", 0, 0, {"kept": nbytes}, (("kept of layers.1", nbytes),))


def chooser(predicted: list[int], measured: list[int | None], exact: bool = False) -> tuple[Chooser, list[int]]:
    """Candidates whose runs measure this (None: memory runs out); and which of them were run, in order."""
    runs: list[int] = []

    def judge(assignment: Assignment) -> Peak | RanOut:
        index = int(assignment.regions[0][0])
        runs.append(index)
        return RanOut(f"MemoryError: run {index}") if measured[index] is None else peak(measured[index])

    every = [Candidate(p, i, Assignment(regions=((str(i),),))) for i, p in enumerate(predicted)]
    return Chooser(every, judge, exact=exact), runs


def test_the_cheapest_that_measures_within_the_budget_is_taken():
    found, runs = chooser([100, 90, 80, 70, 60], [100, 91, 83, 70, 60])
    chosen = found.within(82)
    assert chosen.index == 3 and chosen.passed_over == (2,)
    assert runs == [4, 2, 3]  # the smallest shows how far predictions are off
    assert [c.judged is not None for c in chosen.candidates] == [False, False, True, True, True]


def test_predictions_that_are_off_by_a_constant_are_corrected():
    found, runs = chooser([100, 90, 80, 70, 60], [110, 100, 90, 80, 70])
    assert found.within(90).index == 2 and runs == [4, 2]


def test_a_smaller_budget_never_measures_more():
    """For runs that are off by less than the margin, in either direction and not even in order."""
    predicted = list(range(1000, 400, -20))
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        off = (torch.rand(len(predicted), generator=generator) * 1.6 - 0.8) * (MARGIN - 1)
        measured = [round(p * (1 + o)) for p, o in zip(predicted, off.tolist(), strict=True)]
        measured[-1] = predicted[-1]
        peaks = []
        for budget in range(1000, min(measured) - 1, -7):
            found, _ = chooser(predicted, measured)
            chosen = found.within(budget)
            peaks.append(chosen.candidates[chosen.index].peak.peak)
            assert peaks[-1] <= budget
        assert peaks == sorted(peaks, reverse=True)


def test_exact_candidates_start_at_the_budget():
    found, runs = chooser([100, 90, 80], [100, 90, 80], exact=True)
    assert found.within(95).index == 1 and runs == [1]


def test_nothing_fits():
    found, runs = chooser([100, 90, 80], [105, 95, 86])
    with pytest.raises(InfeasibleBudget, match="the smallest possible peak is 86 bytes") as caught:
        found.within(70)
    assert (caught.value.budget, caught.value.smallest, caught.value.source) == (70, 86, "measured")
    assert "in backward of layers.1: kept 86 B" in str(caught.value)
    assert runs == [2]


def test_a_run_that_memory_does_not_suffice_for_is_over_every_budget():
    found, runs = chooser([100, 90, 80, 70, 60], [None, None, 80, 70, 60])
    chosen = found.within(10_000)
    assert chosen.index == 2 and chosen.passed_over == (0, 1) and runs == [4, 0, 1, 2]
    assert [c.ran_out for c in chosen.candidates] == [True, True, False, False, False]
    assert chosen.candidates[0].peak is None and chosen.candidates[2].peak.peak == 80
    assert found.within(10_000).index == 2 and runs == [4, 0, 1, 2]  # what ran out is not run again
    (note,) = chosen.notes()
    assert note.startswith("memory ran out when 2 plans of a predicted peak of 100 B to 90 B ran")
    assert "over the budget (MemoryError: run 0)" in note
    assert found._chosen(0, []).notes() == [note] and chooser([1], [1])[0].within(1).notes() == []


def test_the_model_as_it_is_may_run_out():
    candidates = [Candidate(9, 0, Assignment(), RanOut("MemoryError")), Candidate(5, 1, Assignment(regions=(("a",),)))]
    note, whole = Chosen(1, tuple(candidates), (0,)).notes()
    assert "when a plan of a predicted peak of 9 B ran" in note
    assert whole == "the model as it is does not run in the memory that there is here: its peak is a prediction"


def test_the_smallest_plan_may_run_out_and_another_fit():
    found, runs = chooser([100, 90, 80], [None, 90, None])
    assert found.within(95).index == 1 and runs == [2, 1]  # nothing to correct predictions by
    assert chooser([100, 79, 80], [None, 79, None])[0].smallest().index == 1
    with pytest.raises(InfeasibleBudget, match="the smallest possible peak is 95 bytes"):
        chooser([100, 90, 80], [None, 95, None])[0].within(92)


def test_the_knee_may_run_out():
    found, runs = chooser([100, 50, 45], [100, None, 46])
    chosen = found.knee()
    assert chosen.index == 2 and chosen.passed_over == (1,) and runs == [1, 2]


@pytest.mark.parametrize("choose", [lambda c: c.within(95), lambda c: c.smallest(), lambda c: c.knee()])
def test_nothing_runs_in_the_memory_that_there_is(choose):
    found, _ = chooser([100, 50, 49, 49], [None] * 4)
    with pytest.raises(MemoryError, match=r"memory ran out in the run of every plan .* pass fake=True") as raised:
        choose(found)
    assert "49 B (MemoryError: run 3)" in str(raised.value)


def test_min_runs_what_is_predicted_as_small():
    found, runs = chooser([100, 81, 80], [100, 79, 82])
    assert found.smallest().index == 1 and sorted(runs) == [1, 2]


def test_knee_is_run():
    found, runs = chooser([100, 50, 45], [100, 51, 46])
    assert found.knee().index == 1 and runs == [1]


def test_long_fronts_are_spread_evenly():
    front = [(10_000 - 3 * i, i, Assignment()) for i in range(3000)]
    few = candidates_of(front)
    assert MANY <= len(few) < 2 * MANY
    assert few[0].predicted == 10_000 and few[-1].predicted == front[-1][0]
    assert all(a.predicted - b.predicted <= 93 for a, b in pairwise(few))


def test_what_long_fronts_leave_out_has_a_smaller_one_at_nearly_the_same_cost():
    """Costs that rise steeply within few bytes at the end, from below nothing: every budget gets nearly the best."""
    front = [(10**6 - 997 * i, i - 3, Assignment()) for i in range(900)]
    front += [(front[-1][0] - i, 897 + 9 * i, Assignment()) for i in range(1, 900)]
    few = candidates_of(front)
    assert len(few) < 3 * MANY < len(front)
    for peak, cost, _ in front:
        assert next(c.cost for c in few if c.predicted <= peak) <= cost + (NEARLY - 1) * abs(cost)
