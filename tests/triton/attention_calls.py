"""Attention at level 3 on Triton, and which kernels run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import attention_level3
from attention_level3 import (
    FLOORS,
    UNLIMITED,
    Case,
    Named,
    assert_as_exact_as_torch,
    attending,
    backward,
    delta,
    forward,
    masks_of_odd_strides,
    needs_extension,
    operands,
    run,
    wanted_of,
    weights,
)

from fused_remat.triton import attention, configs, launch
from fused_remat.triton.attention_tiles import Spec

__all__ = [
    "FLOORS", "UNLIMITED", "Case", "Named", "assert_as_exact_as_torch", "attending", "backward", "check", "delta",
    "forced", "forward", "launched", "masks_of_odd_strides", "needs_extension", "operands", "run", "wanted_of",
    "weights",
]  # fmt: skip


def check(case: Case, given: Named | None = None, label: object = "", **how) -> Named:
    """Forward and backward on Triton against ATen in the same dtype and in float64."""
    return attention_level3.check("triton", case, given, label, **how)


@contextmanager
def forced(config: configs.Config) -> Iterator[None]:
    """Every attention kernel on these tiles."""
    attention.plan.cache_clear()
    try:
        with mock.patch.object(configs, "choose", lambda *key: config):
            yield
    finally:
        attention.plan.cache_clear()


@contextmanager
def launched() -> Iterator[list[Spec]]:
    """What the kernels were compiled for that ran inside the `with` block."""
    specs: list[Spec] = []
    start = launch.launch_hook

    def note(kernel, grid, args, meta) -> None:
        specs.append(meta["SPEC"])
        start(kernel, grid, args, meta)

    with launch.replaced(note):
        yield specs
