"""Recordings of whole optimizer steps: what was allocated when, by which module, and what the peak consists of."""

from __future__ import annotations

import torch

from fused_remat.recording.recording import KINDS, Allocation, Recording, Span
from fused_remat.training_step import TrainingStep

__all__ = ["KINDS", "Allocation", "Recording", "Span", "record_step"]


def record_step(step: TrainingStep, *, fake: bool = False, device: torch.device | str | None = None) -> Recording:
    """Records one optimizer step and takes it back: the model, its optimizer and the random generators are left as they
    were (`fused_remat.training_step.left_untouched`).

    Args:
        step: from `make_step`.
        fake: False: run three real steps and read the allocator's events of the last. True: run with fake tensors,
            which have shapes and no memory; nothing is computed, no real tensor is touched. A model on the device
            "meta", or made under a FakeTensorMode, can only be recorded so.
        device: with `fake`, the device that the step is to be predicted for; None: where its tensors are ("cpu" for
            those on "meta").

    Returns:
        A `Recording`: of the step after the first one, so that the optimizer's state exists.

    Raises:
        ValueError: a real step of a model without memory; `device` without `fake`.
        RuntimeError: a profiler is already running; a fake step whose course depends on values of tensors.
        Whatever the step raises.
    """
    if fake:
        from fused_remat.recording.predicted import predicted

        return predicted(step, None if device is None else torch.device(device))
    from fused_remat.recording.measured import measured
    from fused_remat.training_step import check_has_memory, left_untouched

    if device is not None:
        raise ValueError(
            f"device is {device}, but a real step runs where its tensors are; pass fake=True, or move them"
        )
    check_has_memory(step)
    with left_untouched(step):
        return measured(step)
