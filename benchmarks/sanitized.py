"""`python -m benchmarks.sanitized [BACKEND]`: a few small calls on the GPU, forward and backward, for a sanitizer.

On that backend, or on each that has kernels for a GPU and can run the call.
"""

from __future__ import annotations

import sys

import torch

import fused_remat
from benchmarks.gpu_cases import GPU_BACKENDS
from fused_remat.check.cases import ALIGNED, CASES, NARROW, SMALL, Case, Sizes
from fused_remat.check.run import placed, reasons

NAMES = (
    "gelu",
    "gated, dropout, a quarter kept",
    "causal, grouped heads",
    "float mask and its gradient",
    "rotary, q and k norms",
    "averaged weights, padding",
)
# What the kernels in CUDA C++ do in these sizes alone: library products with epilogues, CUTLASS, copies of 16 bytes,
# and one kernel a pass whose last block adds up what the others made.
NAMES_IN = {
    ALIGNED: (
        "gelu",
        "gelu_tanh, LayerNorm",
        "gated silu",
        "gated, dropout, a quarter kept",
        "causal, dropout",
        "rotary, q and k norms",
    ),
    NARROW: ("gelu", "gated silu", "dropout"),
}


def calls(backend: str) -> list[tuple[Case, Sizes]]:
    """The calls that `backend` makes."""
    names = {SMALL: NAMES} | (NAMES_IN if backend == "cuda" else {})
    return [(case, sizes) for sizes, chosen in names.items() for case in CASES if case.name in chosen]


def main(backend: str) -> None:
    for name in [backend] if backend else GPU_BACKENDS:
        for case, sizes in calls(name):
            if backend or not reasons(case, name, "cuda", torch.bfloat16, sizes):
                tensors = placed(case.tensors(sizes), "cuda", torch.bfloat16)
                with fused_remat.backend(name):
                    outputs = case.function(**case.arguments(tensors, sizes))
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
