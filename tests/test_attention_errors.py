"""Bad input to attention gets one clear error, in eager and under torch.compile, before anything is computed."""

from __future__ import annotations

import attention_cases as cases
import pytest
import torch

import fused_remat

needs_extension = pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension))


def _tensors(**changes):
    given = cases.operands(2, 4, 5, 7, 3, kv_heads=2, dtype=torch.float32, requires_grad=False)
    return given | changes


NAN = float("nan")
# case -> (changed operands, changed settings, error, words of its message)
BAD = {
    "no tensor": ({"q": [1.0]}, {}, TypeError, "q must be a tensor, got list"),
    "no v": ({"v": None}, {}, TypeError, "v must be a tensor, got NoneType"),
    "rank of q": ({"q": torch.ones(4, 5, 3)}, {}, ValueError, r"q must be \[B, heads, length, width\].*\[4, 5, 3\]"),
    "rank of v": ({"v": torch.ones(1, 2, 2, 7, 3)}, {}, ValueError, "v must be .* 4 dims"),
    "batch of k": ({"k": torch.ones(1, 2, 7, 3)}, {}, ValueError, "share the batch size, got 2, 1 and 2"),
    "width of k": ({"k": torch.ones(2, 2, 7, 4)}, {}, ValueError, "k must be as wide as q, got E=4 and E=3"),
    "length of v": ({"v": torch.ones(2, 2, 6, 3)}, {}, ValueError, r"heads and length of k, \[2, 7\], got \[2, 6\]"),
    "heads of v": ({"v": torch.ones(2, 4, 7, 3)}, {}, ValueError, r"heads and length of k, \[2, 7\], got \[4, 7\]"),
    "head counts": (
        {"k": torch.ones(2, 3, 7, 3), "v": torch.ones(2, 3, 7, 3)}, {}, ValueError, "multiple of.*H=4, Hk=3"
    ),
    "no key heads": (
        {"k": torch.ones(2, 0, 7, 3), "v": torch.ones(2, 0, 7, 3)}, {}, ValueError, "multiple of.*H=4, Hk=0"
    ),
    "dtype": ({"k": torch.ones(2, 2, 7, 3).double()}, {}, TypeError, "k is torch.float64, q is torch.float32"),
    "integers": ({"q": torch.ones(2, 4, 5, 3).int()}, {}, TypeError, "q must be floating point"),
    "complex": (
        {n: t.to(torch.complex64) for n, t in _tensors().items()}, {}, TypeError, "real floating-point.*complex64"
    ),
    "device": ({"v": torch.ones(2, 2, 7, 3, device="meta")}, {}, ValueError, "v is on meta, q on cpu"),
    "mask shape": (
        {}, {"attn_mask": torch.ones(5, 6)}, ValueError, r"attn_mask must broadcast.*\[2, 4, 5, 7\].*got \[5, 6\]"
    ),
    "mask per sample without heads": ({}, {"attn_mask": torch.ones(2, 5, 7)}, ValueError, "attn_mask must broadcast"),
    "mask rank": ({}, {"attn_mask": torch.ones(1, 2, 4, 5, 7)}, ValueError, "attn_mask must broadcast"),
    "mask dtype": ({}, {"attn_mask": torch.ones(5, 7).int()}, TypeError, "attn_mask must be bool or floating point"),
    "mask device": ({}, {"attn_mask": torch.ones(5, 7, device="meta")}, ValueError, "attn_mask is on meta, q on cpu"),
    "mask type": ({}, {"attn_mask": [[True]]}, TypeError, "attn_mask must be a tensor, got list"),
    "padding shape": (
        {}, {"key_padding_mask": torch.ones(2, 5)}, ValueError, r"key_padding_mask must be.*\[2, 7\], got \[2, 5\]"
    ),
    "padding of one sample": ({}, {"key_padding_mask": torch.ones(7)}, ValueError, "key_padding_mask must be"),
    "padding dtype": (
        {}, {"key_padding_mask": torch.ones(2, 7).to(torch.uint8)}, TypeError, "key_padding_mask must be bool or"
    ),
    "is_causal": ({}, {"is_causal": "yes"}, TypeError, "is_causal must be a bool, got 'yes'"),
    "corner": ({}, {"causal": "bottom_left"}, ValueError, "causal must be 'top_left', 'bottom_right' or None"),
    "window length": ({}, {"window": (1,)}, TypeError, r"window must be a pair.*got \(1,\)"),
    "window type": ({}, {"window": 3}, TypeError, "window must be a pair.*got 3"),
    "negative window": ({}, {"window": (-1, 0)}, ValueError, "window sides must be ints of at least 0"),
    "fractional window": ({}, {"window": (1.5, 0)}, ValueError, "window sides must be ints"),
    "dropout of 1": ({}, {"dropout_p": 1.0}, ValueError, r"dropout_p must be a number in \[0, 1\), got 1.0"),
    "negative dropout": ({}, {"dropout_p": -0.1}, ValueError, "dropout_p"),
    "dropout NaN": ({}, {"dropout_p": NAN}, ValueError, "dropout_p"),
    "bad dropout in evaluation": ({}, {"dropout_p": 2.0, "training": False}, ValueError, "dropout_p"),
    "scale NaN": ({}, {"scale": NAN}, ValueError, "scale must be a finite number or None, got nan"),
    "scale beyond floats": ({}, {"scale": 10**400}, ValueError, "scale must be a finite number"),
    "unhashable corner": ({}, {"causal": ["top_left"]}, ValueError, "causal must be 'top_left'"),
    "endless workspace": ({}, {"workspace": 2**70}, ValueError, r"workspace must be below 2\*\*63 bytes"),
    "sparse": ({"v": torch.ones(2, 2, 7, 3).to_sparse()}, {}, TypeError, "v must be a dense, strided tensor, got a"),
    "float8": (
        {n: t.to(torch.float8_e4m3fn) for n, t in _tensors().items()}, {}, TypeError, "q must be floating point of at"
    ),
    "softcap of 0": ({}, {"softcap": 0}, ValueError, r"softcap must be a number in \[1e-30, 1e30\], or None.*got 0"),
    "negative softcap": ({}, {"softcap": -50.0}, ValueError, "softcap must be a number .*got -50.0"),
    "softcap NaN": ({}, {"softcap": NAN}, ValueError, "softcap must be a number .*got nan"),
    "infinite softcap": ({}, {"softcap": float("inf")}, ValueError, "softcap must be a number .*got inf"),
    "softcap beyond float32": ({}, {"softcap": 1e39}, ValueError, "softcap must be a number"),
    "softcap type": ({}, {"softcap": True}, ValueError, "softcap must be a number .*got True"),
    "scale type": ({}, {"scale": "1"}, ValueError, "scale must be a finite number"),
    "negative workspace": ({}, {"workspace": -1}, ValueError, "workspace must be at least 1 byte"),
    "workspace type": ({}, {"workspace": 1.5}, TypeError, "workspace must be an int"),
}  # fmt: skip


def test_a_window_may_be_longer_than_any_index():
    q, k, v = (t.float() for t in _tensors().values())
    whole = fused_remat.attention(q, k, v)
    for side in (2**62, 2**63 - 1, 2**70):
        assert torch.equal(fused_remat.attention(q, k, v, window=(side, side)), whole)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case):
    operands, chosen, error, message = BAD[case]
    given, state = _tensors(**operands), torch.get_rng_state()
    with pytest.raises(error, match=message):
        fused_remat.attention(**given, **{"dropout_p": 0.5, **chosen})
    assert torch.equal(torch.get_rng_state(), state), "nothing may be drawn before the refusal"


@pytest.mark.parametrize("case", [case for case in BAD if case != "no tensor"])
def test_bad_input_is_refused_under_compile(case):
    operands, chosen, error, message = BAD[case]
    torch._dynamo.reset()
    tensors = {name: value for name, value in chosen.items() if isinstance(value, torch.Tensor)}
    rest = {name: value for name, value in chosen.items() if name not in tensors}
    compiled = torch.compile(lambda **given: fused_remat.attention(**given, **rest), backend="eager")
    with pytest.raises(error, match=message):
        compiled(**_tensors(**operands), **tensors)


def test_fullgraph_compile_names_the_reason():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda **given: fused_remat.attention(**given, causal="up"), backend="eager", fullgraph=True
    )
    with pytest.raises(torch._dynamo.exc.Unsupported, match="causal must be 'top_left'"):
        compiled(**_tensors())


@needs_extension
def test_the_op_checks_its_own_arguments():
    """A caller of torch.ops gets an error too, never a crash or a wrong number."""
    q, k, v = _tensors().values()
    q.requires_grad_()
    op = torch.ops.fused_remat.attention
    # masks; causal, window left and right, dropout_p, scale, softcap, workspace, backend
    good = (None, None, 0, -1, -1, 0.0, 1.0, 0.0, 1000, "cpp")
    op(q, k, v, *good)
    bad = {
        "q, k and v must be": (q[0], k, v, *good),
        r"k \[1, 2, 7, 3\] .* do not fit": (q, k[:1], v, *good),
        r"k \[2, 2, 7, 2\] .* do not fit": (q, k[..., :2], v, *good),
        r"v \[2, 2, 5, 3\] do not fit": (q, k, v[:, :, :5], *good),
        r"q \[2, 3, 5, 3\].* do not fit": (q[:, :3], k, v, *good),
        r"attn_mask must be 4-D.*\[1, 1, 5, 6\]": (q, k, v, torch.ones(1, 1, 5, 6), *good[1:]),
        r"attn_mask must be 4-D.*\[5, 7\]": (q, k, v, torch.ones(5, 7), *good[1:]),
        "masks are bool or floating point, got Int": (q, k, v, torch.ones(1, 1, 5, 7).int(), *good[1:]),
        r"key_mask must be \[2, 7\], got \[2, 6\]": (q, k, v, None, torch.ones(2, 6), *good[2:]),
        r"dropout_p must be in \[0, 1\), got 1": (q, k, v, *good[:5], 1.0, *good[6:]),
        "softcap must be in .*, or 0 for none, got -1": (q, k, v, *good[:7], -1.0, *good[8:]),
        "softcap must be in .*, or 0 for none, got nan": (q, k, v, *good[:7], NAN, *good[8:]),
        "causal must be 0 .* got 3": (q, k, v, None, None, 3, *good[3:]),
        "attention_fwd_nobody": (q, k, v, *good[:-1], "nobody"),
    }
    for message, arguments in bad.items():
        with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
            op(*arguments)


@pytest.mark.parametrize("name", cases.REFUSED_ON_A_CPU)
def test_a_named_backend_that_cannot_run_says_why(name, monkeypatch):
    with cases.refused_on_a_cpu(name, "attention", monkeypatch):
        fused_remat.attention(**_tensors())
