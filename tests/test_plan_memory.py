"""Plans in less memory than they are planned for: what runs out is over the budget, and the next is run."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch
from plan_cases import CASES, Listed, drawn, explained, planned, step_of
from policy_cases import state_of
from torch import Tensor, nn

from fused_remat.plan import Plan, make
from fused_remat.recording import Recording, record_step

CASE = CASES["list"]
WORDS = "CUDA out of memory. Tried to allocate 20.00 GiB"


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """The models are small."""


def limited(most: int) -> Callable[..., Recording]:
    """`record_step` on a machine on which no step can take more than `most` bytes."""

    def record(step, **options) -> Recording:
        recording = record_step(step, **options)
        if not options.get("fake") and recording.peak_bytes > most:
            raise torch.OutOfMemoryError(WORDS)
        return recording

    return record


@pytest.fixture
def machine(monkeypatch) -> Callable[[int], None]:
    """Sets the memory of the machine, in bytes."""
    return lambda most: monkeypatch.setattr(make, "record_step", limited(most))


@pytest.mark.slow
def test_plans_that_run_out_are_passed_over(machine):
    whole = record_step(step_of(CASE, CASE.model()), fake=True).peak_bytes
    machine(int(0.8 * whole))
    model = CASE.model()
    before = state_of(model)
    found = planned(CASE, 2 * whole, model)
    assert found.measured.peak <= 0.8 * whole and state_of(model) == before
    assert found.passed_over and all(found.front[i].ran_out for i in found.passed_over)
    assert all(found.front[i].measured is None for i in found.passed_over) and not found.front[found.chosen].ran_out
    assert any(f"(OutOfMemoryError: {WORDS})" in note for note in found.notes)
    count = len(found.passed_over)
    assert f"when they were run: {count} ({count} ran out of memory)" in explained(found)
    loaded = Plan.from_json(found.to_json())
    assert loaded == found and [p.ran_out for p in loaded.front] == [p.ran_out for p in found.front]
    assert json.loads(found.to_json())["front"][0]["out_of_memory"] is True


@pytest.mark.slow
def test_where_nothing_runs_the_error_says_what_to_do(machine):
    machine(1000)
    model = CASE.model()
    before = state_of(model)
    with pytest.raises(MemoryError, match=r"memory ran out in the run of every plan .* pass fake=True"):
        planned(CASE, "min", model)
    assert state_of(model) == before


class Asks(Listed):
    """Looks at values, so that it cannot run on fake tensors."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.abs().max().item() < 1e9 else 0 * x)


def test_a_model_that_only_runs_can_tell_of_needs_its_memory(machine):
    machine(1000)
    model = Asks(2)
    with pytest.raises(MemoryError) as raised:
        make.plan(model, drawn(2, 16, 8), budget="min")
    assert "memory ran out in the step with the model as it is (OutOfMemoryError: CUDA" in str(raised.value)
    assert "does not run on fake tensors (" in str(raised.value) and "fake=True" in str(raised.value)


def test_times_cannot_be_compared_where_a_step_runs_out(monkeypatch):
    def timed(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(make, "with_seconds", timed)
    with pytest.raises(MemoryError, match=r'minimise="time" times .* can\'t allocate memory\)\. Pass minimise="flops"'):
        make.plan(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4), budget="min", minimise="time")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is enforced on Linux")
def test_a_real_out_of_memory_in_a_limited_address_space():
    """Layers that nothing fused replaces: nothing is compiled in the other process."""
    program = """
        import json, resource, torch
        from torch import nn
        from fused_remat.plan import plan
        from fused_remat.recording import record_step
        from fused_remat.training_step import make_step

        torch.set_num_threads(1)
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(1))

            def forward(self, x):
                return self.linear(x).tanh() * self.scale

        class Chain(nn.Module):
            def __init__(self, depth):
                super().__init__()
                self.blocks = nn.ModuleList(Block() for _ in range(depth))

            def forward(self, x):
                for block in self.blocks:
                    x = block(x)
                return x

        plan(Chain(2), torch.zeros(2, 4), budget="min")  # whatever is loaded late
        model, x = Chain(5), torch.zeros(2**21, 4)  # 64 MiB kept by each block, as two tensors that are mapped
        before = [p.detach().clone() for p in model.parameters()]
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 370 * 2**20, resource.RLIM_INFINITY))
        found = plan(model, x, budget="2GiB")
        same = all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters()))
        print(json.dumps({"plan": found.to_dict(), "same": same}))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    found = answer["plan"]
    assert answer["same"] and found["front"][0]["out_of_memory"] and 0 in found["passed_over"]
    assert found["measured"]["peak_bytes"] < 400 * 2**20 < found["everything_kept_bytes"]
    assert any("can't allocate memory" in note for note in found["notes"])
    assert any("its peak is a prediction" in note for note in found["notes"])
