"""What `plan` makes of models that are not a plain chain, and of steps that are not plain training."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from plan_cases import Listed, drawn, explained, ids, square
from policy_cases import MLPBlock, llama, seeded
from torch import Tensor, nn

from fused_remat import _step
from fused_remat.plan import Plan, plan
from fused_remat.recording import record_step
from fused_remat.training_step import make_step

pytestmark = pytest.mark.slow  # dozens of plans of whole models

ROWS = (2, 128, 32)


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """The models are small."""


class Step:
    """A model with its inputs, and what a step of it takes and computes, with a plan and without."""

    def __init__(self, make: Callable[[], nn.Module], *inputs: Tensor, **options: Any) -> None:
        self.make, self.inputs, self.options = make, inputs, options

    def model(self) -> nn.Module:
        return seeded(self.make)

    def plan(self, budget: Any = "min", **options: Any) -> Plan:
        return plan(self.model(), *self.inputs, budget=budget, **self.options | options)

    def run(self, planned: Plan | None = None) -> tuple[int, dict[str, Tensor]]:
        """The measured peak, and the results."""
        model = self.model()
        if planned is not None:
            planned.apply(model)
        options = {name: value for name, value in self.options.items() if name in ("loss", "kwargs", "optimizer")}
        peak = record_step(make_step(model, self.inputs, **options)).peak_bytes
        step = make_step(model, self.inputs, **options | {"optimizer": None})
        torch.manual_seed(3)
        found = {"loss": step.run().detach().clone()}
        found |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found |= {f"input {i}": x.grad.clone() for i, x in enumerate(self.inputs) if x.grad is not None}
        step.zero_grad()
        return peak, found


def checked(step: Step, planned: Plan, *, exact: float = 1e-5) -> Plan:
    """The plan keeps its word on peak and results."""
    (whole, stock), (peak, own) = step.run(), step.run(planned)
    assert peak <= planned.measured.peak * 1.001 and peak <= whole
    if planned.predicted is not None:
        within = 0.25 if any("leave out" in note for note in planned.notes) else 0.1
        assert abs(planned.predicted.peak - peak) <= within * peak
    assert own.keys() == stock.keys()
    for name, value in stock.items():
        assert torch.allclose(own[name], value, atol=exact, rtol=1e-3), name
    return planned


class Plain(nn.Module):
    """Neither a chain nor a layer that can run fused."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 64), nn.Conv1d(128, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.sin(self.one(x)))


def test_nothing_to_decide():
    for make in (Plain, lambda: nn.Linear(32, 4), lambda: nn.Sequential(nn.Linear(32, 4))):
        step = Step(make, drawn(*ROWS))
        found = checked(step, step.plan("min"))
        assert found.assignment.layers == {} and found.assignment.regions == ()
        assert len(found.front) == 1 and found.explain()
        assert step.plan(1.0).measured.peak <= found.everything_kept * 1.001
        assert step.plan("knee").chosen == 0


def test_one_block():
    step = Step(lambda: nn.Sequential(nn.Linear(32, 32), MLPBlock()), drawn(*ROWS))
    checked(step, step.plan("min"))


class Repeated(nn.Module):
    """A chain that forward runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLPBlock() for _ in range(2))
        self.once = nn.ModuleList(MLPBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        for block in self.once:
            x = block(x)
        return x


def test_blocks_that_run_twice_stay_and_are_told():
    step = Step(Repeated, drawn(*ROWS))
    found = checked(step, step.plan("min"))
    assert any("blocks.0 is not called exactly once" in note for note in found.notes)
    assert not any(path.startswith("blocks") for path in [*found.assignment.layers, *found.assignment.paths])
    assert any(path.startswith("once") for path in [*found.assignment.layers, *found.assignment.paths])
    assert "blocks.0 is not called exactly once" in explained(found)


def shared() -> nn.Module:
    block = MLPBlock()
    return nn.Sequential(MLPBlock(), block, block, MLPBlock(), MLPBlock())


def test_a_block_with_two_places_stays():
    step = Step(shared, drawn(*ROWS))
    found = checked(step, step.plan("min"))
    assert not {"1", "2"} & set(found.assignment.paths)


class HandLoop(nn.Module):
    """Convolution-like blocks, each called with an argument of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Biased() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x, x.new_full((1,), float(i)))
        return x


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + self.two(torch.sin(torch.cos(self.one(x)) + bias))


class Read(HandLoop):
    """The outputs of all blocks are read at the end."""

    def forward(self, x: Tensor) -> Tensor:
        states = []
        for block in self.blocks:
            x = block(x, x)
            states.append(x)
        return torch.stack(states).mean(0)


@pytest.mark.parametrize("make", [HandLoop, Read])
def test_blocks_that_cannot_run_as_one_are_regions_of_their_own(make):
    step = Step(make, drawn(*ROWS))
    found = checked(step, step.plan("min"))
    assert found.assignment.regions and all(len(region) == 1 for region in found.assignment.regions)
    (note,) = [note for note in found.notes if "run again one by one, not together" in note]
    assert note.startswith("blocks.0-3 (x4) run again one by one") and note in explained(found)


class Careless(nn.Module):
    """Blocks that a region refuses: they change what they are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Changing() for _ in range(3))
        self.others = nn.ModuleList(MLPBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        for block in [*self.blocks, *self.others]:
            x = block(x)
        return x


class Changing(Biased):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1.0)
        return super().forward(x, x)


def test_what_a_guard_refuses_is_planned_without_regions():
    step = Step(Careless, drawn(*ROWS))
    found = checked(step, step.plan("min"))
    assert found.measured.peak < found.everything_kept
    assert not any(path.startswith("blocks") for path in found.assignment.paths)
    assert any("region" in note for note in found.notes)


def test_blocks_without_gradients_stay():
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleList(MLPBlock() for _ in range(2))
            self.blocks = nn.ModuleList(MLPBlock() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for block in self.encoder:
                    x = block(x)
            for block in self.blocks:
                x = block(x)
            return x

    step = Step(Frozen, drawn(*ROWS))
    found = checked(step, step.plan("min"))
    assert any(path.startswith("blocks") for path in [*found.assignment.layers, *found.assignment.paths])


def frozen() -> nn.Module:
    """As under LoRA: the blocks' weights are frozen, the inlet's are trained."""
    model = Listed(4)
    model.blocks.requires_grad_(False)
    return model


STEPS = {
    "frozen blocks": Step(frozen, drawn(2, 128, 8)),
    "eval": Step(lambda: Listed(3).eval(), drawn(2, 128, 8)),
    "inputs with gradients": Step(lambda: Listed(3), drawn(2, 128, 8).requires_grad_()),
    "optimizer": Step(lambda: Listed(3), drawn(2, 128, 8), optimizer=torch.optim.Adagrad),
    "dropout": Step(
        lambda: nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.3), nn.Linear(64, 32)) for _ in range(4))
        ),
        drawn(*ROWS),
    ),
}


@pytest.mark.parametrize(
    "name", ["dropout", *(pytest.param(n, marks=pytest.mark.slow) for n in STEPS if n != "dropout")]
)
def test_steps_of_every_kind(name):
    step = STEPS[name]
    found = checked(step, step.plan("min"))
    assert found.measured.peak < 0.95 * found.everything_kept
    half = (found.measured.peak + found.everything_kept) // 2
    assert checked(step, step.plan(half)).measured.peak <= half


class Dicts(nn.Module):
    """Keyword arguments, a dictionary of outputs and losses from the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLPBlock() for _ in range(4))
        self.side = nn.Linear(32, 4)

    def forward(self, *, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        side = None
        for i, block in enumerate(self.blocks):
            x = block(x * scale)
            if i == 1:
                side = self.side(x)
        return {"main": x, "side": side}


def test_dictionaries_and_auxiliary_losses():
    step = Step(
        Dicts,
        kwargs={"x": drawn(*ROWS), "scale": 0.5},
        loss=lambda out: out["main"].square().mean() + 0.1 * out["side"].abs().mean(),
    )
    checked(step, step.plan("min"))


def test_bf16_parameters():
    step = Step(lambda: Listed(3).bfloat16(), drawn(2, 128, 8).bfloat16())
    checked(step, step.plan("min"), exact=2e-2)


def test_autocast_around_everything():
    step = Step(lambda: Listed(3), drawn(2, 128, 8))
    with torch.autocast("cpu", torch.bfloat16):
        found = checked(step, step.plan("min"), exact=2e-2)
        half = (found.measured.peak + found.everything_kept) // 2
        assert step.run(step.plan(half))[0] <= half


def checkpointed() -> nn.Module:
    model = llama(2)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model.train()


def test_a_model_that_checkpoints_already():
    step = Step(checkpointed, ids(), loss=square)
    checked(step, step.plan("min"))


class Asks(nn.Module):
    """Looks at a value: it cannot run on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLPBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = x * 0.5 if x.abs().max().item() > 2 else x
        return x


def test_a_model_that_looks_at_values_is_measured():
    step = Step(Asks, drawn(*ROWS))
    found = checked(step, step.plan("min"))
    assert found.predicted is None and found.measured.peak < 0.95 * found.everything_kept
    assert any("does not run on fake tensors" in note for note in found.notes)
    assert "not predicted" in found.explain() and found.to_json()


def test_a_step_that_fails_is_heard_and_leaves_the_model():
    class Failing(Listed):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no such file")

    model = Failing(2)
    with pytest.raises(RuntimeError, match="no such file"):
        plan(model, drawn(2, 128, 8), budget="min")
    assert all(
        type(m) in (Failing, nn.ModuleList, MLPBlock, nn.LayerNorm, nn.Linear, nn.GELU, nn.Sequential)
        for m in model.modules()
    )


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """As in a process that is no test's."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


def test_many_recordings_share_one_search_for_leaves(monkeypatch, nothing_frozen):
    model, x = seeded(lambda: Listed(2)), drawn(2, 128, 8)
    step = make_step(model, (x,))
    peak, searches = record_step(step).peak_bytes, []
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    monkeypatch.setattr(_step, "python_tensors", lambda find=_step.python_tensors: searches.append(1) or find())
    frozen, state = gc.get_freeze_count(), torch.get_rng_state()
    with _step.found_once():
        assert not gc.isenabled() and gc.get_freeze_count() > frozen == 0
        assert [record_step(step).peak_bytes, record_step(step, fake=True).peak_bytes] == [peak, peak]
    assert len(searches) == 1 and gc.isenabled() and gc.get_freeze_count() == frozen
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
