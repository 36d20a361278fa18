"""What changes between forward and backward, caches, devices and control flow: put back, told or refused."""

from __future__ import annotations

import dataclasses
import functools
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fused_remat
from fused_remat.guards import (
    RematCache,
    RematError,
    RematMismatch,
    RematMutation,
    RematWarning,
)

region = fused_remat.region


def plainly(fn, *args, **kwargs):
    return fn(*args, **kwargs)


def gradient(run, fn, *args, **kwargs) -> Tensor:
    """Of the first argument, of the sum of what `fn` gives."""
    x = torch.linspace(-1, 2, 6).requires_grad_()
    run(fn, x, *args, **kwargs).sum().backward()
    return x.grad


# Parameters


@pytest.fixture
def stage() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def swap_data(stage: nn.Sequential) -> None:
    stage[0].weight.data = torch.zeros(6, 6)


def resize(stage: nn.Sequential) -> None:
    stage[0].weight.data = torch.zeros(3, 6)


def replace(stage: nn.Sequential) -> None:
    stage[0].weight = nn.Parameter(torch.zeros(6, 6))


def remove(stage: nn.Sequential) -> None:
    del stage[0].weight


@torch.no_grad()
def optimize(stage: nn.Sequential) -> None:
    stage[0].bias.add_(1)  # a bias is saved by nothing: only the replay reads it


def freeze(stage: nn.Sequential) -> None:
    stage[0].weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "happened"),
    [
        (swap_data, "0.weight was given other data"),
        (resize, r"0.weight became float32 \[3, 6\], it was float32 \[6, 6\]"),
        (replace, "0.weight was replaced by another parameter"),
        (remove, "0.weight was removed"),
        (optimize, "0.bias was changed in place"),
        (freeze, "0.weight had requires_grad set to False"),
    ],
)
@pytest.mark.parametrize("how", ["module", "closure"])
def test_parameter_changed_before_backward_is_refused(stage: nn.Sequential, change, happened: str, how: str) -> None:
    x = torch.randn(2, 6, requires_grad=True)
    y = region(stage if how == "module" else lambda x: stage(x), x, name="stage")
    change(stage)
    with pytest.raises(
        RematMutation,
        match=f"^region 'stage': the parameter {happened} between forward and backward; run backward before changing",
    ):
        y.sum().backward()
    assert x.grad is None


def test_parameter_changed_inside_is_refused(stage: nn.Sequential) -> None:
    @torch.no_grad()
    def change() -> None:
        stage[2].bias.add_(1)

    def forward(x: Tensor) -> Tensor:
        change()
        return stage(x)

    with pytest.raises(RematMutation, match=r"region 'f' changes its parameter 2.bias in its forward"):
        region(forward, torch.randn(2, 6, requires_grad=True), name="f")


# What stands between forward and backward is put back for the replay


def both_ways(make, between, *, cast=None) -> list[list[Tensor]]:
    """Gradients of the plain call and of the region where something changes between forward and backward."""
    found = []
    for run in (plainly, region):
        torch.manual_seed(0)
        model = make()
        x = torch.randn(4, 6, requires_grad=True)
        y = run(model, x)
        undo = between(model)
        y.square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())])
        if undo is not None:
            undo()
    return found


def assert_equal(found: list[list[Tensor]]) -> None:
    assert len(found[0]) == len(found[1])
    for plain, ours in zip(*found, strict=True):
        assert torch.equal(plain, ours)


def dropping() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 6))


@pytest.mark.parametrize("training", [True, False])
def test_training_flag_flipped_before_backward(training: bool) -> None:
    models = []

    def flip(model: nn.Module) -> None:
        models.append(model.train(not training))

    assert_equal(both_ways(lambda: dropping().train(training), flip))
    assert [m.training for model in models for m in model.modules()] == [not training] * 12


def test_plain_attribute_changed_before_backward() -> None:
    assert_equal(both_ways(dropping, lambda model: setattr(model[2], "p", 0.9)))


def test_hook_added_before_backward() -> None:
    def hook(model: nn.Module) -> None:
        model[0].register_forward_hook(lambda module, args, out: out * 3)

    assert_equal(both_ways(dropping, hook))


def test_submodule_replaced_before_backward() -> None:
    found = []
    for run in (plainly, region):
        torch.manual_seed(0)
        model = dropping()
        weight = model[0].weight
        y = run(model, torch.randn(4, 6))
        model[0] = nn.Linear(6, 6)
        y.square().sum().backward()
        found.append([weight.grad])
        assert model[0].weight is not weight
    assert_equal(found)


def test_default_dtype_changed_before_backward() -> None:
    class Shifted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.full((6,), 0.5)).exp()

    def change(model: nn.Module):
        torch.set_default_dtype(torch.float64)
        return lambda: torch.set_default_dtype(torch.float32)

    assert_equal(both_ways(lambda: Shifted(6, 6), change))


def test_gradients_off_around_backward(stage: nn.Sequential) -> None:
    x = torch.randn(2, 6, requires_grad=True)
    expected = torch.autograd.grad(stage(x).sum(), x)[0]
    y = region(stage, x).sum()
    with torch.no_grad():
        assert torch.equal(torch.autograd.grad(y, x)[0], expected)


def test_default_device_of_an_inner_region_is_not_that_of_the_outer() -> None:
    """The inner region's replay asks for its input, which makes the outer one replay within it."""

    def outer(x: Tensor) -> Tensor:
        x = x * torch.ones(3)
        with torch.device("meta"):
            return region(lambda x: (x.exp(), torch.ones(3))[0], x.sin())

    x = torch.ones(3, requires_grad=True)
    region(outer, x).sum().backward()
    assert torch.equal(x.grad, x.sin().exp() * x.cos())


# Caches


class GrowingCache:
    """As decoders keep."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def update(self, x: Tensor) -> Tensor:
        self.keys.append(x)
        return torch.stack(self.keys).sum(0)


class Store(GrowingCache):
    """Does not derive its name from its purpose."""


Store.__mro__[1].__name__ = "GrowingCache"


class Memory:
    """Grows, and is called nothing in particular."""

    def __init__(self) -> None:
        self.rows = torch.zeros(0, 6)

    def update(self, x: Tensor) -> Tensor:
        self.rows = torch.cat([self.rows, x.detach()[None]])
        return x * self.rows.sum(0)


def attend(x: Tensor, past_key_values=None, cache=None) -> Tensor:
    store = past_key_values if past_key_values is not None else cache
    return (store.update(x) if hasattr(store, "update") else x).exp()


@pytest.mark.parametrize("make", [GrowingCache, Store])
def test_cache_is_refused_before_anything_runs(make) -> None:
    cache = make()
    with pytest.raises(
        RematCache,
        match=r"^region 'layer 3' gets the key-value cache past_key_values \((GrowingCache|Store)\) while .*use_cache",
    ):
        region(attend, torch.ones(6, requires_grad=True), past_key_values=cache, name="layer 3")
    assert cache.keys == []
    with torch.no_grad():
        region(attend, torch.ones(6, requires_grad=True), past_key_values=cache)
    assert len(cache.keys) == 1


def test_transformers_cache_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    with pytest.raises(RematCache, match=r"cache args\[1\] \(DynamicCache\)"):
        region(attend, torch.ones(6, requires_grad=True), transformers.DynamicCache())


@dataclasses.dataclass
class Context:
    inner: object


@pytest.mark.parametrize(
    "hold",
    [
        lambda cache: {"a": {"b": cache}},
        lambda cache: [({"b": cache},)],
        lambda cache: types.MappingProxyType({"a": [cache]}),
        lambda cache: Context({"a": cache}),
    ],
)
def test_caches_are_refused_however_deep_they_are(hold) -> None:
    class StaticCache:
        keys = torch.ones(6)

    with pytest.raises(RematCache, match=r"^region 'f' gets the key-value cache args\[1\].* \(StaticCache\)"):
        region(lambda x, context: x.exp(), torch.ones(6, requires_grad=True), hold(StaticCache()), name="f")


def test_object_that_grows_is_refused() -> None:
    memory = Memory()
    with pytest.raises(
        RematCache, match=r"region 'f': kwargs\['cache'\].rows was replaced in the forward and would be so again"
    ):
        region(attend, torch.ones(6, requires_grad=True), cache=memory, name="f")


def test_past_as_tensors_warns() -> None:
    for past in (((torch.ones(6), torch.ones(6)),), {"layer 0": [torch.ones(6)]}):
        with pytest.warns(RematWarning, match="gets past keys and values in past_key_values while gradients are on"):
            gradient(region, lambda x, past_key_values: x.exp(), past_key_values=past)


# Devices, control flow, operations that save before they write


def test_device_move_inside_is_told() -> None:
    def move(x: Tensor) -> Tensor:
        x.detach().to("meta")
        return x.exp()

    with pytest.warns(
        RematWarning, match=r"^region '.*move': Tensor.to moves a tensor from cpu to meta at test_guards_between.py:\d+"
    ):
        found = gradient(region, move)
    assert torch.equal(found, gradient(plainly, lambda x: x.exp()))


def test_device_moves_of_later_calls_are_told_with_verify() -> None:
    moves = nn.Module()
    moves.now = False

    def fn(x: Tensor) -> Tensor:
        if moves.now:
            x.detach().to("meta")
        return x.exp()

    for verify in ("off", "always"):
        moves.now = False
        gradient(functools.partial(region, verify=verify), fn)
        moves.now = True
        if verify == "off":
            gradient(region, fn)  # see region's docstring
        else:
            with pytest.warns(RematWarning, match="Tensor.to moves a tensor from cpu to meta"):
                gradient(functools.partial(region, verify=verify), fn)


@pytest.mark.parametrize("early_stop", [True, False])
def test_control_flow_that_changes_is_named(early_stop: bool) -> None:
    calls = iter(range(9))

    class Counter:
        __module__ = "torch"  # not looked into

        def next(self) -> int:
            return next(calls)

    counter = Counter()

    def other_form(x: Tensor) -> Tensor:
        return (x if counter.next() % 2 == 0 else x[:3]).exp()

    def fewer(x: Tensor) -> Tensor:
        return x.exp().sin() if counter.next() % 2 == 0 else x.exp()

    with pytest.raises(
        RematMismatch, match=r"region 'f': the replay rebuilt float32 \[3\] on cpu where .*float32 \[6\]"
    ):
        region(other_form, torch.ones(6, requires_grad=True), name="f").sum().backward()
    next(calls) if next(calls) % 2 == 0 else None
    if early_stop:
        with pytest.raises(
            RematMismatch, match=r"region 'f': the replay saved fewer tensors than the 2 of the forward"
        ):
            region(fewer, torch.ones(6, requires_grad=True), name="f").sum().backward()


def test_backward_inside_a_region_is_refused() -> None:
    def inner(x: Tensor) -> Tensor:
        y = x.exp()
        return torch.autograd.grad(y.sum(), x)[0] * y

    with pytest.raises(RematError, match="backward ran inside its own forward"):
        region(inner, torch.ones(6, requires_grad=True), name="f")


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("how", ["module", "function"])
def test_rrelu_keeps_its_noise(last: bool, how: str) -> None:
    """It saves its noise before it draws it: a replay that stops there has none."""
    act = nn.RReLU() if how == "module" else (lambda x: F.rrelu(x, training=True))
    linear = nn.Linear(6, 6)

    def run(x: Tensor) -> Tensor:
        x = act(linear(x))
        return x if last else linear(x)

    grads = []
    for call in (plainly, lambda fn, x: region(fn, x, verify="always")):
        for _ in range(2):
            torch.manual_seed(0)
            grads.append(gradient(call, run))
    for other in grads[1:]:
        assert torch.equal(grads[0], other)
