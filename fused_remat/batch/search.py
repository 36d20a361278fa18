"""Which batch sizes are tried, in which order: pure control flow, whatever a trial is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Stage = Literal["grow", "narrow", "confirm", "target"]
Outcome = Literal["ran", "over the limit", "out of memory", "data ended", "not run"]


@dataclass(frozen=True)
class Trial:
    """One batch size, tried from clean. Every number was measured; None where it was not.

    Attributes:
        size, stage: what was tried and what for: "grow" and "narrow" look for a size, "confirm" runs the winner once
            more, "target" runs the size of a micro-batch that the search had not tried.
        outcome: "ran" alone means that it fits; "not run" was refused beforehand, for the safety of the machine.
        peak_bytes: of the allocator, everything included: weights, gradients, optimizer state, inputs, activations.
        reserved_bytes: what a CUDA allocator held for it at most; above `peak_bytes` by what fragmentation cost.
        seconds: of a whole step after the first, median.
        rows: in the batch, where the data ended before `size`.
        detail: what the error said, or the limit that was exceeded, in words.
    """

    size: int
    stage: Stage
    outcome: Outcome
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    seconds: float | None = None
    rows: int | None = None
    detail: str = ""

    @property
    def fits(self) -> bool:
        return self.outcome == "ran"


@dataclass
class Found:
    """Where a search ended: `winner` is the confirming trial, None if nothing fits; `reason` says why it went no
    further: "memory", "largest", "data" or "nothing fits"."""

    winner: Trial | None
    reason: Literal["memory", "largest", "data", "nothing fits"]
    trials: list[Trial] = field(default_factory=list)

    @property
    def smallest_failed(self) -> Trial | None:
        """Of the trials for which memory did not suffice."""
        failed = [trial for trial in self.trials if trial.outcome not in ("ran", "data ended")]
        return min(failed, key=lambda trial: trial.size, default=None)


def search(try_size: Callable[[int, Stage], Trial], smallest: int, largest: int | None) -> Found:
    """Doubles from `smallest` until a size fails or `largest` is reached, halves the gap, and runs the winner again.

    Memory need not grow with the size, nor does a size that ran once run always (a fragmented heap): whatever the
    trials say, the winner ran twice, the second time to confirm. Where that fails, the next smaller size that ran is
    confirmed, and the gap between the two is halved again, each size run twice.
    """
    trials: list[Trial] = []

    def attempt(size: int, stage: Stage) -> Trial:
        trials.append(try_size(size, stage))
        return trials[-1]

    def ran(size: int) -> bool:
        return attempt(size, "narrow").fits

    def confirmed(size: int) -> bool:
        return attempt(size, "confirm").fits

    best, failed, reason = _grow(attempt, smallest, largest)
    if best:
        _, failed = _halve(best, failed, ran)
    for best in sorted({trial.size for trial in trials if trial.fits}, reverse=True):
        if confirmed(best):
            break
        failed, reason = best, "memory"
    else:
        return Found(None, "nothing fits", trials)
    best, _ = _halve(best, failed, lambda size: ran(size) and confirmed(size))
    winner = next(trial for trial in trials if trial.fits and (trial.size, trial.stage) == (best, "confirm"))
    return Found(winner, reason, trials)


def _halve(best: int, failed: int | None, works: Callable[[int], bool]) -> tuple[int, int | None]:
    """The two sizes between which the limit lies: none stands between them any more."""
    while failed is not None and failed - best > 1:
        middle = (best + failed) // 2
        if works(middle):
            best = middle
        else:
            failed = middle
    return best, failed


def _grow(
    attempt: Callable[[int, Stage], Trial], smallest: int, largest: int | None
) -> tuple[int, int | None, Literal["memory", "largest", "data"]]:
    """The largest size that ran (0: none), the size that failed after it, and why it ended."""
    best, size, at_the_end = 0, smallest, "largest"
    while True:
        trial = attempt(size, "grow")
        if trial.outcome == "data ended":
            largest, at_the_end = max(trial.rows or 0, best), "data"
            if largest == best:
                return best, None, at_the_end
            size = largest
            continue
        if not trial.fits:
            return best, size, "memory"
        best = size
        if best == largest:
            return best, None, at_the_end
        size = 2 * best if largest is None else min(2 * best, largest)


@dataclass(frozen=True)
class Accumulation:
    """A global batch in micro-batches that ran: `steps` of `batch` rows, and one of `remainder` rows if not 0."""

    batch: int
    steps: int
    remainder: int = 0

    @property
    def total(self) -> int:
        """Rows of the global batch."""
        return self.batch * self.steps + self.remainder

    def __str__(self) -> str:
        rest = f" + 1 x {self.remainder}" if self.remainder else ""
        return f"{self.total} = {self.steps} x {self.batch}{rest}"


def split_target(target: int, most: int) -> Accumulation:
    """`target` rows in micro-batches of at most `most`: equal ones, unless those would be more than twice as many as
    needed; then as large as possible, with a smaller last one."""
    needed = -(-target // most)
    equal = next(steps for steps in range(needed, target + 1) if target % steps == 0)
    if equal <= 2 * needed:
        return Accumulation(target // equal, equal)
    return Accumulation(most, target // most, target % most)
