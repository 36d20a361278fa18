"""Column sums on Triton: added in a fixed order, of any strides, without losing digits."""

from __future__ import annotations

import pytest
import torch
from mlp_chunks import DEVICE

from fused_remat.triton.sums import column_sums

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")
DTYPES = {torch.float64: torch.float64, torch.float32: torch.float32, torch.float16: torch.float32}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "cols"), ((1, 1), (17, 129), (255, 3), (257, 63), (530, 7)))
def test_sums_are_added(rows, cols, dtype):
    a = torch.randn(rows, cols, dtype=torch.float64, device=DEVICE).to(dtype)
    wide = DTYPES[dtype]
    for variant in (a, a.t().contiguous().t(), torch.cat((a, a), 1)[:, :cols], a[:1].expand(rows, cols)):
        out = torch.full((cols,), 2, dtype=wide, device=DEVICE)
        column_sums(variant, out)
        tolerance = 1e-13 if wide == torch.float64 else 2e-6
        truth = 2 + variant.double().sum(0)
        scale = 2 + variant.double().abs().sum(0)
        assert ((out.double() - truth).abs() <= tolerance * scale).all()
        again = torch.full((cols,), 2, dtype=wide, device=DEVICE)
        column_sums(variant, again)
        assert torch.equal(out, again)


def test_a_long_column_loses_no_digits():
    """One chain of fp32 additions would be off by 1e-5 and more."""
    a = torch.full((8_000, 2), 0.1, device=DEVICE)
    out = torch.zeros(2, device=DEVICE)
    column_sums(a, out)
    truth = a[:, 0].double().sum()
    assert ((out.double() - truth).abs() <= 2e-6 * truth).all()


def test_nothing_to_add():
    out = torch.ones(3, device=DEVICE)
    column_sums(torch.empty(0, 3, device=DEVICE), out)
    assert (out == 1).all()
    column_sums(torch.empty(4, 0, device=DEVICE), torch.empty(0, device=DEVICE))
