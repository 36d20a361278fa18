"""The attention op against the reference and stock torch: values, widths, precision, lse, extremes, determinism."""

from __future__ import annotations

import math
from itertools import product

import attention_cases as cases
import pytest
import torch
import torch.nn.functional as F

import fused_remat

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
]
BACKEND = pytest.mark.parametrize("backend", cases.BACKENDS)
WORKSPACES = (1, 2**20)


def _results(given, masks, douts, *, runner=cases.run, **settings):
    """out, lse and all gradients by name; `douts` are those of out and lse."""
    everything = given | cases.learned(masks)
    out, lse = runner(given, **masks, return_lse=True, **settings)
    finite = lse.detach() > -math.inf  # of a row with nothing to attend to, lse has no gradient to speak of
    outputs, douts = (out, lse[finite]), (douts[0], douts[1][finite])
    named = {"out": out.detach(), "lse": lse.detach()}
    return named | {f"d{name}": g for name, g in cases.gradients(outputs, everything, douts).items()}


def _douts(given):
    q, v = given["q"], given["v"]
    return torch.randn(*q.shape[:3], v.shape[3], dtype=torch.float64).to(q.dtype), torch.randn(
        q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32
    )


@BACKEND
@pytest.mark.parametrize("mask", cases.MASKS)
def test_every_mask_and_band_agrees_with_the_reference(mask, backend):
    for shape in ((2, 4, 5, 7, 3), (1, 2, 70, 37, 5)):
        given = cases.operands(*shape, kv_heads=2, value_width=4)
        masks, douts = cases.masks(mask, given), _douts(given)
        for band, position in cases.BANDS.items():
            truth = _results(given, masks, douts, runner=cases.run_reference, **position)
            for workspace in WORKSPACES:
                ours = _results(given, masks, douts, backend=backend, workspace=workspace, **position)
                cases.assert_same(ours, truth, 1e-9, (shape, band, workspace))


@BACKEND
@pytest.mark.parametrize(("heads", "kv_heads"), ((6, 6), (6, 2), (6, 1)))
def test_widths_and_shared_heads(heads, kv_heads, backend):
    for width in (1, 16, 40, 64, 80, 96, 128, 200, 256):
        for value_width in {width, 24, 1}:
            given = cases.operands(1, heads, 7, 9, width, kv_heads=kv_heads, value_width=value_width)
            out = cases.run(given, backend=backend)
            truth = F.scaled_dot_product_attention(*given.values(), enable_gqa=True)
            dout = torch.randn_like(out)
            grads, expected = (cases.gradients(y, given, dout) for y in (out, truth))
            cases.assert_same({"out": out} | grads, {"out": truth} | expected, 1e-9, (width, value_width))
            changed = {name: value.detach().clone() for name, value in given.items()}
            for name in ("q", "k"):
                changed[name][..., -1] += 1.0
            assert (cases.run(changed, backend=backend) - out).abs().max() > 1e-3, "the last channel counts"


@BACKEND
@pytest.mark.parametrize(("length_q", "length_k"), ((1, 1), (1, 129), (63, 64), (129, 127), (341, 65), (64, 341)))
def test_lengths_around_tiles(length_q, length_k, backend):
    given = cases.operands(1, 2, length_q, length_k, 8, kv_heads=1)
    douts = _douts(given)
    for position in ({}, {"is_causal": True}, {"causal": "bottom_right"}, {"window": (40, 3)}, {"window": (None, 0)}):
        truth = _results(given, {}, douts, runner=cases.run_reference, **position)
        for workspace in WORKSPACES:
            ours = _results(given, {}, douts, backend=backend, workspace=workspace, **position)
            cases.assert_same(ours, truth, 1e-9, (position, workspace))


@BACKEND
@pytest.mark.parametrize(("length_q", "length_k"), ((3, 7), (7, 3)))
def test_is_causal_is_aligned_to_the_top_left(length_q, length_k, backend):
    given = cases.operands(2, 3, length_q, length_k, 4)
    triangle = torch.ones(length_q, length_k, dtype=torch.bool).tril()
    douts = _douts(given)
    ours = _results(given, {}, douts, backend=backend, is_causal=True)
    cases.assert_same(ours, _results(given, {"attn_mask": triangle}, douts, backend=backend), 1e-12)
    stock = F.scaled_dot_product_attention(*given.values(), is_causal=True)
    torch.testing.assert_close(ours["out"], stock.detach(), rtol=1e-12, atol=1e-12)
    assert all(t.isfinite().all() for t in ours.values())


# Precision ------------------------------------------------------------------------------------------------------------


@BACKEND
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("mask", ("none", "causal", "bool-keys", "float"))
def test_error_is_at_most_twice_that_of_stock(mask, dtype, backend):
    given = cases.operands(2, 3, 96, 130, 32, value_width=32, dtype=dtype)
    masks = {} if mask == "causal" else cases.masks(mask, given)
    causal = {"is_causal": mask == "causal"}
    exact = {name: value.detach().double().requires_grad_() for name, value in given.items()}
    exact_masks = {n: m if m.dtype == torch.bool else m.double() for n, m in masks.items()}
    dout = torch.randn(2, 3, 96, 32, dtype=torch.float64).to(dtype)
    found = {}
    for name, function, tensors in (
        ("ours", lambda g: cases.run(g, backend=backend, workspace=30_000, **masks, **causal), given),
        ("stock", lambda g: F.scaled_dot_product_attention(*g.values(), **masks, **causal), given),
        ("truth", lambda g: cases.run_reference(g, **exact_masks, **causal), exact),
    ):
        out = function(tensors)
        found[name] = {"out": out} | cases.gradients(out, tensors, dout.to(out.dtype))
    floor = torch.finfo(dtype).eps / 8 if dtype != torch.float64 else 1e-14
    for name, truth in found["truth"].items():
        assert found["ours"][name].dtype == dtype
        error, allowed = (cases.relative_error(found[who][name], truth) for who in ("ours", "stock"))
        assert error <= 2 * allowed + floor, (name, error, allowed)


@BACKEND
@pytest.mark.parametrize("workspace", (1, 2**20))
def test_large_scores_in_half_precision(workspace, backend):
    """Backward must build its probabilities from scores as exact as those that lse was made of."""
    given = cases.operands(1, 2, 256, 256, 64, requires_grad=False)
    factors = {"q": 6.0, "k": 1.5, "v": 1.0}
    given = {name: (value * factors[name]).bfloat16().requires_grad_() for name, value in given.items()}
    exact = {name: value.detach().double().requires_grad_() for name, value in given.items()}
    dout = torch.randn(1, 2, 256, 64).bfloat16()
    out, lse = cases.run(given, backend=backend, workspace=workspace, return_lse=True)
    truth, truth_lse = cases.run_reference(exact, return_lse=True)
    assert truth_lse.max() > 30
    for name, expected in cases.gradients(truth, exact, dout.double()).items():
        ours = cases.gradients(out, given, dout, retain_graph=True)[name]
        assert cases.relative_error(ours, expected) <= 1e-2, name
    scores = exact["q"] @ exact["k"].transpose(-2, -1) / 8
    sums = (scores - lse.double().unsqueeze(-1)).exp().sum(-1)
    assert (sums - 1).abs().max() <= 1e-3
    torch.testing.assert_close(lse.double(), truth_lse, rtol=1e-6, atol=1e-5)


@BACKEND
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("score", (-105.0, 110.0))
def test_padded_tails_and_scores_far_from_zero(score, dtype, backend):
    """What pads a tile must not take part, though exp(0 - lse) overflows at -105 and the true scores do at +110."""
    # In float64 eager is the truth itself; a score of 100 has lost that many units in the last place.
    floor = 200 * torch.finfo(dtype).eps if dtype == torch.float64 else torch.finfo(dtype).eps / 2
    for length_q, length_k in ((65, 65), (33, 100), (7, 129)):
        noise = cases.operands(1, 2, length_q, length_k, 16, requires_grad=False)
        q = 0.1 * noise["q"]
        q[..., 0] = 1.0
        k = 0.1 * noise["k"]
        k[..., 0] = score
        given = {"q": q, "k": k, "v": noise["v"]}
        given = {name: value.to(dtype).requires_grad_() for name, value in given.items()}
        exact = {name: value.detach().double().requires_grad_() for name, value in given.items()}
        douts = _douts(given)
        for position in ({}, {"causal": "bottom_right"}):
            settings = {"scale": 1.0, **position}
            truth = _results(exact, {}, [d.double() for d in douts], runner=cases.run_reference, **settings)
            ours = _results(given, {}, douts, backend=backend, workspace=1, **settings)
            eager = _results(given, {}, douts, runner=cases.run_reference, **settings)
            for name, expected in truth.items():
                assert ours[name].isfinite().equal(expected.isfinite())
                finite = expected.isfinite()
                error, allowed = (cases.relative_error(t[name][finite], expected[finite]) for t in (ours, eager))
                assert error <= 2 * allowed + floor, (name, error, allowed)


@BACKEND
def test_nan_and_masked_nan(backend):
    given = cases.operands(1, 2, 6, 40, 4, requires_grad=False)
    given["q"][0, 0, 2] = math.nan
    out, lse = cases.run(given, backend=backend, return_lse=True)
    truth, truth_lse = cases.run_reference(given, return_lse=True)
    assert truth[0, 0, 2].isnan().all() and truth.isnan().sum() == 4
    torch.testing.assert_close(out, truth, equal_nan=True)
    torch.testing.assert_close(lse, truth_lse, equal_nan=True)
    given = cases.operands(1, 2, 6, 40, 4, requires_grad=False)
    given["k"][:, :, 7] = math.nan
    seen = torch.ones(1, 40, dtype=torch.bool)
    seen[:, 7] = False
    out = cases.run(given, backend=backend, key_padding_mask=seen)
    assert out.isfinite().all()
    torch.testing.assert_close(out, cases.run_reference(given, key_padding_mask=seen))


# lse ------------------------------------------------------------------------------------------------------------------


@BACKEND
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=str)
def test_lse_is_the_natural_log_and_its_gradient_is_the_probabilities(dtype, backend):
    given = cases.operands(2, 3, 20, 33, 8, dtype=dtype)
    out, lse = cases.run(given, backend=backend, return_lse=True, workspace=1)
    assert lse.shape == (2, 3, 20) and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    scores = given["q"].double() @ given["k"].double().transpose(-2, -1) * 8**-0.5
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    dlse = torch.randn_like(lse)
    ours = cases.gradients(lse, given, dlse, retain_graph=True, materialize_grads=True)
    dscores = scores.softmax(-1) * dlse.double().unsqueeze(-1) * 8**-0.5
    truth = {"q": dscores @ given["k"].double(), "k": dscores.transpose(-2, -1) @ given["q"].double()}
    for name, expected in truth.items():
        assert cases.relative_error(ours[name], expected) <= 4 * torch.finfo(dtype).eps, name
    assert (ours["v"] == 0).all()
    both = cases.gradients((out, lse), given, (torch.zeros_like(out), dlse), retain_graph=True)
    for name, expected in ours.items():
        torch.testing.assert_close(both[name], expected)


@BACKEND
def test_empty_rows_and_what_comes_in_there(backend):
    for kind in ("bool-empty-row", "float-empty-row", "empty-sample"):
        given = cases.operands(2, 4, 9, 40, 3)
        masks = cases.masks(kind, given)
        out, lse = cases.run(given, backend=backend, return_lse=True, **masks)
        empty = lse == -math.inf
        assert empty.any() and not empty.all() and (out[empty] == 0).all()
        douts = torch.randn_like(out)
        grads = cases.gradients(out, given, douts, retain_graph=True)
        assert (grads["q"][empty] == 0).all() and all(g.isfinite().all() for g in grads.values())
        louder = torch.where(empty.unsqueeze(-1), 1e6, douts)
        cases.assert_same(cases.gradients(out, given, louder), grads, 0, kind)
    given = cases.operands(2, 4, 5, 2, 3)
    out = cases.run(given, backend=backend, causal="bottom_right")  # the first 3 queries come before every key
    assert (out[:, :, :3] == 0).all() and (out[:, :, 3:] != 0).any()


# Determinism ----------------------------------------------------------------------------------------------------------


@BACKEND
@pytest.mark.parametrize("settings", ({}, {"is_causal": True, "dropout_p": 0.2}), ids=("full", "causal-dropout"))
def test_same_bits_on_every_rerun_and_thread_count(settings, backend):
    given = cases.operands(2, 4, 150, 130, 16, kv_heads=2, dtype=torch.float32)
    masks = {"attn_mask": torch.randn(4, 150, 130)}
    douts = _douts(given)
    before, runs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4, 1):
            torch.set_num_threads(threads)
            runs.append(_results(given, masks, douts, backend=backend, workspace=100_000, **settings))
    finally:
        torch.set_num_threads(before)
    for other in runs[1:]:
        assert all(torch.equal(runs[0][name], other[name]) for name in other)


@BACKEND
def test_the_named_backend_ran(backend):
    given = cases.operands()
    ran = cases.kernels_of(lambda: cases.run(given, backend=backend).sum().backward())
    assert cases.backends_of(ran) == {backend}
    assert {"attention_fwd", "attention_bwd"} <= set(ran)


def test_the_compiled_kernels_run_by_default():
    given = cases.operands()
    assert cases.backends_of(cases.kernels_of(lambda: fused_remat.attention(**given).sum().backward())) == {"cpp"}
    with fused_remat.backend("reference"):
        assert cases.kernels_of(lambda: fused_remat.attention(**given).sum().backward()) == []


# Implementers ---------------------------------------------------------------------------------------------------------


def test_forward_and_backward_on_different_backends_agree():
    q, k, v = (torch.randn(2, heads, length, 5).double() for heads, length in ((4, 9), (2, 11), (2, 11)))
    mask, key_mask = torch.randn(1, 4, 9, 11).double(), torch.rand(2, 11) > 0.2
    seed, dout, dlse = torch.tensor([5]), torch.randn(2, 4, 9, 5).double(), torch.randn(2, 4, 9).double()
    ops, results = torch.ops.fused_remat, []
    for forward, backward in product(cases.BACKENDS, repeat=2):
        call = lambda backend: (q, k, v, mask, key_mask, 2, 6, -1, 0.2, 0.5, 1.5, 2000, backend, torch.float64, seed)
        out, lse = ops.attention_fwd(*call(forward))
        gradients = ops.attention_bwd(dout, dlse, *call(backward), out, lse, [True] * 4 + [False])
        results.append([out, lse, *gradients])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# Extremes that a log-sum-exp cannot carry --------------------------------------------------------------------------


@BACKEND
@pytest.mark.parametrize("value", (torch.finfo(torch.float32).min, -1e9, -1e6, -1e4, 1e4))
def test_a_row_masked_by_one_large_number_keeps_its_probabilities(value, backend):
    """log(4) has no digits left beside -3e38: backward and weights must not live by the log-sum-exp alone."""
    mask = torch.zeros(4, 4)
    mask[2] = value
    given = cases.operands(1, 1, 4, width=8, dtype=torch.float32)
    dout = torch.randn(1, 1, 4, 8)
    out, truth = cases.run(given, backend=backend, attn_mask=mask), cases.run_reference(given, attn_mask=mask)
    cases.assert_same({"out": out}, {"out": truth}, 2e-6)
    cases.assert_same(cases.gradients(out, given, dout), cases.gradients(truth, given, dout), 2e-6)
    eye = torch.eye(8)
    x = torch.randn(1, 4, 8)
    with fused_remat.backend(backend):
        _, weights = fused_remat.multi_head_attention(
            x, None, None, torch.cat([eye] * 3), None, eye, None, 2, attn_mask=mask, need_weights=True
        )
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4), rtol=1e-6, atol=1e-6)


@BACKEND
@pytest.mark.parametrize("name", ("q", "k", "v"))
@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_what_is_not_finite_shows_wherever_it_should(value, name, backend):
    given = cases.operands(1, 1, 4, 5, dtype=torch.float32)
    with torch.no_grad():
        given[name][0, 0, 1, 2] = value
    dout = torch.randn(1, 1, 4, 3)
    out, truth = cases.run(given, backend=backend), cases.run_reference(given)
    ours = {"out": out} | cases.gradients(out, given, dout)
    for key, expected in ({"out": truth} | cases.gradients(truth, given, dout)).items():
        assert torch.equal(ours[key].isfinite(), expected.isfinite()), key
