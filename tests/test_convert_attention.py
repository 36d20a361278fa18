"""fused_remat.convert on nn.MultiheadAttention: the model stays the model, parts that change, weights, keep, report."""

from __future__ import annotations

import copy
import io
import json
import pickle

import pytest
import torch
from convert_cases import (
    LowRank,
    Plain,
    assert_same,
    fused_attentions,
    fused_calls,
    kept_shapes,
    randomize,
    step,
    twins,
)
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from fused_remat import MultiheadAttention, ops
from fused_remat.convert import convert, revert

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(3))


class Block(nn.Module):
    """An attention that is called as most code does, and a hand-written residual."""

    def __init__(self, **settings) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **({"batch_first": True} | settings))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.attention(x, x, x)
        return x + y


class Keeping(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, weights = self.attention(x, x, x)
        return x + y * weights.square().mean()


class Indexing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, x, x)[0]


class Sparing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.attention(x, x, x, need_weights=False)
        return x + y


def test_outputs_and_gradients_stay():
    model, stock = twins(randomize(nn.Sequential(Block(), Keeping(dropout=0.0), Sparing(bias=False))))
    report = convert(model)
    assert [(e.name, e.class_name, e.kind, e.became) for e in report.converted] == [
        (f"{i}.attention", "MultiheadAttention", "attention", "attention, keep=('out',)") for i in range(3)
    ]
    for mode in (True, False):
        with fused_attentions() as calls:
            actual = step(model.train(mode), X)
        assert calls == [""] * 3
        assert_same(actual, step(stock.train(mode), X), 1e-5)
        with torch.no_grad():
            torch.testing.assert_close(model(X), stock(X), rtol=1e-5, atol=1e-5)


def test_everything_that_users_hold_stays():
    model = randomize(Block(dropout=0.3, add_zero_attn=True)).eval()
    model.attention.in_proj_weight.requires_grad_(False)
    model.attention.tag = 1
    stock, other = copy.deepcopy(model), Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attention, forward = model.attention, nn.MultiheadAttention.forward
    before = [(n, id(p), p.requires_grad) for n, p in model.named_parameters()], list(model.state_dict())
    convert(model)
    assert before == ([(n, id(p), p.requires_grad) for n, p in model.named_parameters()], list(model.state_dict()))
    assert model.attention is attention and attention.tag == 1 and not attention.training
    assert attention.dropout == 0.3 and attention.batch_first and attention.add_zero_attn
    assert isinstance(attention, nn.MultiheadAttention) and type(attention).__name__ == "MultiheadAttention"
    assert "fused_remat: attention, keep=('out',)" in repr(model) and nn.MultiheadAttention.forward is forward
    assert type(other.attention) is nn.MultiheadAttention and not other.attention._forward_pre_hooks
    stock.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(stock.state_dict(), strict=True)
    stock_optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    for seed in range(2):
        assert_same(step(model, X, seed=seed), step(stock, X, seed=seed), 1e-5)
        optimizer.step(), stock_optimizer.step()
    assert_same(dict(model.named_parameters()), dict(stock.named_parameters()), 1e-5)
    assert model.train().attention.training
    assert revert(model) == ["attention"] and type(model.attention) is nn.MultiheadAttention
    assert not model.attention._forward_pre_hooks and vars(model.attention).keys() == vars(other.attention).keys() | {
        "tag"
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"kdim": 6, "vdim": 4},
        {"batch_first": False, "add_bias_kv": True},
        {"bias": False, "add_zero_attn": True},
        {"dtype": torch.float64},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_settings_survive(settings):
    attention = randomize(nn.MultiheadAttention(8, 2, **settings))
    stock = copy.deepcopy(attention)
    convert(attention)
    dtype = settings.get("dtype", torch.float32)
    query, key, value = (torch.randn(5, 3, width, dtype=dtype) for width in (8, attention.kdim, attention.vdim))
    with fused_attentions() as calls:
        got = attention(query, key, value)
    assert len(calls) == 1
    for a, b in zip(got, stock(query, key, value), strict=True):
        torch.testing.assert_close(a, b, **({"rtol": 5e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {}))


def test_meta_attention():
    attention = nn.MultiheadAttention(8, 2, device="meta")
    assert len(convert(attention).converted) == 1
    assert all(p.is_meta for p in attention.parameters())


def test_hooks_fire_once():
    model, fired = randomize(Block()), []
    attention = model.attention
    attention.register_forward_pre_hook(lambda m, args, kwargs: fired.append("pre"), with_kwargs=True)
    attention.register_forward_hook(lambda m, args, out: fired.append("forward"))
    attention.register_full_backward_hook(lambda m, dx, dy: fired.append("backward"))
    attention.in_proj_weight.register_hook(lambda grad: fired.append("parameter"))
    assert len(convert(model).converted) == 1
    with fused_attentions() as calls:
        step(model, X)
    assert sorted(fired) == ["backward", "forward", "parameter", "pre"] and len(calls) == 1
    revert(model)
    assert len(attention._forward_pre_hooks) == 1


def test_forward_on_the_instance_is_left_alone():
    model = Block()
    model.attention.forward = lambda *args: (args[0], None)
    report = convert(model)
    assert report.skipped[0].reason == "has a forward of its own on the instance" and report.converted == []


def test_subclasses_are_left_alone():
    class Half(nn.MultiheadAttention):
        def forward(self, *args, **options):
            y, weights = super().forward(*args, **options)
            return y / 2, weights

    report = convert(nn.ModuleList([Half(8, 2), MultiheadAttention(8, 2)]))
    assert report.converted == []
    assert "a subclass of nn.MultiheadAttention that may compute something else" in report.skipped[0].reason
    assert report.skipped[1].reason == "is a fused_remat.MultiheadAttention"
    with pytest.raises(ValueError, match="a subclass of nn"):
        convert(Half(8, 2), strict=True)


class WithWeight(LowRank):
    """An adapter that still shows the weight of what it wraps, as PEFT's do."""

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)


CHANGES = {
    "adapter": lambda linear: WithWeight(linear),
    "hook": lambda linear: linear.register_forward_hook(lambda m, args, out: 2 * out) and linear,
    "weight norm": lambda linear: parametrizations.weight_norm(linear),
    "own forward": lambda linear: setattr(linear, "forward", lambda x: 2 * x) or linear,
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", CHANGES)
def test_an_output_projection_that_is_not_plain_runs_stock_code(how, when):
    model, stock = twins(randomize(Block()))
    if when == "after":
        assert len(convert(model).converted) == 1
    for changed in (model, stock):
        changed.attention.out_proj = CHANGES[how](changed.attention.out_proj)
        randomize(changed)
    if when == "before":
        report = convert(model)
        assert report.converted == [] and report.skipped[0].reason.startswith("out_proj ")
    with fused_attentions() as calls:
        actual = step(model, X)
    assert calls == []
    assert_same(actual, step(stock, X), 1e-6)


def test_parametrized_input_projection():
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    model, stock = twins(randomize(Block()))
    convert(model)
    for changed in (model, stock):
        parametrize.register_parametrization(changed.attention, "in_proj_weight", Doubled())
    assert_same(step(model, X), step(stock, X), 1e-5)
    report = convert(copy.deepcopy(stock))
    assert report.converted == [] and "a subclass of nn.MultiheadAttention" in report.skipped[0].reason


def test_subclassed_weights_and_patched_forward_run_stock_code(monkeypatch):
    class Tagged(nn.Parameter):
        pass

    model, stock = twins(randomize(Block()))
    convert(model)
    model.attention.in_proj_weight.__class__ = Tagged
    with fused_attentions() as calls:
        torch.testing.assert_close(model(X), stock(X))
    model.attention.in_proj_weight.__class__ = nn.Parameter
    monkeypatch.setattr(nn.MultiheadAttention, "forward", lambda self, x, key, value: (2 * x, None))
    with fused_attentions() as patched:
        assert torch.equal(model(X), 3 * X)
    assert calls == patched == []


def test_tied_attentions_are_converted_once():
    model = nn.ModuleDict({"a": Block(), "b": Block()})
    model["b"].attention = model["a"].attention
    stock = copy.deepcopy(randomize(model))
    assert [entry.name for entry in convert(model).converted] == ["a.attention"]
    assert model["a"].attention is model["b"].attention and len(list(model.parameters())) == 4

    def grads(modules):
        modules.zero_grad()
        modules["b"](modules["a"](X)).square().sum().backward()
        return {name: p.grad for name, p in modules.named_parameters()}

    assert_same(grads(model), grads(stock), 1e-5)
    again = convert(model)
    assert again.converted == [] and again.skipped[0].reason.startswith("already converted: attention, keep=('out',)")


def test_copies_and_pickles():
    model = randomize(Block(dropout=0.2)).eval()
    convert(model, keep=("q", "out"))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        with fused_attentions() as calls:
            assert torch.equal(copied(X), model(X))
        assert len(calls) == 2 and "keep=('q', 'out')" in repr(copied)
        assert revert(copied) == ["attention"] and type(copied.attention) is nn.MultiheadAttention
        assert not copied.attention._forward_pre_hooks


def test_rules_for_masks_hold_in_converted_layers():
    model, padding = randomize(Block()), torch.tensor([[False] * 5, [True] * 5, [False] * 5])
    convert(model)
    for training in (True, False):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                y, weights = model.attention.train(training)(X, X, X, key_padding_mask=padding)
                assert torch.equal(weights[1], torch.zeros(5, 5)) and y.isfinite().all()
                causal = model.attention(X, X, X, is_causal=True)[0]
                triangle = torch.ones(5, 5, dtype=torch.bool).triu(1)
                torch.testing.assert_close(causal, model.attention(X, X, X, attn_mask=triangle)[0])


@pytest.mark.parametrize(("cls", "thrown"), [(Block, True), (Indexing, True), (Keeping, False), (Sparing, False)])
def test_report_names_callers_that_throw_weights_away(cls, thrown):
    report = convert(nn.Sequential(cls()))
    note = f"makes weights that {cls.__name__} throws away; convert(..., need_weights=False) leaves them out"
    assert report.converted[0].note == (note if thrown else "")
    assert ("throws away" in str(report)) == thrown
    assert json.loads(json.dumps(report.to_dict()))["converted"][0]["note"] == report.converted[0].note
    assert convert(nn.Sequential(cls()), need_weights=False).converted[0].note == ""


def test_weights_that_nobody_wants_are_not_made():
    model, stock = twins(randomize(nn.Sequential(Block(), Indexing())))
    report = convert(model, need_weights=False)
    assert [entry.became for entry in report.converted] == ["attention, keep=('out',), no weights"] * 2
    assert_same(step(model, X), step(stock, X), 1e-5)
    assert model[0].attention(X, X, X)[1] is None
    model[0].attention.out_proj.register_forward_hook(lambda *args: None)
    assert model[0].attention(X, X, X)[1] is None
    with pytest.raises(TypeError, match="need_weights must be a bool, got None"):
        convert(Block(), need_weights=None)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.MultiheadAttention(6, 2), Plain()


@pytest.mark.parametrize(
    ("keep", "mlp", "attention"),
    [
        (None, (), ("out",)),
        ((), (), ()),
        (("up",), ("up",), ()),
        (("out", "up", "gate", "v"), ("up",), ("v", "out")),
        (0.5, 0.5, ("out",)),
        ({"mlp": 0.5}, 0.5, ("out",)),
        ({"attention": ()}, (), ()),
        ({"attention": ["k"], "mlp": ["up"]}, ("up",), ("k",)),
    ],
)
def test_keep_serves_both_kinds(keep, mlp, attention):
    became = [entry.became for entry in convert(Both(), keep=keep).converted]
    assert became == [f"attention, keep={attention}", f"mlp, gelu, keep={mlp}"]


@pytest.mark.parametrize(
    ("keep", "error", "message"),
    [
        (("hidden",), ValueError, r"keep names \['hidden'\], but a converted layer can keep 'up', 'gate', 'q'"),
        ({"norm": ()}, ValueError, r"keep has \['norm'\], but the kinds of layers are 'mlp', 'attention'"),
        ({"attention": ("up",)}, ValueError, r"keep names \['up'\], but an attention can keep 'q', 'k', 'v', 'out'"),
        ({"attention": 0.5}, TypeError, "keep must be a tuple of residual names, got 0.5"),
        ({"mlp": ("out",)}, ValueError, r"keep names \['out'\], but a gated MLP can keep"),
        ({"mlp": 1.5}, ValueError, "keep as a fraction"),
        ("out", TypeError, "keep must be a tuple of residual names or a float"),
    ],
)
def test_bad_keep_is_named(keep, error, message):
    model = Both()
    with pytest.raises(error, match=message):
        convert(model, keep=keep)
    assert type(model.attention) is nn.MultiheadAttention


def test_a_report_undoes_its_own_conversion_only():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    mlp = convert(model, exclude="self_attn")
    assert mlp.count("mlp") == 1 and mlp.count("attention") == 0
    attention = convert(model, include="self_attn")
    with fused_attentions() as attentions, fused_calls() as mlps:
        model(X)
    assert (len(attentions), len(mlps)) == (1, 1)
    assert mlp.revert() == ["", "norm1", "norm2"] and type(model) is nn.TransformerEncoderLayer
    with fused_attentions() as attentions, fused_calls() as mlps:
        model(X)
    assert (len(attentions), len(mlps)) == (1, 0)
    assert attention.revert() == ["self_attn"] and attention.revert() == []


def test_compiles_without_a_graph_break():
    model, stock = twins(randomize(nn.Sequential(Block(), Sparing())))
    convert(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same({k.replace("_orig_mod.", ""): v for k, v in step(compiled, X).items()}, step(stock, X), 1e-5)


@pytest.mark.skipif(ops.ready() is not None, reason="only compiled operators save memory")
@pytest.mark.parametrize("mode", [True, False])
def test_kept_bytes(mode):
    x = torch.randn(4, 128, 64)
    model = nn.MultiheadAttention(64, 4, batch_first=True).train(mode)

    def kept(need_weights=False):
        return sum(
            nbytes for _, nbytes in kept_shapes(lambda x: model(x, x, x, need_weights=need_weights)[0], x, model)
        )

    assert kept() > 5 * 131072 and kept(need_weights=True) > 13 * 131072
    convert(model)
    assert kept() <= 2 * 131072 + 4 * 4 * 128 * 4
    revert(model)
    convert(model, keep=())
    assert kept() <= 131072 + 4 * 4 * 128 * 4
