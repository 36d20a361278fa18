"""MultiheadAttention in every mode: masks, empty rows, causality, dropout, empty inputs, gradients, compile."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from convert_cases import kept_shapes, randomize
from mlp_cases import kernels_of
from multihead_module_cases import BACKENDS
from torch import nn

import fused_remat
from fused_remat import MultiheadAttention, ops

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = list(itertools.product([True, False], [True, False], [True, False]))  # training, grad, need_weights


@pytest.fixture(params=BACKENDS)
def backend(request):
    with fused_remat.backend(request.param):
        yield request.param


def pair(*args, **settings) -> tuple[MultiheadAttention, nn.MultiheadAttention]:
    """Ours and stock, with the same random parameters."""
    ours, stock = MultiheadAttention(*args, **settings), nn.MultiheadAttention(*args, **settings)
    stock.load_state_dict(randomize(ours).state_dict())
    return ours, stock


def in_mode(module, mode, *inputs, **options):
    training, grad, need_weights = mode
    with torch.set_grad_enabled(grad):
        return module.train(training)(*inputs, need_weights=need_weights, **options)


def naive(module: nn.MultiheadAttention, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Self-attention of x [B, L, E], batch first, with `bias` added to the scores [B, H, L, L]."""
    qkv = x @ module.in_proj_weight.T + module.in_proj_bias
    q, k, v = (t.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for t in qkv.chunk(3, -1))
    p = (q @ k.transpose(-1, -2) / math.sqrt(module.head_dim) + bias).softmax(-1)
    return module.out_proj((p @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("mode", MODES)
def test_padded_sample_gives_the_bias_and_leaves_the_others_alone(backend, mode):
    module = randomize(MultiheadAttention(16, 2, batch_first=True))
    x = torch.randn(2, 4, 16)
    padding = torch.tensor([[False] * 4, [True] * 4])
    y, weights = in_mode(module, mode, x, x, x, key_padding_mask=padding)
    torch.testing.assert_close(y[1], module.out_proj.bias.expand(4, 16), rtol=0, atol=1e-6)
    alone, weights_alone = in_mode(module, mode, x[:1], x[:1], x[:1])
    torch.testing.assert_close(y[:1], alone, rtol=1e-5, atol=1e-6)
    if mode[2]:
        assert torch.equal(weights[1], torch.zeros(4, 4))
        torch.testing.assert_close(weights[:1], weights_alone, rtol=1e-5, atol=1e-6)
    if mode[1]:
        parameters = list(module.parameters())
        gradients = torch.autograd.grad(y[0].square().sum(), parameters)
        expected = torch.autograd.grad(alone.square().sum(), parameters)
        for got, want in zip(gradients, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_head_that_is_masked_out_adds_nothing(backend, mode):
    module = randomize(MultiheadAttention(6, 3, batch_first=True))
    x = torch.randn(2, 5, 6)
    mask = torch.zeros(2, 3, 5, 5, dtype=torch.bool)
    mask[:, 1] = True
    y, weights = in_mode(module, mode, x, x, x, attn_mask=mask.flatten(0, 1), average_attn_weights=False)
    without = copy.deepcopy(module)
    with torch.no_grad():
        without.out_proj.weight[:, 2:4] = 0
    expected, expected_weights = in_mode(without, mode, x, x, x, average_attn_weights=False)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    if mode[2]:
        assert torch.equal(weights[:, 1], torch.zeros(2, 5, 5))
        torch.testing.assert_close(weights[:, [0, 2]], expected_weights[:, [0, 2]], rtol=1e-5, atol=1e-6)
    if mode[1]:
        y.square().sum().backward()
        assert all(p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("kind", ["bias per head", "mask per head and padding"])
def test_masks_mean_the_same_in_every_mode(backend, kind):
    module = randomize(MultiheadAttention(16, 4, batch_first=True))
    x, options = torch.randn(2, 8, 16), {}
    if kind == "bias per head":
        bias = torch.randn(8, 8, 8)
        options["attn_mask"], total = bias, bias.view(2, 4, 8, 8)
    else:
        mask = torch.rand(8, 8, 8) < 0.4
        mask[:, :, 0] = False
        padding = torch.zeros(2, 8, dtype=torch.bool)
        padding[1, 6:] = True
        options |= {"attn_mask": mask, "key_padding_mask": padding}
        total = torch.zeros(2, 4, 8, 8).masked_fill(mask.view(2, 4, 8, 8) | padding.view(2, 1, 1, 8), -math.inf)
    expected = naive(module, x, total)
    for mode in MODES:
        torch.testing.assert_close(in_mode(module, mode, x, x, x, **options)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 7), (7, 3)])
def test_causal_flag_is_the_top_left_triangle(backend, mode, padded, lengths):
    module = randomize(MultiheadAttention(8, 2, batch_first=True))
    query, key = torch.randn(2, lengths[0], 8), torch.randn(2, lengths[1], 8)
    options = {"key_padding_mask": torch.arange(lengths[1]).expand(2, -1) >= lengths[1] - 1} if padded else {}
    causal = in_mode(module, mode, query, key, key, is_causal=True, **options)
    triangle = torch.ones(lengths, dtype=torch.bool).triu(1)
    masked = in_mode(module, mode, query, key, key, attn_mask=triangle, **options)
    unmasked = in_mode(module, mode, query, key, key, **options)
    for got, want in zip(causal, masked, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert (causal[0] - unmasked[0]).abs().max() > 1e-2


@pytest.mark.parametrize("mode", MODES)
def test_causal_hint_does_not_change_what_the_mask_says(mode):
    module = randomize(MultiheadAttention(8, 2, batch_first=True))
    x = torch.randn(2, 5, 8)
    for mask in (torch.rand(5, 5) < 0.3, torch.randn(5, 5), torch.ones(5, 5, dtype=torch.bool).triu(1)):
        hinted = in_mode(module, mode, x, x, x, attn_mask=mask, is_causal=True)[0]
        assert torch.equal(hinted, in_mode(module, mode, x, x, x, attn_mask=mask)[0])


def test_padding_of_any_kind_joins_the_causal_mask(backend):
    module = randomize(MultiheadAttention(16, 2, batch_first=True))
    x = torch.randn(2, 6, 16)
    padding, triangle = torch.zeros(2, 6, dtype=torch.bool), torch.ones(6, 6, dtype=torch.bool).triu(1)
    padding[0, 4:] = True

    def added(mask):
        return torch.zeros(mask.shape).masked_fill(mask, -math.inf)

    for need_weights in (False, True):
        ys = [
            module(x, x, x, key_padding_mask=p, attn_mask=m, need_weights=need_weights)[0]
            for p, m in ((padding, triangle), (added(padding), added(triangle)), (padding, added(triangle)))
        ]
        ys.append(module(x, x, x, attn_mask=triangle, need_weights=need_weights)[0])
        assert (ys[0] - ys[1]).abs().max() < 1e-6 and (ys[0] - ys[2]).abs().max() < 1e-6
        assert (ys[0][0] - ys[3][0]).abs().max() > 1e-2
        numbers = torch.randn(2, 6)
        as_padding = module(x, x, x, key_padding_mask=numbers, need_weights=need_weights)[0]
        spread = numbers[:, None, None].expand(2, 2, 6, 6).flatten(0, 1)
        as_mask = module(x, x, x, attn_mask=spread, need_weights=need_weights)[0]
        torch.testing.assert_close(as_padding, as_mask, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("first", [True, False])
def test_empty_batch_keys_and_queries(backend, first):
    ours, stock = pair(8, 2, batch_first=first)

    def shaped(batch, length):
        return torch.randn((batch, length, 8) if first else (length, batch, 8))

    x = shaped(0, 5)
    y, weights = ours(x, x, x)
    assert y.shape == x.shape and weights.shape == (0, 5, 5)
    y.sum().backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in ours.parameters())
    query, key = shaped(2, 3), shaped(2, 0)
    for need_weights in (True, False):
        y = ours(query, key, key, need_weights=need_weights)[0]
        torch.testing.assert_close(y, ours.out_proj.bias.expand_as(query), rtol=0, atol=0)
        torch.testing.assert_close(y, stock(query, key, key, need_weights=need_weights)[0])
    query, key = shaped(2, 0), shaped(2, 3)
    assert ours(query, key, key)[0].shape == query.shape and ours(query, key, key)[1].shape == (2, 0, 3)


@pytest.mark.parametrize("first", [True, False])
def test_dropout_is_off_in_evaluation(backend, first):
    ours, stock = pair(8, 2, dropout=0.5, batch_first=first)
    x = torch.randn(5, 5, 8)
    ours.eval(), stock.eval()
    want = stock(x, x, x)[0]
    assert torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])
    torch.testing.assert_close(ours(x, x, x)[0], want, rtol=1e-5, atol=1e-6)
    for module in (ours, stock):
        module(x, x, x)[0].square().sum().backward()
    for p, q in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)


def test_dropout_is_unbiased_and_repeats_by_seed(backend):
    module = randomize(MultiheadAttention(8, 2, dropout=0.5, batch_first=True))
    x = torch.randn(1, 5, 8)
    many = x.expand(600, 5, 8)
    torch.manual_seed(3)
    y, weights = module(many, many, many, average_attn_weights=False)
    torch.manual_seed(3)
    assert torch.equal(module(many, many, many)[0], y)
    assert not torch.equal(module(many, many, many)[0], y)
    kept = weights != 0
    assert abs(kept.double().mean() - 0.5) < 4 * 0.5 / weights.numel() ** 0.5
    want, probabilities = module.eval()(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(weights, torch.where(kept, 2 * probabilities, 0.0), rtol=1e-4, atol=1e-6)
    assert ((y.mean(0) - want[0]).norm() / y.std(0).norm()) < 4 / 600**0.5


def test_dropped_weights_are_those_that_made_the_output(backend):
    module = randomize(MultiheadAttention(4, 2, dropout=0.4, batch_first=True))
    x = torch.randn(3, 6, 4)
    y, weights = module(x, x, x, average_attn_weights=False)
    v = (x @ module.in_proj_weight[8:].T + module.in_proj_bias[8:]).unflatten(-1, (2, 2)).transpose(1, 2)
    torch.testing.assert_close(y, module.out_proj((weights @ v).transpose(1, 2).flatten(2)), rtol=1e-5, atol=1e-5)


def test_dropping_everything_is_stocks_answer():
    ours, _ = pair(8, 2, dropout=1.0)
    x = torch.randn(5, 2, 8)
    y, weights = ours(x, x, x)
    torch.testing.assert_close(y, ours.out_proj.bias.expand_as(y))
    assert torch.equal(weights, torch.zeros(2, 5, 5))


def test_evaluation_between_forward_and_backward_changes_nothing(backend):
    module, x, gradients = randomize(MultiheadAttention(8, 2, dropout=0.5)), torch.randn(5, 2, 8), []
    for switch in (False, True):
        torch.manual_seed(5)
        module.train().zero_grad()
        y, _ = module(x, x, x, need_weights=False)
        module.train(not switch)
        y.sum().backward()
        gradients.append([p.grad.clone() for p in module.parameters()])
    assert all(map(torch.equal, *gradients))


def test_weights_train_behind_a_frozen_input(backend):
    ours, stock = pair(8, 2)
    x = torch.randn(5, 2, 8)
    for training in (True, False):
        for module in (ours, stock):
            module.train(training).zero_grad()
            y = module(x, x, x, need_weights=False)[0]
            assert y.requires_grad
            y.square().sum().backward()
        for p, q in zip(ours.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert not ours(x, x, x)[0].requires_grad


def test_frozen_parameters_in_every_combination(backend):
    ours, stock = pair(4, 2, dtype=torch.float64)
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    for chosen in itertools.product([False, True], repeat=5):
        results = []
        for module in (ours, stock):
            leaf = x.clone().requires_grad_(chosen[0])
            for parameter, trainable in zip(module.parameters(), chosen[1:], strict=True):
                parameter.requires_grad_(trainable).grad = None
            y = module(leaf, leaf, leaf, need_weights=False)[0]
            assert y.requires_grad == any(chosen)
            if y.requires_grad:
                y.square().sum().backward()
            results.append([leaf.grad, *(p.grad for p in module.parameters())])
        for got, want, wanted in zip(*results, chosen, strict=True):
            assert (got is not None) == (want is not None) == wanted
            if wanted:
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_second_backward_through_one_graph(backend):
    module = randomize(MultiheadAttention(8, 2))
    x = torch.randn(5, 2, 8, requires_grad=True)
    y = module(x, x, x)[0].square().sum()
    (dx,) = torch.autograd.grad(y, x, retain_graph=True)
    y.backward(retain_graph=True)
    assert torch.equal(x.grad, dx)
    once = [p.grad.clone() for p in module.parameters()]
    y.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(module.parameters(), once, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


@pytest.mark.parametrize("need_weights", [True, False])
def test_per_sample_gradients(need_weights):
    module = randomize(MultiheadAttention(8, 2, dtype=torch.float64))
    parameters, xs = dict(module.named_parameters()), torch.randn(3, 5, 8, dtype=torch.float64)

    def loss(parameters, x):
        y, weights = torch.func.functional_call(module, parameters, (x, x, x), {"need_weights": need_weights})
        return y.square().sum() + (weights.square().sum() if need_weights else 0.0)

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, xs)
    for i, x in enumerate(xs):
        module.zero_grad()
        loss(parameters, x).backward()
        for name, parameter in parameters.items():
            torch.testing.assert_close(per_sample[name][i], parameter.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("need_weights", [True, False])
def test_second_derivatives(backend, need_weights):
    module = randomize(MultiheadAttention(4, 2, dtype=torch.float64))
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def call(x, mask, *parameters):
        named = dict(zip(dict(module.named_parameters()), parameters, strict=True))
        options = {"attn_mask": mask, "need_weights": need_weights}
        results = torch.func.functional_call(module, named, (x, x, x), options)
        return results if need_weights else results[0]

    inputs = (x, mask, *module.parameters())
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("need_weights", [True, False])
def test_autocast_computes_in_its_dtype_and_returns_gradients_in_theirs(backend, need_weights):
    ours, stock = pair(32, 4, batch_first=True)
    x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1))
    padding = torch.arange(16).expand(4, 16) > 12

    def results(module, enabled):
        leaf = x.clone().requires_grad_()
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = module(leaf, leaf, leaf, key_padding_mask=padding, need_weights=need_weights)[0]
        assert y.dtype == (torch.bfloat16 if enabled else torch.float32)
        y.float().square().mean().backward()
        return [y.float(), leaf.grad, *(p.grad for p in module.parameters())]

    for got, want, truth in zip(results(ours, True), results(stock, True), results(stock, False), strict=True):
        assert got.dtype == torch.float32 and truth.abs().max() > 1e-4
        assert (got - truth).norm() <= 1.5 * (want - truth).norm() + 1e-3 * truth.norm()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_compiles_without_a_graph_break(first, need_weights):
    ours, stock = pair(8, 2, batch_first=first)
    x = torch.randn(3, 5, 8)
    mask = torch.rand((5 if first else 3,) * 2) < 0.2
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for module in (compiled, stock):
        y, weights = module(x, x, x, attn_mask=mask, need_weights=need_weights)
        (y.square().sum() + (weights.square().sum() if need_weights else 0.0)).backward()
    torch.testing.assert_close(compiled(x, x, x, attn_mask=mask)[0], stock(x, x, x, attn_mask=mask)[0])
    for p, q in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(ops.ready() is not None, reason="only compiled operators save memory")
@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_keeps_input_output_and_one_number_per_query_and_head(mode, first):
    x = torch.randn(4, 128, 64) if first else torch.randn(128, 4, 64)
    mask = torch.zeros(128, 128, dtype=torch.bool).triu(1)

    def kept(keep, **options):
        module = MultiheadAttention(64, 4, batch_first=first, keep=keep).train(mode)
        return sorted(nbytes for _, nbytes in kept_shapes(lambda x: module(x, x, x, **options)[0], x, module))

    lse, u = 4 * 4 * 128 * 4, x.numel() * 4
    assert kept(("out",), need_weights=False) == [lse, u, u]
    assert kept((), need_weights=False) == [lse, u]
    assert kept(("q", "k", "v", "out"), need_weights=False) == [lse, u, u, u, u, u]
    assert kept(("out",), need_weights=True) == [lse, u, u]
    assert kept(("out",), need_weights=False, attn_mask=mask) == [lse, 128 * 128, u, u]


@pytest.mark.skipif(ops.ready() is not None, reason="only compiled operators can be told apart")
def test_one_fused_call_runs(backend):
    module, x = randomize(MultiheadAttention(8, 2)), torch.randn(5, 2, 8)
    ran = kernels_of(lambda: module(x, x, x)[0].sum().backward())
    wanted = {"multi_head_attention_fwd", "multi_head_attention_bwd"}
    assert wanted <= set(ran) if backend != "reference" else not ran
    assert ran.count("multi_head_attention_fwd") == (backend != "reference")
