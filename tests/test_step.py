"""Measuring times right, leaves the process as it was, and says what is wrong with its arguments."""

import gc
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fused_remat import _step
from fused_remat.measure import Spread, compare_time, measure


@pytest.fixture(autouse=True, scope="module")
def callers(nothing_old_is_looked_through) -> None:
    """Python holds the tensor made here, as a caller would."""
    global X
    X = torch.randn(12, 6, requires_grad=True)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))


# Time


class Clock:
    """Stands in for `time` in `_step`; functions under test move it by hand."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_step, "time", clock)
    return clock


def test_seconds_is_the_median_of_forward_plus_backward(clock):
    durations = iter([9.0] * 4 + [5.0, 1.0, 3.0])  # warm-up, two recorded, one under hooks; then the timed ones

    def fn():
        clock.now += next(durations)
        return X.sum()

    assert measure(fn, repeats=3).seconds == 3.0
    assert next(durations, None) is None


def test_compare_time_takes_ratios_within_a_round_and_rotates_the_order(clock):
    calls, load = [], {}

    def variant(name, cost):
        def fn():
            calls.append(name)
            turn = calls.count(name)
            load.setdefault(turn, 1.0 + turn)  # the machine slows down from round to round
            clock.now += cost * load[turn]
            return X

        return fn

    variants = {"a": variant("a", 1.0), "b": variant("b", 2.0), "c": variant("c", 0.5)}
    timings = compare_time(variants, backward=False, rounds=3, warmup=1)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"
    assert list(timings) == ["a", "b", "c"]
    ratios = {name: timing.ratio_to(timings["a"]) for name, timing in timings.items()}
    assert ratios == {"a": Spread(1.0, 1.0, 1.0), "b": Spread(2.0, 2.0, 2.0), "c": Spread(0.5, 0.5, 0.5)}
    assert astuple(timings["a"].seconds) == pytest.approx((4.0, 3.4, 4.6))


# Leaves the process as it was


def test_gradients_and_random_generators_come_back():
    net, x = mlp(), torch.randn(12, 6, requires_grad=True)
    net[0].weight.grad = torch.ones(10, 6)
    before, rng = net[0].weight.grad, torch.get_rng_state()
    measure(lambda: nn.functional.dropout(net(x)), repeats=1)
    assert net[0].weight.grad is before
    assert torch.equal(before, torch.ones(10, 6))
    assert x.grad is None and net[2].weight.grad is None
    assert torch.equal(torch.get_rng_state(), rng)


def test_tensors_without_storage_may_be_around():
    with FakeTensorMode():
        fake = torch.empty(3, requires_grad=True)
    around = [fake, torch.eye(3).to_sparse().requires_grad_(), nn.LazyLinear(3), torch.empty(3, device="meta")]
    around.append(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged, requires_grad=True))
    net = mlp()
    assert measure(lambda: net(X), repeats=0).kept_hook_bytes == 2 * 12 * 10 * 4
    assert len(around) == 5


@pytest.mark.parametrize("fails_in", ["warm-up", "profile", "hooks", "repeat", "backward"])
def test_a_function_that_raises_leaves_nothing_behind(fails_in):
    net, calls = mlp(), []
    net[0].weight.grad = before = torch.ones(10, 6)
    rng = torch.get_rng_state()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dout):
            raise ArithmeticError("on purpose")

    def fn():
        calls.append(None)
        if len(calls) == {"warm-up": 1, "profile": 3, "hooks": 4, "repeat": 5}.get(fails_in):
            raise ArithmeticError("on purpose")
        return Fails.apply(net(X)) if fails_in == "backward" else net(X)

    with pytest.raises(ArithmeticError, match="on purpose"):
        measure(fn)
    assert net[0].weight.grad is before
    assert torch.equal(torch.get_rng_state(), rng)
    assert not torch.autograd._profiler_enabled()
    assert gc.isenabled()
    packed = measure(lambda: mlp()(X), repeats=0)
    assert packed.gemms == 6


def test_measuring_prints_nothing():
    code = (
        "import torch; from fused_remat.measure import measure\n"
        "w = torch.randn(4, 4, requires_grad=True); w.grad = torch.ones(4, 4)\n"
        "measure(lambda: (w @ w).sum())"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


# Bad input


@pytest.mark.parametrize(
    "kwargs, error, message",
    [
        (dict(fn=3), TypeError, "fn must be a function without arguments, got int"),
        (dict(fn=lambda: (X, X)), TypeError, "fn must return one tensor, got tuple"),
        (dict(fn=lambda: X.detach()), ValueError, "pass backward=False"),
        (dict(fn=lambda: X, warmup=0), ValueError, "warmup must be at least 1, got 0"),
        (dict(fn=lambda: X, repeats=-1), ValueError, "repeats must be at least 0, got -1"),
        (dict(fn=lambda: X, repeats=1.5), TypeError, "repeats must be an integer, got 1.5"),
        (dict(fn=lambda: X, repeats=True), TypeError, "repeats must be an integer, got True"),
    ],
)
def test_bad_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        measure(**kwargs)


def test_bad_arguments_of_compare_time():
    with pytest.raises(ValueError, match="variants is empty"):
        compare_time({})
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        compare_time({"a": lambda: X.sum()}, rounds=0)
    with pytest.raises(TypeError, match="fn must be a function"):
        compare_time({"a": X})


def test_inside_another_profiler():
    with torch.autograd.profiler.profile(), pytest.raises(RuntimeError, match="one is already running"):
        measure(lambda: X.sum())
    assert measure(lambda: X.sum(), repeats=0).output_bytes == 4
