"""Backward hands over unrounded fp32 gradients where `Tensor.grad_dtype` asks for them."""

from __future__ import annotations

import mha_cases
import mlp_cases as cases
import pytest
import spy
import torch
from main_grad_cases import BF16, CASES, VIEWED, gradients, is_rounded, rounds_products
from torch import nn
from torch.utils.checkpoint import checkpoint

import fused_remat

pytestmark = pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension))


@pytest.mark.parametrize("name", CASES)
def test_rounding_is_all_that_differs(name):
    """The gradient that a parameter gets by default is the wide one, rounded once."""
    layer, (x, dy) = CASES[name].layer(), CASES[name].batches()[0]
    rounded = gradients(layer, x, dy)
    fused_remat.accumulate_in_fp32(layer)
    for parameter, wide in gradients(layer, x, dy).items():
        assert rounded[parameter].dtype == BF16 and wide.dtype == torch.float32
        assert torch.equal(wide.to(BF16), rounded[parameter]), parameter
        assert rounds_products or is_rounded(wide) == (parameter in VIEWED.get(name, ())), parameter


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
@pytest.mark.parametrize("rows", (40, 200), ids=("features", "tokens"))
def test_both_chunk_axes_in_many_chunks(rows, gated, backend):
    given = cases.operands(rows, 16, 48, gated=gated, dtype=BF16)
    budget = 8192
    axis, tile_rows, tile_features, _ = cases.plan(given, budget, backend)
    assert axis == ("features" if rows == 40 else "tokens")
    assert (tile_features < 48) if rows == 40 else (tile_rows < 200)
    dy = torch.randn(rows, 16).to(BF16)
    step = lambda: cases.gradients(cases.run(given, backend=backend, workspace=budget), given, dy)
    rounded = step()
    for t in given.values():
        t.grad_dtype = torch.float32
    for name, wide in step().items():
        assert wide.dtype == torch.float32 and torch.equal(wide.to(BF16), rounded[name]), name
        assert name == "x" or backend == "aten" or rounds_products or not is_rounded(wide), name
        assert name != "x" or is_rounded(wide), "the gradient of the input is rounded as always"


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize(
    "block",
    (
        mha_cases.Block(norm="layer_norm", qk_norm=True, bias_kv=True),
        mha_cases.Block(packed=False, model_k=4, model_v=3, length_k=7, out=5, kv_heads=1),
        mha_cases.Block(packed=False, blocked=True, ranks=(2, 3, 3, 2)),
    ),
    ids=("packed", "separate", "by heads, adapters"),
)
@pytest.mark.parametrize("budget", (None, 1), ids=("one-group", "least"))
def test_every_operand_of_an_attention_block(budget, block, backend):
    given = block.operands(BF16)
    dy = torch.randn(2, 5, block.out or 6).to(BF16)
    step = lambda: cases.gradients(block.call(given, backend=backend, workspace=budget), given, dy)
    rounded = step()
    for t in given.values():
        t.grad_dtype = torch.float32
    for name, wide in step().items():
        assert wide.dtype == torch.float32 and torch.equal(wide.to(BF16), rounded[name]), name
        if name in ("query", "key", "value"):
            assert is_rounded(wide), name
        elif backend == "cpp" and not rounds_products and wide.numel() > 8:
            assert not is_rounded(wide), name


def test_only_what_asks_for_it_is_wide():
    layer, (x, dy) = CASES["gated-features"].layer(), CASES["gated-features"].batches()[0]
    layer.up_proj.weight.grad_dtype = torch.float32
    layer.down_proj.weight.grad_dtype = None  # any dtype: stays as it is
    layer(x).backward(dy)
    dtypes = {name: p.grad.dtype for name, p in layer.named_parameters()}
    assert dtypes.pop("up_proj.weight") == torch.float32 and set(dtypes.values()) == {BF16}


def test_half_precision_and_autocast():
    layer = fused_remat.MLP(16, 48).half()
    fused_remat.accumulate_in_fp32(layer)
    layer(torch.randn(5, 16).half()).sum().backward()
    assert layer.fc1.weight.grad.dtype == torch.float32
    assert not torch.equal(layer.fc1.weight.grad, layer.fc1.weight.grad.half().float())
    layer = fused_remat.MLP(16, 48)
    with torch.autocast("cpu", dtype=BF16):
        y = layer(torch.randn(5, 16))
    expected = torch.autograd.grad(y, list(layer.parameters()), torch.ones_like(y), retain_graph=True)
    fused_remat.accumulate_in_fp32(layer)
    y.backward(torch.ones_like(y))
    assert all(torch.equal(p.grad, g) for p, g in zip(layer.parameters(), expected, strict=True))


@pytest.mark.parametrize("reentrant", (False, True), ids=("non-reentrant", "reentrant"))
def test_inside_a_checkpoint(reentrant):
    layer, (x, dy) = CASES["mlp-tokens"].layer(), CASES["mlp-tokens"].batches()[0]
    fused_remat.accumulate_in_fp32(layer)
    expected = gradients(layer, x, dy)
    checkpoint(layer, x.requires_grad_(), use_reentrant=reentrant).backward(dy)
    assert all(torch.equal(p.grad, expected[name]) for name, p in layer.named_parameters())


def test_create_graph_takes_the_reference_and_casts():
    layer, (x, dy) = CASES["mlp-features"].layer(), CASES["mlp-features"].batches()[0]
    fused_remat.accumulate_in_fp32(layer)
    (gradient,) = torch.autograd.grad(layer(x), [layer.fc1.weight], dy, create_graph=True)
    assert gradient.dtype == torch.float32 and gradient.requires_grad and is_rounded(gradient)


@pytest.mark.parametrize("name", ("mlp-features", "attention-packed"))
def test_a_compiled_layer_hands_over_rounded_gradients(name):
    """AOTAutograd traces backward without seeing grad_dtype: the sums are fp32, each term is rounded."""
    case = CASES[name]
    layer, (x, dy) = case.layer(), case.batches()[0]
    rounded = gradients(layer, x, dy)
    fused_remat.accumulate_in_fp32(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for times in (1, 2):
        compiled(x).backward(dy)
        for parameter, p in layer.named_parameters():
            assert p.grad.dtype == torch.float32
            assert torch.equal(p.grad, times * rounded[parameter].float()), parameter


@pytest.mark.parametrize("make", (lambda: fused_remat.MLP(16, 48), lambda: nn.Linear(16, 16)), ids=("ours", "stock"))
def test_compiled_autograd_refuses_loudly(make):
    """torch's compiled autograd assigns gradients of the parameter's dtype, to stock layers too."""
    layer = make().to(BF16)
    fused_remat.accumulate_in_fp32(layer)
    y = layer(torch.randn(5, 16).to(BF16))
    with (
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)),
        pytest.raises(RuntimeError, match="gradient with dtype 'c10::BFloat16' to a tensor with grad_dtype 'Float'"),
    ):
        y.sum().backward()


# The ops -------------------------------------------------------------------------------------------------------------


def _mlp_backward(wide: list[bool]) -> tuple:
    given = cases.operands(3, 4, 6, 5, gated=True, dtype=BF16, requires_grad=False)
    ones = torch.ones(4, dtype=BF16)
    layer = cases.op_layer(given, fused_remat.Norm("layer_norm", ones, ones))
    nothing = torch.empty(0, dtype=torch.int64)
    residual = torch.empty(3, 0, dtype=BF16)
    call = (given["x"], *layer, "silu", 0.0, 0, 0, 2000, "cpp", BF16, nothing, None, residual, residual)
    return (torch.randn(3, 5).to(BF16), *call, cases.output_mask(*[True] * 9), wide)


def test_opcheck_with_a_wide_mask():
    for flags in ([True] * 9, [False, True, False] * 3, [False] * 9):
        wide = cases.output_mask(*flags)
        results = torch.library.opcheck(torch.ops.fused_remat.mlp_bwd.default, _mlp_backward(wide))
        assert set(results.values()) == {"SUCCESS"}
        gradients = torch.ops.fused_remat.mlp_bwd(*_mlp_backward(wide))
        wanted = [torch.float32 if w and i else BF16 for i, w in enumerate(wide)]
        assert [g.dtype for g in gradients] == wanted


def test_opcheck_of_attention_with_a_wide_mask():
    block = mha_cases.Block(norm="layer_norm", qk_norm=True, bias_kv=True, mask="float")
    given = block.operands(BF16)
    with spy.watching() as calls:
        mha_cases.gradients(block.call(given), given, torch.randn(2, 5, 6).to(BF16))
    (arguments,) = (arguments for name, arguments in calls if name == "multi_head_attention_bwd")
    *rest, wanted, wide = arguments
    assert not any(wide) and wanted[19], "a mask has a gradient"
    op = torch.ops.fused_remat.multi_head_attention_bwd
    results = torch.library.opcheck(op.default, (*rest, wanted, wanted))
    assert set(results.values()) == {"SUCCESS"}
    for i, (gradient, wide) in enumerate(zip(op(*rest, wanted), op(*rest, wanted, wanted), strict=True)):
        assert gradient.dtype == BF16 and wide.dtype == (torch.float32 if wanted[i] and 3 <= i < 19 else BF16)
        assert torch.equal(wide.to(BF16), gradient)


def test_a_wide_mask_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="wide_mask must have 15 entries, got 2"):
        torch.ops.fused_remat.mlp_bwd(*_mlp_backward([True, True]))
