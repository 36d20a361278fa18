"""`fused-remat check` of the backend "cuda", on CPU tensors."""

from __future__ import annotations

import pytest

from fused_remat.check import run as check
from fused_remat.check.cases import CASES
from fused_remat.check.command import _check_can_run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}: {case.name}")
def test_kernels_pass(case):
    rows = list(check.run("cpu", "cuda", [case]))
    assert [(row.check, row.passed) for row in rows] == [
        ("gradcheck", True), ("float32", True), ("bfloat16", True)
    ], rows  # fmt: skip


def test_the_backend_may_be_named():
    assert check.unavailable("cpu", "cuda") == []
    _check_can_run("cuda", "cpu")
