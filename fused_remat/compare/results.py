"""What a comparison found, as plain records: every file and table is written from these."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from fused_remat.budget import MIB
from fused_remat.compare.train import Curve
from fused_remat.compare.variants import STOCK
from fused_remat.compare.workload import MlpShape
from fused_remat.measure import Measurement, Timeline

# The first steps pay for allocator growth and first-use set-up, so they are timed but not compared.
_UNTIMED_STEPS = 3


@dataclass(frozen=True)
class Spread:
    """Median, 20th and 80th percentile."""

    p50: float
    p20: float
    p80: float


@dataclass(frozen=True)
class VariantResult:
    """One variant's curve and the memory of one of its steps.

    `mlps`, `attentions` and `blocks` count what was changed, `explanation` says how, `converted` and `skipped` name the
    layers, `path` says what ran in them.
    """

    name: str
    explanation: str
    curve: Curve
    memory: Measurement
    timeline: Timeline
    mlps: int
    attentions: int
    blocks: int
    converted: tuple[str, ...]
    skipped: tuple[str, ...]
    path: str

    @property
    def kept_mib(self) -> float:
        return self.memory.kept_bytes / MIB

    @property
    def forward_peak_mib(self) -> float:
        return self.memory.forward_peak_bytes / MIB

    @property
    def backward_peak_mib(self) -> float:
        return self.memory.backward_peak_bytes / MIB

    @property
    def gradient_mib(self) -> float:
        return self.memory.gradient_bytes / MIB


@dataclass(frozen=True)
class ModelResult:
    """One model trained by every variant.

    `steps` optimizer steps each; `unit` is the loss's, "" if it has none; `shape` is that of the MLPs, where it is
    known; `workspace_bytes` is the scratch budget of each fused call; `seconds` is the wall time of it all.
    """

    name: str
    title: str
    description: str
    metric: str
    unit: str
    remarks: tuple[str, ...]
    steps: int
    parameters: int
    shape: MlpShape | None
    workspace_bytes: int
    seconds: float
    variants: Mapping[str, VariantResult]

    def largest_loss_difference(self, name: str) -> float:
        """The largest |loss - stock's loss| (nats) over all steps."""
        pairs = zip(self.variants[name].curve.losses, self.variants[STOCK].curve.losses, strict=True)
        return max(abs(own - stock) for own, stock in pairs)

    def step_time_ratio(self, name: str) -> Spread:
        """Seconds of a step over stock's seconds for the same step."""
        own, stock = self.variants[name].curve.seconds, self.variants[STOCK].curve.seconds
        first = min(_UNTIMED_STEPS, len(own) - 1)
        return spread([a / b for a, b in zip(own[first:], stock[first:], strict=True)])

    def step_seconds(self, name: str) -> float:
        """Median seconds of one optimizer step."""
        seconds = self.variants[name].curve.seconds
        return statistics.median(seconds[min(_UNTIMED_STEPS, len(seconds) - 1) :])

    def redone_flop(self, name: str) -> int:
        """FLOP of library matrix products in one step, beyond those of stock."""
        return self.variants[name].memory.gemm_flop - self.variants[STOCK].memory.gemm_flop


def spread(values: list[float]) -> Spread:
    """Of at least one value, with linear interpolation between the sorted ones."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return Spread(statistics.median(values), tenths[1], tenths[7])
