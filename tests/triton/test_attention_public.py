"""`fused_remat.attention` and attention weights on the Triton backend, from the arguments that a caller gives."""

from __future__ import annotations

import math

import attention_calls as calls
import attention_cases as cases
import pytest
import torch

import fused_remat

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
]


def _results(given, masks, dout, dlse=None, *, backend="triton", **settings):
    """out, lse and every gradient by name."""
    everything = given | cases.learned(masks)
    out, lse = cases.run(given, backend=backend, return_lse=True, **masks, **settings)
    outputs, douts = (out,), (dout,)
    if dlse is not None:
        finite = lse.detach() > -math.inf
        outputs, douts = (out, lse[finite]), (dout, dlse[finite])
    named = {"out": out.detach(), "lse": lse.detach()}
    return named | {f"d{name}": g for name, g in cases.gradients(outputs, everything, douts).items()}


def _as(tensors, dtype):
    """The same numbers in another dtype, as leaves of their own; bool masks as they are."""
    return {n: t.detach().to(dtype).requires_grad_(t.requires_grad) if t.is_floating_point() else t
            for n, t in tensors.items()}  # fmt: skip


def _check(given, masks, *, with_dlse=False, **settings):
    """Triton in the dtype of q against float64, beside torch in that dtype."""
    dtype = given["q"].dtype
    dout = torch.randn(*given["q"].shape[:3], given["v"].shape[3], dtype=torch.float64).to(dtype)
    dlse = torch.randn(given["q"].shape[:3], dtype=torch.float64).float() if with_dlse else None
    exact = (_as(given, torch.float64), _as(masks, torch.float64), dout.double())
    found = _results(given, masks, dout, dlse, **settings)
    stock = _results(given, masks, dout, dlse, backend="reference", **settings)
    truth = _results(*exact, None if dlse is None else dlse.double(), backend="reference", **settings)
    calls.assert_as_exact_as_torch(found, stock, truth, settings)
    return found


# Every mask with one band, every band with one mask.
PAIRS = [
    ("none", "is_causal"), ("bool", "full"), ("bool-shared", "causal-window"), ("bool-per-sample", "top_left"),
    ("bool-keys", "window"), ("bool-empty-row", "bottom_right"), ("float", "left-window"), ("float-per-head", "full"),
    ("float-per-query", "is_causal"), ("float-keys", "bottom_right"), ("float-empty-row", "window"),
    ("padding", "causal-wide-window"), ("float-padding", "is_causal"), ("empty-sample", "full"),
    ("bool+padding", "window"), ("float+padding", "bottom_right"), ("float+float-padding", "causal-window"),
]  # fmt: skip


@pytest.mark.parametrize(("mask", "band"), PAIRS)
def test_masks_and_bands(mask, band):
    given = cases.operands(2, 4, 19, 35, 5, kv_heads=2, value_width=4, dtype=torch.float32)
    _check(given, cases.masks(mask, given), with_dlse=True, **cases.BANDS[band])


def test_every_mask_and_band_is_paired():
    assert {mask for mask, _ in PAIRS} == set(cases.MASKS) and {band for _, band in PAIRS} == set(cases.BANDS)


def test_the_kernels_of_triton_ran():
    given = cases.operands(1, 1, 3, dtype=torch.float32)
    ran = cases.kernels_of(lambda: cases.run(given, backend="triton").sum().backward())
    assert {name for name in ran if name.startswith("attention") and "_triton" in name} == {
        "attention_fwd_triton", "attention_delta_triton", "attention_bwd_triton"
    }  # fmt: skip


def test_an_incoming_gradient_of_one_value():
    given = cases.operands(1, 2, 18, 20, 4, kv_heads=1, dtype=torch.float32)
    cases.run(given, backend="triton").sum().backward()
    ours = {name: t.grad for name, t in given.items()}
    truth = torch.autograd.grad(cases.run_reference(given).sum(), list(given.values()))
    for grad, expected in zip(ours.values(), truth, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", ("q", "k", "v", "kv", "qk"))
def test_frozen_operands(frozen):
    given = cases.operands(1, 2, 18, 20, 4, dtype=torch.float32)
    for name in frozen:
        given[name].requires_grad_(False)
    _check(given, {}, is_causal=True)


@pytest.mark.parametrize("position", ({}, {"is_causal": True}), ids=("full", "causal"))
def test_gradients_are_those_of_the_explicit_dropout_mask(position):
    given = cases.operands(1, 2, 70, 70, 8, dtype=torch.float32)
    dout = torch.randn(1, 2, 70, 8)
    mask = cases.dropout_kept
    torch.manual_seed(4)
    kept = mask(fused_remat.reference.draw_seed(torch.device("cpu")), 0.3, (1, 2, 70, 70))
    out = cases.run(given, backend="triton", seed=4, dropout_p=0.3, **position)
    truth, *_ = cases.naive(*given.values(), kept=kept, dropout_p=0.3, **position)
    torch.testing.assert_close(out, truth, rtol=1e-5, atol=1e-5)
    cases.assert_same(cases.gradients(out, given, dout), cases.gradients(truth, given, dout), 1e-4)


def test_large_scores_in_half_precision():
    """Backward must build its probabilities from scores as exact as those that lse was made of."""
    given = cases.operands(1, 1, 96, 96, 64, requires_grad=False)
    factors = {"q": 6.0, "k": 1.5, "v": 1.0}
    given = {name: (value * factors[name]).half().requires_grad_() for name, value in given.items()}
    found = _check(given, {})
    assert found["lse"].max() > 30
    scores = given["q"].double() @ given["k"].double().transpose(-2, -1) / 8
    sums = (scores - found["lse"].double().unsqueeze(-1)).exp().sum(-1)
    assert (sums - 1).abs().max() <= 1e-3


@pytest.mark.parametrize("empty", ("batch", "queries", "keys", "width", "value width", "heads"))
def test_sizes_of_zero(empty):
    sizes = {"batch": 2, "heads": 2, "queries": 3, "keys": 4, "width": 5, "value width": 6}
    sizes[empty] = 0
    b, h, i, j, e, f = sizes.values()
    shapes = {"q": (b, h, i, e), "k": (b, max(h, 1), j, e), "v": (b, max(h, 1), j, f)}
    given = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}
    for settings in ({"is_causal": True, "dropout_p": 0.3}, {"attn_mask": torch.zeros(i, j, requires_grad=True)}):
        everything = given | {n: v for n, v in settings.items() if n == "attn_mask"}
        found = []
        for backend in ("triton", "reference"):
            out, lse = cases.run(given, backend=backend, return_lse=True, **settings)
            grads = cases.gradients(out, everything, torch.ones_like(out), materialize_grads=True)
            found.append({"out": out, "lse": lse} | grads)
        cases.assert_same(*found, 1e-5, settings)


@pytest.mark.parametrize("average", (True, False))
@pytest.mark.parametrize("keep", ((), ("out",)), ids=("rebuild", "keep-out"))
def test_weights_and_their_gradient(average, keep):
    heads, width = 2, 16
    torch.manual_seed(0)
    x = torch.randn(2, 19, width)
    given = {"x": x, "in": torch.randn(3 * width, width) / 4, "out": torch.randn(width, width) / 4}
    dy, bias = torch.randn(2, 19, width), torch.randn(19, 19)
    dweights = torch.randn(2, 19, 19) if average else torch.randn(2, heads, 19, 19)
    found = {}
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float32), ("reference", torch.float64)):
        leaves = {name: t.to(dtype).requires_grad_() for name, t in (given | {"bias": bias}).items()}
        with fused_remat.backend(backend):
            y, weights = fused_remat.multi_head_attention(
                leaves["x"], None, None, leaves["in"], None, leaves["out"], None, heads, attn_mask=leaves["bias"],
                need_weights=True, average_attn_weights=average, keep=keep,
            )  # fmt: skip
        grads = torch.autograd.grad((y, weights), list(leaves.values()), (dy.to(dtype), dweights.to(dtype)))
        found[backend, dtype] = [y.detach(), weights.detach(), *grads]
    ours, stock, truth = found.values()
    for made, plain, exact in zip(ours, stock, truth, strict=True):
        error, allowed = ((t.double() - exact).norm().item() for t in (made, plain))
        assert error <= 2 * allowed + 1e-6 * exact.norm().item()


@pytest.mark.parametrize("kind", ("causal", "mask"))
def test_a_key_that_no_query_sees_may_be_nan(kind):
    given = cases.operands(1, 1, 18, 24, 8, dtype=torch.float32)  # queries that do not fill a tile
    mask = torch.ones(18, 24, dtype=torch.bool)
    mask[:, 18:] = False
    settings = {"is_causal": True} if kind == "causal" else {"attn_mask": mask}
    with torch.no_grad():
        given["k"][:, :, 20:] = math.nan
    dout = torch.randn(1, 1, 18, 8)
    expected = _results(given, {}, dout, backend="cpp", **settings)
    for name, found in _results(given, {}, dout, **settings).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-6, equal_nan=True)
        assert name == "dq" or not found.isnan().any()  # dq is NaN everywhere: ds of 0 times that key
