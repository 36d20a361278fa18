"""Predicting for a GPU where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fused_remat.budget import resolve, workspace
from fused_remat.ops.memory import not_on_the_cpu
from fused_remat.sizes import format_bytes


@dataclass(frozen=True)
class StandIn:
    """The device that fake tensors are on, for the device that is asked for.

    torch runs no backward of fake CUDA tensors without a CUDA device. Fake tensors on the CPU take their place then,
    with the workspace that CUDA calls have, and without the upcasts of CPUs that do not multiply bf16.
    """

    device: torch.device | None
    note: str = ""

    @classmethod
    def of(cls, device: torch.device | None) -> StandIn:
        if device is None or device.type != "cuda" or torch.cuda.is_available():
            return cls(device)
        return cls(
            torch.device("cpu"),
            f"there is no CUDA device here: predicted with CPU tensors in the place of CUDA's, and the workspace of "
            f"CUDA ({format_bytes(resolve(None, 'cuda'))}) where the plan names none",
        )

    @contextmanager
    def settings(self) -> Iterator[None]:
        """For the time of a prediction."""
        if not self.note:
            yield
            return
        with workspace(resolve(None, "cuda")), not_on_the_cpu():
            yield
