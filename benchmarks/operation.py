"""What an operation brings to the benchmark: its cases, their inputs, the truth and the providers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

# The two that others are compared with; every operation has providers of these names.
EAGER, CHECKPOINT = "eager", "checkpoint"

Leaves = Mapping[str, Tensor]
Forward = Callable[[], Tensor]


class NotRun(Exception):
    """A provider cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Bar:
    """A goal: the median time of `provider` is at most `most` times that of `baseline`. Printed, never enforced."""

    provider: str
    baseline: str
    most: float


class Case(Protocol):
    """One shape and dtype. `gemm_flop`: FLOP of one matrix product of the layer, the unit of product counts."""

    name: str
    dtype: torch.dtype
    gemm_flop: int
    bars: Sequence[Bar]

    def config(self) -> dict[str, Any]:
        """The case as JSON values, for the CSV."""

    def with_dtype(self, dtype: torch.dtype) -> Case:
        """The same shape in another dtype, without goals if it is another."""


@dataclass(frozen=True)
class Operation:
    """One entry of `run.OPERATIONS`.

    Attributes:
        parse: text of `--shapes`, dtype or None, activation or None -> case; raises ValueError.
        leaves: case, device -> the inputs by name, in the case's dtype, all requiring gradients.
        truth: case, leaves of any dtype -> the output, plainly computed.
        judged: case -> the case whose results the gate compares, where that is another: one without dropout.
        providers: name -> (case, leaves -> forward function over these leaves); raises NotRun.
        slow_providers: names that `--quick` leaves out.
        error_limits: name -> error allowed in units of eager's, where that is not `parity.DEFAULT_LIMIT`.
    """

    name: str
    shape_help: str
    cases: Sequence[Case]
    quick_cases: Sequence[Case]
    parse: Callable[[str, torch.dtype | None, str | None], Case]
    leaves: Callable[[Any, torch.device], Leaves]
    truth: Callable[[Any, Leaves], Tensor]
    providers: Mapping[str, Callable[[Any, Leaves], Forward]]
    judged: Callable[[Any], Any] = lambda case: case
    slow_providers: frozenset[str] = frozenset()
    error_limits: Mapping[str, float] = field(default_factory=dict)
