"""Tests of the Triton kernels, executed on the CPU: by Triton's interpreter, or by ttsem where that runs pytest."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            # The interpreter computes with NumPy, which warns about the infinities and NaNs that kernels mean.
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
