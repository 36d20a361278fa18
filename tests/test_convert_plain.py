"""Converted layers whose parts change: settings, swapped children, adapters, hooks, parametrisations, own forwards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from convert_cases import Layer, LowRank, ScaledLinear, assert_same, down, fused_calls, randomize, step, twins, up
from torch import nn
from torch.nn.utils import parametrizations, prune

from fused_remat.convert import convert


def test_settings_read_by_the_layer_are_watched():
    def forward(s, x):
        return s.b(F.dropout(s.act(s.a(x)), s.p, s.training)) * s.factor

    layer = randomize(Layer(forward, a=up(), b=down(), act=nn.GELU(), p=0.0, factor=1.0, other=3))
    assert len(convert(layer).converted) == 1
    x = torch.randn(4, 6)
    plain = layer(x)
    with fused_calls() as calls:
        layer.other = 4  # not read by forward
        layer(x)
        assert len(calls) == 1
        layer.factor = 3.0
        torch.testing.assert_close(layer(x), 3 * plain)
        layer.factor, layer.p = 1.0, 0.5
        assert not torch.allclose(layer(x), plain)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model[1], "approximate", "tanh"),
        lambda model: model.__setitem__(1, nn.ReLU()),
        lambda model: model.append(nn.Tanh()),
        lambda model: model.insert(0, nn.Tanh()),
        lambda model: model.__delitem__(3),
        lambda model: model.__delitem__(1),
    ],
)
def test_changed_children_are_noticed(change):
    model = randomize(nn.Sequential(up(), nn.GELU(), down(), nn.Sigmoid()))
    convert(model)
    change(model)
    x = torch.randn(4, 6)
    expected = x
    for child in model:
        expected = child(expected)
    with fused_calls() as calls:
        torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-7)
    assert calls == []


def test_slices_of_a_converted_sequential_work():
    model = nn.Sequential(up(), nn.GELU(), down(), nn.Sigmoid())
    convert(model)
    x = torch.randn(4, 6)
    torch.testing.assert_close(model[2:](model[:2](x)), model(x))


def test_hook_on_all_modules_sees_every_child():
    model, seen = nn.Sequential(up(), nn.GELU(), down()), []
    convert(model)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        with fused_calls() as calls:
            model(torch.randn(4, 6))
    finally:
        handle.remove()
    assert calls == [] and seen == [*model, model]


def adapted(linear: nn.Linear) -> nn.Module:
    return randomize(LowRank(linear), seed=5)


def own_forward(linear: nn.Linear) -> nn.Module:
    linear.forward = lambda x: F.linear(x, linear.weight) * 3
    return linear


def subclassed(linear: nn.Linear) -> nn.Module:
    other = ScaledLinear(linear.in_features, linear.out_features)
    other.load_state_dict(linear.state_dict())
    return other


def hooked(linear: nn.Linear) -> nn.Module:
    linear.register_forward_hook(lambda module, args, output: output * 2)
    return linear


def backward_hooked(linear: nn.Linear) -> nn.Module:
    linear.register_full_backward_hook(lambda module, dx, dy: (dx[0] * 2,))
    return linear


def pruned(linear: nn.Linear) -> nn.Module:
    return prune.l1_unstructured(linear, "weight", 0.5)


CHANGES = {
    "adapter": (adapted, "is a convert_cases.LowRank, not a plain nn.Linear"),
    "subclass": (subclassed, "is a convert_cases.ScaledLinear"),
    "weight norm": (parametrizations.weight_norm, "ParametrizedLinear"),
    "pruning": (pruned, "has forward hooks"),
    "hook": (hooked, "has forward hooks"),
    "backward hook": (backward_hooked, "has backward hooks"),
    "own forward": (own_forward, "has a forward of its own on the instance"),
}


def gated() -> nn.Module:
    return Layer(lambda s, x: s.c(s.act(s.a(x)) * s.b(x)), a=up(), b=up(), c=down(), act=nn.SiLU())


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", CHANGES)
def test_children_that_are_not_plain_are_called(how, when):
    change, reason = CHANGES[how]
    for make in (gated, lambda: nn.Sequential(up(), nn.GELU(), down())):
        for name in [name for name, child in make().named_children() if isinstance(child, nn.Linear)]:
            model, stock = twins(randomize(make()))
            if when == "after":
                assert len(convert(model).converted) == 1
            for layer in (model, stock):
                layer._modules[name] = change(layer._modules[name])
            if when == "before":
                report = convert(model)
                assert report.converted == [] and reason in report.skipped[0].reason
                assert report.skipped[0].reason.startswith(name)
            with fused_calls() as calls:
                x = torch.randn(4, 6)
                actual = step(model, x)
            assert calls == []
            assert_same(actual, step(stock, x), 1e-6)
            assert how != "adapter" or actual[f"d{name}.a.weight"].abs().max() > 1e-3


def test_merged_adapter_gives_the_same_result_and_is_fused_again():
    model = randomize(gated())
    convert(model)
    model.b = adapted(model.b)
    x = torch.randn(4, 6)
    before = model(x)
    base, delta = model.b.base, model.b.b.weight @ model.b.a.weight
    with torch.no_grad():
        base.weight += delta
    model.b = base
    with fused_calls() as calls:
        torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize("part", ["act", "drop"])
def test_hooks_on_other_parts_are_called_too(part):
    layer = Layer(lambda s, x: s.b(s.drop(s.act(s.a(x)))), a=up(), b=down(), act=nn.GELU(), drop=nn.Dropout(0.0))
    convert(layer)
    seen = []
    handle = layer._modules[part].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    x = torch.randn(4, 6)
    layer(x)
    handle.remove()
    assert seen == [(4, 10)]
    with fused_calls() as calls:
        layer(x)
    assert len(calls) == 1
