"""`ranks`: two processes in a gloo group, started once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from rank_group import Ranks


@pytest.fixture(scope="session")
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Ranks]]:
    group: list[Ranks] = []
    yield group
    for ranks in group:
        ranks.stop()


@pytest.fixture
def ranks(_group: list[Ranks], tmp_path: Path) -> Ranks:
    """The two processes; new ones after a test in which they died or hung."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("needs gloo")
    if not (_group and _group[-1].alive):
        _group.append(Ranks(tmp_path))
    return _group[-1]
