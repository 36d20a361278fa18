"""Device functions that the MLP kernels share: operand tiles, tile order, parts of an accumulator, dropout, storing.

A tile of [rows, features] is cut into blocks [BLOCK_M, BLOCK_N]; BLOCK_K cuts what a product sums over. Blocks start at
int64 addresses; offsets within one are int32 unless WIDE says that they could overflow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fused_remat.triton import dropout

# Arguments that differ from chunk to chunk and must not compile a kernel anew.
CHUNK_ARGUMENTS = ("row0", "feature0", "hidden_features", "threshold", "scale_bits")
# Row blocks whose tiles are walked column by column, so that their operands meet in L2.
GROUP_M = tl.constexpr(8)


@triton.jit
def block_of(program, rows, features, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Row block and feature block of a program."""
    blocks_m, blocks_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(features, BLOCK_N)
    group = program // (GROUP_M * blocks_n)
    within = program % (GROUP_M * blocks_n)
    height = tl.minimum(blocks_m - group * GROUP_M, GROUP_M)
    return group * GROUP_M + within % height, within // height


@triton.jit
def offsets(SIZE: tl.constexpr, WIDE: tl.constexpr):
    span = tl.arange(0, SIZE)
    return span.to(tl.int64) if WIDE else span


@triton.jit
def tile_at(
    a,  # pointer
    row0,
    col0,
    stride_row,
    stride_col,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Pointers to the block [ROWS, COLS] at (row0, col0)."""
    start = a + tl.cast(row0, tl.int64) * stride_row + tl.cast(col0, tl.int64) * stride_col
    return start + offsets(ROWS, WIDE)[:, None] * stride_row + offsets(COLS, WIDE)[None, :] * stride_col


@triton.jit
def within(row0, col0, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Bool [ROWS, COLS], True inside of [rows, cols]."""
    return (row0 + tl.arange(0, ROWS) < rows)[:, None] & (col0 + tl.arange(0, COLS) < cols)[None, :]


@triton.jit
def operand(
    a,  # pointer, or descriptor of the matrix ("rows") or of its transpose ("columns")
    row0,
    col0,
    rows,
    cols,
    stride_row,
    stride_col,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ACCESS: tl.constexpr,
    EVEN: tl.constexpr,  # COLS divides cols
    WIDE: tl.constexpr,
):
    """A block [ROWS, COLS] of a GEMM's operand [rows, cols], zeros beyond it; the same values for every ACCESS."""
    if ACCESS == "rows":
        tile = a.load([row0, col0])
    elif ACCESS == "columns":
        tile = a.load([col0, row0]).T
    else:
        inside = (row0 + tl.arange(0, ROWS) < rows)[:, None]
        if not EVEN:
            inside = inside & (col0 + tl.arange(0, COLS) < cols)[None, :]
        tile = tl.load(tile_at(a, row0, col0, stride_row, stride_col, ROWS, COLS, WIDE), mask=inside, other=0.0)
    return tile


@triton.jit
def part_of(tile, PART: tl.constexpr, PARTS: tl.constexpr):
    """The PART-th of PARTS (1, 2, 4 or 8) groups of columns: an epilogue on a whole accumulator spills registers."""
    part = tile
    for level in tl.static_range(3):
        if 2**level < PARTS:
            left, right = tl.split(tl.permute(tl.reshape(part, (part.shape[0], 2, part.shape[1] // 2)), (0, 2, 1)))
            part = left if PART // (PARTS // 2 ** (level + 1)) % 2 == 0 else right
    return part


@triton.jit
def kept_elements(
    seed,  # pointer to int64, or None: all are kept
    row,
    col,
    row0,
    feature0,
    hidden_features,
    threshold,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Which elements of the block at (row, col) of the tile survive; they are numbered within [M, hidden_features]."""
    keep = None
    if seed is not None:
        first = (tl.cast(row0, tl.int64) + row) * hidden_features + feature0 + col
        index = first + tl.arange(0, ROWS).to(tl.int64)[:, None] * hidden_features + tl.arange(0, COLS)[None, :]
        keep = dropout.kept(tl.load(seed), index, threshold)
    return keep


@triton.jit
def dropped(values, keep, scale_bits):
    """`values` with dropped elements 0 and the others scaled."""
    if keep is not None:
        # fp64 by its bits: floats are passed as fp32.
        scale = scale_bits.to(tl.float64, bitcast=True).to(values.dtype)
        values = tl.where(keep, values * scale, 0.0)
    return values
