"""Weights by heads and low-rank adapters of `multi_head_attention` above the Triton kernels."""

from __future__ import annotations

import attention_calls as calls
import mha_cases as cases
import pytest
import torch
from mha_cases import Block, results

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
]
SIZES = {"packed": False, "bias": False, "batch": 1, "length": 7, "model": 8, "heads": 4, "kv_heads": 2}
BLOCKS = {"by heads": Block(**SIZES, blocked=True), "adapters": Block(**SIZES, ranks=(2, 3, 1, 2))}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_as_exact_as_torch(block):
    given = block.operands(torch.float32)
    exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    dy = torch.randn(1, 7, 8, dtype=torch.float64).float()
    settings = {"is_causal": True, "dropout_p": 0.2}
    stock = results(block, given, dy, backend="reference", **settings)
    truth = results(block, exact, dy.double(), backend="reference", **settings)
    found = results(block, given, dy, backend="triton", keep=(), workspace=1, **settings)
    for name in truth:
        error, allowed = (cases.relative_error(made[name], truth[name]) for made in (found, stock))
        assert error <= 2 * allowed + calls.FLOORS[torch.float32], (name, error, allowed)
