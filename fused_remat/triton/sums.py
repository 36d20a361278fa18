"""Sums over the rows of a matrix, in a fixed order: blocks of rows to partial sums, those to one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_remat.triton import launch

# Rows of one partial sum.
SUM_ROWS = 256
BLOCK_ROWS, BLOCK_COLS = 16, 128


@triton.jit
def column_sums_kernel(
    a,
    a_row,
    a_col,
    out,  # [cols], added to; or [row blocks, cols], written
    rows,
    cols,
    ADD: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    blocks = tl.cdiv(cols, BLOCK_COLS)
    sum_block = tl.program_id(0) // blocks
    col = (tl.program_id(0) % blocks * BLOCK_COLS + tl.arange(0, BLOCK_COLS)).to(tl.int64)
    first = sum_block * SUM_ROWS
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), out.dtype.element_ty)
    for row0 in range(first, tl.minimum(first + SUM_ROWS, rows), BLOCK_ROWS):
        row = (row0 + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        at = a + row[:, None] * a_row + col[None, :] * a_col
        total += tl.load(at, mask=(row < rows)[:, None] & (col < cols)[None, :], other=0.0).to(total.dtype)
    to = out + sum_block.to(tl.int64) * cols + col
    sums = tl.sum(total, 0)
    if ADD:
        sums += tl.load(to, mask=col < cols, other=0.0)
    tl.store(to, sums, mask=col < cols)


def column_sums(
    a: Tensor,  # [rows, N], any strides
    out: Tensor,  # [N], fp32, or fp64 for fp64
) -> None:
    """out += the sums over the rows of `a`."""
    rows, cols = a.shape
    if rows == 0 or cols == 0:
        return
    blocks = triton.cdiv(rows, SUM_ROWS)
    to = out if blocks == 1 else torch.empty((blocks, cols), dtype=out.dtype, device=out.device)
    launch.launch(
        column_sums_kernel,
        (blocks * triton.cdiv(cols, BLOCK_COLS),),
        a,
        a.stride(0),
        a.stride(1),
        to,
        rows,
        cols,
        ADD=blocks == 1,
        SUM_ROWS=SUM_ROWS,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_COLS=BLOCK_COLS,
        num_warps=4,
    )
    if blocks > 1:
        column_sums(to, out)
