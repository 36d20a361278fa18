"""Every op, case, dtype and backend on the GPU: gradients by finite differences, results against float64."""

from __future__ import annotations

import pytest
import torch
from gpu_device import FAST, needs_gpu

import fused_remat
from fused_remat import dispatch, reference
from fused_remat._triton import arch_of
from fused_remat.check import run as check
from fused_remat.check.cases import CASES, TINY, Case, Sizes

pytestmark = needs_gpu


COMPARISONS = [(case, sizes, dtype) for case in CASES for sizes, dtype in check.comparisons(case, "cuda")]


def _named(value: object) -> str:
    if isinstance(value, Sizes):
        return value.name or "odd"
    return f"{value.op}: {value.name}" if isinstance(value, Case) else str(value)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}: {case.name}")
@pytest.mark.parametrize("backend", FAST)
def test_gradients_in_float64(case, backend):
    row = check.judged_row(case, "gradcheck", backend, "cuda", torch.float64, TINY, check.gradients_differ)
    if row.passed is None:
        pytest.skip(f"{backend}: {row.detail}")
    assert row.passed, row.detail


@pytest.mark.parametrize(("case", "sizes", "dtype"), COMPARISONS, ids=_named)
def test_results_against_float64(case, sizes, dtype):
    judge = check.Judge(case, "cuda", dtype, sizes)
    ran = 0
    for backend in FAST:
        row = check.judged_row(case, str(dtype), backend, "cuda", dtype, sizes, judge)
        assert row.passed is not False, f"{backend}: {row.detail}"
        ran += row.passed is True
    assert ran, "no backend ran"


@pytest.mark.parametrize("backend", FAST)
def test_a_gpu_draws_the_masks_of_a_cpu(backend):
    """Of hidden features and of probabilities, bit for bit."""
    rows, features, p = 129, 341, 0.3
    for op in ("mlp", "attention"):
        call = dispatch.Call(op, "cuda", torch.float32, "relu", arch=arch_of(torch.device("cuda")))
        if reasons := dispatch.why_not(backend, call):
            pytest.skip(f"{backend}: {'; '.join(reasons)}")
    x, eye = torch.ones(rows, 1, device="cuda"), torch.eye(features, device="cuda")
    torch.manual_seed(3)
    seed = reference.draw_seed(x.device)
    torch.manual_seed(3)
    with fused_remat.backend(backend):
        hidden = fused_remat.mlp(x, torch.ones(features, 1, device="cuda"), eye, activation="relu", dropout_p=p)
    assert torch.equal((hidden != 0).cpu(), reference.dropout_mask(seed.cpu(), p, (rows, features)))
    q = torch.zeros(2, 3, 127, 16, device="cuda")
    torch.manual_seed(3)
    with fused_remat.backend(backend):
        out = fused_remat.attention(q, q, torch.ones_like(q), dropout_p=p)
    kept = reference.dropout_mask(seed.cpu(), p, (2, 3, 127, 127)).sum(-1)
    torch.testing.assert_close(out[..., 0].cpu() * 127 * (1 - p), kept.float(), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype, tolerance", ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)), ids=str)
def test_rebuilt_probabilities_of_large_scores_sum_to_one(dtype, tolerance, each_gpu_backend):
    """Backward multiplies k by q where forward multiplied q by k: other rounding would show at scores of thousands."""
    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda", dtype=dtype) for _ in range(3))
    q, k, v = (t.requires_grad_() for t in (30 * q, 30 * k, v))
    out, lse = fused_remat.attention(q, k, v, return_lse=True)
    assert lse.abs().max() > 1000
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    sums = dv.float().sum(2)
    torch.testing.assert_close(sums, torch.full_like(sums, 256.0), rtol=tolerance, atol=0.0)
