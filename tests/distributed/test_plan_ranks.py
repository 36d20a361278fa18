"""One plan on all ranks, whatever each of them measures."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fused_remat.plan import InfeasibleBudget, make, plan
from fused_remat.plan.peak import Peak


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


def planned(budget: object, minimise: str) -> str:
    """On rank 1 everything is measured larger by 1000 bytes, and memory is less; seconds are each rank's own."""
    rank = dist.get_rank()
    peak_of, device_memory = make.Peak.of, make.device_memory

    class Larger(Peak):
        @classmethod
        def of(cls, recording, in_flight=1):
            found = peak_of(recording, in_flight)
            if recording.source == "predicted":
                return found
            return Peak(**vars(found) | {"peak": found.peak + 1000 * rank})

    make.Peak, make.device_memory = Larger, lambda device: 10**7 - 10**6 * rank
    try:
        return plan(model(), torch.randn(2, 64, 16), budget=budget, minimise=minimise).to_json()
    except InfeasibleBudget as error:
        return str(error.smallest)
    finally:
        make.Peak, make.device_memory = Peak, device_memory


@pytest.mark.slow
@pytest.mark.parametrize("minimise", ["flops", "time"])
@pytest.mark.parametrize("budget", ["min", "knee", 0.06, 500_000, 1000])
def test_every_rank_has_the_same_plan(ranks, budget, minimise):
    first, second = ranks(planned, budget, minimise)
    assert first == second


def planned_where_one_runs_out(most: int) -> str:
    """On rank 1 no real step can take more than `most` bytes."""
    record = make.record_step

    def limited(step, **options):
        recording = record(step, **options)
        if dist.get_rank() == 1 and recording.source == "measured" and recording.peak_bytes > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return recording

    make.record_step = limited
    try:
        return plan(model(), torch.randn(2, 64, 16), budget="1GiB").to_json()
    finally:
        make.record_step = record


@pytest.mark.slow
def test_what_one_rank_has_no_memory_for_no_rank_plans(ranks):
    """... and none waits for the peak of a run that the other did not finish."""
    own = plan(model(), torch.randn(2, 64, 16), budget="min")
    whole = own.everything_kept
    first, second = ranks(planned_where_one_runs_out, (own.measured.peak + whole) // 2)
    assert first == second
    found = json.loads(first)
    assert found["passed_over"] and found["front"][found["passed_over"][0]]["out_of_memory"]
    assert found["measured"]["peak_bytes"] <= (own.measured.peak + whole) // 2
    assert "(on another rank)" in found["notes"][-2]
    assert "the model as it is does not run in the memory that there is here" in found["notes"][-1]


@pytest.mark.slow
def test_peaks_are_those_of_the_rank_that_needs_most(ranks):
    own = plan(model(), torch.randn(2, 64, 16), budget="min").measured.peak
    (said, _) = ranks(planned, 1000, "flops")
    assert int(said) == own + 1000
