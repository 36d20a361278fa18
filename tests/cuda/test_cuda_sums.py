"""Column sums in CUDA C++: added in a fixed order, of any strides, without losing digits."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")
DTYPES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}


def column_sums(a: torch.Tensor, out: torch.Tensor) -> None:
    torch.ops.fused_remat.column_sums_cuda(a, out)


def layouts(a: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, cols = a.shape
    return {
        "rows": a,
        "columns": a.t().contiguous().t(),
        "wider": torch.cat((a, a), 1)[:, :cols],
        "shifted": torch.cat((a, a), 1)[:, 1 : cols + 1],
        "one row": a[:1].expand(rows, cols),
        "every other": torch.stack((a, a), 2)[..., 1],
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "cols"), ((1, 1), (17, 136), (255, 3), (257, 64), (530, 7)))
def test_sums_are_added(rows, cols, dtype, thread_order):
    a = torch.randn(rows, cols, dtype=torch.float64).to(dtype)
    wide = DTYPES[dtype]
    for name, variant in layouts(a).items():
        guarded = torch.full((3 * cols,), 2, dtype=wide)
        out = guarded[cols : 2 * cols]
        column_sums(variant, out)
        tolerance = 1e-13 if wide == torch.float64 else 2e-6
        truth = 2 + variant.double().sum(0)
        scale = 2 + variant.double().abs().sum(0)
        assert ((out.double() - truth).abs() <= tolerance * scale).all(), name
        assert (guarded[:cols] == 2).all() and (guarded[2 * cols :] == 2).all()
        for seed in (1, 2):
            thread_order(seed)
            again = torch.full((2 * cols,), 2, dtype=wide)
            column_sums(variant, again[::2])
            assert torch.equal(out, again[::2])
            assert (again[1::2] == 2).all()


def test_a_long_column_loses_no_digits():
    """One chain of fp32 additions would be off by 1e-5 and more."""
    a = torch.full((70_000, 2), 0.1)
    out = torch.zeros(2)
    column_sums(a, out)
    truth = a[:, 0].double().sum()
    assert ((out.double() - truth).abs() <= 2e-6 * truth).all()


def test_nothing_to_add():
    out = torch.ones(3)
    column_sums(torch.empty(0, 3), out)
    assert (out == 1).all()
    column_sums(torch.empty(4, 0), torch.empty(0))


@pytest.mark.parametrize(
    ("a", "out", "error", "text"),
    (
        (torch.ones(2, 3, 4), torch.ones(3), ValueError, r"a must be \[rows, N\]"),
        (torch.ones(2, 3), torch.ones(2), ValueError, r"out must be \[3\]"),
        (torch.ones(2, 3), torch.ones(3).double(), TypeError, "out must be Float for a of Float; got Double"),
        (torch.ones(2, 3).int(), torch.ones(3), TypeError, "float64, float32, float16 and bfloat16; got Int"),
    ),
)
def test_what_does_not_fit_is_refused(a, out, error, text):
    with pytest.raises(error, match=text):
        column_sums(a, out)
