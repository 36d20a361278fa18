"""Fixtures that every test may use."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator

import pytest

# Where Triton is not installed, the folder of its tests must not pass for it: this folder is on the path.
_triton = importlib.util.find_spec("triton")
if _triton is None or _triton.origin is None:
    sys.modules["triton"] = None

import torch  # noqa: E402  # asks for Triton as it likes

# Without a GPU Triton's interpreter runs its kernels; Triton asks when it is imported, which torch may do at any time.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Threads of processes that run tests side by side would only wait for each other.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    torch.set_num_threads(max(1, torch.get_num_threads() // int(workers)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of these folders compiles kernels for all of them, in minutes; the others wait for it."""
    for item in items:
        if item.path.parent.name in ("cuda", "simt") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(2400))


@pytest.fixture(autouse=True, scope="module")
def nothing_old_is_looked_through() -> None:
    """What there is by now, ten thousand tests among it, stays. Who measures collects garbage and looks for tensors,
    which takes seconds in such a process, and does not see what was made before this."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For what is too small to share: threads that wait for each other cost more than they help."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Every uninitialised buffer, those of C++ code included, holds NaN: what reads one before writing it shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
