"""MultiheadAttention against nn.MultiheadAttention in thousands of drawn configurations."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from multihead_module_cases import BACKENDS, assert_equal_answers, build, draw, expected, run

import fused_remat

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}
DRAWN = 2100
SLICES = 6  # so that a failure and a slow machine show where


@pytest.mark.parametrize("part", range(SLICES))
def test_equal_to_the_stock_module(part):
    for index in range(part * DRAWN // SLICES, (part + 1) * DRAWN // SLICES):
        _check(index, BACKENDS[0])


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_equal_to_the_stock_module_on_other_backends(backend):
    for index in range(DRAWN, DRAWN + 300):
        _check(index, backend)


def _check(index: int, backend: str) -> None:
    case = draw(index)
    module = build(fused_remat.MultiheadAttention, case, index)
    actual = run(backend, module, case, index)
    about = f"case {index} {case.settings} {list(case.options)} rule={case.rule!r}"
    assert_equal_answers(actual, expected(case, index), TOLERANCES[case.settings["dtype"]], about)


def test_draws_cover_what_they_claim_to():
    cases = [draw(index) for index in range(DRAWN)]
    seen: Counter[str] = Counter()
    for case in cases:
        masks = [case.options.get(name) for name in ("attn_mask", "key_padding_mask")]
        seen["ruled"] += bool(case.rule)
        seen["empty row"] += case.rule.startswith("a row")
        seen["flag alone"] += case.rule.startswith("is_causal")
        seen["appended"] += case.rule.startswith("appended")
        seen["no rule, masked, trained, with weights"] += (
            not case.rule and any(m is not None for m in masks) and case.training and case.options["need_weights"]
        )
        seen["two masks"] += all(m is not None for m in masks)
        seen["mixed kinds"] += len({m.dtype for m in masks if m is not None}) == 2
        seen["mask per head"] += masks[0] is not None and masks[0].dim() == 3
        seen["mask gradient"] += bool(case.masks) and case.grad
        seen["unbatched"] += case.query.dim() == 2
        seen["sequence first"] += case.query.dim() == 3 and not case.settings["batch_first"]
        seen["widths"] += case.settings.get("kdim") is not None or case.settings.get("vdim") is not None
        seen["no keys"] += case.key.shape[-2 if case.settings["batch_first"] or case.key.dim() == 2 else 0] == 0
        seen["empty batch"] += case.query.numel() == 0
        seen["evaluated without gradients"] += not case.training and not case.grad
    assert len(cases) >= 2000 and sum(not case.rule for case in cases) >= 1200
    assert len({case.rule for case in cases}) == 5
    assert all(count >= 20 for count in seen.values()), seen
