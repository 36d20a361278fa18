"""Capped scores in every attention kernel, against ATen in the same dtype and in float64."""

from __future__ import annotations

import math

import attention_calls as calls
import pytest
import torch
import triton
import triton.language as tl
from attention_calls import Case

import fused_remat
from fused_remat.triton import attention, attention_tiles
from fused_remat.triton.attention_tiles import Spec

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(calls.needs_extension is not None, reason=str(calls.needs_extension)),
]
CAPPED = Case(batch=1, softcap=0.8)
CASES = {
    "plain": CAPPED,
    "causal": CAPPED.but(high=0, length_q=70, length_k=70),
    "window, shared heads": CAPPED.but(heads=4, kv_heads=2, low=-9, high=3, rebuild=True),
    "bool mask": CAPPED.but(attn_mask="bool 1hij", key_mask="bool b11j", rebuild=True),
    "float mask": CAPPED.but(attn_mask="float bhij", key_mask="float b11j"),
    "everything": CAPPED.but(
        batch=2, attn_mask="float 1h1j", key_mask="bool b11j", dropout_p=0.2, dweights="b1ij", rebuild=True, high=20,
        extra_keys=2,
    ),
    "dropout": CAPPED.but(dropout_p=0.3, dweights="bhij"),
    "bound that nothing reaches": CAPPED.but(softcap=1e4),
    "scores far beyond the bound": CAPPED.but(scale=300.0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_forward_backward_and_weights(name):
    ours = calls.check(CASES[name], weights_of="b1ij")
    assert all(t.isfinite().all() for t in ours.values())


@pytest.mark.parametrize("score", (-300.0, 300.0))
def test_rows_whose_lse_keeps_too_few_digits(score):
    case = CAPPED.but(softcap=500.0, scale=1.0, length_q=33, length_k=65)
    given = calls.operands(case)
    given["q"] *= 0.5
    given["k"] *= 0.5
    given["q"][..., 0], given["k"][..., 0] = 1.0, score
    saved = calls.forward("triton", case, given)
    assert (saved["lse"].abs() > 64).all()
    assert (calls.delta("triton", case, given, saved)["correction"] != 0).any()
    calls.check(case, given, weights_of="bhij")
    calls.check(case.but(high=32, rebuild=True), given)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float16), ids=str)
@pytest.mark.parametrize("softcap", (0.8, 50.0, 1000.0))
def test_other_dtypes(softcap, dtype):
    case = CAPPED.but(length_q=34, length_k=40, dtype=dtype, softcap=softcap, scale=1.0)
    calls.check(case.but(high=4), weights_of="bhij")
    calls.check(case.but(attn_mask="float 1hij", rebuild=True))


def test_what_is_compiled():
    """No cap leaves no trace in a kernel; a cap that rounded products cannot tell from an exact one is made quickly."""
    found = {}
    for dtype, softcap in ((torch.float32, 0.0), (torch.float32, 50.0), (torch.float16, 50.0), (torch.float16, 1000.0)):
        case = CAPPED.but(dtype=dtype, softcap=softcap)
        given = calls.operands(case)
        call = attention.Call((given["q"], given["k"], given["v"]), 16, *calls.attending(case, given)[:-1])
        spec, _ = call.plan("attention_fwd")
        found[dtype, softcap] = spec.cap, call.numbers.softcap is None
    assert found == {
        (torch.float32, 0.0): ("", True),
        (torch.float32, 50.0): ("exact", False),
        (torch.float16, 50.0): ("quick", False),
        (torch.float16, 1000.0): ("exact", False),
    }
    assert Spec(16, 16, 16, 16).cap == ""


@triton.jit
def _tanh_kernel(x, value, slope, N: tl.constexpr, SPEC: tl.constexpr):
    at = tl.arange(0, N)
    t, s = attention_tiles.tanh(tl.load(x + at), SPEC)
    tl.store(value + at, t)
    tl.store(slope + at, s)


@pytest.mark.parametrize(("cap", "tolerance"), (("quick", 3e-7), ("exact", 2e-7)))
def test_tanh(cap, tolerance):
    x = torch.cat((torch.linspace(-12, 12, 1018), torch.tensor([0.0, 1e-20, 1e30, -1e30, math.inf, -math.inf])))
    value, slope = torch.empty_like(x), torch.empty_like(x)
    unit = 2 * math.log2(math.e) if cap == "quick" else 1.0
    _tanh_kernel[(1,)](unit * x, value, slope, N=1024, SPEC=Spec(16, 16, 16, 16, cap=cap))
    exact = x.double().tanh()
    torch.testing.assert_close(value.double(), exact, rtol=0, atol=tolerance)
    torch.testing.assert_close(slope.double(), 1 - exact.square(), rtol=0, atol=2 * tolerance)
    if cap == "exact":
        torch.testing.assert_close(value.double(), exact, rtol=4e-7, atol=0)


@pytest.mark.parametrize("keep", ((), ("out",)), ids=str)
def test_the_block(keep):
    x = torch.randn(2, 9, 8, requires_grad=True)
    w_in, w_out = (torch.randn(24, 8) / 3).requires_grad_(), (torch.randn(8, 8) / 3).requires_grad_()
    found = []
    for backend in ("triton", "reference"):
        with fused_remat.backend(backend):
            y, weights = fused_remat.multi_head_attention(
                x, None, None, w_in, None, w_out, None, 2, softcap=0.5, is_causal=True, need_weights=True, keep=keep
            )
        dy = torch.linspace(-1, 1, y.numel()).view(y.shape)
        dweights = torch.linspace(1, -1, weights.numel()).view(weights.shape)
        found.append((y, weights, *torch.autograd.grad((y, weights), (x, w_in, w_out), (dy, dweights))))
    for ours, truth in zip(*found, strict=True):
        torch.testing.assert_close(ours, truth, rtol=2e-5, atol=2e-5)
