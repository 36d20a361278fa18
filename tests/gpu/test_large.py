"""Tensors of more than 2^31 elements: what lies beyond must be computed like what lies before."""

from __future__ import annotations

import pytest
import torch
from gpu_device import alone, needs_gpu

import fused_remat
from fused_remat import reference

pytestmark = [*needs_gpu, pytest.mark.usefixtures("each_gpu_backend")]
BEYOND = 2**31
GIB_NEEDED = {"test_operands_of_attention": 90, "test_masks_and_probabilities": 30, "test_rows_of_an_mlp": 60}
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}


@pytest.fixture(autouse=True)
def memory(request):
    with alone(GIB_NEEDED[request.node.originalname]):
        yield


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def test_operands_of_attention():
    """Many samples: the last ones lie beyond 2^31 elements of q, k, v, out and their gradients."""
    batch, heads, length, width = 2**15 + 1, 8, 64, 128
    assert batch * heads * length * width > BEYOND
    q, k, v = (randn(batch, heads, length, width).requires_grad_() for _ in range(3))
    out = fused_remat.attention(q, k, v, is_causal=True)
    gradients = torch.autograd.grad(out, (q, k, v), out.detach())
    part = slice(-2, None)
    few = [t[part].detach().float().requires_grad_() for t in (q, k, v)]
    truth, _, _ = reference.attention(*few, causal="top_left")
    torch.testing.assert_close(out[part].float(), truth, **TOLERANCE)
    for got, expected in zip(gradients, torch.autograd.grad(truth, few, out[part].detach().float()), strict=True):
        # By norms: single elements are no larger than a tolerance that bf16 needs.
        assert (got[part].float() - expected).norm() <= 3e-2 * expected.norm()


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_masks_and_probabilities(dropout_p):
    """One long sample: rows of the mask, and numbers of the dropout mask, beyond 2^31."""
    length, heads, width = 65536, 2, 64
    assert length * length > BEYOND
    q, k, v = (randn(1, heads, length, width).requires_grad_() for _ in range(3))
    mask = torch.rand(1, 1, length, length, device="cuda") < 0.5
    torch.manual_seed(5)
    seed = reference.draw_seed(q.device)
    torch.manual_seed(5)
    out = fused_remat.attention(q, k, v, attn_mask=mask, dropout_p=dropout_p)
    dq, _, _ = torch.autograd.grad(out, (q, k, v), out.detach())
    rows = slice(length - 16, length)
    few = q[:, :, rows].detach().float().requires_grad_()
    scores = (few @ k.detach().float().transpose(-2, -1)) * width**-0.5
    probabilities = scores.masked_fill(~mask[:, :, rows], float("-inf")).softmax(-1)
    if dropout_p:
        head, row, key = torch.meshgrid(
            torch.arange(heads), torch.arange(rows.start, rows.stop), torch.arange(length), indexing="ij"
        )
        index = ((head * length + row) * length + key).to("cuda")
        words = torch.stack(reference.philox_words(seed, index >> 2), -1).gather(-1, (index & 3).unsqueeze(-1))
        kept = words.squeeze(-1) >= round(dropout_p * 2**32)
        probabilities = torch.where(kept, probabilities / (1 - dropout_p), 0.0)
    truth = probabilities @ v.detach().float()
    # Means of half of 65536 values: small, hence no absolute tolerance that would hide them.
    error = (out[:, :, rows].float() - truth).norm() / truth.norm()
    assert error < 1e-2
    (expected,) = torch.autograd.grad(truth, few, out[:, :, rows].detach().float())
    assert (dq[:, :, rows].float() - expected).norm() / expected.norm() < 3e-2


@pytest.mark.parametrize("gated", [False, True])
def test_rows_of_an_mlp(gated):
    rows, width, hidden = 2**21 + 129, 1024, 256
    assert rows * width > BEYOND
    x = randn(rows, width).requires_grad_()
    weights = [randn(hidden, width) / 32, randn(width, hidden) / 16, randn(hidden, width) / 32]
    w_up, w_down, w_gate = (t.requires_grad_() for t in weights)
    y = fused_remat.mlp(x, w_up, w_down, w_gate=w_gate if gated else None, activation="silu")
    (dx,) = torch.autograd.grad(y, x, y.detach())
    part = slice(-65, None)
    few = x[part].detach().float().requires_grad_()
    wide = [t.detach().float() for t in (w_up, w_down, w_gate)]
    truth = reference.mlp(few, *wide[:2], w_gate=wide[2] if gated else None, activation="silu")
    torch.testing.assert_close(y[part].float(), truth, **TOLERANCE)
    (expected,) = torch.autograd.grad(truth, few, y[part].detach().float())
    torch.testing.assert_close(dx[part].float(), expected, **TOLERANCE)
