"""`python -m benchmarks.sanitized [BACKEND]`: a few small calls on the GPU, forward and backward, for a sanitizer."""

from __future__ import annotations

import contextlib
import sys

import torch

import fused_remat
from fused_remat.check.cases import CASES, SMALL
from fused_remat.check.run import placed

NAMES = (
    "gelu",
    "gated, dropout, a quarter kept",
    "causal, grouped heads",
    "float mask and its gradient",
    "rotary, q and k norms",
    "averaged weights, padding",
)


def main(backend: str) -> None:
    for case in CASES:
        if case.name in NAMES:
            tensors = placed(case.tensors(SMALL), "cuda", torch.bfloat16)
            with fused_remat.backend(backend) if backend else contextlib.nullcontext():
                outputs = case.function(**case.arguments(tensors, SMALL))
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
