"""Which kind of `Recording` a block is, by when it was made and freed."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fused_remat.training_step import BACKWARD, FORWARD


def kind_of(
    died: float, phase: str, phases: Mapping[str, tuple[float, float]], *, is_loss: bool, outlives_replay: bool
) -> str:
    """The kind of a block made in `phase`. `outlives_replay`: of a recomputed forward that made it."""
    if died <= phases[phase][1]:
        return "rebuilt" if phase == BACKWARD and outlives_replay else "temporary"
    if phase == FORWARD:
        return "output" if died == math.inf or is_loss else "kept"
    return "gradients" if phase == BACKWARD else "optimizer"
