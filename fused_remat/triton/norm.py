"""LayerNorm and RMSNorm of token rows, folded into the ops: applied to pieces of x, and applied again in backward.

Rows are normalised in fp32, or in fp64 for fp64, and may be of any width. csrc/aten/norm.cpp says what is computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_remat.triton import launch
from fused_remat.triton.sums import column_sums

KINDS = ("layer_norm", "rms_norm")
# Widest block of a row; wider rows are walked block by block.
MAX_BLOCK = 4096
# Elements of a program's block of rows.
TILE = 4096
# Rows of one partial sum of dweight and dbias, and the block that its columns are walked in.
SUM_ROWS = 128
BLOCK_ROWS, BLOCK_COLS = 16, 128
TRITON_DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@triton.jit
def row_block(a, row, a_row, a_col, start, n_rows, width, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Columns [start, start + BLOCK) of some rows in DTYPE, zeros beyond the last; and which are inside."""
    col = start + tl.arange(0, BLOCK)
    inside = (row < n_rows)[:, None] & (col < width)[None, :]
    at = a + row[:, None] * a_row + (col.to(tl.int64) * a_col)[None, :]
    return tl.load(at, mask=inside, other=0.0).to(DTYPE), inside


@triton.jit
def vector_block(a, start, width, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    col = start + tl.arange(0, BLOCK)
    return tl.load(a + col, mask=col < width, other=0.0).to(DTYPE)[None, :]


@triton.jit
def row_statistics(
    rows, row, rows_row, rows_col, n_rows, width,
    LAYER_NORM: tl.constexpr, EPS: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The mean (0 for rms_norm) and the factor to unit variance or mean square, [ROWS] each."""
    mean = tl.zeros((ROWS,), DTYPE)
    if LAYER_NORM:
        for start in range(0, PADDED, BLOCK):
            x, _ = row_block(rows, row, rows_row, rows_col, start, n_rows, width, DTYPE, BLOCK)
            mean += tl.sum(x, 1)
        mean = mean / width
    square = tl.zeros((ROWS,), DTYPE)
    for start in range(0, PADDED, BLOCK):
        x, inside = row_block(rows, row, rows_row, rows_col, start, n_rows, width, DTYPE, BLOCK)
        centred = tl.where(inside, x - mean[:, None], 0.0)
        square += tl.sum(centred * centred, 1)
    return mean, 1.0 / tl.sqrt(square / width + EPS)


@triton.jit
def normalize_rows_kernel(
    rows, rows_row, rows_col,  # [n, width]
    weight, bias,  # [width] or None
    out, out_row, out_col,
    n_rows, width,
    LAYER_NORM: tl.constexpr,
    EPS: tl.constexpr,  # a constant: floats are passed as fp32
    DTYPE: tl.constexpr,  # computed in
    ROUND_TO: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mean, by = row_statistics(rows, row, rows_row, rows_col, n_rows, width, LAYER_NORM, EPS, DTYPE, ROWS, BLOCK, PADDED)
    for start in range(0, PADDED, BLOCK):
        x, inside = row_block(rows, row, rows_row, rows_col, start, n_rows, width, DTYPE, BLOCK)
        normalized = (x - mean[:, None]) * by[:, None]
        if weight is not None:
            normalized *= vector_block(weight, start, width, DTYPE, BLOCK)
        if bias is not None:
            normalized += vector_block(bias, start, width, DTYPE, BLOCK)
        col = (start + tl.arange(0, BLOCK)).to(tl.int64)
        at = out + row[:, None] * out_row + col[None, :] * out_col
        tl.store(at, normalized.to(ROUND_TO).to(out.dtype.element_ty), mask=inside)


@triton.jit
def row_gradient_statistics_kernel(
    dnormalized, d_row, d_col,  # [n, width]
    rows, rows_row, rows_col,
    weight,  # [width] or None
    statistics,  # [4, n]: mean, factor, mean of g, mean of g along the normalised row; g = dnormalized * weight
    n_rows, width,
    LAYER_NORM: tl.constexpr, EPS: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mean, by = row_statistics(rows, row, rows_row, rows_col, n_rows, width, LAYER_NORM, EPS, DTYPE, ROWS, BLOCK, PADDED)
    total = tl.zeros((ROWS,), DTYPE)
    along = tl.zeros((ROWS,), DTYPE)
    for start in range(0, PADDED, BLOCK):
        x, _ = row_block(rows, row, rows_row, rows_col, start, n_rows, width, DTYPE, BLOCK)
        # Zeros beyond the last column.
        g, _ = row_block(dnormalized, row, d_row, d_col, start, n_rows, width, DTYPE, BLOCK)
        if weight is not None:
            g *= vector_block(weight, start, width, DTYPE, BLOCK)
        along += tl.sum(g * (x - mean[:, None]) * by[:, None], 1)
        if LAYER_NORM:
            total += tl.sum(g, 1)
    at = statistics + row
    tl.store(at, mean, mask=row < n_rows)
    tl.store(at + n_rows, by, mask=row < n_rows)
    tl.store(at + 2 * tl.cast(n_rows, tl.int64), total / width, mask=row < n_rows)
    tl.store(at + 3 * tl.cast(n_rows, tl.int64), along / width, mask=row < n_rows)


@triton.jit
def row_gradients_kernel(
    dnormalized, d_row, d_col,  # [n, width]
    rows, rows_row, rows_col,
    weight,
    statistics,  # [4, n], as above
    drows, drows_row, drows_col,  # [n, width], maybe dnormalized itself; or None
    partial_weight, partial_bias,  # [row blocks, width] or None
    n_rows, width,
    SUM_ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Gradient of a block of rows and columns, and what it adds to those of weight and bias."""
    blocks = tl.cdiv(width, BLOCK_COLS)
    sum_block, start = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK_COLS
    col = (start + tl.arange(0, BLOCK_COLS)).to(tl.int64)
    DTYPE: tl.constexpr = statistics.dtype.element_ty
    dweight = tl.zeros((BLOCK_ROWS, BLOCK_COLS), DTYPE)
    dbias = tl.zeros((BLOCK_ROWS, BLOCK_COLS), DTYPE)
    first = sum_block * SUM_ROWS
    for row0 in range(first, tl.minimum(first + SUM_ROWS, n_rows), BLOCK_ROWS):
        row = (row0 + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        at = statistics + row
        mean = tl.load(at, mask=row < n_rows, other=0.0)
        by = tl.load(at + n_rows, mask=row < n_rows, other=0.0)
        g_mean = tl.load(at + 2 * tl.cast(n_rows, tl.int64), mask=row < n_rows, other=0.0)
        along = tl.load(at + 3 * tl.cast(n_rows, tl.int64), mask=row < n_rows, other=0.0)
        x, inside = row_block(rows, row, rows_row, rows_col, start, n_rows, width, DTYPE, BLOCK_COLS)
        d, _ = row_block(dnormalized, row, d_row, d_col, start, n_rows, width, DTYPE, BLOCK_COLS)
        values = (x - mean[:, None]) * by[:, None]
        dweight += d * values
        dbias += d
        if drows is not None:
            if weight is not None:
                d *= vector_block(weight, start, width, DTYPE, BLOCK_COLS)
            d = (d - g_mean[:, None] - values * along[:, None]) * by[:, None]
            tl.store(
                drows + row[:, None] * drows_row + col[None, :] * drows_col, d.to(drows.dtype.element_ty), mask=inside
            )
    if partial_weight is not None:
        tl.store(partial_weight + sum_block.to(tl.int64) * width + col, tl.sum(dweight, 0), mask=col < width)
    if partial_bias is not None:
        tl.store(partial_bias + sum_block.to(tl.int64) * width + col, tl.sum(dbias, 0), mask=col < width)


def dense(vector: Tensor | None) -> Tensor | None:
    """As kernels load vectors of parameters: without gaps."""
    return vector if vector is None else vector.contiguous()


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"norm must be layer_norm or rms_norm, got {kind}")


def _blocks(width: int) -> dict[str, int]:
    block = min(triton.next_power_of_2(width), MAX_BLOCK)
    return {
        "ROWS": max(1, TILE // block),
        "BLOCK": block,
        "PADDED": triton.cdiv(width, block) * block,
        "num_warps": 4 if block < MAX_BLOCK else 8,
    }


def normalize_rows(
    rows: Tensor,  # [n, D], any strides
    kind: str,
    weight: Tensor | None,  # [D]
    bias: Tensor | None,  # [D]
    eps: float,
    compute: torch.dtype,
    out: Tensor,  # [n, D]
) -> None:
    """out <- norm(rows), rounded to `compute`."""
    _check_kind(kind)
    if rows.numel() == 0:
        return
    n, width = rows.shape
    weight, bias = dense(weight), dense(bias)
    blocks = _blocks(width)
    launch.launch(
        normalize_rows_kernel,
        (triton.cdiv(n, blocks["ROWS"]),),
        *(rows, *rows.stride(), weight, bias, out, *out.stride(), n, width),
        LAYER_NORM=kind == "layer_norm",
        EPS=eps,
        DTYPE=tl.float64 if compute == torch.float64 else tl.float32,
        ROUND_TO=TRITON_DTYPES[compute],
        **blocks,
    )


def normalize_rows_bwd(
    dnormalized: Tensor,  # [n, D], fp32 or fp64
    rows: Tensor,  # [n, D]
    kind: str,
    weight: Tensor | None,  # [D]
    bias: Tensor | None,
    eps: float,
    drows: Tensor | None,  # [n, D]; may be `dnormalized`
    dweight: Tensor | None,  # [D], added to
    dbias: Tensor | None,  # [D], added to
) -> None:
    _check_kind(kind)
    if rows.numel() == 0 or (drows is None and dweight is None and dbias is None):
        return
    n, width = rows.shape
    blocks = _blocks(width)
    inputs = (dnormalized, *dnormalized.stride(), rows, *rows.stride(), dense(weight))
    statistics = dnormalized.new_empty((4, n))
    launch.launch(
        row_gradient_statistics_kernel,
        (triton.cdiv(n, blocks["ROWS"]),),
        *(*inputs, statistics, n, width),
        LAYER_NORM=kind == "layer_norm",
        EPS=eps,
        DTYPE=TRITON_DTYPES[dnormalized.dtype],
        **blocks,
    )
    sum_blocks = triton.cdiv(n, SUM_ROWS)
    partials = [None if t is None else t.new_empty((sum_blocks, width)) for t in (dweight, dbias)]
    target = (None, 0, 0) if drows is None else (drows, *drows.stride())
    launch.launch(
        row_gradients_kernel,
        (sum_blocks * triton.cdiv(width, BLOCK_COLS),),
        *(*inputs, statistics, *target, *partials, n, width),
        SUM_ROWS=SUM_ROWS,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_COLS=BLOCK_COLS,
        num_warps=4,
    )
    for partial, sums in zip(partials, (dweight, dbias), strict=True):
        if sums is not None:
            column_sums(partial, sums)
