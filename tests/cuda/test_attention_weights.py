"""Attention weights in CUDA C++, averaged or by the head, and their gradients."""

from __future__ import annotations

import attention_level3 as calls
import pytest
import torch
from attention_level3 import Case

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread", "own_attention")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SETTINGS = {
    "plain": Case(),
    "long": Case(batch=1, length_q=66, length_k=67, high=1),
    "window": Case(batch=1, length_q=67, length_k=140, low=60, high=75, extra_keys=2),
    "masks": Case(attn_mask="bool 1hij", key_mask="float b11j"),
    "dropout": Case(dropout_p=0.3, length_k=67),
    "cap": Case(softcap=0.8, high=20),
    "shared heads": Case(heads=6, kv_heads=2),
    "wide heads": Case(batch=1, width=100),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("letters", ("b1ij", "bhij"))
@pytest.mark.parametrize("settings", SETTINGS)
def test_weights_are_added(settings, letters, dtype):
    calls.check("cuda", SETTINGS[settings].but(dtype=dtype), weights_of=letters)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dweights", ("b1ij", "bhij"))
@pytest.mark.parametrize("rebuild", (False, True))
@pytest.mark.parametrize("settings", SETTINGS)
def test_gradients_of_weights(settings, rebuild, dweights, dtype):
    calls.check("cuda", SETTINGS[settings].but(dtype=dtype, dweights=dweights, rebuild=rebuild))


def test_widest_heads():
    for dtype, width in ((torch.float64, 128), (torch.float32, 256), (torch.float16, 256)):
        calls.check("cuda", Case(batch=1, width=width, scale=0.1, dtype=dtype), weights_of="b1ij")


@pytest.mark.parametrize("layout", ("transposed", "every second key", "guarded"))
def test_strides_of_weights_and_their_gradient(layout):
    case = Case()
    given = calls.operands(case)
    saved = calls.forward("cuda", case, given)
    expected = calls.weights("cuda", case, given, saved, "bhij")
    whole = torch.full((2, 2, 37, 74), -0.0)  # adding 0 to it would show too
    weights = {
        "transposed": whole.transpose(2, 3)[:, :, 1:18, 1:36],
        "every second key": whole[:, :, 1:18, 2:72:2],
        "guarded": whole[:, :, 1:18, 1:36],
    }[layout]
    weights.fill_(1)
    torch.ops.fused_remat.attention_weights_cuda(
        given["q"], given["k"], *calls.attending(case, given), saved["lse"], 1.0, weights
    )
    assert torch.equal(weights, expected)
    weights.fill_(-0.0)
    assert (whole == 0).all() and whole.signbit().all()

    dense = calls.operands(case.but(dweights="bhij"))
    weights.copy_(dense["dweights"])
    near = calls.run("cuda", case.but(dweights="bhij"), dense)
    for name, tensor in calls.run("cuda", case.but(dweights="bhij"), dense | {"dweights": weights}).items():
        assert torch.equal(tensor, near[name]), name


def test_rows_of_large_lse_in_one_head_alone():
    """The others keep their bits, and need no correction."""
    case = Case(batch=1, attn_mask="float bhij")
    given = calls.operands(case)
    given["attn_mask"][0, 1, 4] = -1e9
    ours = calls.check("cuda", case, given, weights_of="bhij")
    sums = (ours["weights"] - 1).sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


def test_wrong_weights():
    case = Case()
    given = calls.operands(case)
    saved = calls.forward("cuda", case, given)
    arguments = (given["q"], given["k"], *calls.attending(case, given), saved["lse"], 1.0)
    for shape in ((2, 3, 17, 35), (2, 2, 17, 34), (2, 2, 35)):
        with pytest.raises(ValueError, match=r"weights must be \[B, 1 or H, Lq, Lk\]"):
            torch.ops.fused_remat.attention_weights_cuda(*arguments, torch.ones(shape))
    with pytest.raises(TypeError, match="weights must be Float"):
        torch.ops.fused_remat.attention_weights_cuda(*arguments, torch.ones(2, 2, 17, 35, dtype=torch.float64))
