"""fused_remat.convert: the model stays the model (names, parameters, classes, hooks, copies, ties), and the report."""

from __future__ import annotations

import copy
import json
import sys

import pytest
import torch
import torch.nn.functional as F
from convert_cases import Gated, Plain, assert_same, fused_calls, kept_shapes, net, randomize, sequential, step, twins
from torch import nn

import fused_remat
from fused_remat import ops
from fused_remat._profiled import HINT
from fused_remat.convert import convert, revert
from fused_remat.nn import MLP

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def test_outputs_and_gradients_stay():
    model, stock = twins(net())
    report = convert(model)
    assert [(e.name, e.class_name, e.became) for e in report.converted] == [
        ("a", "Plain", "mlp, gelu, keep=()"),
        ("b", "Gated", "gated mlp, silu, keep=()"),
        ("c", "Sequential", "mlp, relu, keep=()"),
    ]
    assert report.skipped == []
    for mode in (True, False):
        with fused_calls() as calls:
            actual = step(model.train(mode), X)
        assert calls == ["gelu", "silu", "relu"]
        assert_same(actual, step(stock.train(mode), X), 1e-5)


@pytest.mark.parametrize("mode", [True, False])
def test_converted_layers_keep_their_input_and_nothing_else(mode):
    if (reason := ops.ready()) is not None:
        pytest.skip(f"needs the compiled extension: {reason}")
    x = torch.randn(64, 6)
    for layer in (Plain(), Gated(), sequential()):
        layer.train(mode)
        stock = kept_shapes(layer, x)
        convert(layer)
        assert [shape for shape, _ in kept_shapes(layer, x)] == [(64, 6)]
        assert any(10 in shape for shape, _ in stock)


def test_identity_of_everything_that_users_hold():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stock = copy.deepcopy(model)
    other = net()  # a second model of the same classes
    before = {
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "parameters": [(name, id(p)) for name, p in model.named_parameters()],
        "keys": list(model.state_dict()),
        "torch": (nn.Linear.forward, nn.Sequential.forward, F.linear, F.gelu, nn.GELU.forward),
        "classes": [type(module) for module in other.modules()],
    }
    state = copy.deepcopy(model.state_dict())
    convert(model)
    assert before["modules"] == [(name, id(module)) for name, module in model.named_modules()]
    assert before["parameters"] == [(name, id(p)) for name, p in model.named_parameters()]
    assert before["keys"] == list(model.state_dict())
    assert before["torch"] == (nn.Linear.forward, nn.Sequential.forward, F.linear, F.gelu, nn.GELU.forward)
    assert before["classes"] == [type(module) for module in other.modules()]
    assert type(Plain()) is Plain and Plain().forward.__func__ is Plain.forward
    assert isinstance(model.a, Plain) and type(model.a).__name__ == "Plain" and isinstance(model.c, nn.Sequential)
    assert type(model.a).__module__ == Plain.__module__ and repr(model.a).startswith("Plain(")
    assert "fused_remat: mlp, gelu, keep=()" in repr(model.a) and "fused_remat" not in repr(other)

    model.load_state_dict(state, strict=True)
    stock.load_state_dict(model.state_dict(), strict=True)
    stock_optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    for seed in range(3):
        assert_same(step(model, X, seed=seed), step(stock, X, seed=seed), 1e-5)
        optimizer.step()
        stock_optimizer.step()
    assert_same(dict(model.named_parameters()), dict(stock.named_parameters()), 1e-5)


def test_adam_state_loads_into_the_converted_model():
    model, stock = twins(net().double())  # Adam turns rounding noise in tiny gradients into whole steps
    saved = torch.optim.Adam(stock.parameters())
    step(stock, X.double())
    saved.step()
    model.load_state_dict(stock.state_dict())
    convert(model)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    for trained, own in ((stock, saved), (model, optimizer)):
        step(trained, X.double())
        own.step()
    assert_same(dict(model.named_parameters()), dict(stock.named_parameters()), 1e-9)


def test_flags_dtypes_devices_and_attributes_stay():
    model = nn.ModuleDict({"training_": Plain(0.3), "evaluated": Plain(0.3).eval(), "wide": Gated().double()})
    model["narrow"], model["unmade"] = Gated().to(torch.bfloat16), Plain().to("meta")
    model["training_"].fc1.weight.requires_grad_(False)
    model["training_"].tag = 1

    def facts():
        return (
            [(name, m.training) for name, m in model.named_modules()],
            [(name, p.requires_grad, p.dtype, p.device) for name, p in model.named_parameters()],
        )

    before = facts()
    assert len(convert(model).converted) == 5
    assert facts() == before
    assert model["training_"].tag == 1 and model["training_"].drop1.p == 0.3
    for name in ("training_", "evaluated", "wide", "narrow"):
        dtype = model[name]._modules.get("fc1", model[name]._modules.get("up_proj")).weight.dtype
        with fused_calls() as calls:
            assert model[name](X.to(dtype)).dtype == dtype
        assert len(calls) == 1
    assert model["unmade"](X.to("meta")).shape == X.shape
    assert torch.equal(model["evaluated"](X), model["evaluated"](X))
    model.eval()
    assert not any(module.training for module in model.modules())


def test_dropout_modules_decide_about_dropout():
    model = randomize(Plain(0.5))
    convert(model)
    torch.manual_seed(0)
    assert not torch.equal(model(X), model(X))
    model.drop1.eval()
    model.drop2.p = 0.0
    stock = randomize(Plain())
    torch.testing.assert_close(model(X), stock(X), rtol=1e-5, atol=1e-6)
    model.drop1.train().p = 1.0
    with fused_calls() as calls:
        torch.testing.assert_close(model(X), model.fc2.bias.expand(4, 6))
    assert calls == []


def test_hooks_on_the_layer_fire_once():
    model, fired = randomize(Plain()), []
    model.register_forward_pre_hook(lambda m, args, kwargs: fired.append("pre"), with_kwargs=True)
    model.register_forward_hook(lambda m, args, out: fired.append("forward"))
    model.register_full_backward_hook(lambda m, dx, dy: fired.append("backward"))
    model.fc1.weight.register_hook(lambda grad: fired.append("parameter"))
    model.fc2.weight.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))
    stock = copy.deepcopy(randomize(Plain()))
    assert len(convert(model).converted) == 1
    with fused_calls() as calls:
        actual = step(model, X)
    assert len(calls) == 1
    assert sorted(fired) == ["accumulated", "backward", "forward", "parameter", "pre"]
    assert_same(actual, step(stock, X), 1e-5)


def test_own_forward_on_the_layer_still_runs():
    model, ran = randomize(Plain()), []
    original = model.forward
    model.forward = lambda x: ran.append(1) or original(x)
    report = convert(model)
    assert report.converted == [] and report.skipped[0].reason == "has a forward of its own on the instance"
    model(X)
    assert ran == [1]


def test_revert_restores_classes_and_results():
    model, stock = twins(net())
    classes = [type(module) for module in model.modules()]
    attributes = [sorted(vars(module)) for module in model.modules()]
    convert(model)
    assert [type(module) for module in model.modules()] != classes
    assert revert(model) == ["a", "b", "c"]
    assert [type(module) for module in model.modules()] == classes
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    with fused_calls() as calls:
        actual = step(model, X)
    assert calls == [] and revert(model) == []
    assert_same(actual, step(stock, X), 1e-7)


def test_report_reverts_only_its_own_layers():
    model = net()
    convert(model, include="a")
    report = convert(model, include="b")
    assert report.revert() == ["b"] and report.revert() == []
    assert revert(model) == ["a"]


def test_twice_changes_nothing():
    model = net()
    convert(model, keep=("up",))
    classes = [type(module) for module in model.modules()]
    again = convert(model, strict=True)
    assert again.converted == [] and [type(module) for module in model.modules()] == classes
    assert [entry.name for entry in again.skipped] == ["a", "b", "c"]
    assert "already converted: mlp, gelu, keep=('up',)" in again.skipped[0].reason
    assert convert(nn.ModuleList([MLP(4, 8)])).skipped[0].reason == "is a fused_remat.MLP"


def test_dry_run_changes_nothing():
    model = net()
    before = [(type(module), sorted(vars(module))) for module in model.modules()]
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    report = convert(model, dry_run=True)
    assert [entry.name for entry in report.converted] == ["a", "b", "c"] and report.dry_run
    assert [(type(module), sorted(vars(module))) for module in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), rng) and "3 would be converted" in str(report)
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    assert report.revert() == []


def test_converting_leaves_no_trace_in_random_states_modes_or_hooks():
    model, seen = net(), []
    rng = torch.get_rng_state()
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))
    try:
        with torch.no_grad(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
            assert len(convert(model).converted) == 3
            assert not torch.is_grad_enabled()
    finally:
        handle.remove()
    assert torch.equal(torch.get_rng_state(), rng) and seen == []


def test_strict_names_what_cannot_be_converted_and_changes_nothing():
    model = net()
    model.a.act = nn.Mish()
    nn.utils.parametrizations.weight_norm(model.b.up_proj)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=r"(?s)strict=True.*a \(Plain\): its activation nn.Mish.*b \(Gated\): up_proj"):
        convert(model, strict=True)
    assert [type(module) for module in model.modules()] == classes
    assert [entry.name for entry in convert(model, strict=True, exclude=["a", "b"]).converted] == ["c"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"include": "a"}, ["a"]),
        ({"include": "[ab]"}, ["a", "b"]),
        ({"include": ["a", nn.Sequential]}, ["a", "c"]),
        ({"include": lambda name, module: name == "b"}, ["b"]),
        ({"exclude": Gated}, ["a", "c"]),
        ({"include": Plain, "exclude": "a"}, []),
        ({"exclude": ("a", lambda name, module: isinstance(module, nn.Sequential))}, ["b"]),
    ],
)
def test_include_and_exclude(choice, expected):
    assert [entry.name for entry in convert(net(), **choice).converted] == expected


def test_a_name_stands_for_everything_below_it():
    model = nn.ModuleDict({"encoder": net(), "decoder": net()})
    assert [e.name for e in convert(model, exclude="decoder").converted] == ["encoder.a", "encoder.b", "encoder.c"]
    assert [e.name for e in convert(model, include="*.c").converted] == ["decoder.c"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"include": "encodr"}, ValueError, "include names 'encodr', but the model has no such module; it has 'embed'"),
        ({"exclude": ["a", "zz*"]}, ValueError, r"exclude names 'zz\*'"),
        ({"include": 3}, TypeError, "include must be a name, a glob pattern, .*; got 3"),
        ({"include": [3]}, TypeError, "include must be a name, a glob pattern, a module class or a function"),
        ({"exclude": int}, TypeError, "exclude has the class int, which is not an nn.Module"),
        ({"keep": ("gates",)}, ValueError, r"keep names \['gates'\]"),
        ({"keep": 2.0}, ValueError, "keep as a fraction"),
        ({"model": [1]}, TypeError, "model must be an nn.Module, got list"),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    model = arguments.pop("model", net())
    with pytest.raises(error, match=message):
        convert(model, **arguments)
    with pytest.raises(TypeError, match=r"model must be an nn.Module, got str"):
        revert("model")


def test_keep_is_cut_to_what_the_layer_has():
    model = net()
    report = convert(model, keep=("gate", "up"))
    assert [entry.became.partition("keep=")[2] for entry in report.converted] == [
        "('up',)",
        "('up', 'gate')",
        "('up',)",
    ]
    revert(model)
    assert convert(model, keep=0.25).converted[0].became == "mlp, gelu, keep=0.25"


def test_report_prints_the_same_without_rich_and_dumps(monkeypatch):
    model = net()
    model.a.act = nn.Mish()
    report = convert(model)
    assert json.loads(json.dumps(report.to_dict()))["skipped"][0] == {
        "name": "a",
        "class_name": "Plain",
        "kind": "",
        "became": "",
        "note": "",
        "reason": report.skipped[0].reason,
    }
    text = str(report)
    assert text.startswith("2 converted, 1 left alone\n")
    assert all(word in text for word in ("Gated", "gated mlp, silu, keep=()", "nn.Mish", "left alone because"))
    assert all(len(line) <= 140 and "rich" not in line for line in text.splitlines())
    monkeypatch.setitem(sys.modules, "rich", None)
    assert str(report) == text
    assert str(convert(nn.Linear(2, 2))) == "0 converted, 0 left alone"


def test_tied_modules_are_converted_once_and_stay_tied():
    model = nn.ModuleDict({"a": Plain(), "b": Plain()})
    model["again"] = model["a"]
    model["b"].fc1.weight = model["a"].fc1.weight
    stock = copy.deepcopy(model)
    assert [entry.name for entry in convert(model).converted] == ["a", "b"]
    assert model["again"] is model["a"] and model["b"].fc1.weight is model["a"].fc1.weight
    assert len(list(model.parameters())) == len(list(stock.parameters())) == 7

    def grads(modules):
        modules.zero_grad()
        (modules["a"](X) * modules["b"](X) + modules["again"](2 * X)).sum().backward()
        return {name: p.grad for name, p in modules.named_parameters()}

    assert_same(grads(model), grads(stock), 1e-5)
    assert convert(model).converted == []
    assert [entry.name for entry in convert(copy.deepcopy(stock), include="again").converted] == ["a"]
    assert convert(copy.deepcopy(stock), include=["a", "again"], exclude="again").converted == []


def test_a_model_that_nobody_profiled_gets_a_hint(recwarn):
    def model() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), nn.Linear(8, 8))

    for options in ({}, {"policy": "full"}, {"dry_run": True}):
        report = convert(model(), **options)
        assert report.notes == [HINT] and str(report).splitlines()[-1] == HINT and report.to_dict()["notes"] == [HINT]
    other = nn.Sequential(nn.Linear(8, 8))
    assert not convert(other).notes  # nothing was converted
    for look in (fused_remat.profile, lambda *a, **k: fused_remat.plan(*a, budget="min", **k)):
        known = model()
        look(known, torch.ones(2, 8), fake=True)
        for options in ({}, {"policy": "full"}):
            report = convert(known, **options)
            assert report.converted and not report.notes
            report.revert()
        assert convert(copy.deepcopy(known)).notes == [HINT]
    found = fused_remat.plan(model(), torch.ones(2, 8), budget="min", fake=True)
    assert not convert(model(), policy=found).notes  # the plan comes of a look at such a model
    assert not recwarn.list
