"""Recordings of real steps: kinds, places, the peak; and that nothing is left behind."""

from __future__ import annotations

import json
import math

import pytest
import torch
from recording_cases import Chain, Residual, kinds, mlp
from torch import nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from fused_remat.recording import KINDS, Allocation, Recording, Span, record_step
from fused_remat.training_step import make_step

X = torch.linspace(-1, 1, 64 * 32).view(64, 32)
CHAIN_UNIT = 4 * 2**18


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(("segments", "units"), [(1, 65), (2, 34), (4, 20), (8, 16), (16, 20), (32, 34), (64, 65)])
def test_chain_in_segments_has_the_peak_of_the_paper(segments, units, fake):
    """k + n/k units of n = 64 equal layers in k segments (the first segment's input is the parameter itself)."""
    recording = record_step(make_step(Chain(64, segments, CHAIN_UNIT // 4), ()), fake=fake)
    peak = (recording.peak_bytes - recording.static_bytes) / CHAIN_UNIT
    assert abs(peak - units) < 0.4  # of scalars, and a generator's state for each segment
    assert round(recording.kept_bytes / CHAIN_UNIT, 0) == segments - 1 + (segments == 64) * 0
    assert kinds(recording)["rebuilt"] == 64 * CHAIN_UNIT
    assert (recording.peak_phase, recording.static["parameters"]) == ("backward", CHAIN_UNIT)


@pytest.mark.parametrize("fake", [False, True])
def test_kinds_and_places_of_a_plain_step(fake):
    m, d, f = 64, 32, 64
    model = mlp(d, f)
    recording = record_step(make_step(model, (X,), optimizer=AdamW), fake=fake)
    weights = 4 * (2 * d * f + d + f)
    assert recording.static == {
        "parameters": weights, "buffers": 0, "optimizer": 2 * weights + 4 * 4, "inputs": 4 * m * d, "gradients": 0,
    }  # fmt: skip
    assert recording.kept_by_module() == {"0": 4 * m * f, "1": 4 * m * f, "2": 4 * m * d}
    assert recording.kept_bytes == sum(recording.kept_by_module().values())
    total = kinds(recording)
    assert (total["gradients"], total["output"]) == (weights, 4) and set(total) <= set(KINDS)
    assert (recording.peak_phase, recording.peak_module) == ("backward", "")  # of the loss, whose gradient is as wide
    gemm = 2 * m * d * f
    assert dict(recording.flop) == {
        ("forward", "0"): gemm, ("forward", "2"): gemm, ("backward", "2"): 2 * gemm, ("backward", "0"): gemm,
    }  # fmt: skip
    assert sum(recording.flop.values()) == 5 * gemm and recording.redone_flop == 0
    assert [(s.module, s.phase) for s in recording.spans] == [
        (module, phase) for phase, order in (("forward", "012"), ("backward", "210")) for module in ("", *order)
    ]
    of_gradients = {a.module for a in recording.allocations if a.kind == "gradients"}
    assert of_gradients == {"0", "2"} and {a.phase for a in recording.allocations} == {
        "forward",
        "backward",
        "optimizer",
    }
    for a in recording.allocations:
        first, last = recording.phases[a.phase]
        assert first <= a.born <= last and a.nbytes > 0


@pytest.mark.parametrize("fake", [False, True])
def test_peak_sees_the_optimizer(fake):
    """Adam over a large parameter that hardly any activation uses; its temporaries make the peak."""
    model = nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in [(512, 4), (4, 512)] * 2))
    recording = record_step(make_step(model, (torch.ones(1, 512),), optimizer=AdamW), fake=fake)
    assert recording.peak_phase == "optimizer" and recording.peak_module == ""
    weight = 4 * 512 * 4
    assert recording.peak_bytes >= recording.static_bytes + 4 * weight  # gradients, and temporaries of one
    together = record_step(
        make_step(model, (torch.ones(1, 512),), optimizer=lambda p: AdamW(p, foreach=True)), fake=fake
    )
    assert together.peak_bytes > recording.peak_bytes  # the temporaries of all parameters at once


@pytest.mark.parametrize("fake", [False, True])
def test_modules_called_twice_and_gradients_that_meet(fake):
    recording = record_step(make_step(Residual(), (X,)), fake=fake)
    assert [(s.module, s.phase) for s in recording.spans if s.module == "a"] == [("a", p) for p in
        ("forward",) * 3 + ("backward",) * 3]  # fmt: skip
    gemm = 2 * 64 * 32 * 32
    assert recording.flop["forward", "a"] == 3 * gemm and recording.flop["backward", "b"] == 5 * gemm
    # An addition where gradients meet is in place: no third block beside the two.
    assert recording.peak_bytes - recording.static_bytes - recording.kept_bytes < 4 * X.nbytes + 6 * 4 * 32 * 32


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("fake", [False, True])
def test_replays_are_told_apart(fake, reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    x = X.clone().requires_grad_()
    recording = record_step(make_step(Model(), (x,)), fake=fake)
    gemm = 2 * 64 * 32 * 64
    # Early stop leaves out the last product; reentrant checkpointing has none.
    assert recording.redone == ({"inner.0": gemm, "inner.2": gemm} if reentrant else {"inner.0": gemm})
    assert recording.redone_flop == gemm * (2 if reentrant else 1)
    assert recording.flop["backward", "inner.0"] == 3 * gemm
    rebuilt = {a.module for a in recording.allocations if a.kind == "rebuilt"}
    assert rebuilt == ({"inner.0", "inner.1", "inner.2"} if reentrant else {"inner.0", "inner.1"})
    assert recording.kept_bytes == 4 * 64 * 32 + 5056  # the output, and the state of the generator
    assert ("inner.0", "backward") in {(s.module, s.phase) for s in recording.spans}


def test_recording_leaves_everything_as_it_was():
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.5))
    step = make_step(model, (X.clone(),), optimizer=AdamW)
    for fake in (False, True):
        before = {name: (id(t), t.data_ptr(), t.tolist()) for name, t in model.state_dict(keep_vars=True).items()}
        state, call = torch.get_rng_state(), nn.Module.__call__
        model[0].weight.grad = torch.ones(32, 32)
        record_step(step, fake=fake)
        assert {n: (id(t), t.data_ptr(), t.tolist()) for n, t in model.state_dict(keep_vars=True).items()} == before
        assert torch.equal(torch.get_rng_state(), state) and nn.Module.__call__ is call
        assert not step.optimizer.state and torch.equal(model[0].weight.grad, torch.ones(32, 32))
        assert step.optimizer.param_groups[0]["params"][0] is model[0].weight


@pytest.mark.parametrize("fake", [False, True])
def test_a_step_that_fails_leaves_everything_as_it_was(fake):
    model = mlp()
    weight, call, rng = model[0].weight, nn.Module.__call__, torch.get_rng_state
    step = make_step(model, (torch.ones(3, 7),))
    with pytest.raises(RuntimeError, match=r"shape|dim"):
        record_step(step, fake=fake)
    assert model[0].weight is weight and type(weight) is nn.Parameter
    assert nn.Module.__call__ is call and torch.get_rng_state is rng


def test_real_steps_need_memory_and_no_device():
    with torch.device("meta"):
        model = mlp()
    with pytest.raises(ValueError, match="have no memory"):
        record_step(make_step(model, (X,)))
    with pytest.raises(ValueError, match="device is cpu, but a real step runs where its tensors are"):
        record_step(make_step(mlp(), (X,)), device="cpu")


@pytest.mark.parametrize("fake", [False, True])
def test_state_of_a_trained_optimizer(fake):
    """Its counters are real numbers that the optimizer reads."""
    model = mlp()
    step = make_step(model, (X,), optimizer=AdamW)
    fresh = record_step(step, fake=fake)
    step.run()
    assert record_step(step, fake=fake).static == fresh.static
    assert {s["step"].item() for s in step.optimizer.state.values()} == {1.0}


def test_tensors_handed_on_from_step_to_step():
    """An optimizer that makes its state anew: the old one is freed within the step, and counted until then."""

    class Momentum(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state["sum"] = state["sum"] * 0.9 + p.grad if state else p.grad.clone()

    model = nn.Sequential(nn.Linear(256, 256, bias=False))
    recording = record_step(make_step(model, (torch.ones(2, 256),), optimizer=Momentum))
    weight = 4 * 256 * 256
    assert recording.static["optimizer"] == 0
    handed_on = [a for a in recording.allocations if a.kind == "optimizer" and a.born == 0 and a.nbytes == weight]
    assert len(handed_on) == 1 and handed_on[0].died < math.inf
    assert recording.peak_bytes - recording.static_bytes < 5 * weight


def hand_made() -> Recording:
    return Recording(
        "cpu", "measured", {"parameters": 10, "inputs": 5},
        (
            Allocation(8, 0.0, 4.0, "kept", "a", "forward"),
            Allocation(4, 1.0, 2.0, "temporary", "b", "forward"),
            Allocation(6, 2.0, 3.0, "temporary", "", "backward"),
            Allocation(2, 3.0, math.inf, "gradients", "a", "backward"),
        ),
        (Span("a", "forward", 0.0, 1.0),), {"forward": (0.0, 2.0), "backward": (2.0, 5.0)},
        {("forward", "a"): 3, ("backward", "a"): 7}, {"a": 2}, "by hand",
    )  # fmt: skip


def test_numbers_that_follow_from_allocations():
    r = hand_made()
    assert (r.static_bytes, r.peak_bytes, r.peak_moment, r.peak_phase, r.peak_module) == (15, 29, 2.0, "backward", "")
    assert (r.kept_bytes, r.kept_by_module(), sum(r.flop.values()), r.redone_flop) == (8, {"a": 8}, 10, 2)
    sums = [(moment, sum(alive.values()), alive["temporary"]) for moment, alive in r.timeline()]
    assert sums == [(0.0, 23, 0), (1.0, 27, 4), (2.0, 29, 6), (3.0, 25, 0), (4.0, 17, 0)]
    assert max(total for _, total, _ in sums) == r.peak_bytes


def test_to_dict_is_json():
    data = json.loads(json.dumps(hand_made().to_dict()))
    assert data["allocations"][3] == {
        "nbytes": 2, "born": 3.0, "died": None, "kind": "gradients", "module": "a", "phase": "backward",
    }  # fmt: skip
    assert data["flop"][1] == {"phase": "backward", "module": "a", "flop": 7} and data["peak_bytes"] == 29


def test_a_recording_without_allocations():
    r = Recording("cpu", "predicted", {"parameters": 3}, (), (), {"forward": (0.0, 1.0)})
    assert (r.peak_bytes, r.peak_phase, r.peak_module, r.timeline()[0][0]) == (3, "forward", "", 0.0)


def test_every_kind_of_allocation_is_listed():
    assert set(kinds(hand_made())) <= set(KINDS)
