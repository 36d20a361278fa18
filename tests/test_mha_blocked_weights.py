"""Weights of q, k and v that lie head by head, as views of one weight that holds those of a head together."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import mha_cases as cases
import pytest
import spy
import torch
from mha_cases import RESIDUALS, Block, results
from test_mha_checkpoint import Layer
from test_mha_compile import level1_arguments
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import fused_remat
from fused_remat.measure import measure

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
    # torch's own tracing does these.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]
BACKEND = pytest.mark.parametrize("backend", cases.BACKENDS)
BLOCKED = {"packed": False, "blocked": True}
BLOCKS = {
    "plain": Block(**BLOCKED),
    "no bias": Block(**BLOCKED, bias=False),
    "other widths": Block(**BLOCKED, model=7, heads=4, kv_heads=2, width=5, value_width=3, out=6),
    "one key head": Block(**BLOCKED, heads=3, kv_heads=1),
    "three inputs": Block(**BLOCKED, length_k=7, model_k=5, model_v=8, separate_value=True),
    "everything": Block(
        **BLOCKED, heads=4, kv_heads=2, width=6, value_width=3, norm="rms_norm", qk_norm=True, rotary=4, bias_kv=True,
        zero_key=True, mask="float+padding",
    ),
}  # fmt: skip
SETTINGS = {"full": {}, "causal, dropout": {"is_causal": True, "dropout_p": 0.3}}


def _dy(block, given):
    return torch.randn(block.reference(given).shape, dtype=torch.float64).to(given["query"].dtype)


def _rows(given):
    """The same operands with weights [rows, D] and biases [rows]."""
    flat = lambda n, t: t.detach().flatten(0, 1).requires_grad_() if n[:2] in ("w_", "b_") else t
    return {name: flat(name, t) for name, t in given.items()}


def _flat(found):
    return {n: t.flatten(0, 1) if n[:3] in ("dw_", "db_") and t.dim() > 1 + (n[:3] == "dw_") else t
            for n, t in found.items()}  # fmt: skip


@BACKEND
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_every_block_agrees_with_rows_on_the_reference(block, backend):
    given = block.operands()
    assert given["w_q"].shape[:2] == (block.heads, block.width) and not given["w_q"].is_contiguous()
    dy = _dy(block, given)
    for name, settings in SETTINGS.items():
        truth = results(replace(block, blocked=False), _rows(given), dy, backend="reference", **settings)
        mine = results(block, given, dy, backend="reference", **settings)
        assert all(mine[f"d{n}"].shape == given[n].shape for n in ("w_q", "w_k", "w_v"))
        cases.assert_same(_flat(mine), truth, 0, name)
        for keep, workspace in product(((), ("out",), RESIDUALS, ("k",)), (1, 2**20)):
            ours = results(block, given, dy, backend=backend, keep=keep, workspace=workspace, **settings)
            assert all(ours[f"d{n}"].is_contiguous() for n in given if n[:2] in ("w_", "b_"))
            cases.assert_same(_flat(ours), truth, 1e-9, (name, keep, workspace))


@BACKEND
def test_parts_may_differ_in_form(backend):
    """Any of the three weights and biases by heads, the others as rows."""
    block = BLOCKS["other widths"]
    given = block.operands()
    rows, dy = _rows(given), _dy(block, given)
    truth = results(block, rows, dy, backend="reference")
    for names in (("w_q",), ("w_v", "b_k"), ("w_k", "w_v"), ("b_q", "b_v")):
        mixed = rows | {name: given[name] for name in names}
        cases.assert_same(_flat(results(block, mixed, dy, backend=backend, workspace=1)), truth, 1e-9, names)


@BACKEND
@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16), ids=str)
def test_views_of_a_weight_that_holds_each_head_together(dtype, backend):
    """GPT-NeoX and BLOOM: rows [H, 3, E] of one parameter; the same numbers as three weights give."""
    heads, width, model = 4, 4, 6
    x = torch.randn(2, 5, model, dtype=torch.float64).to(dtype).requires_grad_()
    together = torch.randn(heads * 3 * width, model, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(heads * 3 * width, dtype=torch.float64).to(dtype).requires_grad_()
    w_out = torch.randn(model, heads * width, dtype=torch.float64).to(dtype).requires_grad_()
    dy = torch.randn(2, 5, model, dtype=torch.float64).to(dtype)

    def step(w, b):
        with fused_remat.backend(backend):
            y = fused_remat.multi_head_attention(x, None, None, w, b, w_out, None, heads, workspace=1)
        return y, *torch.autograd.grad(y, (x, together, bias, w_out), dy)

    views = together.view(heads, 3, width, model).unbind(1), bias.view(heads, 3, width).unbind(1)
    copies = [tuple(part.flatten(0, 1).contiguous() for part in parts) for parts in views]
    for ours, truth in zip(step(*views), step(*copies), strict=True):
        assert torch.equal(ours, truth)


@pytest.mark.slow
@BACKEND
@pytest.mark.parametrize("name", ("other widths", "three inputs"))
def test_gradcheck(name, backend):
    small = {"batch": 1, "length": 3, "model": 3, "width": 2, "value_width": 1, "out": 2}
    small |= {"length_k": 2, "model_k": 2, "model_v": 4} if name == "three inputs" else {"heads": 4}
    block = replace(BLOCKS[name], **small)
    given = block.operands()
    leaves = {n: t for n, t in given.items() if t.requires_grad}
    for settings in ({"is_causal": True, "dropout_p": 0.3}, {"keep": ()})[: 2 if backend == "cpp" else 1]:

        def call(*values, settings=settings):
            changed = given | dict(zip(leaves, values, strict=True))
            return block.call(changed, backend=backend, workspace=1, **settings)

        assert gradcheck(call, tuple(leaves.values()), fast_mode=True)
        assert gradgradcheck(call, tuple(leaves.values()), fast_mode=True)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@BACKEND
def test_error_is_at_most_twice_that_of_torch(dtype, backend):
    block = Block(**BLOCKED, bias=False, length=64, model=32, heads=4, kv_heads=2, width=16)
    given = block.operands(dtype)
    exact = {n: t.detach().double().requires_grad_() for n, t in given.items()}
    dy = _dy(block, given)
    ours = results(block, given, dy, backend=backend, workspace=20_000)
    stock = results(block, given, dy, backend="reference")
    for name, truth in results(block, exact, dy.double(), backend="reference").items():
        assert ours[name].dtype == dtype
        error, allowed = (cases.relative_error(found[name], truth) for found in (ours, stock))
        assert error <= 2 * allowed + torch.finfo(dtype).eps / 8, (name, error, allowed)


@pytest.mark.parametrize("workspace", (1, 60_000, 2**20))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_backward_sees_the_bits_of_forward(dtype, workspace):
    block = Block(**BLOCKED, length=40, model=24, heads=6, kv_heads=3, width=16)
    given = block.operands(dtype)

    def step():
        y = block.call(given, backend="cpp", workspace=workspace)
        y.backward(torch.randn_like(y))

    forward, backward = spy.heads_seen(step)
    assert len(forward) == len(backward) and (workspace > 1 or len(forward) == 3)
    for ours, theirs in zip(forward, backward, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# Memory ---------------------------------------------------------------------------------------------------------------

BIG = Block(**BLOCKED, bias=False, batch=1, length=32, model=512, heads=8, kv_heads=8, width=64)
WEIGHT = 4 * 512 * 512  # bytes of one of the four


def _big():
    """Operands of BIG, the weights of q, k and v being views of one parameter; and that parameter."""
    given = BIG.operands(torch.float32)
    together = (torch.randn(8 * 3 * 64, 512) * 512**-0.5).requires_grad_()
    return given, together


def _call(given, together, **settings):
    views = dict(zip(("w_q", "w_k", "w_v"), together.view(8, 3, 64, 512).unbind(1), strict=True))
    return BIG.call(given | views, backend="cpp", **settings)


def test_only_the_parameter_itself_is_saved():
    given, together = _big()
    held = {t.untyped_storage().data_ptr() for t in (given["query"], together, given["out_proj_weight"])}
    others, shapes = {}, []

    def pack(t):
        shapes.append(tuple(t.shape))
        if t.untyped_storage().data_ptr() not in held:
            others[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        _call(given, together)
    assert shapes.count((8, 64, 512)) == 3, "the views are what is saved"
    out, lse = 4 * 32 * 512, 4 * 8 * 32
    assert sum(others.values()) == out + lse


@pytest.mark.parametrize("workspace", (WEIGHT // 4, WEIGHT // 2, 8 * WEIGHT))
def test_no_weight_is_copied_whole_beside_the_workspace(workspace):
    given, together = _big()
    measured = measure(lambda: _call(given, together, workspace=workspace), repeats=1)
    views = dict(zip(("w_q", "w_k", "w_v"), together.view(8, 3, 64, 512).unbind(1), strict=True))
    plan = fused_remat.explain(
        fused_remat.multi_head_attention, given["query"], None, None, tuple(views.values()), None,
        given["out_proj_weight"], None, 8, workspace=workspace,
    )  # fmt: skip
    small = 8 * given["query"].nbytes  # out, lse, sums of dx, tiles of the scores
    taken = measured.forward_peak_above_output_bytes
    assert taken <= plan.forward.nbytes + small
    if workspace < WEIGHT:
        assert taken < WEIGHT, "not one weight fits into that"
    # Of torch's own: gradients of the three views, and the parameter's gradient that they become.
    gradients = 3 * WEIGHT
    assert measured.backward_peak_above_gradients_bytes <= plan.backward.nbytes + small + gradients


def test_heads_that_lie_together_are_not_copied():
    """[heads, width, D] of a dense weight, and groups of one head: there the products take the weight as it lies."""
    together = Block(**BLOCKED, model=64, heads=4, kv_heads=4, width=16)
    plan = torch.ops.fused_remat.multi_head_attention_plan
    given = together.operands(torch.float32)
    dense = {n: t.detach().contiguous() if n[:2] in ("w_", "b_") else t for n, t in given.items()}
    nbytes = {
        name: plan(*level1_arguments(together, operands, {"workspace": 2**22}, "cpp"))[2]
        for name, operands in (("apart", given), ("dense", dense), ("rows", _rows(given)))
    }
    assert nbytes["rows"] == nbytes["dense"] == nbytes["apart"] - 3 * 4 * 64 * 64


def test_flops_are_those_of_rows():
    from torch.utils.flop_counter import FlopCounterMode

    block = BLOCKS["other widths"]
    given, counts = block.operands(), []
    for operands in (given, _rows(given)):
        with FlopCounterMode(display=False) as counter:
            block.call(operands).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


# Tracing, autocast, errors --------------------------------------------------------------------------------------------


@BACKEND
def test_opcheck(backend):
    block = BLOCKS["three inputs"]
    given = block.operands(torch.float32)
    for name, arguments in spy.samples(lambda: block.call(given, keep=("q",)), backend):
        if name.startswith("multi_head_attention"):
            assert set(opcheck(getattr(torch.ops.fused_remat, name).default, arguments).values()) == {"SUCCESS"}
    arguments = level1_arguments(block, given, {}, backend)
    assert set(opcheck(torch.ops.fused_remat.multi_head_attention.default, arguments).values()) == {"SUCCESS"}


def test_fullgraph_and_autocast():
    torch._dynamo.reset()
    block = Block(**BLOCKED, bias=False, length=9, model=8, heads=4, kv_heads=2)
    layer, x = Layer(block), torch.randn(2, 9, 8)

    def step(function, **autocast):
        layer.zero_grad()
        with torch.autocast("cpu", **autocast):
            y = function(x)
        y.float().square().sum().backward()
        assert all(p.grad.dtype == torch.float32 and p.grad.shape == p.shape for p in layer.parameters())
        return [y.detach(), *(p.grad.clone() for p in layer.parameters())]

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for ours, truth in zip(step(compiled, enabled=False), step(layer, enabled=False), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=2e-6)
    for ours, truth in zip(step(layer, dtype=torch.bfloat16), step(layer, enabled=False), strict=True):
        assert cases.relative_error(ours, truth) <= 3e-2


ONES = torch.ones
THREE = (ONES(2, 4, 6), ONES(2, 4, 6), ONES(2, 4, 6))
BAD = {
    "packed": ({"in_proj_weight": ONES(2, 12, 6)}, r"in_proj_weight must be \[out, in\] with 2 dims; got \[2, 12, 6\]"),
    "rank": (
        {"in_proj_weight": (ONES(1, 2, 4, 6), *THREE[1:])},
        r"in_proj_weight\[0\] must be \[out, in\] with 2 dims, or \[heads, width, in\] with 3; got \[1, 2, 4, 6\]",
    ),
    "heads of q": ({"in_proj_weight": (ONES(4, 4, 6), *THREE[1:])}, r"must have shape \[2, 4, 6\], got \[4, 4, 6\]"),
    "width of k": ({"in_proj_weight": (THREE[0], ONES(2, 5, 6), THREE[2])}, r"\[1\] must have shape \[2, 4, 6\]"),
    "columns of v": ({"in_proj_weight": (*THREE[:2], ONES(2, 4, 5))}, r"\[2\] must have shape \[2, 4, 6\]"),
    "bias": ({"in_proj_bias": (ONES(4, 2), None, None)}, r"in_proj_bias\[0\] must have shape \[2, 4\], got \[4, 2\]"),
    "packed bias": ({"in_proj_bias": ONES(6, 4)}, r"in_proj_bias must have shape \[24\], got \[6, 4\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_shapes_are_refused(case):
    changes, message = BAD[case]
    right = {"in_proj_weight": THREE, "in_proj_bias": None}
    call = lambda **given: fused_remat.multi_head_attention(
        ONES(2, 5, 6), None, None, out_proj_weight=ONES(6, 8), out_proj_bias=None, num_heads=2, **given
    )
    assert call(**right).shape == (2, 5, 6)
    with pytest.raises(ValueError, match=message):
        call(**right | changes)


@pytest.mark.parametrize(
    "changes",
    (
        {"w_q": ONES(4, 2, 6)}, {"w_k": ONES(2, 5, 6)}, {"w_v": ONES(2, 4, 5)}, {"b_q": ONES(4, 2)},
        {"b_k": ONES(1, 8)}, {"b_q": ONES(3, 8)}, {"w_q": ONES(1, 2, 4, 6)},
        {"w_q": ONES(2, 12, 6), "w_k": None, "w_v": None},
    ),
    ids=lambda changes: ", ".join(f"{n} {list(t.shape)}" for n, t in changes.items() if t is not None),
)  # fmt: skip
def test_the_op_checks_shapes_by_heads(changes):
    block = Block(**BLOCKED, model=6, width=4)
    given = block.operands(torch.float32)
    arguments = level1_arguments(block, given, {}, "cpp")
    op = torch.ops.fused_remat.multi_head_attention
    named = dict(zip([argument.name for argument in op.default._schema.arguments], arguments, strict=False))
    op(*named.values())
    with pytest.raises(ValueError):
        op(*(named | changes).values())
