"""Low-rank adapters of the projections of multi-head attention: the reference, gradients, precision, determinism."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import mha_cases as cases
import pytest
import spy
import torch
from mha_cases import ADAPTED, RESIDUALS, SCALES, Block, results
from test_mha_checkpoint import Layer
from test_mha_compile import level1_arguments
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import fused_remat
from fused_remat import LowRank, Norm

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
    # torch's own tracing does these.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]
BACKEND = pytest.mark.parametrize("backend", cases.BACKENDS)
THREE = {"packed": False}
BLOCKS = {
    "plain": Block(**THREE, ranks=(2, 3, 1, 2)),
    "shared heads, no bias": Block(
        **THREE, bias=False, heads=4, kv_heads=2, width=5, value_width=3, out=7, ranks=(2, 1, 4, 3)
    ),
    "q and v": Block(**THREE, heads=4, kv_heads=1, ranks=(2, 0, 2, 0)),
    "out of packed weights": Block(ranks=(0, 0, 0, 2), heads=3, kv_heads=3),
    "wide ranks": Block(**THREE, model=3, heads=2, width=2, value_width=1, out=2, ranks=(9, 10, 11, 12)),
    "three inputs": Block(**THREE, length_k=7, model_k=5, model_v=8, separate_value=True, ranks=(2, 1, 2, 1)),
    "cross, norm": Block(**THREE, length_k=7, norm="layer_norm", ranks=(2, 1, 2, 1), mask="bool+padding"),
    "norms, rotary, by heads": Block(
        **THREE, blocked=True, norm="rms_norm", qk_norm=True, rotary=4, heads=4, kv_heads=2, width=6, ranks=(2, 1, 2, 1)
    ),
    "extra keys": Block(**THREE, bias_kv=True, zero_key=True, mask="float+padding", heads=4, ranks=(1, 2, 3, 2)),
    "empty rows": Block(**THREE, mask="bool-empty-row", ranks=(1, 2, 3, 2)),
}  # fmt: skip
SETTINGS = {"full": {}, "causal": {"is_causal": True}, "dropout": {"dropout_p": 0.3}}
KEEPS = ((), ("out",), RESIDUALS, ("k", "v"), ("q",))


def _dy(block, given):
    return torch.randn(block.reference(given).shape, dtype=torch.float64).to(given["query"].dtype)


def _merged(given, part, weight):
    """weight + scale b a: what an adapter of `part` amounts to."""
    if f"{part}_a" not in given:
        return weight
    return weight + SCALES[part] * (given[f"{part}_b"] @ given[f"{part}_a"]).view(weight.shape)


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_the_reference_is_the_block_with_merged_weights(block):
    given = block.operands()
    merged = {n: t for n, t in given.items() if not n.endswith(("_a", "_b"))}
    merged |= {f"w_{p}": _merged(given, p, given[f"w_{p}"]) for p in "qkv" if not block.packed}
    merged["out_proj_weight"] = _merged(given, "out", given["out_proj_weight"])
    y, truth = block.reference(given), replace(block, ranks=(0, 0, 0, 0)).reference(merged)
    torch.testing.assert_close(y, truth, rtol=1e-11, atol=1e-11)
    dy = torch.randn_like(y)
    cases.assert_same(cases.gradients(y, given, dy), cases.gradients(truth, given, dy), 1e-10)


@BACKEND
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_every_block_agrees_with_the_reference(block, backend):
    given = block.operands()
    dy = _dy(block, given)
    for name, settings in SETTINGS.items():
        truth = results(block, given, dy, backend="reference", **settings)
        for keep, workspace in product(KEEPS, (1, 2**20)):
            ours = results(block, given, dy, backend=backend, keep=keep, workspace=workspace, **settings)
            cases.assert_same(ours, truth, 1e-9, (name, keep, workspace))


@BACKEND
@pytest.mark.parametrize("average", (True, False), ids=("averaged", "per head"))
def test_weights_and_their_gradient_agree_with_the_reference(average, backend):
    block = BLOCKS["norms, rotary, by heads"]
    given = block.operands()
    dy, settings = _dy(block, given), {"average_attn_weights": average, "dropout_p": 0.2}
    _, weights = block.reference(given, need_weights=True, **settings)
    dweights = torch.randn_like(weights)
    truth = results(block, given, dy, dweights, backend="reference", **settings)
    for keep in ((), ("out",)):
        ours = results(block, given, dy, dweights, backend=backend, keep=keep, workspace=1, **settings)
        cases.assert_same(ours, truth, 1e-9, keep)


@BACKEND
def test_sizes_of_zero(backend):
    for changes in ({"batch": 0}, {"length": 0}):
        block = replace(BLOCKS["plain"], **changes)
        given = block.operands()
        dy = _dy(block, given)
        ours = results(block, given, dy, backend=backend)
        cases.assert_same(ours, results(block, given, dy, backend="reference"), 1e-12)


@pytest.mark.slow
@BACKEND
@pytest.mark.parametrize("name", ("shared heads, no bias", "three inputs", "norms, rotary, by heads", "extra keys"))
def test_gradcheck(name, backend):
    block = replace(BLOCKS[name], batch=1, length=3, model=3, ranks=(1, 2, 1, 2))
    given = block.operands()
    leaves = {n: t for n, t in given.items() if t.requires_grad}
    grid = ({"keep": ("out", "v"), "dropout_p": 0.3, "need_weights": True}, {"keep": ()})
    for settings in grid if backend == "cpp" else grid[:1]:  # the streaming above aten is that above cpp

        def call(*values, settings=settings):
            changed = given | dict(zip(leaves, values, strict=True))
            return block.call(changed, backend=backend, workspace=1, **settings)

        assert gradcheck(call, tuple(leaves.values()), fast_mode=True)
        assert gradgradcheck(call, tuple(leaves.values()), fast_mode=True)


@BACKEND
def test_only_requested_gradients_are_computed(backend):
    """Each operand alone, all but each, the factors alone, and the base alone."""
    block = BLOCKS["cross, norm"]
    given = block.operands()
    names = [name for name, t in given.items() if t.requires_grad]
    dy = _dy(block, given)
    truth = results(block, given, dy, backend="reference")
    factors = {n for n in names if n.endswith(("_a", "_b"))}
    subsets = [{n} for n in names] + [set(names) - {n} for n in names] + [factors, set(names) - factors]
    for subset, keep in product(subsets, (("out",), RESIDUALS)):
        for name in names:
            given[name].requires_grad_(name in subset)
        ours = results(block, given, dy, backend=backend, keep=keep)
        cases.assert_same(ours, {n: t for n, t in truth.items() if n == "y" or n[1:] in subset}, 1e-10, subset)


# Precision and determinism --------------------------------------------------------------------------------------------


def _stock(block, given, dy):
    """Linear layers with adapters beside them as PEFT runs them, factors cast to the dtype of x, around SDPA."""
    x, linear = given["query"], torch.nn.functional.linear

    def adapted(part, x, weight, bias):
        a, b = (given[f"{part}_{f}"].to(x.dtype) for f in "ab")
        return linear(x, weight, bias) + SCALES[part] * linear(linear(x, a), b)

    q, k, v = (
        adapted(p, x, given[f"w_{p}"], given[f"b_{p}"]).unflatten(-1, (-1, block.width)).transpose(1, 2) for p in "qkv"
    )
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(-2)
    y = adapted("out", out, given["out_proj_weight"], given["out_proj_bias"])
    return {"y": y.detach()} | {f"d{name}": g for name, g in cases.gradients(y, given, dy).items()}


@BACKEND
@pytest.mark.parametrize("keep", ((), ("out",), RESIDUALS), ids=str)
@pytest.mark.parametrize("wide_factors", (False, True), ids=("same dtype", "fp32 factors"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_error_is_at_most_twice_that_of_eager(dtype, wide_factors, keep, backend):
    block = Block(**THREE, length=64, model=32, heads=4, kv_heads=2, width=16, ranks=(4, 4, 4, 4))
    given = block.operands(dtype)
    if wide_factors:
        given |= {n: t.detach().float().requires_grad_() for n, t in given.items() if n.endswith(("_a", "_b"))}
    exact = {name: value.detach().double().requires_grad_() for name, value in given.items()}
    dy = _dy(block, given)
    ours = results(block, given, dy, backend=backend, keep=keep, workspace=20_000)
    eager = _stock(block, given, dy)
    floor = torch.finfo(dtype).eps / 8
    for name, truth in results(block, exact, dy.double(), backend="reference").items():
        assert ours[name].dtype == (dtype if name == "y" else given[name[1:]].dtype)
        error, allowed = (cases.relative_error(found[name], truth) for found in (ours, eager))
        assert error <= 2 * allowed + floor, (name, error, allowed)


@BACKEND
def test_factors_of_any_dtype(backend):
    """float64 and half factors beside fp32; each gradient in the dtype of its factor."""
    block = BLOCKS["plain"]
    given = block.operands(torch.float32)
    for name, dtype in (("q_a", torch.float64), ("k_b", torch.float16), ("out_a", torch.bfloat16)):
        given[name] = given[name].detach().to(dtype).requires_grad_()
    dy = _dy(block, given)
    ours, truth = (results(block, given, dy, backend=name) for name in (backend, "reference"))
    assert all(ours[f"d{name}"].dtype == t.dtype for name, t in given.items())
    for name in truth:
        torch.testing.assert_close(ours[name], truth[name], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(("workspace", "threads"), ((20_000, 1), (60_000, 3), (2**20, 1)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_kept_and_rebuilt_projections_give_the_same_bits(dtype, workspace, threads):
    block = Block(**THREE, length=40, model=24, heads=6, kv_heads=3, width=16, norm="rms_norm", ranks=(4, 3, 8, 4))
    given = block.operands(dtype)
    dy = _dy(block, given)
    torch.set_num_threads(threads)
    kept = results(block, given, dy, backend="cpp", keep=RESIDUALS[:3], workspace=workspace)
    for keep in ((), ("k", "v")):
        rebuilt = results(block, given, dy, backend="cpp", keep=keep, workspace=workspace)
        assert all(torch.equal(value, kept[name]) for name, value in rebuilt.items()), keep


@pytest.mark.parametrize("keep", ((), ("out",)), ids=str)
@pytest.mark.parametrize("workspace", (1, 60_000, 2**20))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_backward_sees_the_bits_of_forward(dtype, workspace, keep):
    block = Block(**THREE, length=40, model=24, heads=6, kv_heads=3, width=16, norm="rms_norm", ranks=(4, 3, 8, 4))
    given = block.operands(dtype)

    def step():
        y = block.call(given, backend="cpp", workspace=workspace, keep=keep)
        y.backward(torch.randn_like(y))

    forward, backward = spy.heads_seen(step)
    assert len(forward) == len(backward) and (workspace > 1 or len(forward) == 3)
    for ours, theirs in zip(forward, backward, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@BACKEND
def test_same_bits_on_every_rerun(dtype, backend):
    block = Block(**THREE, length=48, model=32, heads=4, kv_heads=2, width=16, ranks=(4, 3, 8, 4))
    given = block.operands(dtype)
    dy, runs = _dy(block, given), []
    torch.set_num_threads(2)
    for _ in range(4):
        runs.append(results(block, given, dy, backend=backend, workspace=2_000_000, dropout_p=0.1))
    y = block.call(given, backend=backend, workspace=2_000_000, dropout_p=0.1)
    runs += [{f"d{n}": g for n, g in cases.gradients(y, given, dy, retain_graph=True).items()} for _ in range(2)]
    for run in runs[1:]:
        assert all(torch.equal(value, runs[0][name]) for name, value in run.items())


# Tracing, autocast, errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "backend"),
    (
        ("norms, rotary, by heads", torch.float32, "cpp"),
        ("norms, rotary, by heads", torch.float32, "aten"),
        ("three inputs", torch.bfloat16, "cpp"),
    ),
    ids=str,
)
def test_opcheck(name, dtype, backend):
    block = BLOCKS[name]
    given = block.operands(dtype)
    given |= {n: t.detach().float().requires_grad_() for n, t in given.items() if n.endswith(("_a", "_b"))}
    for op, arguments in spy.samples(lambda: block.call(given, keep=("q",)), backend):
        if op.startswith("multi_head_attention"):
            assert set(opcheck(getattr(torch.ops.fused_remat, op).default, arguments).values()) == {"SUCCESS"}
    arguments = level1_arguments(block, given, {}, backend)
    assert set(opcheck(torch.ops.fused_remat.multi_head_attention.default, arguments).values()) == {"SUCCESS"}


def test_fullgraph_and_autocast():
    torch._dynamo.reset()
    block = Block(**THREE, bias=False, length=9, model=8, heads=4, kv_heads=2, ranks=(2, 0, 3, 2), norm="rms_norm")
    layer, x = Layer(block), torch.randn(2, 9, 8)

    def step(function, **autocast):
        layer.zero_grad()
        with torch.autocast("cpu", **autocast):
            y = function(x)
        y.float().square().sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in layer.parameters())
        return [y.detach(), *(p.grad.clone() for p in layer.parameters())]

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for ours, truth in zip(step(compiled, enabled=False), step(layer, enabled=False), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=2e-6)
    half = step(layer, dtype=torch.bfloat16)
    assert half[0].dtype == torch.bfloat16
    for ours, truth in zip(half, step(layer, enabled=False), strict=True):
        assert cases.relative_error(ours, truth) <= 3e-2


def test_transforms_take_the_reference_path():
    block = BLOCKS["plain"]
    given = {n: t.detach() for n, t in block.operands().items()}
    loss = lambda a: block._call(given | {"q_a": a}, {}).square().sum()
    leaf = given["q_a"].clone().requires_grad_()
    (truth,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(given["q_a"]), truth)


def test_explain_knows_adapters():
    """The plan leaves room for ranks wider than the layer."""
    nbytes = {}
    for rank in (1, 200):
        given = Block(**THREE, ranks=(rank,) * 4).operands(torch.bfloat16)
        three = tuple(given[f"w_{p}"] for p in "qkv")
        found = fused_remat.explain(
            fused_remat.multi_head_attention, given["query"], None, None, three, None, given["out_proj_weight"], None,
            2, **cases.adapters(given),
        )  # fmt: skip
        assert found.backend == "cpp"
        nbytes[rank] = found.backward.nbytes
    assert nbytes[200] > nbytes[1]


ONES = torch.ones
GOOD = LowRank(ONES(3, 6), ONES(8, 3), 0.5)
BAD = {
    "type": ({"q_adapter": (ONES(3, 6), ONES(8, 3), 1.0)}, TypeError, "q_adapter must be a.*LowRank or None.*tuple"),
    "norm": ({"v_adapter": Norm("rms_norm")}, TypeError, "v_adapter must be a fused_remat.LowRank"),
    "no tensor": ({"k_adapter": LowRank(None, ONES(8, 3))}, TypeError, "k_adapter.a must be a tensor, got NoneType"),
    "b": ({"k_adapter": LowRank(ONES(3, 6), [1.0])}, TypeError, "k_adapter.b must be a tensor, got list"),
    "scale": ({"q_adapter": replace(GOOD, scale=float("inf"))}, ValueError, "q_adapter.scale must be a finite number"),
    "tensor scale": ({"q_adapter": replace(GOOD, scale=ONES(()))}, ValueError, "q_adapter.scale must be a finite"),
    "ranks": (
        {"q_adapter": LowRank(ONES(3, 6), ONES(8, 4))}, ValueError,
        r"q_adapter.a must be \[r, 6\] and q_adapter.b \[8, r\].*got \[3, 6\] and \[8, 4\]",
    ),
    "no rank": ({"q_adapter": LowRank(ONES(0, 6), ONES(8, 0))}, ValueError, "a rank r of at least 1"),
    "in of v": ({"v_adapter": LowRank(ONES(3, 5), ONES(8, 3))}, ValueError, r"v_adapter.a must be \[r, 6\]"),
    "out of k": ({"k_adapter": LowRank(ONES(3, 6), ONES(7, 3))}, ValueError, r"k_adapter.b \[8, r\]"),
    "out": ({"out_adapter": LowRank(ONES(3, 6), ONES(8, 3))}, ValueError, r"out_adapter.a must be \[r, 8\].*\[6, r\]"),
    "dims": ({"q_adapter": LowRank(ONES(3, 6, 1), ONES(8, 3))}, ValueError, r"q_adapter.a must be \[r, 6\]"),
    "integers": ({"q_adapter": LowRank(ONES(3, 6).int(), ONES(8, 3))}, TypeError, "q_adapter.a must be floating point"),
    "complex": ({"q_adapter": LowRank(ONES(3, 6).cfloat(), ONES(8, 3))}, TypeError, "q_adapter.a is torch.complex64"),
    "device": ({"q_adapter": LowRank(ONES(3, 6, device="meta"), ONES(8, 3))}, ValueError, "q_adapter.a is on meta"),
    "packed": ({"q_adapter": GOOD, "in_proj_weight": ONES(24, 6)}, ValueError, "one packed tensor; pass a tuple"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_adapters_are_refused(case):
    changes, error, message = BAD[case]
    right = {"in_proj_weight": (ONES(8, 6),) * 3, "q_adapter": GOOD, "out_adapter": LowRank(ONES(3, 8), ONES(6, 3))}
    call = lambda **given: fused_remat.multi_head_attention(
        ONES(2, 5, 6),
        None,
        None,
        in_proj_bias=None,
        out_proj_weight=ONES(6, 8),
        out_proj_bias=None,
        num_heads=2,
        **given,
    )
    assert call(**right).shape == (2, 5, 6)
    with pytest.raises(error, match=message):
        call(**right | changes)


@pytest.mark.parametrize(
    "changes",
    (
        {"q_a": None}, {"k_b": None}, {"q_a": ONES(3, 7)}, {"v_b": ONES(9, 1)}, {"out_a": ONES(3, 8)},
        {"out_b": ONES(6, 2, 1)}, {"k_a": ONES(18)}, {"adapter_scales": [1.0, 1.0]},
    ),
    ids=str,
)  # fmt: skip
def test_the_op_checks_its_own_factors(changes):
    block = BLOCKS["plain"]
    arguments = level1_arguments(block, block.operands(torch.float32), {}, "cpp")
    op = torch.ops.fused_remat.multi_head_attention
    named = dict(zip([argument.name for argument in op.default._schema.arguments], arguments, strict=False))
    op(*named.values())
    with pytest.raises(ValueError):
        op(*(named | changes).values())


def test_the_ops_have_no_more_arguments_than_torch_takes():
    """torch registers ops of at most 64 arguments, and aborts where one has more."""
    assert len(torch.ops.fused_remat.multi_head_attention_bwd.default._schema.arguments) <= 64


def test_every_adapter_has_a_case():
    assert ADAPTED == RESIDUALS and set(SCALES) == set(ADAPTED)
    assert all(any(block.ranks[i] for block in BLOCKS.values()) for i in range(4))
