"""The reference of attention and of the block: formulas written out, stock torch, finite differences."""

from __future__ import annotations

import math

import attention_cases as cases
import pytest
import torch
import torch.nn.functional as F
from mha_cases import Block
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import fused_remat
from fused_remat import Norm, reference

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPES = {  # batch, heads, kv heads, Lq, Lk, E, Ev
    "square": (2, 4, 4, 5, 5, 3, 3),
    "more keys": (2, 4, 2, 3, 7, 5, 2),
    "fewer keys": (2, 6, 1, 7, 3, 1, 4),
}


def _given(shape: str) -> dict[str, torch.Tensor]:
    batch, heads, kv_heads, length_q, length_k, width, value_width = SHAPES[shape]
    return cases.operands(
        batch, heads, length_q, length_k, width, kv_heads=kv_heads, value_width=value_width, dtype=torch.float64
    )


def _reference(given, *, is_causal=False, causal=None, window=None, attn_mask=None, **settings):
    """`reference.attention` with the 4-D mask and the corner that it wants."""
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    return reference.attention(
        **given, attn_mask=attn_mask, causal=causal or ("top_left" if is_causal else None),
        window=window or (None, None), **settings,
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", cases.MASKS)
def test_attention_is_the_written_formula(mask, shape):
    given = _given(shape)
    masks = cases.masks(mask, given)
    everything = given | cases.learned(masks)
    for band, position in cases.BANDS.items():
        ours = _reference(given, **masks, **position, scale=0.7)
        truth = cases.naive(**given, **masks, **position, scale=0.7)
        for name, a, b in zip(("out", "lse", "probabilities"), ours, truth, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m, n=name, w=band: f"{w} {n}: {m}")
        # The gradient of a row's lse is where that lse is finite.
        finite = truth[1].detach() > -math.inf
        douts = [torch.randn_like(t) for t in (truth[0], truth[1][finite], truth[2])]
        grads = [
            cases.gradients((out, lse[finite], probabilities), everything, douts, allow_unused=True)
            for out, lse, probabilities in (ours, truth)
        ]
        cases.assert_same(*grads, 1e-11, band)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", ("none", "bool", "bool-keys", "float", "float-per-head", "float-keys"))
def test_attention_is_that_of_stock_torch(mask, shape):
    given = _given(shape)
    masks = cases.masks(mask, given)
    bands = ({}, {"is_causal": True}) if mask == "none" else ({},)
    for position in bands:
        out, _, _ = _reference(given, **masks, **position)
        truth = F.scaled_dot_product_attention(*given.values(), **masks, **position, enable_gqa=True)
        torch.testing.assert_close(out, truth, rtol=1e-12, atol=1e-12)


def test_half_precision_is_computed_in_float32():
    given = cases.operands(dtype=torch.bfloat16, requires_grad=False)
    out, lse, _ = reference.attention(**given)
    wide, wide_lse, _ = reference.attention(**{name: value.float() for name, value in given.items()})
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert torch.equal(out, wide.bfloat16()) and torch.equal(lse, wide_lse)


def test_dropout_is_by_the_index_of_the_element():
    given = _given("more keys")
    shape = (2, 4, 3, 7)
    for seed in (torch.tensor([0]), torch.tensor([-(2**62) - 77])):
        kept = cases.dropout_kept(seed, 0.4, shape)
        assert torch.equal(kept, reference.dropout_mask(seed, 0.4, shape)) and 0 < kept.double().mean() < 1
        ours = _reference(given, dropout_p=0.4, seed=seed)
        truth = cases.naive(**given, kept=kept, dropout_p=0.4)
        for a, b in zip(ours, truth, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("extra", (1, 2))
@pytest.mark.parametrize("mask", ("bool-empty-row", "float", "bool+padding", "float-padding"))
def test_extra_keys_are_visible_whatever_the_masks(mask, extra):
    given = cases.operands(2, 3, 4, 6, 3)
    masks = cases.masks(mask, given)
    more = {name: torch.cat((t, torch.randn(2, 3, extra, 3, dtype=t.dtype)), 2) for name, t in given.items()}
    more["q"] = given["q"]
    wide = {}
    for name, value in masks.items():
        wide[name] = F.pad(value, (0, extra), value=value.dtype == torch.bool)
    seen = F.pad(cases.band(4, 6, causal="bottom_right"), (0, extra), value=True)
    truth_mask = wide.pop("attn_mask", torch.zeros((), dtype=torch.float64))
    if truth_mask.dtype == torch.bool:
        truth_mask = torch.where(truth_mask, 0.0, -math.inf).double()
    truth_mask = truth_mask.masked_fill(~seen, -math.inf)
    ours = _reference(more, **masks, causal="bottom_right", extra_keys=extra)
    truth = cases.naive(**more, attn_mask=truth_mask, **wide)
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert (ours[1] > -math.inf).all(), "no row is empty"


@pytest.mark.parametrize("mask", ("bool-empty-row", "float-empty-row", "empty-sample"))
def test_rows_with_nothing_to_attend_to_are_zero(mask):
    given = cases.operands(2, 3, 4, 6, 3)
    masks = cases.masks(mask, given)
    out, lse, probabilities = _reference(given, **masks)
    empty = lse == -math.inf
    assert empty.any() and not empty.all()
    assert (out[empty] == 0).all() and (probabilities[empty] == 0).all()
    douts = torch.randn_like(out)
    grads = cases.gradients(out, given, douts)
    assert (grads["q"][empty] == 0).all() and all(g.isfinite().all() for g in grads.values())
    # What comes in at an empty row reaches nobody.
    changed = cases.gradients(_reference(given, **masks)[0], given, torch.where(empty.unsqueeze(-1), 1e6, douts))
    cases.assert_same(changed, grads, 0)


@pytest.mark.parametrize("mask", ("none", "bool-empty-row", "float", "float+padding", "float-padding"))
@pytest.mark.parametrize("dropout_p", (0.0, 0.4))
def test_attention_gradcheck(dropout_p, mask):
    given = cases.operands(1, 2, 3, 4, 2, kv_heads=1)
    masks = cases.masks(mask, given)
    everything = given | cases.learned(masks)
    fixed = {name: value for name, value in masks.items() if name not in everything}
    seed = torch.tensor([3])

    def function(*values):
        tensors = dict(zip(everything, values, strict=True)) | fixed
        qkv = {name: tensors.pop(name) for name in ("q", "k", "v")}
        out, lse, _ = _reference(qkv, **tensors, causal="bottom_right", dropout_p=dropout_p, seed=seed)
        return out, lse[lse > -math.inf]

    assert gradcheck(function, tuple(everything.values()))
    assert gradgradcheck(function, tuple(everything.values()))


# The block ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", ("self", "cross", "widths"))
@pytest.mark.parametrize("extra", ("", "bias_kv", "zero", "bias_kv+zero"))
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "no-bias"))
def test_block_is_nn_multihead_attention(bias, extra, keys):
    widths = {"kdim": 5, "vdim": 7} if keys == "widths" else {}
    stock = nn.MultiheadAttention(
        12, 3, bias=bias, add_bias_kv="bias_kv" in extra, add_zero_attn="zero" in extra, batch_first=True,
        dtype=torch.float64, **widths,
    )  # fmt: skip
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.5)
    query = torch.randn(2, 4, 12, dtype=torch.float64)
    key, value = (
        (torch.randn(2, 6, widths.get(name, 12), dtype=torch.float64) for name in ("kdim", "vdim"))
        if keys != "self"
        else (query, query)
    )
    weight = stock.in_proj_weight if not widths else (stock.q_proj_weight, stock.k_proj_weight, stock.v_proj_weight)
    length_k = key.shape[1]
    hidden = torch.rand(2, length_k) < 0.3
    hidden[:, 0] = False
    per_head = torch.rand(2 * 3, 4, length_k) < 0.3
    per_head[..., 0] = False
    bias_table = torch.randn(4, length_k, dtype=torch.float64)
    flat = lambda b: None if b is None else b.view(-1)
    for masks, theirs in (
        ({}, {}),
        ({"key_padding_mask": ~hidden}, {"key_padding_mask": hidden}),
        ({"attn_mask": ~per_head.view(2, 3, 4, length_k)}, {"attn_mask": per_head}),
        ({"attn_mask": bias_table}, {"attn_mask": bias_table}),
        ({"attn_mask": ~per_head[:1], "key_padding_mask": ~hidden},
         {"attn_mask": per_head[0], "key_padding_mask": hidden}),
    ):  # fmt: skip
        for average in (True, False):
            with fused_remat.backend("reference"):
                ours = fused_remat.multi_head_attention(
                    query, key, value, weight, stock.in_proj_bias, stock.out_proj.weight, stock.out_proj.bias, 3,
                    bias_k=flat(stock.bias_k), bias_v=flat(stock.bias_v), add_zero_attn=stock.add_zero_attn,
                    need_weights=True, average_attn_weights=average, **masks,
                )  # fmt: skip
            truth = stock(query, key, value, average_attn_weights=average, **theirs)
            douts = [torch.randn_like(t) for t in truth]
            ours_grads, truth_grads = (
                torch.autograd.grad(outputs, list(stock.parameters()), douts, allow_unused=True)
                for outputs in (ours, truth)
            )
            for a, b in zip((*ours, *ours_grads), (*truth, *truth_grads), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ("layer_norm", "rms_norm"))
@pytest.mark.parametrize("affine", (True, False))
def test_normalize_is_that_of_stock_torch(affine, kind):
    x = torch.randn(3, 4, 7, dtype=torch.float64) * 3 + 1
    weight, bias = (torch.randn(7, dtype=torch.float64) for _ in range(2)) if affine else (None, None)
    if kind == "layer_norm":
        truth = F.layer_norm(x, (7,), weight, bias, 0.01)
    else:
        truth, bias = F.rms_norm(x, (7,), weight, 0.01), None
    torch.testing.assert_close(reference.normalize(x, Norm(kind, weight, bias, 0.01)), truth, rtol=1e-12, atol=1e-12)
    assert reference.normalize(x, None) is x


@pytest.mark.parametrize("interleaved", (False, True), ids=("halves", "pairs"))
@pytest.mark.parametrize("batch_angles", (1, 2))
def test_rotation_is_multiplication_by_complex_numbers(batch_angles, interleaved):
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    angle = torch.randn(batch_angles, 5, 3, dtype=torch.float64)
    spread = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    ours = reference.rotate(x, spread.cos(), spread.sin(), interleaved)
    turned, rest = x[..., :6], x[..., 6:]
    real, imaginary = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    product = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
    parts = (product.real, product.imag)
    truth = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    torch.testing.assert_close(ours, torch.cat((truth, rest), -1), rtol=1e-12, atol=1e-12)


def test_block_with_norms_and_rotation_is_the_written_formula():
    block = Block(
        heads=4, kv_heads=2, width=4, value_width=3, out=5, norm="rms_norm", qk_norm=True, rotary=2, bias_kv=True
    )
    given = block.operands()
    y, weights = block.reference(given, need_weights=True, is_causal=True, average_attn_weights=False)
    x = F.rms_norm(given["query"], (6,), given["norm_weight"], 1e-5)
    rows = (16, 8, 6)
    q, k, v = (
        F.linear(x, w, b).view(2, 5, -1, width).transpose(1, 2)
        for w, b, width in zip(
            given["in_proj_weight"].split(rows), given["in_proj_bias"].split(rows), (4, 4, 3), strict=True
        )
    )
    cos, sin = block.angles(torch.float64)
    q, k = (F.rms_norm(t, (4,), given[n], 1e-6) for t, n in ((q, "q_norm"), (k, "k_norm")))
    q, k = (reference.rotate(t, cos[None], sin[None], False) for t in (q, k))
    k, v = (
        torch.cat((t, given[n].view(1, 2, 1, -1).expand(2, -1, -1, -1)), 2) for t, n in ((k, "bias_k"), (v, "bias_v"))
    )
    seen = F.pad(torch.ones(5, 5).tril() > 0, (0, 1), value=True)
    out, _, probabilities = cases.naive(q, k, v, attn_mask=seen)
    truth = F.linear(out.transpose(1, 2).flatten(-2), given["out_proj_weight"], given["out_proj_bias"])
    torch.testing.assert_close(y, truth, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weights, probabilities, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "block",
    (
        Block(batch=1, length=3, heads=2, kv_heads=1, width=2, norm="layer_norm", qk_norm=True, rotary=2),
        Block(batch=1, length=2, length_k=3, model_k=3, model_v=2, packed=False, width=2, bias_kv=True, zero_key=True),
        Block(batch=1, length=3, width=2, norm="rms_norm", mask="float+padding", settings=(("dropout_p", 0.3),)),
    ),
    ids=("self", "cross", "masked"),
)
def test_block_gradcheck(block):
    given = block.operands()
    leaves = {name: value for name, value in given.items() if value.requires_grad}

    def function(*values):
        return block.reference(given | dict(zip(leaves, values, strict=True)), need_weights=True)

    assert gradcheck(function, tuple(leaves.values()), fast_mode=True)
    assert gradgradcheck(function, tuple(leaves.values()), fast_mode=True)
