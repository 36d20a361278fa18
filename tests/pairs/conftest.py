"""Our layers and converted models beside PyTorch's own tools: fixtures of every pair."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def small_and_fresh(one_thread) -> None:
    """Tiny tensors want no threads; nothing compiled by one test is found by another."""
    torch.compiler.reset()
