"""`fused_remat.convert(model, policy=...)`."""

from __future__ import annotations

from typing import Any

from torch import nn

from fused_remat._profiled import HINT, was_profiled
from fused_remat.convert import not_strictly
from fused_remat.convert.report import Report
from fused_remat.policy.arrangement import Arrangement
from fused_remat.policy.named import assignment_of


def apply_policy(
    model: nn.Module,
    policy: Any,
    every: int,
    verify: str | None,
    *,
    include: Any,
    exclude: Any,
    need_weights: bool,
    dry_run: bool,
    strict: bool,
) -> Report:
    """Arrange `model` as `policy` says; arguments, result and errors are those of `fused_remat.convert`."""
    arrangement = Arrangement(model, include=include, exclude=exclude, need_weights=need_weights)
    assignment = assignment_of(arrangement, policy, every, verify)
    changes = any(keep is not None for keep in assignment.layers.values()) or assignment.regions
    if strict and arrangement.skipped and changes:
        raise not_strictly(arrangement.skipped)
    arrangement.set(assignment)
    report = arrangement.report
    if changes and not was_profiled(model) and not hasattr(policy, "assignment"):  # a plan comes of profiled steps
        report.notes.append(HINT)
    if dry_run:
        arrangement.revert()
        report.dry_run = True
        return report
    report.undo = arrangement.revert
    return report
