"""Regions and torch.compile."""

from __future__ import annotations

import pytest
import torch
from test_region import results, twins
from torch import Tensor, nn

import fused_remat
from fused_remat.guards import RematWarning


@pytest.mark.slow
def test_region_compiled_says_that_its_guards_are_off() -> None:
    plain, ours = twins(lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)))

    def step(x: Tensor) -> Tensor:
        return fused_remat.region(ours, x.sin()) * 2

    x = torch.randn(4, 8)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with pytest.warns(RematWarning, match="guards and verify are off"):
        ours_found = results(ours, compiled, x)
    for a, b in zip(ours_found, results(plain, lambda x: plain(x.sin()) * 2, x), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_region_around_a_compiled_module() -> None:
    plain, ours = twins(lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)))
    compiled = torch.compile(ours, backend="aot_eager")
    x = torch.randn(4, 8)
    found = results(ours, lambda x: fused_remat.region(compiled, x), x)
    for a, b in zip(found, results(plain, plain, x), strict=True):
        torch.testing.assert_close(a, b)
