"""`plan(minimise="time")`: timing many arrangements in turn changes neither the model nor what is measured later."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fused_remat._progress import Progress
from fused_remat.convert.rebind import fused_class, records_of
from fused_remat.plan import plan
from fused_remat.plan import seconds as seconds_of
from fused_remat.policy import Arrangement, Assignment
from fused_remat.recording import record_step
from fused_remat.training_step import make_step


@pytest.fixture(autouse=True)
def _quickly(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrangements are switched as often as it takes; how long a step lasts does not matter here."""
    monkeypatch.setattr(seconds_of, "ROUNDS", 1)


def chain(depth: int = 4) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(depth)])


def bound(model: nn.Module) -> list[tuple[str, type, dict]]:
    return [(name, type(module), dict(records_of(module))) for name, module in model.named_modules()]


@pytest.mark.parametrize("depth", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_what_was_measured_is_what_the_plan_takes(depth):
    model, x = chain(depth), torch.randn(64, 32)
    before = bound(model)
    timed = plan(model, x, budget="min", minimise="time")
    assert bound(model) == before and not any(map(records_of, model.modules()))
    timed.apply(model)
    assert record_step(make_step(model, (x,))).peak_bytes == timed.measured.peak
    counted = plan(chain(depth), x, budget="min")
    assert timed.measured.peak == counted.measured.peak < timed.everything_kept
    assert plan(chain(depth), x, budget=timed.measured.peak, minimise="time").measured.peak == timed.measured.peak


class Stops(nn.Module):
    """A chain whose forward fails at call number `at`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = chain()
        self.at, self.calls = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(None)
        if len(self.calls) == self.at:
            raise RuntimeError("no such file")
        return self.blocks(x)


def test_a_step_that_fails_while_it_is_timed_leaves_the_model():
    x = torch.randn(64, 32)
    model = Stops()
    arrangement = Arrangement(model)
    path = "blocks.1"
    variants = [Assignment({}, regions) for regions in ((), ((path,),), (("blocks.1", "blocks.2"),), (("blocks.3",),))]
    step = make_step(model, (x,))
    for at in range(1, 2 * len(variants) + 1):
        arrangement.set(variants[at % len(variants)])
        model.at = at
        with pytest.raises(RuntimeError, match="no such file"):
            seconds_of._compared(step, arrangement, variants, torch.device("cpu"), Progress(None))
        assert not any(map(records_of, model.modules())), at
        assert [type(m) for m in model.blocks] == [nn.Sequential] * 4, at
        assert model.calls == []  # what was counted inside is taken back
    model.at = 0
    arrangement.set(variants[1])
    assert list(records_of(model.blocks[1])) == ["forward"] and type(model.blocks[1]) is not nn.Sequential


def test_records_need_a_class_that_reads_them():
    model = chain()
    arrangement = Arrangement(model)
    wanted = Assignment({}, (("1",),))
    arrangement.set(wanted)
    model[1].__class__ = nn.Sequential  # whatever gave the class back and not the records
    arrangement.set(Assignment({}, (("1",),), "once"))
    assert type(model[1]) is fused_class(nn.Sequential, ("forward",))
    arrangement.revert()
    assert type(model[1]) is nn.Sequential and not records_of(model[1])
