"""Capped scores, softcap * tanh(scores / softcap), in attention and in the block from x."""

from __future__ import annotations

import math

import attention_cases as cases
import mha_cases
import pytest
import spy
import torch
from mha_cases import Block
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import fused_remat
from fused_remat import reference

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
]
BACKEND = pytest.mark.parametrize("backend", cases.BACKENDS)
CAP = 0.8  # scores are of order 1: some are hardly changed, others nearly at the bound
MASKS = ("none", "bool", "bool-empty-row", "float", "float-per-query", "float-keys", "float+padding", "empty-sample")
BANDS = ("full", "is_causal", "causal-window")


def _given(dtype=torch.float64, **sizes):
    return cases.operands(**{"batch": 2, "heads": 4, "kv_heads": 2, "length_q": 5, "length_k": 7, **sizes}, dtype=dtype)


def _results(function, given, masks, douts, **settings):
    """out and lse where it is finite, and the gradients of the operands and learned masks, by name."""
    leaves = given | cases.learned(masks)
    outputs = dict(zip(("out", "lse"), function(given, **masks, **settings), strict=False))
    finite = outputs["lse"].detach() > -math.inf
    outputs["lse"] = outputs["lse"][finite]
    grads = cases.gradients(tuple(outputs.values()), leaves, (douts[0], douts[1][finite]))
    return {name: t.detach() for name, t in outputs.items()} | grads


def _ours(given, **settings):
    return cases.run(given, return_lse=True, **settings)


def _naive(given, **settings):
    return cases.naive(**given, **settings)


def _douts(given, dtype=torch.float64):
    rows = given["q"].shape[:3]
    return torch.randn(*rows, given["v"].shape[3], dtype=dtype), torch.randn(
        rows, dtype=torch.promote_types(dtype, torch.float32)
    )


# The core -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
def test_the_reference_is_the_written_formula(mask):
    given = _given()
    masks, douts = cases.masks(mask, given), _douts(given)
    for band in BANDS:
        position = cases.BANDS[band]
        ours = _results(_ours, given, masks, douts, backend="reference", softcap=CAP, **position)
        truth = _results(_naive, given, masks, douts, softcap=CAP, **position)
        cases.assert_same(ours, truth, 1e-11, band)
        plain = _results(_naive, given, masks, douts, **position)
        assert not torch.allclose(plain["out"], truth["out"], atol=1e-3), "the cap changes something"


def test_the_reference_passes_gradcheck_twice():
    given = _given(batch=1, heads=2, kv_heads=1, length_q=3, length_k=4, width=2)
    mask = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)

    def function(q, k, v, mask):
        return reference.attention(q, k, v, attn_mask=mask, softcap=CAP)

    assert gradcheck(function, (*given.values(), mask))
    assert gradgradcheck(function, (*given.values(), mask), fast_mode=True)


@BACKEND
@pytest.mark.parametrize("mask", MASKS)
def test_masks_bands_and_shared_heads(mask, backend):
    for sizes in ({}, {"heads": 3, "kv_heads": 1, "length_q": 37, "length_k": 70, "value_width": 5}):
        given = _given(**sizes)
        masks, douts = cases.masks(mask, given), _douts(given)
        for band in BANDS:
            settings = {"softcap": CAP, "scale": 0.9, **cases.BANDS[band]}
            truth = _results(_naive, given, masks, douts, **settings)
            for workspace in (1, 2**20):
                ours = _results(_ours, given, masks, douts, backend=backend, workspace=workspace, **settings)
                cases.assert_same(ours, truth, 1e-10, (band, workspace))


@BACKEND
def test_dropout(backend):
    given = _given(length_q=9, length_k=33)
    masks, douts = cases.masks("float", given), _douts(given)
    torch.manual_seed(0)
    kept = cases.dropout_kept(reference.draw_seed(torch.device("cpu")), 0.3, (2, 4, 9, 33))
    ours = _results(_ours, given, masks, douts, backend=backend, softcap=CAP, dropout_p=0.3)
    truth = _results(_naive, given, masks, douts, softcap=CAP, dropout_p=0.3, kept=kept)
    cases.assert_same(ours, truth, 1e-10)


@BACKEND
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("softcap", (0.8, 50.0))
def test_error_is_at_most_twice_that_of_eager(softcap, dtype, backend):
    given = _given(dtype, length_q=66, length_k=97, width=32)
    exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    masks, douts = cases.masks("float", given), _douts(given, dtype)
    settings = {"softcap": softcap, "is_causal": True}
    ours = _results(_ours, given, masks, douts, backend=backend, workspace=30_000, **settings)
    eager = _results(_ours, given, masks, douts, backend="reference", **settings)
    exact_masks = {name: mask.detach().double() for name, mask in masks.items()}
    truth = _results(_naive, exact, exact_masks, [d.double() for d in douts], **settings)
    for name, expected in truth.items():
        error, allowed = (cases.relative_error(found[name], expected) for found in (ours, eager))
        assert error <= 2 * allowed + torch.finfo(dtype).eps / 8, (name, error, allowed)


@BACKEND
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_scores_far_beyond_the_cap(dtype, backend):
    """At the bound the slope is 0, so that q and k have no gradient; an infinite score is at the bound, too."""
    given = _given(dtype, length_q=40, length_k=70)
    with torch.no_grad():
        given["q"].mul_(1e4)
        given["k"].mul_(1e4)
    douts = _douts(given, dtype)
    ours, truth = (_results(_ours, given, {}, douts, backend=b, softcap=2.0) for b in (backend, "reference"))
    cases.assert_same(ours, truth, 8 * torch.finfo(dtype).eps)
    assert (ours["q"] == 0).all() and (ours["k"] == 0).all() and (ours["v"] != 0).all()
    with torch.no_grad():
        given["k"][:, :, 3, 0] = math.inf
        out, expected = (cases.run(given, backend=b, softcap=2.0) for b in (backend, "reference"))
    assert out.isfinite().all()
    torch.testing.assert_close(out, expected)


@BACKEND
def test_rows_whose_lse_keeps_too_few_digits(backend):
    """A cap of 3000 allows an lse that needs its correction; so does a mask beside a small one."""
    given = _given(torch.float32, length_q=33, length_k=40)
    for softcap, factor, shift in ((3000.0, 40.0, 0.0), (5.0, 1.0, -1e6)):
        loud = {
            name: (factor * t.detach() if name in "qk" else t.detach()).requires_grad_() for name, t in given.items()
        }
        masks = {"attn_mask": torch.full((1, 4, 33, 1), shift)}
        douts = _douts(loud, torch.float32)
        douts = douts[0], torch.zeros_like(douts[1])
        ours = _results(_ours, loud, masks, douts, backend=backend, softcap=softcap)
        assert ours["lse"].abs().max() > 64
        exact = {name: t.detach().double().requires_grad_() for name, t in loud.items()}
        wide_masks = {"attn_mask": masks["attn_mask"].detach().double()}
        truth = _results(_naive, exact, wide_masks, [d.double() for d in douts], softcap=softcap)
        eager = _results(_ours, loud, masks, douts, backend="reference", softcap=softcap)
        for name in ("out", "q", "k", "v"):
            error, allowed = (cases.relative_error(found[name], truth[name]) for found in (ours, eager))
            assert error <= 2 * allowed + 1e-6, (name, softcap, error, allowed)


@BACKEND
def test_a_wide_cap_changes_nothing(backend):
    given = _given(torch.float32, length_q=20, length_k=33)
    douts = _douts(given, torch.float32)
    ours, plain = (_results(_ours, given, {}, douts, backend=backend, softcap=cap) for cap in (1e6, None))
    cases.assert_same(ours, plain, 1e-5)


@BACKEND
def test_gradcheck(backend):
    given = _given(batch=1, length_q=3, length_k=4, width=2)
    masks = cases.learned(cases.masks("float+float-padding", given))
    names = [*given, *masks]

    def function(*values):
        tensors = dict(zip(names, values, strict=True))
        return cases.run(tensors, backend=backend, softcap=CAP, return_lse=True, workspace=1, **settings)

    for settings in ({}, {"is_causal": True, "dropout_p": 0.3}):
        assert gradcheck(function, (*given.values(), *masks.values()), fast_mode=backend == "aten"), settings
    assert gradgradcheck(function, (*given.values(), *masks.values()), fast_mode=True)


def test_opcheck_of_every_op():
    given = _given(torch.float32)
    masks = cases.masks("float+padding", given)
    cases.learned(masks)
    checked = spy.samples(lambda: cases.run(given, softcap=CAP, return_lse=True, **masks), "aten")
    assert {"attention_fwd", "attention_bwd", "attention_fwd_aten", "attention_bwd_aten"} <= {n for n, _ in checked}
    for name, arguments in checked:
        assert CAP in [a for a in arguments if isinstance(a, float)], name
        assert set(opcheck(getattr(torch.ops.fused_remat, name).default, arguments).values()) == {"SUCCESS"}, name


def test_functorch_and_the_kernels_agree():
    given = _given()
    loss = lambda q: fused_remat.attention(q, given["k"], given["v"], softcap=CAP).square().sum()
    (expected,) = torch.autograd.grad(loss(given["q"]), given["q"])
    torch.testing.assert_close(torch.func.grad(loss)(given["q"].detach()), expected, rtol=1e-10, atol=1e-10)


# The block ------------------------------------------------------------------------------------------------------------

BLOCKS = {
    "plain": Block(),
    "shared heads, cross": Block(heads=4, kv_heads=2, length_k=7, mask="float-per-head"),
    "q/k norm and rotary": Block(heads=4, kv_heads=2, width=6, qk_norm=True, rotary=4, mask="bool-empty-row"),
    "everything": Block(
        heads=4, kv_heads=2, width=6, value_width=3, norm="rms_norm", qk_norm=True, rotary=4, bias_kv=True,
        zero_key=True, mask="float+padding",
    ),
}  # fmt: skip
BLOCK = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)


def test_the_block_caps_what_attention_caps():
    """Without projections and norms of its own the block is attention; appended keys are capped, too."""
    eye, x = torch.eye(6, dtype=torch.float64), torch.randn(2, 5, 6, dtype=torch.float64)
    extra = torch.randn(2, 6, dtype=torch.float64)
    weights = (torch.cat([eye] * 3), None, eye, None, 2)
    y = fused_remat.multi_head_attention(x, None, None, *weights, softcap=CAP, bias_k=extra[0], bias_v=extra[1])
    heads = x.unflatten(-1, (2, 3)).transpose(1, 2)
    k, v = (torch.cat((heads, e.view(1, 2, 1, 3).expand(2, -1, -1, -1)), dim=2) for e in extra)
    out, _, _ = cases.naive(heads, k, v, softcap=CAP)
    torch.testing.assert_close(y, out.transpose(1, 2).flatten(-2), rtol=1e-11, atol=1e-11)


@BACKEND
@BLOCK
def test_every_block_agrees_with_the_reference(block, backend):
    given = block.operands()
    dy = torch.randn_like(block.reference(given))
    for settings in ({}, {"is_causal": True, "dropout_p": 0.3}, {"window": (2, 1)}):
        settings = settings | {"softcap": 0.3}
        _, weights = block.reference(given, need_weights=True, **settings)
        dweights = torch.randn_like(weights)
        for weighed in (None, dweights):
            truth = mha_cases.results(block, given, dy, weighed, backend="reference", **settings)
            for keep in ((), ("out",), ("q", "k", "v", "out")):
                ours = mha_cases.results(block, given, dy, weighed, backend=backend, keep=keep, workspace=1, **settings)
                cases.assert_same(ours, truth, 1e-9, (settings, keep))


@BACKEND
@pytest.mark.parametrize("name", ("shared heads, cross", "q/k norm and rotary"))
def test_gradcheck_of_the_block(name, backend):
    block = BLOCKS[name]
    given = block.operands()
    leaves = {n: t for n, t in given.items() if t.requires_grad}

    def function(*values):
        tensors = given | dict(zip(leaves, values, strict=True))
        return block.call(tensors, backend=backend, keep=(), workspace=1, softcap=CAP, need_weights=True)

    assert gradcheck(function, tuple(leaves.values()), fast_mode=True)


def test_kept_and_rebuilt_residuals_give_the_same_bits():
    block = Block(batch=1, length=70, heads=4, kv_heads=2, width=8, qk_norm=True)
    given = block.operands(torch.float32)
    dy = torch.randn(1, 70, 6)
    kept, rebuilt = (
        mha_cases.results(block, given, dy, backend="cpp", keep=keep, softcap=CAP)
        for keep in (("q", "k", "v", "out"), ("out",))
    )
    assert all(torch.equal(kept[name], rebuilt[name]) for name in kept)


# Compiled -------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
@pytest.mark.parametrize("op", ("attention", "multi_head_attention"))
def test_fullgraph(op):
    torch._dynamo.reset()
    if op == "attention":
        given = _given(torch.float32)
        eager = lambda given: fused_remat.attention(**given, softcap=CAP, is_causal=True)
    else:
        block = BLOCKS["q/k norm and rotary"]
        given = block.operands(torch.float32)
        eager = lambda given: block._call(given, {"softcap": CAP})
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    dout = torch.randn_like(eager(given))
    ours, truth = ({"out": y} | cases.gradients(y, given, dout) for y in (compiled(given), eager(given)))
    cases.assert_same(ours, truth, 1e-6)
