"""fused_remat.nn: settings, equality with written-out torch, frozen weights, dropout, children that are not plain."""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from convert_cases import LowRank, ScaledLinear, assert_same, fused_calls, kept_shapes, randomize, step
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

from fused_remat import ops
from fused_remat.activations import ACTIVATIONS
from fused_remat.nn import MLP, GatedMLP


class Stock(nn.Module):
    """The written-out twin of both modules, on the same children."""

    def __init__(self, layer: MLP | GatedMLP) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer, act = self.layer, ACTIVATIONS[self.layer.activation]
        if isinstance(layer, MLP):
            return layer.fc2(act(layer.fc1(x)))
        return layer.down_proj(act(layer.gate_proj(x)) * layer.up_proj(x))


def build(kind: type[nn.Module], **settings) -> nn.Module:
    return randomize(kind(6, 10, 4, dtype=torch.float64, **settings))


def stock_step(layer: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name.replace("dlayer.", "d"): value for name, value in step(Stock(layer), x).items()}


@pytest.fixture
def compiled_ops():
    """Skips where only the reference path can run, which saves no memory."""
    reason = ops.ready()
    if reason is not None:
        pytest.skip(f"needs the compiled extension: {reason}")


KINDS = pytest.mark.parametrize("kind", [MLP, GatedMLP])
X = torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@KINDS
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_written_out_layer(kind, activation, bias):
    layer = build(kind, activation=activation, bias=bias)
    with fused_calls() as calls:
        actual = step(layer, X)
    assert calls == [activation]
    assert_same(actual, stock_step(layer, X), 1e-10)


def test_children_names_and_default_sizes():
    assert [name for name, _ in MLP(4).named_parameters()] == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert MLP(4).fc1.weight.shape == MLP(4).fc2.weight.shape == (4, 4)
    gated = GatedMLP(4, 8, dtype=torch.bfloat16)
    assert list(gated.state_dict()) == ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
    assert gated.down_proj.weight.shape == (4, 8) and gated.up_proj.weight.dtype == torch.bfloat16
    assert MLP(4, 8, 5, device="meta").fc2.weight.shape == (5, 8)


@KINDS
def test_repr_shows_the_settings(kind):
    text = repr(kind(4, 8, activation="relu", dropout=0.25, keep=("up",)))
    assert "activation='relu', dropout=0.25, keep=('up',)" in text and "in_features=4" in text


@KINDS
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"activation": "swish"}, ValueError, "activation must be one of gelu, .*silu.*; got 'swish'"),
        ({"activation": F.gelu}, ValueError, "activation must be one of"),
        ({"dropout": 1.0}, ValueError, r"dropout must be a number in \[0, 1\), got 1.0"),
        ({"dropout": -0.1}, ValueError, "dropout must be"),
        ({"dropout": float("nan")}, ValueError, "dropout must be"),
        ({"dropout": True}, ValueError, "dropout must be"),
        ({"hidden_features": 0}, ValueError, "hidden_features must be an int of at least 1, got 0"),
        ({"in_features": -3}, ValueError, "in_features must be"),
        ({"out_features": 2.0}, ValueError, "out_features must be"),
        ({"keep": ("hidden",)}, ValueError, r"keep names \['hidden'\], but a .* can keep 'up'"),
        ({"keep": 1.5}, ValueError, r"keep as a fraction must be in \[0, 1\], got 1.5"),
        ({"keep": "up"}, TypeError, "keep must be a tuple of residual names or a float"),
        ({"keep": True}, TypeError, "keep must be"),
    ],
)
def test_bad_settings_are_named(kind, settings, error, message):
    with pytest.raises(error, match=message):
        kind(**{"in_features": 4, "hidden_features": 8} | settings)


def test_gate_can_be_kept_by_the_gated_layer_only():
    assert GatedMLP(4, 8, keep=("gate", "up")).keep == ("up", "gate")
    with pytest.raises(ValueError, match="a plain MLP can keep 'up'"):
        MLP(4, 8, keep=("up", "gate"))


@KINDS
@pytest.mark.parametrize("keep", [(), ("up",), 0.5])
def test_keep_does_not_change_results(kind, keep):
    layer = build(kind, keep=keep)
    assert_same(step(layer, X), stock_step(layer, X), 1e-10)


@KINDS
def test_frozen_weights_in_every_combination(kind):
    layer = build(kind, bias=True)
    parameters = dict(layer.named_parameters())
    expected = stock_step(layer, X)
    for chosen in itertools.product([False, True], repeat=len(parameters) + 1):
        for parameter, trainable in zip(parameters.values(), chosen[1:], strict=True):
            parameter.requires_grad_(trainable)
            parameter.grad = None
        x = X.clone().requires_grad_(chosen[0])
        y = layer(x)
        assert y.requires_grad == any(chosen)
        if any(chosen):
            y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=y.dtype))
        gradients = {"dx0": x.grad} | {f"d{name}": parameter.grad for name, parameter in parameters.items()}
        assert [gradient is not None for gradient in gradients.values()] == list(chosen)
        for name, gradient in gradients.items():
            if gradient is not None:
                torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-9)


@KINDS
@pytest.mark.parametrize("shape", [(6,), (1, 6), (0, 6), (2, 0, 6)])
def test_unusual_shapes(kind, shape):
    layer = build(kind, bias=True)
    x = torch.randn(shape, dtype=torch.float64)
    actual, expected = step(layer, x), stock_step(layer, x)
    assert actual["output"].shape == (*shape[:-1], 4)
    for name, want in expected.items():
        torch.testing.assert_close(actual[name], want, rtol=1e-9, atol=1e-9)


@KINDS
def test_dropout_is_off_in_eval_and_unbiased_in_training(kind):
    layer = build(kind, dropout=0.5)
    x = X.reshape(-1, 6)[:1].expand(4000, 6)
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    assert_same(step(layer, X), stock_step(layer, X), 1e-10)
    layer.train()
    torch.manual_seed(0)
    first, second = layer(x), layer(x)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(layer(x), first)
    deviation = (first.mean(0) - Stock(layer)(x)[0]).norm() / first.std(0).norm()
    assert deviation < 4 / 4000**0.5


@KINDS
def test_eval_between_forward_and_backward_changes_nothing(kind):
    layer = build(kind, dropout=0.5)
    gradients = []
    for switch in (False, True):
        torch.manual_seed(5)
        layer.train().zero_grad()
        y = layer(X)
        if switch:
            layer.eval()
        y.sum().backward()
        gradients.append([p.grad.clone() for p in layer.parameters()])
    assert all(map(torch.equal, *gradients))


@KINDS
@pytest.mark.parametrize("mode", [True, False])
def test_keeps_its_input_and_nothing_else(kind, mode, compiled_ops):
    layer, x = kind(64, 256).train(mode), torch.randn(4, 128, 64)
    assert kept_shapes(layer, x) == [((4, 128, 64), 131072)]
    residuals = {MLP: ("up",), GatedMLP: ("up", "gate")}[kind]
    kept = kept_shapes(kind(64, 256, keep=residuals), x)
    assert kept == [((4, 128, 64), 131072), *[((512, 256), 524288)] * len(residuals)]
    with torch.no_grad():
        assert not layer(x).requires_grad


@KINDS
def test_per_sample_gradients(kind):
    layer = build(kind)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, X)
    for i, x in enumerate(X):
        layer.zero_grad()
        loss(parameters, x).backward()
        for name, parameter in parameters.items():
            torch.testing.assert_close(per_sample[name][i], parameter.grad, rtol=1e-9, atol=1e-9)


@KINDS
def test_autocast_computes_in_its_dtype_and_returns_gradients_in_theirs(kind):
    layer = randomize(kind(32, 64))
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))

    def autocast_step(model):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        layer.zero_grad()
        y.float().square().mean().backward()
        return y, [p.grad for p in layer.parameters()]

    y, gradients = autocast_step(layer)
    want_y, want_gradients = autocast_step(Stock(layer))
    assert y.dtype == torch.bfloat16 and all(gradient.dtype == torch.float32 for gradient in gradients)
    for got, want in zip([y, *gradients], [want_y, *want_gradients], strict=True):
        assert (got.float() - want.float()).norm() <= 2e-2 * want.float().norm() and want.abs().max() > 1e-3


def not_plain(layer: nn.Module, name: str, how: str) -> nn.Module:
    """`layer` with one child changed in a way that reading its weight misses."""
    linear = getattr(layer, name)
    if how == "adapter":
        setattr(layer, name, randomize(LowRank(linear)))
    elif how == "subclass":
        scaled = ScaledLinear(linear.in_features, linear.out_features, linear.bias is not None, dtype=torch.float64)
        scaled.load_state_dict(linear.state_dict())
        setattr(layer, name, scaled)
    elif how == "weight norm":
        parametrizations.weight_norm(linear)
    elif how == "hook":
        linear.register_forward_hook(lambda module, args, output: output * 2)
    elif how == "pre-hook":
        linear.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    elif how == "backward hook":
        linear.register_full_backward_hook(lambda module, dx, dy: (dx[0] * 2,))
    elif how == "own forward":
        linear.forward = lambda x: F.linear(x, linear.weight) * 3
    return layer


HOW = ["adapter", "subclass", "weight norm", "hook", "pre-hook", "backward hook", "own forward"]


@KINDS
@pytest.mark.parametrize("how", HOW)
def test_children_that_are_not_plain_are_called(kind, how):
    for name, _ in build(kind).named_children():
        layer = not_plain(build(kind), name, how)
        with fused_calls() as calls:
            actual = step(layer, X)
        assert calls == []
        assert_same(actual, stock_step(layer, X), 1e-10)


@KINDS
def test_unfused_path_keeps_dropout(kind):
    layer = not_plain(build(kind, dropout=0.5), next(iter(build(kind)._modules)), "own forward")
    torch.manual_seed(0)
    assert not torch.equal(layer(X), layer(X))
    assert torch.equal(layer.eval()(X), layer(X))


@KINDS
def test_hook_on_all_modules_sees_every_child(kind):
    layer, seen = build(kind), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        with fused_calls() as calls:
            layer(X)
    finally:
        handle.remove()
    assert calls == [] and set(layer.children()) < set(seen)


def test_flop_counting_measures_the_path_that_trains():
    with fused_calls() as calls, FlopCounterMode(display=False):
        build(MLP)(X)
    assert calls == ["gelu"]


@KINDS
def test_mixed_dtypes_fail_as_the_children_do(kind):
    layer = build(kind)
    list(layer.children())[-1].to(torch.float32)
    with pytest.raises(RuntimeError, match="dtype"):
        layer(X)


@KINDS
def test_deepcopy_pickle_and_torch_save(kind):
    layer = build(kind, dropout=0.1, keep=("up",)).eval()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)):
        assert torch.equal(copied(X), layer(X)) and copied.keep == ("up",) and not copied.training


@KINDS
def test_compiles_without_a_graph_break_and_follows_later_adapters(kind):
    layer = build(kind)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same(
        step(compiled, X), {k.replace("dlayer.", "d_orig_mod."): v for k, v in step(Stock(layer), X).items()}, 1e-10
    )
    name, linear = next(layer.named_children())
    setattr(layer, name, randomize(LowRank(linear), seed=4))
    torch.testing.assert_close(compiled(X), Stock(layer)(X), rtol=1e-10, atol=1e-10)


@KINDS
def test_functional_call_uses_the_given_weights(kind):
    layer, other = build(kind), randomize(build(kind), seed=9)
    with fused_calls() as calls:
        out = torch.func.functional_call(layer, dict(other.named_parameters()), (X,))
    assert len(calls) == 1
    torch.testing.assert_close(out, Stock(other)(X), rtol=1e-10, atol=1e-10)
