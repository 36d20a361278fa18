"""A kernel that keeps the law, for the tests of budgets."""

from __future__ import annotations

from benchmarks.budgets.table import Budget

FITS = Budget(
    kernel="attention_fwd E=64 plain", arch=90, variant="plain", tiles="M=128 N=128", warps=8, stages=2, registers=200,
    stack_bytes=0, shared_bytes=81920, tensor_memory=0, dots=True, tensor_core={"wgmma": 12}, warnings=[],
)  # fmt: skip
