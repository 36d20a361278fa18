"""The same idea at work: a small `fused_remat.mlp`, its bytes measured, and its backward cut into steps.

M token rows of width D, F hidden features. Plain torch keeps x [M, D], up [M, F] and hidden [M, F]; the fused MLP keeps
x and rebuilds up and hidden for a chunk of features at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import fused_remat
from fused_remat import ops

TOKENS, WIDTH, FEATURES = 256, 64, 1024
WORKSPACE = 512 * 1024  # bytes; for about five chunks
_ITEM = 4  # bytes of a float32
_BUFFERS = 2  # [M, chunk] tensors that a chunk needs at once: the pair up, dhidden becomes hidden, dup


@dataclass(frozen=True)
class MlpExample:
    """Bytes of the example. `measured`: kept and peak are from allocator events; else kept is by formula, peak None.

    Attributes:
        chunk_features: hidden features of a backward chunk; the last one may have fewer.
        workspace_bytes: what a backward chunk needs, from the plan of the call if `measured`, else by formula.
        kept_plain, kept_fused: kept for backward, x included; weights and y are not.
        peak_plain, peak_fused: highest sum in backward, beside y and the gradients that it returns.
    """

    measured: bool
    chunk_features: int
    workspace_bytes: int
    kept_plain: int
    kept_fused: int
    peak_plain: int | None
    peak_fused: int | None

    @property
    def chunks(self) -> int:
        return math.ceil(FEATURES / self.chunk_features)


@dataclass(frozen=True)
class MlpStep:
    """One step: `chunk` counts from 1, 0 outside of chunks. `workspace`: what lies in it; `rebuilt`, `done`: chunks."""

    name: str
    chunk: int
    workspace: tuple[str, ...]
    kept: tuple[str, ...]
    rebuilt: int
    done: int


def x_bytes() -> int:
    return TOKENS * WIDTH * _ITEM


def full_bytes() -> int:
    """Of one whole [M, F] tensor."""
    return TOKENS * FEATURES * _ITEM


def mlp_example() -> MlpExample:
    """Measured by real calls on the CPU; by formula where the compiled operators are not at hand.

    Looking for them may compile them, as any first use does.
    """
    return by_formula() if ops.ready() is not None else _measured()


def by_formula() -> MlpExample:
    """What shapes alone tell: nothing is run."""
    chunk = WORKSPACE // (_BUFFERS * TOKENS * _ITEM)
    kept = x_bytes()
    return MlpExample(
        measured=False, chunk_features=chunk, workspace_bytes=_BUFFERS * TOKENS * chunk * _ITEM,
        kept_plain=kept + 2 * full_bytes(), kept_fused=kept, peak_plain=None, peak_fused=None,
    )  # fmt: skip


def _measured() -> MlpExample:
    made = torch.Generator().manual_seed(0)
    source = torch.randn(TOKENS, WIDTH, generator=made)
    w_up = torch.randn(FEATURES, WIDTH, generator=made).div_(math.sqrt(WIDTH)).requires_grad_()
    w_down = torch.randn(WIDTH, FEATURES, generator=made).div_(math.sqrt(FEATURES)).requires_grad_()

    def x() -> torch.Tensor:  # made within the call, so that it is counted
        return source.clone().requires_grad_()

    def plain() -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x(), w_up)), w_down)

    def fused() -> torch.Tensor:
        return fused_remat.mlp(x(), w_up, w_down, workspace=WORKSPACE)

    theirs, ours = (fused_remat.measure(one, repeats=0) for one in (plain, fused))
    plan = fused_remat.explain(fused_remat.mlp, x(), w_up, w_down, workspace=WORKSPACE).backward
    if getattr(plan, "axis", None) != "features":
        raise RuntimeError(f"the example is made for chunks of hidden features, but its plan is: {plan}")
    return MlpExample(
        measured=True, chunk_features=plan.features, workspace_bytes=plan.nbytes, kept_plain=theirs.kept_bytes,
        kept_fused=ours.kept_bytes, peak_plain=theirs.backward_peak_above_gradients_bytes,
        peak_fused=ours.backward_peak_above_gradients_bytes,
    )  # fmt: skip


def mlp_steps(chunks: int) -> list[MlpStep]:
    """Forward as one step, then three steps for each chunk of backward."""
    steps = [MlpStep("mlp_start", 0, (), (), 0, 0), MlpStep("mlp_forward", 0, (), ("x",), 0, 0)]
    for chunk in range(1, chunks + 1):
        steps += [
            MlpStep("mlp_up", chunk, ("up",), ("x",), chunk, chunk - 1),
            MlpStep("mlp_dup", chunk, ("hidden", "dup"), ("x",), chunk, chunk - 1),
            MlpStep("mlp_use", chunk, (), ("x",), chunk, chunk),
        ]
    return [*steps, MlpStep("mlp_over", 0, (), (), chunks, chunks)]
