"""`fused_remat.plan`: forms of a budget, the front, what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from plan_cases import explained
from plan_models import MIB, Blocks

import fused_remat
from fused_remat.ops import memory
from fused_remat.plan import InfeasibleBudget, Plan, make, plan
from fused_remat.plan.numbers import read_numbers
from fused_remat.plan.places import places_of
from fused_remat.plan.solver import solve
from fused_remat.policy import Arrangement, Assignment
from fused_remat.recording import record_step
from fused_remat.training_step import make_step

pytestmark = pytest.mark.slow  # dozens of plans of whole models

ADAMW = torch.optim.AdamW


@pytest.fixture(autouse=True, scope="module")
def workspace() -> Iterator[None]:
    """The smallest tiles, so that a small model's activations are more than its workspace."""
    with fused_remat.workspace(64 * 1024):
        yield


def small() -> tuple[Blocks, torch.Tensor]:
    return Blocks(4, width=32, hidden=128), torch.randn(4, 64, 32)


@pytest.fixture(scope="module")
def planned(workspace) -> tuple[Blocks, torch.Tensor, Plan]:
    """A model of three blocks planned for half its activations, on fake tensors."""
    torch.manual_seed(0)
    model, x = small()
    return model, x, plan(model, x, optimizer=ADAMW, budget=0.7, fake=True)


# Budgets ---------------------------------------------------------------------------------------------------------


def test_forms_of_a_budget(planned):
    model, x, found = planned
    assert found.budget_bytes == int(0.7 * found.everything_kept)
    asked = dict(optimizer=ADAMW, fake=True)
    same = plan(model, x, budget=found.budget_bytes, **asked)
    assert same.assignment == found.assignment and same.budget_bytes == found.budget_bytes
    of_device = plan(model, x, budget="50%", device_bytes=2 * found.budget_bytes, **asked)
    assert of_device.budget_bytes == found.budget_bytes and of_device.assignment == found.assignment
    least = plan(model, x, budget="min", **asked)
    assert least.predicted.peak == pytest.approx(min(point.peak for point in least.front), rel=0.02)
    knee = plan(model, x, budget=" Knee ", **asked)
    assert knee.budget == "knee" and knee.budget_bytes is None
    assert least.predicted.peak <= knee.predicted.peak <= found.everything_kept


def test_the_front_is_the_same_for_every_budget(planned):
    model, x, found = planned
    other = plan(model, x, budget="min", optimizer=ADAMW, fake=True)
    assert other.front == found.front
    assert all(a.peak > b.peak and a.cost <= b.cost for a, b in zip(found.front, found.front[1:], strict=False))
    assert found.front[found.chosen].peak <= found.budget_bytes < found.front[found.chosen - 1].peak


def test_predicted_points_of_the_front_come_true(planned):
    """What the solver adds up from units is what a recording of the whole step says."""
    model, x, _ = planned
    step = make_step(model, (x,), optimizer=ADAMW)
    arrangement = Arrangement(model)

    def record(assignment: Assignment):
        arrangement.set(assignment)
        return record_step(step, fake=True)

    try:
        (numbers,) = read_numbers(model, places_of(arrangement), record, [64 * 1024])  # that in force
        front = solve(numbers.units, floor=numbers.parts.optimizer)
        assert len(front) > 5
        for solution in front[::3]:
            recording = record(numbers.assignment(solution))
            assert recording.peak_bytes == pytest.approx(numbers.base.static_bytes + solution.peak, rel=0.02)
            assert recording.redone_flop == solution.cost
    finally:
        arrangement.revert()


def test_infeasible_budgets_name_the_smallest_peak_and_what_holds_it(planned):
    model, x, _ = planned
    with pytest.raises(InfeasibleBudget) as caught:
        plan(model, x, budget="50 kB", optimizer=ADAMW, fake=True)
    error = caught.value
    assert isinstance(error, ValueError) and error.budget == 50_000 and error.source == "predicted"
    message = str(error)
    assert f"the smallest possible peak is {error.smallest} bytes" in message
    assert all(f"{kind} " in message for kind in ("optimizer", "parameters", "temporary", "kept"))
    assert plan(model, x, budget=error.smallest, optimizer=ADAMW, fake=True).predicted.peak == error.smallest


# What it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        (dict(budget="much"), ValueError, 'budget must be bytes, a fraction, "min" or "knee"; got \'much\''),
        (dict(budget=True), TypeError, "budget must be bytes"),
        (dict(budget=[3]), TypeError, "budget must be bytes"),
        (dict(budget=1.5), ValueError, "fraction must be above 0 and at most 1"),
        (dict(budget=0), ValueError, "budget must be at least 1 byte"),
        (dict(budget="2GiB", device_bytes="1GiB"), ValueError, "a budget fits on the device"),
        (dict(budget=1.0, device_bytes=0.5), ValueError, "device_bytes is the fraction"),
        (dict(budget=1.0, minimise="joules"), ValueError, "minimise must be one of 'flops', 'time'; got 'joules'"),
        (dict(budget=1.0, minimise="time", fake=True), ValueError, "fake=True runs none"),
        (dict(budget=1.0, fake=1), TypeError, "fake must be a bool, got 1"),
        (dict(budget=1.0, in_flight=0), ValueError, "in_flight must be an int of at least 1"),
        (dict(budget=1.0, in_flight=1.5), TypeError, "in_flight must be an int (micro-batches), got 1.5"),
        (dict(budget=1.0, in_flight=True), TypeError, "in_flight must be an int (micro-batches), got True"),
        (dict(budget=1.0, count="parameters"), TypeError, "count must be a list of kinds"),
        (dict(budget=1.0, count=["kept"]), ValueError, "activations always count"),
        (dict(budget=1.0, device="cuda"), ValueError, "pass fake=True"),
        (dict(budget=1.0, loss=3), TypeError, "loss must be a function"),
    ],
)
def test_arguments_are_checked_before_anything_runs(arguments, kind, says):
    model, x = small()
    model.register_forward_pre_hook(lambda *args: pytest.fail("the model was run"))
    with pytest.raises(kind) as caught:
        plan(model, x, **arguments)
    assert says in str(caught.value)


def test_plans_are_refused_where_there_is_no_backward():
    model, x = small()
    model.register_forward_pre_hook(lambda *args: pytest.fail("the model was run"))
    for fake in (False, True):
        with torch.no_grad(), pytest.raises(RuntimeError, match="plan was called with gradients off"):
            plan(model, x, budget="min", fake=fake)


def test_compiled_models_are_refused():
    model, x = small()
    with pytest.raises(ValueError, match="the model is compiled"):
        plan(torch.compile(model, backend="eager"), x, budget=1.0, fake=True)
    model.blocks[1].compile(backend="eager")
    with pytest.raises(ValueError, match=r"blocks\.1 is compiled, .*apply the plan, and compile then"):
        plan(model, x, budget=1.0, fake=True)


def test_a_converted_model_is_planned_as_if_it_were_not(planned):
    model, x, found = planned
    report = fused_remat.convert(model)
    try:
        assert plan(model, x, optimizer=ADAMW, budget=0.7, fake=True).assignment == found.assignment
        assert all("fused_remat" in repr(block.mlp) for block in model.blocks)
    finally:
        report.revert()


def test_meta_models_are_planned_without_memory():
    with torch.device("meta"):
        model, x = Blocks(2, width=2048, hidden=8192), torch.empty(64, 1024, 2048)
    with fused_remat.workspace(256 * MIB):
        found = plan(model, x, budget=0.5, optimizer=ADAMW, fake=True)
    assert found.measured is None and found.predicted.peak <= found.budget_bytes
    with pytest.raises(ValueError, match="pass fake=True"):
        plan(model, x, budget=0.5)


# For a device that is not there ----------------------------------------------------------------------------------


def test_a_missing_gpu_is_stood_in_for(planned, monkeypatch):
    """No upcasts; the workspace is that in force, as on a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _, x, here = planned
    model = Blocks(4, width=32, hidden=128).bfloat16()
    asked = dict(optimizer=ADAMW, budget="min", fake=True)
    there = plan(model, x.bfloat16(), device="cuda", device_bytes="80GiB", **asked)
    assert there.device == "cuda" and there.device_bytes == 80 * 2**30
    assert "there is no CUDA device here" in there.notes[0] and "(64.0 KiB)" in there.notes[0]
    assert there.notes[0] in explained(there) and not here.notes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_workspaces_inside_operators_are_the_same_on_meta(dtype, monkeypatch):
    """The short way of `transient_bytes`, which takes tensors on "meta", against the long one on fake tensors."""
    model = Blocks(2, width=32, hidden=128).to(dtype)
    fused_remat.convert(model, keep=())
    step = make_step(model, (torch.randn(4, 64, 32, dtype=dtype),))
    monkeypatch.setattr(memory, "_known", {})
    short = record_step(step, fake=True)
    monkeypatch.setattr(memory, "_known", {})
    monkeypatch.setattr(memory, "_asks_the_device", lambda argument: isinstance(argument, torch.Tensor))
    long = record_step(step, fake=True)
    assert short.allocations == long.allocations
    assert max(a.nbytes for a in short.allocations if a.kind == "temporary") > 4 * 64 * 32
    with memory.not_on_the_cpu():
        elsewhere = record_step(step, fake=True)
    upcasts = dtype == torch.bfloat16 and elsewhere.peak_bytes != short.peak_bytes
    assert elsewhere.peak_bytes == short.peak_bytes or upcasts


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_llama_of_8_billion_parameters_on_80_gib(monkeypatch):
    """32k tokens, bf16, no memory and no GPU. With AdamW in bf16 nothing fits: weights, gradients and states are 60 GiB
    and the logits in fp32 with their gradients 47 GiB. With plain SGD a plan does."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=131072, use_cache=False, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(1, 32768, dtype=torch.long)
    steps = []
    monkeypatch.setattr(make, "record_step", lambda *args, **more: steps.append(1) or record_step(*args, **more))
    asked = dict(kwargs={"input_ids": ids, "labels": ids}, fake=True, device="cuda", device_bytes="80GiB", budget=1.0)
    with fused_remat.workspace(256 * MIB):  # as CUDA has by default
        found = plan(model, optimizer=torch.optim.SGD, **asked)
    gib = 2**30
    assert len(steps) <= 7  # a few seconds each: under a minute in all
    assert found.budget_bytes == 80 * gib >= found.predicted.peak > 76 * gib
    assert found.everything_kept > 200 * gib
    text = found.explain()
    assert "parameters, there before the step" in text and "not measured" in text
    assert "model.layers.0" in text and len(text.splitlines()) < 60
    whole = sum(unit.redone for unit in found.units)
    again = 32 * 28.1e12  # every layer run again
    assert 0 < whole < again
    with pytest.raises(InfeasibleBudget) as caught, fused_remat.workspace(256 * MIB):
        plan(model, optimizer=ADAMW, **asked)
    assert caught.value.smallest > 90 * gib and "optimizer 29.92 GiB" in str(caught.value)
    # The logits in fp32, their gradients, and what computes them.
    assert "temporary of the loss and other code outside of layers: 31.31 GiB" in str(caught.value)
