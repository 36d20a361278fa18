"""MultiheadAttention in the place of nn.MultiheadAttention: construction, state, nn.Transformer, odd parts, errors."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
import warnings

import pytest
import torch
from convert_cases import LowRank, ScaledLinear, assert_same, randomize, step
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import fused_remat
from fused_remat import MultiheadAttention, functional

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
]

SETTINGS = [
    {"kdim": kdim, "vdim": vdim, "bias": bias, "add_bias_kv": bias_kv}
    for kdim, vdim, bias, bias_kv in itertools.product([None, 12], [None, 20, 24], [True, False], [True, False])
]


@pytest.fixture
def calls(monkeypatch):
    """Grows by one per fused call."""
    made, original = [], functional.multi_head_attention
    monkeypatch.setattr(functional, "multi_head_attention", lambda *a, **k: made.append(1) or original(*a, **k))
    return made


def as_ours(module: nn.Module, **more) -> nn.Module:
    """A copy of a stock model whose attentions are ours, with the same weights."""
    copied = copy.deepcopy(module)
    for parent in list(copied.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.MultiheadAttention:
                ours = MultiheadAttention(
                    child.embed_dim, child.num_heads, child.dropout, child.in_proj_bias is not None,
                    batch_first=child.batch_first, dtype=child.out_proj.weight.dtype, **more,
                ).train(child.training)  # fmt: skip
                ours.load_state_dict(child.state_dict())
                setattr(parent, name, ours)
    return copied


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_initial_values_and_state_are_stocks(settings):
    torch.manual_seed(7)
    stock = nn.MultiheadAttention(24, 3, 0.1, **settings)
    after = torch.rand(1)
    torch.manual_seed(7)
    ours = MultiheadAttention(24, 3, 0.1, **settings)
    assert torch.equal(torch.rand(1), after)
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in stock.named_modules()]
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), stock.parameters(), strict=True))
    stock.load_state_dict(randomize(ours).state_dict(), strict=True)
    ours.load_state_dict(randomize(stock, seed=2).state_dict(), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), stock.parameters(), strict=True))
    public = {name for name in vars(stock) if not name.startswith("_") or name == "_qkv_same_embed_dim"}
    assert {name: vars(ours)[name] for name in public} == {name: vars(stock)[name] for name in public}


def test_devices_dtypes_and_repr():
    module = MultiheadAttention(8, 2, device="meta", dtype=torch.bfloat16, keep=("out", "q"))
    assert module.in_proj_weight.is_meta and module.out_proj.weight.dtype == torch.bfloat16
    assert module.keep == ("q", "out") and "keep=('q', 'out')" in repr(module)
    assert "strict=True" in repr(MultiheadAttention(8, 2, strict=True))
    assert isinstance(module, nn.MultiheadAttention) and fused_remat.nn.MultiheadAttention is MultiheadAttention


@pytest.mark.parametrize("first", [True, False])
def test_outputs_are_contiguous(first):
    module, x = MultiheadAttention(8, 2, batch_first=first), torch.randn(5, 3, 8)
    for training in (True, False):
        assert module.train(training)(x, x, x)[0].is_contiguous()


@pytest.mark.parametrize("strict", [False, True])
def test_copies_and_pickles(strict):
    module = randomize(MultiheadAttention(8, 2, 0.3, batch_first=True, keep=("q",), strict=strict)).eval()
    module.tag = "mine"
    file, x = io.BytesIO(), torch.randn(3, 5, 8)
    torch.save(module, file)
    file.seek(0)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        assert torch.equal(copied(x, x, x)[0], module(x, x, x)[0])
        assert copied.keep == ("q",) and copied.strict == strict and not copied.training and copied.tag == "mine"


def test_state_of_an_older_stock_module():
    module = MultiheadAttention.__new__(MultiheadAttention)
    state = vars(nn.MultiheadAttention(8, 2)).copy()
    del state["_qkv_same_embed_dim"]
    module.__setstate__(state)
    x = torch.randn(5, 3, 8)
    assert module._qkv_same_embed_dim and module.keep == ("out",) and module(x, x, x)[0].shape == x.shape


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_in_encoder_and_decoder_layers(norm_first, first, training, grad, calls):
    settings = {"dropout": 0.0, "batch_first": first, "norm_first": norm_first, "dtype": torch.float64}
    x, memory = (torch.randn(3, 5, 8, dtype=torch.float64) for _ in range(2))
    lengths = (3, 5) if first else (5, 3)
    padding = torch.zeros(lengths, dtype=torch.bool)
    padding[1, 3:] = True
    causal = torch.ones(lengths[1], lengths[1], dtype=torch.bool).triu(1)
    encoder = randomize(nn.TransformerEncoderLayer(8, 2, 16, **settings)).train(training)
    decoder = randomize(nn.TransformerDecoderLayer(8, 2, 16, **settings)).train(training)
    with torch.set_grad_enabled(grad):
        for options in ({}, {"src_key_padding_mask": padding}, {"src_mask": causal, "is_causal": True}):
            torch.testing.assert_close(as_ours(encoder)(x, **options), encoder(x, **options), rtol=1e-9, atol=1e-9)
        options = {"tgt_mask": causal, "tgt_is_causal": True, "memory_key_padding_mask": padding}
        torch.testing.assert_close(as_ours(decoder)(x, memory, **options), decoder(x, memory, **options))
    assert len(calls) == 3 + 2


def test_encoder_layer_in_evaluation_gives_no_nan(calls):
    layer = as_ours(randomize(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval())
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [True] * 5])
    y = layer(x, src_key_padding_mask=padding)
    with torch.no_grad():
        assert torch.equal(layer(x, src_key_padding_mask=padding), y)
    assert y.isfinite().all() and len(calls) == 2


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_in_a_whole_encoder(training, nested):
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    stock = randomize(nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)).train(training)
    ours, x, padding = as_ours(stock), torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            for options in ({}, {"src_key_padding_mask": padding}):
                torch.testing.assert_close(ours(x, **options), stock(x, **options), rtol=1e-5, atol=1e-5)
    padding[2] = True
    with torch.no_grad():
        assert ours(x, src_key_padding_mask=padding).isfinite().all()


def test_whole_transformer_trains_like_stock():
    settings = {"batch_first": True, "norm_first": True, "dtype": torch.float64, "dropout": 0.0}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor is True")
        stock = randomize(nn.Transformer(8, 2, 2, 2, 16, **settings))
    ours, x, y = as_ours(stock), torch.randn(2, 4, 8, dtype=torch.float64), torch.randn(2, 5, 8, dtype=torch.float64)
    assert_same(step(ours, x, y), step(stock, x, y), 1e-9)


def not_plain(module: MultiheadAttention, how: str) -> MultiheadAttention:
    if how == "adapter":
        module.out_proj = randomize(LowRank(module.out_proj), seed=5)
    elif how == "subclass":
        scaled = ScaledLinear(8, 8, dtype=torch.float64)
        scaled.load_state_dict(module.out_proj.state_dict())
        module.out_proj = scaled
    elif how == "weight norm":
        parametrizations.weight_norm(module.out_proj)
    elif how == "hook":
        module.out_proj.register_forward_hook(lambda module, args, output: output * 2)
    elif how == "pre-hook":
        module.out_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    elif how == "own forward":
        weight = module.out_proj.weight
        module.out_proj.forward = lambda x: nn.functional.linear(x, weight) * 3
    return module


class WrittenOut(nn.Module):
    """Self-attention in batch-first products that calls `out_proj`, on the children of `module`."""

    def __init__(self, module: MultiheadAttention) -> None:
        super().__init__()
        self.module = module

    def forward(self, x):
        module = self.module
        q, k, v = (x @ module.in_proj_weight.T + module.in_proj_bias).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        p = (q @ k.transpose(-1, -2) / 2).softmax(-1)
        return module.out_proj((p @ v).transpose(1, 2).flatten(2))


class SelfAttention(nn.Module):
    def __init__(self, module: MultiheadAttention) -> None:
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x, x, x)


@pytest.mark.parametrize("how", ["plain", "adapter", "subclass", "weight norm", "hook", "pre-hook", "own forward"])
@pytest.mark.parametrize("training", [True, False])
def test_an_output_projection_that_is_not_plain_is_called(how, training):
    module = not_plain(randomize(MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)), how).train(training)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    actual = step(SelfAttention(module), x)
    assert_same(actual, step(WrittenOut(module), x), 1e-10)
    if how == "adapter":
        assert actual["dmodule.out_proj.a.weight"].abs().max() > 1e-3


def test_a_backward_hook_on_the_output_projection_fires():
    module, x, fired = randomize(MultiheadAttention(8, 2)), torch.randn(5, 2, 8), []
    module.out_proj.register_full_backward_hook(lambda *args: fired.append(1))
    module(x, x, x)[0].sum().backward()
    assert fired == [1]


def test_parametrized_input_projection_trains():
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    x = torch.randn(5, 2, 8)
    plain, doubled = randomize(MultiheadAttention(8, 2)), randomize(MultiheadAttention(8, 2))
    parametrize.register_parametrization(doubled, "in_proj_weight", Doubled())
    with torch.no_grad():
        plain.in_proj_weight *= 2
    for module in (plain, doubled):
        module(x, x, x)[0].square().sum().backward()
    original = doubled.parametrizations.in_proj_weight.original
    torch.testing.assert_close(original.grad, 2 * plain.in_proj_weight.grad)


def test_hooks_on_the_module_fire_once():
    module, x, fired = randomize(MultiheadAttention(8, 2)), torch.randn(5, 2, 8, requires_grad=True), []
    module.register_forward_pre_hook(lambda m, args, kwargs: fired.append("pre"), with_kwargs=True)
    module.register_forward_hook(lambda m, args, out: fired.append("forward"))
    module.register_full_backward_hook(lambda m, dx, dy: fired.append("backward"))
    module.in_proj_weight.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))
    module(x, x, x, need_weights=False)[0].sum().backward()
    assert sorted(fired) == ["accumulated", "backward", "forward", "pre"]


def test_masks_are_not_expanded(monkeypatch):
    seen = []
    original = functional.multi_head_attention

    def watched(*args, attn_mask, key_padding_mask, **options):
        seen.append((attn_mask, key_padding_mask))
        return original(*args, attn_mask=attn_mask, key_padding_mask=key_padding_mask, **options)

    monkeypatch.setattr(functional, "multi_head_attention", watched)
    module, x = MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 5, 8)
    mask = torch.rand(5, 5) < 0.3
    module(x, x, x, attn_mask=mask)
    module(x, x, x, attn_mask=mask.expand(6, 5, 5))
    module(x, x, x, attn_mask=torch.zeros(5, 5).expand(6, 5, 5), key_padding_mask=torch.zeros(3, 5))
    sizes = [mask.untyped_storage().nbytes() for mask, _ in seen]
    assert sizes == [25, 25, 100] and seen[1][0].shape == (1, 1, 5, 5) and seen[2][0].shape == (3, 2, 5, 5)
    assert seen[2][1].shape == (3, 5)


def test_strict_gives_stocks_nan_and_errors():
    ours, x = randomize(MultiheadAttention(8, 2, batch_first=True, strict=True)), torch.randn(2, 5, 8)
    stock = nn.MultiheadAttention(8, 2, batch_first=True)
    stock.load_state_dict(ours.state_dict())
    padding = torch.tensor([[False] * 5, [True] * 5])
    hidden = torch.zeros(4, 5, 5).masked_fill(torch.arange(4).view(4, 1, 1) == 2, -math.inf)
    triangle = torch.ones(5, 5, dtype=torch.bool).triu(1)
    nans = 0
    for options, training, grad, need_weights in itertools.product(
        ({"key_padding_mask": padding}, {"attn_mask": hidden}, {"attn_mask": triangle}, {"attn_mask": ~triangle},
         {"attn_mask": torch.rand(5, 5) < 0.3, "is_causal": True}),
        *[(True, False)] * 3,
    ):  # fmt: skip
        with torch.set_grad_enabled(grad):
            got, want = (m.train(training)(x, x, x, need_weights=need_weights, **options) for m in (ours, stock))
        for a, b in zip(got, want, strict=True):
            if b is not None:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
                nans += b.isnan().any().item()
    assert nans > 8
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        ours.train()(x, x, x, is_causal=True)
    with pytest.raises(AssertionError, match="embedding dimension"):
        ours(*[torch.randn(2, 5, 7)] * 3)
    with pytest.raises(RuntimeError):
        ours(x, x, x, attn_mask=torch.zeros(5, 5, dtype=torch.float64))


def test_strict_runs_fused_wherever_stock_agrees(calls):
    ours, x = MultiheadAttention(8, 2, strict=True), torch.randn(5, 2, 8)
    padding = torch.tensor([[False] * 5, [True] * 4 + [False]])
    ours(x, x, x)
    ours(x, x, x, key_padding_mask=padding, attn_mask=torch.zeros(5, 5))
    assert len(calls) == 2
    ours(x, x, x, key_padding_mask=~padding)
    assert len(calls) == 2


X, XB, UNBATCHED = torch.randn(5, 2, 8), torch.randn(2, 5, 8), torch.randn(5, 8)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"embed_dim": 0}, ValueError, "greater than 0"),
        ({"num_heads": 3}, AssertionError, "divisible"),
        ({"dropout": 1.5}, ValueError, r"dropout must be a number in \[0, 1\], got 1.5"),
        ({"dropout": "0.1"}, ValueError, "dropout must be"),
        ({"keep": ("hidden",)}, ValueError, r"keep names \['hidden'\], but MultiheadAttention can keep 'q', 'k', 'v'"),
        ({"keep": "out"}, TypeError, "keep must be a tuple"),
        ({"keep": 0.5}, TypeError, "keep must be a tuple"),
    ],
)
def test_bad_settings_are_named(settings, error, message):
    with pytest.raises(error, match=message):
        MultiheadAttention(**{"embed_dim": 8, "num_heads": 2} | settings)


@pytest.mark.parametrize(
    ("inputs", "options", "error", "message"),
    [
        ((None, X, X), {}, TypeError, "query must be a tensor, got NoneType"),
        ((X, X, X), {"attn_mask": [[True]]}, TypeError, "attn_mask must be a tensor or None, got list"),
        ((X[None], X, X), {}, ValueError, r"query must be \[length, features\] or \[length, B, features\]"),
        ((X, X[0], X), {}, ValueError, r"key must have 3 dims, as query has, got \[2, 8\]"),
        ((X[..., :7], X, X), {}, ValueError, "query has 7 features in its last dim, but embed_dim is 8"),
        ((X, X[..., :7], X), {}, ValueError, "key has 7 features in its last dim, but kdim is 8"),
        ((X, X, X[..., :7]), {}, ValueError, "value has 7 features in its last dim, but vdim is 8"),
        ((X, X, X[:4]), {}, ValueError, "key and value must have the same length and batch size"),
        ((X, X[:, :1], X[:, :1]), {}, ValueError, "query and key must have the same batch size.*batch_first is False"),
        (
            (X, X, X),
            {"key_padding_mask": torch.zeros(5, 2)},
            ValueError,
            r"key_padding_mask must be \[B, S\] = \[2, 5\]",
        ),
        ((X, X, X), {"key_padding_mask": torch.zeros(2, 5).int()}, TypeError, "must be bool .* got torch.int32"),
        ((X, X, X), {"attn_mask": torch.zeros(5, 5).long()}, TypeError, "attn_mask must be bool .* got torch.int64"),
        ((X, X, X), {"attn_mask": torch.zeros(1, 5, 5)}, ValueError, r"\[L, S\] = \[5, 5\].*= \[4, 5, 5\], got \[1, 5"),
        ((X, X, X), {"attn_mask": torch.zeros(2, 2, 5, 5)}, ValueError, r"attn_mask must be .* got \[2, 2, 5, 5\]"),
        ((UNBATCHED,) * 3, {"key_padding_mask": torch.zeros(1, 5)}, ValueError, r"must be \[S\] = \[5\]"),
        ((UNBATCHED,) * 3, {"attn_mask": torch.zeros(4, 5, 5)}, ValueError, r"\[num_heads, L, S\] = \[2, 5, 5\]"),
        ((X.double(),) * 3, {}, TypeError, "in_proj_weight is torch.float32, query is torch.float64"),
        ((X, X, X), {"attn_mask": torch.zeros(5, 5, device="meta")}, ValueError, "attn_mask is on meta, query on cpu"),
    ],
)
def test_bad_calls_are_named(inputs, options, error, message):
    with pytest.raises(error, match=message):
        MultiheadAttention(8, 2)(*inputs, **options)


def test_nested_tensors_outside_of_evaluation_fail_as_stocks_do():
    x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)])
    with pytest.raises(AssertionError, match="NestedTensor"):
        MultiheadAttention(8, 2, batch_first=True)(x, x, x)
