"""Bad input to multi-head attention gets one clear error, in eager and under torch.compile, before any computation."""

from __future__ import annotations

import inspect

import mha_cases as cases
import pytest
import torch
from mha_cases import Block

import fused_remat
from fused_remat import Norm
from fused_remat.functional.multi_head_attention import prepare_multi_head_attention

needs_extension = pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension))
ONES = torch.ones


def _arguments(**changes):
    """A call that is right, as keyword arguments, with some of them changed."""
    query = ONES(2, 5, 6)
    right = {
        "query": query, "key": None, "value": None, "in_proj_weight": ONES(24, 6), "in_proj_bias": ONES(24),
        "out_proj_weight": ONES(6, 8), "out_proj_bias": ONES(6), "num_heads": 2,
    }  # fmt: skip
    return right | changes


THREE = (ONES(8, 6), ONES(8, 6), ONES(8, 6))
ANGLES = ONES(5, 4)
# case -> (changed arguments, error, words of its message)
BAD = {
    "no tensor": ({"query": [1.0]}, TypeError, "query must be a tensor, got list"),
    "rank of query": ({"query": ONES(5, 6)}, ValueError, r"query must be \[B, length, features\].*\[5, 6\]"),
    "batch of key": ({"key": ONES(1, 5, 6)}, ValueError, "must share the batch size"),
    "length of value": ({"key": ONES(2, 4, 6), "value": ONES(2, 3, 6)}, ValueError, "key and value the length"),
    "no heads": ({"num_heads": 0}, ValueError, "num_heads must be an int of at least 1, got 0"),
    "head counts": ({"num_heads": 2, "num_kv_heads": 3}, ValueError, "multiple of.*H=2, Hk=3"),
    "rank of a weight": ({"out_proj_weight": ONES(6)}, ValueError, r"out_proj_weight must be \[out, in\]"),
    "columns of out_proj": ({"out_proj_weight": ONES(6, 7)}, ValueError, "out_proj_weight must be.*H=2"),
    "rows of in_proj": ({"in_proj_weight": ONES(23, 6)}, ValueError, r"in_proj_weight must have .*got \[23, 6\]"),
    "columns of in_proj": ({"in_proj_weight": ONES(24, 5)}, ValueError, r"in_proj_weight must have shape \[24, 6\]"),
    "two weights": ({"in_proj_weight": THREE[:2]}, ValueError, "in_proj_weight must be one packed tensor or a tuple"),
    "one of three weights": (
        {"in_proj_weight": (THREE[0], ONES(7, 6), THREE[2])}, ValueError, r"in_proj_weight\[1\] must have.*\[8, 6\]"
    ),
    "a weight is None": ({"in_proj_weight": (THREE[0], None, THREE[2])}, TypeError, r"in_proj_weight\[1\] must be"),
    "width of key": ({"key": ONES(2, 5, 7)}, ValueError, "key has 7 features and query 6.*pass a tuple of three"),
    "in_proj_bias": ({"in_proj_bias": ONES(23)}, ValueError, r"in_proj_bias must have shape \[24\], got \[23\]"),
    "one of three biases": (
        {"in_proj_bias": (None, ONES(7), None)}, ValueError, r"in_proj_bias\[1\] must have shape \[8\]"
    ),
    "out_proj_bias": ({"out_proj_bias": ONES(5)}, ValueError, r"out_proj_bias must have shape \[6\]"),
    "bias_k alone": ({"bias_k": ONES(8)}, ValueError, "bias_k and bias_v go together"),
    "softcap": ({"softcap": 0.0}, ValueError, "softcap must be a number in .*, or None for none, got 0.0"),
    "bias_v": ({"bias_k": ONES(8), "bias_v": ONES(9)}, ValueError, r"bias_v must have shape \[8\]"),
    "norm": ({"norm": "layer_norm"}, TypeError, "norm must be a fused_remat.Norm or None, got str"),
    "kind of norm": ({"norm": Norm("batch_norm")}, ValueError, "norm.kind must be 'layer_norm' or 'rms_norm'"),
    "bias of an RMS norm": ({"norm": Norm("rms_norm", None, ONES(6))}, ValueError, "norm.bias was given.*rms_norm"),
    "weight of norm": ({"norm": Norm("rms_norm", ONES(5))}, ValueError, r"norm.weight must have shape \[6\]"),
    "q_norm": ({"q_norm": ONES(3)}, ValueError, r"q_norm must have shape \[4\]"),
    "rotary type": ({"rotary": ANGLES}, TypeError, r"rotary must be a pair \(cos, sin\)"),
    "odd rotary": ({"rotary": (ONES(5, 3), ONES(5, 3))}, ValueError, "an even R of at most E=4"),
    "wide rotary": ({"rotary": (ONES(5, 6), ONES(5, 6))}, ValueError, "an even R of at most E=4"),
    "length of rotary": ({"rotary": (ONES(4, 4), ONES(4, 4))}, ValueError, "with L=5"),
    "sin unlike cos": ({"rotary": (ANGLES, ONES(5, 2))}, ValueError, "cos and sin must have one shape"),
    "rotary without cos": ({"rotary": (None, ANGLES)}, TypeError, r"pair \(cos, sin\) of tensors, got \['NoneType'"),
    "rotary without sin": ({"rotary": (ANGLES, None)}, TypeError, r"pair \(cos, sin\) of tensors"),
    "eps of q and k": ({"qk_norm_eps": float("nan")}, ValueError, "qk_norm_eps must be a finite number"),
    "eps of the norm": (
        {"norm": fused_remat.Norm("rms_norm", eps=float("inf"))}, ValueError, "norm.eps must be a finite number"
    ),
    "need_weights": ({"need_weights": "no"}, TypeError, "need_weights must be a bool, got 'no'"),
    "rotary across lengths": (
        {"rotary": (ANGLES, ANGLES), "key": ONES(2, 7, 6)}, ValueError, "lengths must be equal, got 5 and 7"
    ),
    "mask shape": ({"attn_mask": ONES(5, 6)}, ValueError, r"attn_mask must broadcast.*\[2, 2, 5, 5\]"),
    "stock's mask of [B H, L, S]": ({"attn_mask": ONES(4, 5, 5)}, ValueError, "attn_mask must broadcast"),
    "mask dtype": ({"attn_mask": ONES(5, 5).int()}, TypeError, "attn_mask must be bool or floating point"),
    "padding shape": ({"key_padding_mask": ONES(2, 6)}, ValueError, r"key_padding_mask must be.*\[2, 5\]"),
    "corner": ({"causal": "right"}, ValueError, "causal must be 'top_left', 'bottom_right' or None"),
    "window": ({"window": (1, 2, 3)}, TypeError, "window must be a pair"),
    "dtype": ({"out_proj_weight": ONES(6, 8).double()}, TypeError, "out_proj_weight is torch.float64, query is"),
    "dtype of rotary": ({"rotary": (ANGLES.double(), ANGLES.double())}, TypeError, r"rotary\[0\] is torch.float64"),
    "integers": ({"query": ONES(2, 5, 6).int()}, TypeError, "query must be floating point"),
    "device": ({"in_proj_bias": ONES(24, device="meta")}, ValueError, "in_proj_bias is on meta, query on cpu"),
    "keep name": ({"keep": ("lse",)}, ValueError, "keep names.*lse.*can keep 'q', 'k', 'v', 'out'"),
    "keep type": ({"keep": "out"}, TypeError, "keep must be a tuple"),
    "dropout of 1": ({"dropout_p": 1.0}, ValueError, r"dropout_p must be a number in \[0, 1\)"),
    "scale": ({"scale": float("inf")}, ValueError, "scale must be a finite number"),
    "workspace": ({"workspace": 0}, ValueError, "workspace must be at least 1 byte"),
}  # fmt: skip


def test_the_call_is_right_without_the_changes():
    assert fused_remat.multi_head_attention(**_arguments()).shape == (2, 5, 6)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case):
    changes, error, message = BAD[case]
    state = torch.get_rng_state()
    with pytest.raises(error, match=message):
        fused_remat.multi_head_attention(**_arguments(**{"dropout_p": 0.5, **changes}))
    assert torch.equal(torch.get_rng_state(), state), "nothing may be drawn before the refusal"


@pytest.mark.parametrize("case", ("rank of query", "rows of in_proj", "kind of norm", "odd rotary", "keep name"))
def test_bad_input_is_refused_under_compile(case):
    changes, error, message = BAD[case]
    torch._dynamo.reset()
    compiled = torch.compile(lambda: fused_remat.multi_head_attention(**_arguments(**changes)), backend="eager")
    with pytest.raises(error, match=message):
        compiled()


@needs_extension
def test_rotary_angles_that_learn_take_the_reference_path():
    cos, sin = (ONES(5, 4, requires_grad=True) for _ in range(2))
    call = lambda: fused_remat.multi_head_attention(**_arguments(rotary=(cos, sin)))
    assert cases.kernels_of(call) == []
    assert all(g is not None for g in torch.autograd.grad(call().square().sum(), (cos, sin)))
    with fused_remat.backend("cpp"), pytest.raises(RuntimeError, match="rotary angles that require grad"):
        call()


@pytest.mark.parametrize("name", cases.REFUSED_ON_A_CPU)
def test_a_named_backend_that_cannot_run_says_why(name, monkeypatch):
    with cases.refused_on_a_cpu(name, "multi_head_attention", monkeypatch):
        block = Block()
        block.call(block.operands())


def _op_arguments(**changes) -> list:
    """Arguments of torch.ops.fused_remat.multi_head_attention as the functional call makes them, some replaced."""
    passed = inspect.signature(fused_remat.multi_head_attention).bind(**_arguments())
    passed.apply_defaults()
    names = [argument.name for argument in torch.ops.fused_remat.multi_head_attention.default._schema.arguments]
    made = dict(zip(names, [*prepare_multi_head_attention(**passed.arguments).arguments, "cpp", None], strict=True))
    assert changes.keys() <= made.keys()
    return list((made | changes).values())


RAW = {
    "no heads": {"num_heads": 0},
    "cos alone": {"cos": ONES(1, 5, 4)},
    "w_k alone": {"w_k": ONES(8, 6)},
    "bias_k alone": {"bias_k": ONES(8)},
    "small mask": {"attn_mask": ONES(1, 1, 3, 3)},
    "small key mask": {"key_mask": ONES(2, 3)},
    "integer key mask": {"key_mask": ONES(2, 5).int()},
    "rows of w_q": {"w_q": ONES(23, 6)},
    "columns of w_out": {"w_out": ONES(6, 6)},
    "batches of cos": {"cos": ONES(3, 5, 4), "sin": ONES(3, 5, 4)},
    "kind of weights": {"need_weights": 7},
    "dropout of 1": {"dropout_p": 1.0},
    "negative softcap": {"softcap": -1.0},
}


@needs_extension
@pytest.mark.parametrize("case", RAW)
def test_the_op_checks_its_own_arguments(case):
    """A caller of torch.ops gets an error too, never a crash or a number read out of bounds."""
    torch.ops.fused_remat.multi_head_attention(*_op_arguments())
    with pytest.raises((ValueError, TypeError)):
        torch.ops.fused_remat.multi_head_attention(*_op_arguments(**RAW[case]))


@needs_extension
def test_the_inner_ops_check_their_own_arguments():
    ops, call, no_seed = torch.ops.fused_remat, _op_arguments(), torch.empty(0, dtype=torch.int64)
    _, _, *kept, lse = ops.multi_head_attention_fwd(*call, no_seed)
    with pytest.raises(ValueError, match="dropout needs an int64 seed"):
        ops.multi_head_attention_fwd(*_op_arguments(dropout_p=0.5), no_seed)
    dy, query_alone = ONES(2, 5, 6), [True] + [False] * 28
    backward = lambda dy, lse, mask: ops.multi_head_attention_bwd(
        dy, None, *call, no_seed, None, None, *kept, lse, mask
    )
    assert backward(dy, lse, query_alone)[0].shape == (2, 5, 6)
    for bad in ((dy, None, query_alone), (dy[:1], lse, query_alone), (dy, lse[..., :3], query_alone),
                (dy, lse, [True]), (dy, lse, [True] * 29)):  # fmt: skip
        with pytest.raises(ValueError):
            backward(*bad)
