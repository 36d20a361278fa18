"""From the front to one plan: candidates are run, cheapest first, until one stays within the budget.

Why a smaller budget never has a larger measured peak. The candidates are the same for every budget, in the same order.
A budget passes over those whose prediction, corrected by what the smallest plan measured, exceeds it by more than
`MARGIN`, and then takes the first whose measured peak is within it. Let b < B. What b takes, B may take too, so B takes
that one or an earlier one. An earlier one was either run for b and measured more than b, or passed over for b, which
means (as long as no prediction is too high by more than the margin) that it measures more than b. In both cases its
peak is above b, and that of b's plan is not. A run that memory does not suffice for has a peak above every budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fused_remat._out_of_memory import RanOut
from fused_remat.plan.errors import InfeasibleBudget
from fused_remat.plan.peak import Peak
from fused_remat.plan.solver import knee
from fused_remat.policy import Assignment
from fused_remat.sizes import format_bytes

MARGIN = 1.02
MANY = 100  # candidates, of which none is left out
NEARLY = 1.05  # times the cost
_AS_SMALL = 1.02  # of the smallest prediction: those are run for "min"
_MOST_FOR_MIN = 4

Judge = Callable[[Assignment], Peak | RanOut]


@dataclass(frozen=True)
class Candidate:
    """A plan of the front: its peak (bytes, predicted), what it costs, and, once it was run, what came of that run."""

    predicted: int
    cost: int
    assignment: Assignment
    judged: Peak | RanOut | None = None

    @property
    def peak(self) -> Peak | None:
        """Of the run that was made, if that came to its end."""
        return self.judged if isinstance(self.judged, Peak) else None

    @property
    def ran_out(self) -> bool:
        """Whether it was run and memory did not suffice."""
        return isinstance(self.judged, RanOut)


@dataclass(frozen=True)
class Chosen:
    """The index of what was chosen among the candidates, which hold every run that was made."""

    index: int
    candidates: tuple[Candidate, ...]
    passed_over: tuple[int, ...]  # run before it and found above the budget, or memory ran out

    def notes(self) -> list[str]:
        """What to tell of runs that memory did not suffice for."""
        ran_out = [candidate for candidate in self.candidates if candidate.ran_out]
        if not ran_out:
            return []
        several = "a plan" if len(ran_out) == 1 else f"{len(ran_out)} plans"
        notes = [
            f"memory ran out when {several} of a predicted peak of {_sizes(ran_out)} ran, which counts as over the "
            f"budget ({ran_out[0].judged.error})"
        ]
        if any(candidate.assignment == Assignment() for candidate in ran_out):
            notes.append("the model as it is does not run in the memory that there is here: its peak is a prediction")
        return notes


def candidates_of(front: Sequence[tuple[int, int, Assignment]]) -> list[Candidate]:
    """Of a front (peak, cost, assignment; cheapest first) all, or where it has more than `MANY` those that matter.

    What is left out has a next smaller one among the rest that costs at most `NEARLY` times as much, and that lies in
    the same one of `MANY` equal slices of the peaks. Which those are does not depend on the budget.
    """
    every = [Candidate(*point) for point in front]
    if len(every) <= MANY:
        return every
    high, low = every[0].predicted, every[-1].predicted
    left = every[-1:]
    for candidate in reversed(every[:-1]):
        slices = [(high - c.predicted) * (MANY - 1) // (high - low) for c in (candidate, left[-1])]
        if slices[0] != slices[1] or left[-1].cost - candidate.cost > (NEARLY - 1) * abs(candidate.cost):
            left.append(candidate)
    return left[::-1]


class Chooser:
    """Runs candidates and keeps what they measured. `exact`: the judge predicts, as the front does; no margin.

    `workspaces`: those (in bytes) among which the candidates were found.
    """

    def __init__(self, candidates: Sequence[Candidate], judge: Judge, *, exact: bool, workspaces: Sequence[int] = ()):
        self.candidates, self.exact, self.workspaces = list(candidates), exact, workspaces
        self._judge = judge

    def run(self, index: int) -> Candidate:
        """The candidate, which is run unless it was."""
        candidate = self.candidates[index]
        if candidate.judged is None:
            candidate = self.candidates[index] = replace(candidate, judged=self._judge(candidate.assignment))
        return candidate

    def peak(self, index: int) -> float:
        """In bytes, of its run; inf where memory ran out."""
        peak = self.run(index).peak
        return math.inf if peak is None else peak.peak

    def within(self, budget: int) -> Chosen:
        """The cheapest whose peak, when run, is at most `budget`.

        Raises InfeasibleBudget, or MemoryError: no plan that was run came to its end.
        """
        passed_over = []
        for index in range(self._start(budget), len(self.candidates)):
            if self.peak(index) <= budget:
                return self._chosen(index, passed_over)
            passed_over.append(index)
        least = self._least([*self._small(), *passed_over])
        if self.peak(least) > budget:
            raise infeasible(budget, self.candidates[least].peak, self.workspaces)
        return self._chosen(least, passed_over)

    def _start(self, budget: int) -> int:
        limit = budget
        if not self.exact:
            last = self.run(len(self.candidates) - 1)
            limit = MARGIN * budget - (last.peak.peak - last.predicted if last.peak else 0)
        fitting = (i for i, candidate in enumerate(self.candidates) if candidate.predicted <= limit)
        return next(fitting, len(self.candidates) - 1)

    def smallest(self) -> Chosen:
        """Of those predicted as small as can be, or nearly, the smallest when run; of equals the cheapest.

        Raises MemoryError: none of them runs.
        """
        return self._chosen(self._least(self._small()), [])

    def knee(self) -> Chosen:
        """Where a saving begins to get dear (`solver.knee`); if that does not run, the next smaller one that does.

        Raises MemoryError: none of them runs.
        """
        first = knee([(candidate.predicted, candidate.cost) for candidate in self.candidates])
        passed_over = []
        for index in range(first, len(self.candidates)):
            if not self.run(index).ran_out:
                return self._chosen(index, passed_over)
            passed_over.append(index)
        raise nothing_runs([self.candidates[index] for index in passed_over])

    def _small(self) -> list[int]:
        least = self.candidates[-1].predicted
        small = [i for i, candidate in enumerate(self.candidates) if candidate.predicted <= _AS_SMALL * least]
        return small[-_MOST_FOR_MIN:]

    def _least(self, indices: Iterable[int]) -> int:
        """The one with the smallest peak when run. Raises MemoryError if memory ran out for each of them."""
        index = min(indices, key=lambda i: (self.peak(i), i))
        if self.candidates[index].ran_out:
            raise nothing_runs([candidate for candidate in self.candidates if candidate.ran_out])
        return index

    def _chosen(self, index: int, passed_over: list[int]) -> Chosen:
        return Chosen(index, tuple(self.candidates), tuple(passed_over))


def nothing_runs(tried: Sequence[Candidate]) -> MemoryError:
    """The error where memory ran out for every plan that was run."""
    return MemoryError(
        f"memory ran out in the run of every plan that was tried: {len(tried)}, of a predicted peak of {_sizes(tried)} "
        f"({tried[-1].judged.error}). To plan for a machine with more memory pass fake=True, which runs nothing; to "
        "train on this one make the batch or the model smaller"
    )


def _sizes(candidates: Sequence[Candidate]) -> str:
    high, low = (format_bytes(pick(c.predicted for c in candidates)) for pick in (max, min))
    return high if high == low else f"{high} to {low}"


def infeasible(budget: int, smallest: Peak, workspaces: Sequence[int] = ()) -> InfeasibleBudget:
    """The error for a budget that the smallest plan exceeds; `workspaces`: those (in bytes) that plans might have."""
    sizes = " or ".join(map(format_bytes, workspaces))
    tried = f", with a workspace of {sizes} for fused layers," if workspaces else ""
    smaller = ", the workspace in force (fused_remat.workspace)" if workspaces else ""
    held = "; ".join(f"{name}: {format_bytes(nbytes)}" for name, nbytes in smallest.largest)
    return InfeasibleBudget(
        f"budget is {budget} bytes ({format_bytes(budget)}), but the smallest possible peak is {smallest.peak} bytes "
        f"({format_bytes(smallest.peak)}, {smallest.source}), in {smallest.moment}: {smallest.held_by()}. Most of what "
        f"is made in the step: {held}. No choice of what is kept{tried} lowers the rest: make the batch or the model "
        f"smaller{smaller}, or change the optimizer",
        budget,
        smallest.peak,
        smallest.source,
    )
