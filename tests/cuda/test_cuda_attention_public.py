"""The public attention op on the CUDA C++ backend: gradients against finite differences, and the formula."""

from __future__ import annotations

import attention_cases as cases
import pytest
import torch
from torch.autograd import gradcheck

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread", "own_attention")


def _given(mask: str, **shape) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    given = cases.operands(1, 2, 3, 4, 3, kv_heads=1, value_width=2, **shape)
    masks = cases.masks(mask, given)
    return given | cases.learned(masks), {name: m for name, m in masks.items() if not m.requires_grad}


@pytest.mark.parametrize("mask", cases.MASKS)
@pytest.mark.parametrize(
    "settings", ({}, {"is_causal": True}, {"window": (2, 1), "dropout_p": 0.3}, {"softcap": 0.9}), ids=str
)
def test_gradcheck(mask, settings):
    given, fixed = _given(mask)

    def function(*values):
        named = dict(zip(given, values, strict=True))
        out, lse = cases.run(named | fixed, backend="cuda", return_lse=True, **settings)
        return out, torch.where(lse.isfinite(), lse, 0.0)

    assert gradcheck(function, tuple(given.values()), fast_mode=True)


@pytest.mark.parametrize("mask", cases.MASKS)
@pytest.mark.parametrize("band", cases.BANDS)
def test_values_and_gradients_are_those_of_the_reference(mask, band):
    given, fixed = _given(mask)
    results = []
    for run in (cases.run_reference, lambda *a, **k: cases.run(*a, backend="cuda", **k)):
        out = run(given | fixed, dropout_p=0.2, **cases.BANDS[band])
        dout = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(3))
        results.append({"out": out} | cases.gradients(out, given, dout))
    cases.assert_same(results[1], results[0], 1e-12, (mask, band))
