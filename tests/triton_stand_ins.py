"""Kernels that break the budgets in a known way; run as a script, prints what `benchmarks.budgets` finds of each."""

import json
from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.budgets.compiled import Compiler
from benchmarks.budgets.launches import Case, record
from fused_remat.triton import launch


@triton.jit
def products(a, b, c, n, COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """COUNT accumulators that live at the same time."""
    row, col, inner = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, 64)
    first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, n, 64):
        left = tl.load(a + row[:, None] * n + (k + inner)[None, :])
        right = tl.load(b + (k + inner)[:, None] * n + col[None, :])
        first = tl.dot(left, right, first)
        if COUNT == 2:
            second = tl.dot(left, right + 1.0, second)
    tl.store(c + row[:, None] * n + col[None, :], first * second if COUNT == 2 else first)


def call(count: int, columns: int) -> None:
    a, b = (torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta") for _ in range(2))
    c = torch.empty(4096, 4096, device="meta")
    launch.launch(products, (1,), a, b, c, 4096, COUNT=count, BLOCK_M=128, BLOCK_N=columns, num_warps=8, num_stages=3)


def main() -> None:
    compiler = Compiler()
    found = {}
    for name, arch, count, columns in (
        ("fits", 90, 1, 128),
        ("spills", 80, 1, 512),
        ("serialised", 90, 2, 256),
        ("trap", 100, 2, 512),
    ):
        (recorded,) = record(Case(name, "plain", partial(call, count, columns)), arch)
        found[name] = compiler.measure(recorded, arch)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
