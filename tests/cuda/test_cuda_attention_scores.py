"""Attention kernels in CUDA C++ at level 3: empty rows, what is not finite, large scores, caps, dropout, errors."""

from __future__ import annotations

import math

import attention_level3 as calls
import pytest
import torch
from attention_level3 import Case
from test_cuda_attention_kernels import SETTINGS

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread", "own_attention")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)


def check(case, given=None, label="", **how):
    return calls.check("cuda", case, given, label, **how)


# Rows with nothing to attend to, and what is not finite --------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("kind", ("bool", "float"))
def test_rows_with_nothing_to_attend_to(kind, dtype):
    case = Case(attn_mask=f"{kind} bhij", rebuild=True, dweights="b1ij", dropout_p=0.2, dtype=dtype)
    given = calls.operands(case)
    nothing = False if kind == "bool" else -math.inf
    given["attn_mask"][:, :, 3] = nothing
    given["attn_mask"][1, 0] = nothing
    ours = check(case, given, weights_of="bhij")
    assert (ours["lse"][1, 0] == -math.inf).all()
    for name in ("out", "rebuilt", "delta", "dq"):
        assert (ours[name][1, 0] == 0).all() and (ours[name][:, :, 3] == 0).all()
    assert (ours["weights"][1, 0] == 1).all()
    assert all(ours[name].isfinite().all() for name in calls.wanted_of(given))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", ("q", "k", "v"))
@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_what_is_not_finite_shows_where_it_should(value, name, dtype):
    case = Case(batch=1, heads=1, length_q=4, length_k=5, width=3, value_width=3, dtype=dtype)
    given = calls.operands(case)
    given[name][0, 0, 1, 2] = value
    ours, truth = calls.run("cuda", case, given), calls.run("aten", case, given)
    for key in ("out", "dq", "dk", "dv"):
        assert torch.equal(ours[key].isfinite(), truth[key].isfinite()), key


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_what_is_not_finite_stays_with_the_rows_that_see_it(dtype):
    case = Case(batch=1, heads=1, length_q=70, length_k=70, high=0, dtype=dtype)
    given = calls.operands(case)
    given["k"][0, 0, 40] = math.nan
    ours = calls.run("cuda", case, given)
    assert ours["out"][:, :, :40].isfinite().all() and ours["out"][:, :, 40:].isnan().all()
    given = calls.operands(case.but(key_mask="bool b11j"))
    given["k"][0, 0, 40], given["key_mask"][..., 40] = math.nan, False
    given["key_mask"][..., 0] = True
    assert calls.run("cuda", case, given)["out"].isfinite().all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_a_key_that_nobody_sees_may_be_nan(dtype):
    """Its own gradients are 0; queries that a tile has beyond the last one see nothing either."""
    case = Case(batch=1, heads=1, attn_mask="float 11ij", key_mask="bool b11j", dtype=dtype)
    given = calls.operands(case)
    given["key_mask"][..., 0] = True
    given["key_mask"][..., 20] = False
    given["k"][0, 0, 20] = math.nan
    ours = calls.run("cuda", case, given, weights_of="b1ij")
    for name in ("out", "lse", "delta", "dk", "dv", "dattn_mask", "weights"):
        assert ours[name].isfinite().all(), name
    assert (ours["dk"][0, 0, 20] == 0).all() and (ours["dv"][0, 0, 20] == 0).all()
    assert (ours["dattn_mask"][..., 20] == 1).all() and (ours["weights"][..., 20] == 1).all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("beyond", ("keys", "queries"))
def test_memory_beyond_the_last_row_is_not_read(beyond, dtype):
    case = Case(length_q=17, length_k=35, attn_mask="float bhij", key_mask="float b11j", dtype=dtype)
    given = calls.operands(case)
    clean = calls.run("cuda", case, given)
    for name in ("k", "v") if beyond == "keys" else ("q", "dout"):
        t = given[name]
        longer = torch.full((*t.shape[:2], 80, 24), math.nan, dtype=dtype)
        longer[:, :, : t.shape[2], : t.shape[3]] = t
        given[name] = longer[:, :, : t.shape[2], : t.shape[3]]
    for name, tensor in calls.run("cuda", case, given).items():
        assert torch.equal(tensor, clean[name]), name


# Scores that a log-sum-exp cannot carry ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("value", (torch.finfo(torch.float32).min, -1e9, -1e6, -1e4, 1e4))
@pytest.mark.parametrize("rebuild", (False, True))
def test_a_row_masked_by_one_large_number_keeps_its_probabilities(value, rebuild, dtype):
    case = Case(1, 2, 1, 5, 40, attn_mask="float 11ij", rebuild=rebuild, dweights="b1ij" * rebuild, dtype=dtype)
    given = calls.operands(case)
    given["attn_mask"] = torch.zeros(1, 1, 5, 40)
    given["attn_mask"][:, :, 2] = value
    check(case, given, weights_of="b1ij")


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("score", (-105.0, 110.0, 3000.0))
def test_scores_far_from_zero_and_padded_tails(score, dtype):
    case = Case(batch=1, heads=1, length_q=33, length_k=65, scale=1.0, dtype=dtype)
    given = calls.operands(case)
    given["q"] *= 0.1
    given["k"] *= 0.1
    given["q"][..., 0], given["k"][..., 0] = 1.0, score
    saved = calls.forward("cuda", case, given)
    rows = calls.delta("cuda", case, given, saved)
    assert (saved["lse"].abs() > 64).all() and (rows["correction"] != 0).any()
    for variant in (case, case.but(high=32, rebuild=True)):
        ours, stock = (calls.run(backend, variant, given, weights_of="bhij") for backend in ("cuda", "aten"))
        truth = calls.run("aten", variant.but(dtype=torch.float64), calls.in_double(given), weights_of="bhij")
        if dtype == torch.float16:  # of rounded gradients of scores, sums with such keys keep few digits
            for made in (ours, stock):
                made["dq"] = truth["dq"]
        calls.assert_as_exact_as_torch(ours, stock, truth)


def test_corrections_are_for_large_rows_alone():
    case = Case(rebuild=True)
    given = calls.operands(case)
    for rebuild in (False, True):
        saved = calls.forward("cuda", case, given)
        assert (calls.delta("cuda", case.but(rebuild=rebuild), given, saved)["correction"] == 0).all()


# Caps -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", (0.05, 0.8, 50.0, 1e4))
def test_caps(softcap, dtype):
    for scale in {torch.float64: (0.3,), torch.float32: (0.3, 3.0)}.get(dtype, (0.3, 300.0)):
        case = Case(batch=1, softcap=softcap, scale=scale, dtype=dtype)
        check(case)
        check(case.but(attn_mask="float 1hij", key_mask="bool b11j"))


# Dropout and other implementers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("shape", ((1, 1, 1, 1), (2, 3, 5, 7), (1, 2, 70, 65)), ids=str)
@pytest.mark.parametrize("seed", (0, -1, 2**62 + 12345))
def test_dropout_masks_are_those_of_cpp(shape, seed, dtype):
    batch, heads, length_q, length_k = shape
    case = Case(batch, heads, heads, length_q, length_k, 3, length_k, dtype, dropout_p=0.3, seed=seed)
    for ours in (case, case.but(head0=2, num_heads=heads + 5), case.but(head0=2**26, num_heads=2**27)):
        given = calls.operands(ours)
        given["v"] = torch.eye(length_k, dtype=dtype).expand(batch, heads, -1, -1)
        masks = [calls.forward(backend, ours, given)["out"] != 0 for backend in ("cuda", "cpp")]
        assert torch.equal(*masks)


@pytest.mark.parametrize("settings", SETTINGS)
def test_forward_and_backward_on_different_backends_agree(settings):
    case = SETTINGS[settings].but(batch=1, length_q=65)
    given = calls.operands(case)
    check(case, given, forward_by="cpp")
    ours, mixed = calls.run("cpp", case, given), calls.run("cpp", case, given, forward_by="cuda")
    for name, expected in ours.items():
        torch.testing.assert_close(mixed[name], expected, rtol=1e-4, atol=1e-5)


# Wrong arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    (
        ("k", lambda t: t[..., :8], ValueError, "k must be"),
        ("k", lambda t: t.double(), TypeError, "k must be Float, got Double"),
        ("q", lambda t: t.transpose(2, 3).contiguous().transpose(2, 3), ValueError, "q must have a dense last dim"),
        ("v", lambda t: t[:, :, 1:], ValueError, "v must be"),
        ("attn_mask", lambda t: t[..., 1:], ValueError, "attn_mask must broadcast to"),
        ("key_mask", lambda t: t.expand(-1, 2, -1, -1), ValueError, "key_mask must broadcast to"),
        ("k", lambda t: t.expand(-1, 4, -1, -1), ValueError, "do not fit together"),
    ),
)
def test_operands_that_do_not_fit(name, change, error, message):
    case = Case(attn_mask="float bhij", key_mask="float b11j", heads=2)
    given = calls.operands(case)
    with pytest.raises(error, match=message):
        calls.forward("cuda", case, given | {name: change(given[name])})


def test_seeds_and_results_that_do_not_fit():
    case = Case(dropout_p=0.5)
    given = calls.operands(case)
    fixed = list(calls.attending(case, given))
    qkv = [given[name] for name in ("q", "k", "v")]
    out, lse = torch.empty(2, 2, 17, 16), torch.empty(2, 2, 17)
    op = torch.ops.fused_remat.attention_fwd_cuda
    for results, message in (((out[..., :8], lse), "out must be"), ((out, lse[:1]), "lse must be")):
        with pytest.raises(ValueError, match=message):
            op(*qkv, *fixed, *results)
    with pytest.raises(TypeError, match="lse must be Float, got Double"):
        op(*qkv, *fixed, out, lse.double())
    fixed[2] = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="dropout takes a seed of one int64"):
        op(*qkv, *fixed, out, lse)
