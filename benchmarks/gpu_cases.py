"""The shapes that a GPU is timed at, and modelled for; bf16. Tiny ones of the same kinds stand in for a dry run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from benchmarks.attention_cases import BlockCase, CoreCase
from benchmarks.cases import OURS, MLPCase
from benchmarks.operation import CHECKPOINT, EAGER, Bar

TOKENS, MODEL = 32768, 2048
# Those with kernels of their own for a GPU: timed beside each other, and sanitised.
GPU_BACKENDS = ("triton", "cuda")


@dataclass(frozen=True)
class GpuCases:
    """One list for each operation of `benchmarks.run`."""

    mlp: Sequence[MLPCase]
    attention: Sequence[CoreCase]
    mha: Sequence[BlockCase]


def gated_width(width: int) -> int:
    """Hidden features of a gated MLP with about as many parameters as a plain one of 4 times the width."""
    return (8 * width // 3 + 255) // 256 * 256


# Goals for one H200, by whether the MLP is gated; for the widest ones.
_GOAL_WIDTH = 4096
_GOALS = {
    False: (Bar(OURS, EAGER, 1.20), Bar(OURS, CHECKPOINT, 1.05), Bar(OURS, "checkpoint-reentrant", 0.92)),
    True: (Bar(OURS, EAGER, 1.25), Bar(OURS, CHECKPOINT, 1.05), Bar(OURS, "checkpoint-reentrant", 0.92)),
}


def _mlp(width: int) -> Sequence[MLPCase]:
    plain = MLPCase(8192, width, 4 * width, dtype=torch.bfloat16)
    both = (plain, replace(plain, hidden=gated_width(width), gated=True, activation="silu"))
    return [replace(case, bars=_GOALS[case.gated] if width == _GOAL_WIDTH else ()) for case in both]


FULL = GpuCases(
    mlp=[case for width in (768, 1024, 4096) for case in _mlp(width)],
    attention=[
        CoreCase(TOKENS // length, MODEL // width, length, width, causal, dtype=torch.bfloat16)
        for width, length, causal in product((64, 128), (2048, 8192, 32768), (False, True))
    ],
    mha=[
        BlockCase(8192 // length, length, MODEL, MODEL // 128, causal, dtype=torch.bfloat16)
        for length, causal in product((2048, 8192), (False, True))
    ],
)
_TINY_MLP = MLPCase(48, 16, 40)
TINY = GpuCases(
    mlp=[_TINY_MLP, replace(_TINY_MLP, gated=True, activation="silu")],
    attention=[CoreCase(1, 2, 33, 16, causal) for causal in (False, True)],
    mha=[BlockCase(1, 24, 32, 2, causal=True)],
)
