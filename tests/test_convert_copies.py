"""fused_remat.convert: copies, pickles, other ways to call, and tracing of converted layers."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from convert_cases import (
    Gated,
    Layer,
    LowRank,
    Plain,
    TwoLinear,
    assert_same,
    fused_calls,
    randomize,
    sequential,
    step,
    twins,
)
from torch import nn

from fused_remat import ops
from fused_remat.convert import convert, revert

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def check_copy(copied: nn.Module, model: nn.Module) -> None:
    assert isinstance(copied, type(model).__mro__[1]) and copied is not model
    with fused_calls() as calls:
        torch.testing.assert_close(copied(X), model(X), rtol=1e-6, atol=1e-7)
    assert len(calls) == 2
    assert set(map(id, copied.parameters())).isdisjoint(map(id, model.parameters()))
    with torch.no_grad():  # the copy runs on its own weights
        next(copied.parameters()).zero_()
    assert not torch.allclose(copied(X), model(X))
    assert revert(copied) == [""] and type(copied) is type(model).__mro__[1]


@pytest.mark.parametrize("make", [Plain, Gated, sequential])
def test_deepcopy_pickle_and_torch_save(make):
    model = randomize(make())
    convert(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    check_copy(torch.load(file, weights_only=False), model)
    check_copy(copy.deepcopy(model), model)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        check_copy(pickle.loads(pickle.dumps(model, protocol)), model)


def test_pickle_loads_in_a_new_process(tmp_path):
    model = randomize(sequential())
    convert(model, keep=("up",))
    torch.save({"model": model, "x": X, "y": model(X)}, tmp_path / "model.pt")
    code = f"""
import torch
saved = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
assert "fused_remat: mlp, relu, keep=('up',)" in repr(saved["model"]), saved["model"]
torch.testing.assert_close(saved["model"](saved["x"]), saved["y"])
import fused_remat.convert
from fused_remat.convert.rebind import unbind
assert unbind(saved["model"]) and type(saved["model"]) is torch.nn.Sequential
print("loaded")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "loaded", done.stderr


def test_functional_call_and_keyword_input():
    model, other = randomize(Plain()), randomize(Plain(), seed=8)
    convert(model)
    with fused_calls() as calls:
        out = torch.func.functional_call(model, dict(other.named_parameters()), (X,))
        torch.testing.assert_close(model(x=X), model(X))
    assert len(calls) == 3
    torch.testing.assert_close(out, other(X), rtol=1e-5, atol=1e-6)


def test_extra_arguments_run_the_layer_itself():
    class Scaled(Plain):
        def forward(self, x, scale=1.0):
            return super().forward(x) * scale

    model = randomize(Scaled())
    assert len(convert(model).converted) == 1
    with fused_calls() as calls:
        torch.testing.assert_close(model(X, 2.0), 2 * model(X), rtol=1e-5, atol=1e-6)
    assert len(calls) == 1
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        model()


def test_class_patched_later_is_honoured(monkeypatch):
    model = randomize(Plain())
    convert(model)
    monkeypatch.setattr(Plain, "forward", lambda self, x: x * 7)
    torch.testing.assert_close(model(X), X * 7)


@pytest.mark.parametrize("make", [Plain, Gated, sequential, lambda: TwoLinear(F.silu).float()])
def test_compiles_without_a_graph_break(make):
    model, stock = twins(randomize(make()))
    convert(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual = {name.replace("_orig_mod.", ""): value for name, value in step(compiled, X).items()}
    assert_same(actual, step(stock, X), 1e-5)


def test_many_converted_classes_compile_apart():
    torch.compiler.reset()
    for i in range(torch._dynamo.config.recompile_limit + 2):
        layer = randomize(Layer(lambda s, x: s.b(F.silu(s.a(x))), a=nn.Linear(6, 4 + i), b=nn.Linear(4 + i, 6)))
        stock = copy.copy(layer)
        convert(layer, strict=True)
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(X), stock(X), rtol=1e-5, atol=1e-5)


def test_compiled_layer_follows_later_changes():
    torch.compiler.reset()
    model, stock = twins(randomize(Plain()))
    convert(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(X)
    for change in (
        lambda layer: setattr(layer.act, "approximate", "tanh"),
        lambda layer: setattr(layer, "act", nn.ReLU()),
        lambda layer: setattr(layer.fc2, "forward", lambda h: F.linear(h, layer.fc2.weight) * 3),
        lambda layer: setattr(layer, "fc1", randomize(LowRank(layer.fc1), seed=4)),
    ):
        change(model)
        change(stock)
        torch.testing.assert_close(compiled(X), stock(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict):
    model, stock = twins(randomize(Plain().eval()))
    convert(model)
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(model, (X,), dynamic_shapes=({0: batch},), strict=strict)
    x = torch.randn(7, 6)
    torch.testing.assert_close(exported.module()(x), stock(x), rtol=1e-5, atol=1e-6)
    assert ("fused_remat.mlp" in str(exported.graph)) == (ops.ready() is None)


def test_symbolic_tracing_sees_the_children():
    model, stock = twins(randomize(Plain()))
    convert(model)
    traced = torch.fx.symbolic_trace(nn.Sequential(model))
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"][:2] == ["0.fc1", "0.act"]
    torch.testing.assert_close(traced(X), stock(X), rtol=1e-6, atol=1e-7)
