"""What a search for batch sizes found: numbers, and the table that a person reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fused_remat._about import in_words
from fused_remat._columns import aligned
from fused_remat.batch.search import Accumulation, Trial
from fused_remat.sizes import format_bytes

_FRAGMENTED = 0.05  # of what is allocated; less is the rounding of blocks


@dataclass(frozen=True)
class BatchResult:
    """One policy.

    Attributes:
        policy: its name; "as it is": the model was tried as it came.
        batch: the largest size found that ran, twice, from clean; None if nothing fits.
        stopped: why no larger one, in a sentence.
        winner: the last run of `batch`: peak and seconds, measured.
        accumulation: `target` rows in micro-batches that ran; None without `target`, or if nothing fits.
        micro_batch: the run of the micro-batch of `accumulation`.
        trials: all of them, in order.
        warnings: sentences.
    """

    policy: str
    batch: int | None
    stopped: str
    winner: Trial | None
    accumulation: Accumulation | None
    micro_batch: Trial | None
    trials: tuple[Trial, ...]
    warnings: tuple[str, ...] = ()

    @property
    def samples_per_second(self) -> float | None:
        """Of the winner, measured."""
        if self.winner is None or not self.winner.seconds:
            return None
        return self.winner.size / self.winner.seconds

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        found["samples_per_second"] = self.samples_per_second
        if self.accumulation is not None:
            found["accumulation"]["total"] = self.accumulation.total
        return found


@dataclass(frozen=True)
class BatchReport:
    """One result per policy, in the order asked for. Bytes and seconds were measured, on `device`.

    `about`: parameters, optimizer, versions and the inputs of the first batch that was tried, of `about["batch"]` rows;
    None where none was. `limit_bytes` comes from `limit_source`, and the fraction `margin` of it stays free; `steps`
    were run per trial.
    """

    model: str
    device: str
    about: dict[str, Any] | None
    limit_bytes: int
    limit_source: str
    margin: float
    steps: int
    target: int | None
    results: tuple[BatchResult, ...]
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether something fits under every policy."""
        return all(result.batch is not None for result in self.results)

    def __getitem__(self, policy: str) -> BatchResult:
        """The result of the policy of that name."""
        return {result.policy: result for result in self.results}[policy]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, strings and numbers, for JSON."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("results", "warnings")}
        return {
            **own,
            "ok": self.ok,
            "results": [result.to_dict() for result in self.results],
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        rows = [_row(result) for result in self.results]
        header = {"policy": "policy", "batch": "batch", "peak": "peak (measured)", "step": "s/step (measured)",
                  "rate": "samples/s", "target": f"for {self.target}"}  # fmt: skip
        columns = [name for name in header if any(row[name] for row in rows)]
        cells = [[header[name] for name in columns], *([row[name] for name in columns] for row in rows)]
        who = f"{self.model} on {self.device}"
        lines = [
            f"{in_words(self.about)} (inputs of batch {self.about['batch']})" if self.about else who,
            f"{format_bytes(self.limit_bytes)} {self.limit_source}, {self.margin:.0%} of it to stay free; {self.steps} "
            "optimizer steps per trial",
            *aligned(cells),
            *(f"{result.policy}: {result.stopped}" for result in self.results),
            *(f"warning: {warning}" for warning in self.warnings),
            *(f"warning: {result.policy}: {warning}" for result in self.results for warning in result.warnings),
        ]
        return "\n".join(lines)


def fragmentation(trial: Trial | None) -> str | None:
    """A sentence about what an allocator held beyond what was allocated, if that is worth one."""
    if trial is None or trial.reserved_bytes is None or not trial.peak_bytes:
        return None
    gap = trial.reserved_bytes - trial.peak_bytes
    if gap <= _FRAGMENTED * trial.peak_bytes:
        return None
    return (
        f"the allocator held {format_bytes(trial.reserved_bytes)} for a peak of {format_bytes(trial.peak_bytes)}: "
        f"{format_bytes(gap)} are lost to fragmentation"
    )


def _row(result: BatchResult) -> dict[str, str]:
    winner, rate = result.winner, result.samples_per_second
    return {
        "policy": result.policy,
        "batch": "nothing fits" if winner is None else str(winner.size),
        "peak": "" if winner is None else _bytes(winner.peak_bytes),
        "step": "" if winner is None or winner.seconds is None else f"{winner.seconds:.4g}",
        "rate": "" if rate is None else f"{rate:.4g}",
        "target": "" if result.accumulation is None else str(result.accumulation),
    }


def _bytes(nbytes: int | None) -> str:
    return "not measured" if nbytes is None else format_bytes(nbytes)
