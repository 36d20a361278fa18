"""Backward kernels of an MLP tile: hidden, dup and dgate from x, dy and what was kept.

`mlp_fused_kernel` makes pre-activations and dhidden in one kernel; `mlp_dhidden_kernel` finds the pre-activations in
memory, made by library GEMMs or kept, and may overwrite them by their gradients; `mlp_dact_kernel` finds dhidden there
too. All end in `differentiate`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fused_remat.triton.activations import value_and_slope
from fused_remat.triton.mlp_fwd import load_pre, pre_activations
from fused_remat.triton.mlp_tiles import (
    CHUNK_ARGUMENTS,
    block_of,
    dropped,
    kept_elements,
    operand,
    part_of,
    tile_at,
    within,
)


@triton.jit
def differentiate(
    up, gate, dhidden,  # [ROWS, COLS] at (row, col), wide; a plain layer's `gate` is not looked at
    seed, row0, feature0, hidden_features, threshold, scale_bits,
    hidden, hidden_row, dup, dup_row, dgate, dgate_row,  # dgate: None for a plain layer
    row, col, rows, features,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Stores hidden, dup and dgate; returns the column sums of dup and dgate before they were rounded."""
    inside = within(row, col, rows, features, ROWS, COLS)
    keep = kept_elements(seed, row, col, row0, feature0, hidden_features, threshold, ROWS, COLS)
    dhidden = dropped(dhidden, keep, scale_bits)
    if dgate is not None:
        activated, slope = value_and_slope(gate, ACTIVATION)
        made, dups, dgates = activated * up, dhidden * activated, dhidden * up * slope
    else:
        made, slope = value_and_slope(up, ACTIVATION)
        dups = dhidden * slope
        dgates = dups
    made = dropped(made, keep, scale_bits)
    DTYPE: tl.constexpr = hidden.dtype.element_ty
    tl.store(tile_at(hidden, row, col, hidden_row, 1, ROWS, COLS, WIDE), made.to(DTYPE), mask=inside)
    tl.store(tile_at(dup, row, col, dup_row, 1, ROWS, COLS, WIDE), dups.to(DTYPE), mask=inside)
    if dgate is not None:
        tl.store(tile_at(dgate, row, col, dgate_row, 1, ROWS, COLS, WIDE), dgates.to(DTYPE), mask=inside)
    # Rows beyond the last are products of zeros with what an infinite bias could make of them.
    return tl.sum(tl.where(inside, dups, 0.0), 0), tl.sum(tl.where(inside, dgates, 0.0), 0)


@triton.jit
def store_sums(sums, partial, block_m, col, features, COLS: tl.constexpr):
    """Column sums of a row block to its row of `partial` [row blocks, features], if that is wanted."""
    if partial is not None:
        cols = col + tl.arange(0, COLS)
        tl.store(partial + block_m.to(tl.int64) * features + cols, sums, mask=cols < features)


@triton.jit
def hidden_gradient(
    dy, dy_row, dy_col, w_down, w_down_row, w_down_col, m0, f0, rows, features, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DY_ACCESS: tl.constexpr, W_DOWN_ACCESS: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """dy w_down of a block; w_down is given transposed, [features, depth]."""
    dhidden = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for d0 in tl.range(0, depth, BLOCK_K, warp_specialize=WARP_SPECIALIZE):
        a = operand(dy, m0, d0, rows, depth, dy_row, dy_col, BLOCK_M, BLOCK_K, DY_ACCESS, EVEN, WIDE)
        b = operand(
            w_down, f0, d0, features, depth, w_down_row, w_down_col, BLOCK_N, BLOCK_K, W_DOWN_ACCESS, EVEN, WIDE
        )
        dhidden = tl.dot(a, b.T, dhidden, input_precision=PRECISION)
    return dhidden


@triton.jit(do_not_specialize=CHUNK_ARGUMENTS)
def mlp_fused_kernel(
    x, x_row, x_col,  # [rows, depth]: a matrix and its strides
    w_up, w_up_row, w_up_col,  # [features, depth]
    w_gate, w_gate_row, w_gate_col,  # [features, depth] or None
    dy, dy_row, dy_col,  # [rows, depth_out]
    w_down, w_down_row, w_down_col,  # [features, depth_out]
    b_up, b_gate,  # [features] or None
    seed, row0, feature0, hidden_features, threshold, scale_bits,  # seed: None without dropout
    hidden, hidden_row, dup, dup_row, dgate, dgate_row,  # [rows, features]; dgate: None for a plain layer
    partial_up, partial_gate,  # [row blocks, features] or None
    rows, features, depth, depth_out,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    X_ACCESS: tl.constexpr, W_UP_ACCESS: tl.constexpr, W_GATE_ACCESS: tl.constexpr,
    DY_ACCESS: tl.constexpr, W_DOWN_ACCESS: tl.constexpr,
    EVEN: tl.constexpr, EVEN_OUT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """Nothing kept: the pre-activations and dhidden stay in registers. Two loops, for x and dy may differ in width."""
    block_m, block_n = block_of(tl.program_id(0), rows, features, BLOCK_M, BLOCK_N)
    m0, f0 = block_m * BLOCK_M, block_n * BLOCK_N
    # In their storage dtype while the second loop runs: half the registers, and rounded they must be anyway.
    all_up, all_gate = pre_activations(
        x, x_row, x_col, w_up, w_up_row, w_up_col, w_gate, w_gate_row, w_gate_col, b_up, b_gate,
        m0, f0, rows, features, depth, hidden.dtype.element_ty, BLOCK_M, BLOCK_N, BLOCK_K,
        X_ACCESS, W_UP_ACCESS, W_GATE_ACCESS, EVEN, WIDE, PRECISION, WARP_SPECIALIZE,
    )  # fmt: skip
    all_dhidden = hidden_gradient(
        dy, dy_row, dy_col, w_down, w_down_row, w_down_col, m0, f0, rows, features, depth_out,
        BLOCK_M, BLOCK_N, BLOCK_K, DY_ACCESS, W_DOWN_ACCESS, EVEN_OUT, WIDE, PRECISION, WARP_SPECIALIZE,
    )  # fmt: skip
    COLS: tl.constexpr = BLOCK_N // PARTS
    for part in tl.static_range(PARTS):
        col = f0 + part * COLS
        sums_up, sums_gate = differentiate(
            part_of(all_up, part, PARTS).to(tl.float32), part_of(all_gate, part, PARTS).to(tl.float32),
            part_of(all_dhidden, part, PARTS),
            seed, row0, feature0, hidden_features, threshold, scale_bits,
            hidden, hidden_row, dup, dup_row, dgate, dgate_row, m0, col, rows, features,
            ACTIVATION, BLOCK_M, COLS, WIDE,
        )  # fmt: skip
        store_sums(sums_up, partial_up, block_m, col, features, COLS)
        store_sums(sums_gate, partial_gate, block_m, col, features, COLS)


@triton.jit(do_not_specialize=CHUNK_ARGUMENTS)
def mlp_dhidden_kernel(
    dy, dy_row, dy_col,  # [rows, depth]
    w_down, w_down_row, w_down_col,  # [features, depth]
    up, up_row, gate, gate_row,  # pre-activations [rows, features], maybe dup and dgate themselves; gate or None
    b_up, b_gate,  # what is still to be added to them, or None
    seed, row0, feature0, hidden_features, threshold, scale_bits,
    hidden, hidden_row, dup, dup_row, dgate, dgate_row,
    partial_up, partial_gate,
    rows, features, depth,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    DY_ACCESS: tl.constexpr, W_DOWN_ACCESS: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """dhidden stays in registers; the pre-activations come from memory."""
    block_m, block_n = block_of(tl.program_id(0), rows, features, BLOCK_M, BLOCK_N)
    m0, f0 = block_m * BLOCK_M, block_n * BLOCK_N
    all_dhidden = hidden_gradient(
        dy, dy_row, dy_col, w_down, w_down_row, w_down_col, m0, f0, rows, features, depth,
        BLOCK_M, BLOCK_N, BLOCK_K, DY_ACCESS, W_DOWN_ACCESS, EVEN, WIDE, PRECISION, WARP_SPECIALIZE,
    )  # fmt: skip
    COLS: tl.constexpr = BLOCK_N // PARTS
    for part in tl.static_range(PARTS):
        col = f0 + part * COLS
        ups = load_pre(up, up_row, b_up, m0, col, rows, features, tl.float32, BLOCK_M, COLS, WIDE)
        gates = ups
        if gate is not None:
            gates = load_pre(gate, gate_row, b_gate, m0, col, rows, features, tl.float32, BLOCK_M, COLS, WIDE)
        sums_up, sums_gate = differentiate(
            ups, gates, part_of(all_dhidden, part, PARTS),
            seed, row0, feature0, hidden_features, threshold, scale_bits,
            hidden, hidden_row, dup, dup_row, dgate, dgate_row, m0, col, rows, features,
            ACTIVATION, BLOCK_M, COLS, WIDE,
        )  # fmt: skip
        store_sums(sums_up, partial_up, block_m, col, features, COLS)
        store_sums(sums_gate, partial_gate, block_m, col, features, COLS)


@triton.jit(do_not_specialize=CHUNK_ARGUMENTS)
def mlp_dact_kernel(
    up, up_row, gate, gate_row,  # pre-activations, maybe dup and dgate themselves; gate or None
    b_up, b_gate,  # what is still to be added to them, or None
    seed, row0, feature0, hidden_features, threshold, scale_bits,
    hidden, hidden_row, dup, dup_row, dgate, dgate_row,  # hidden: holds dhidden
    partial_up, partial_gate,
    rows, features,
    ACTIVATION: tl.constexpr,
    SUM_ROWS: tl.constexpr,  # rows of one partial sum
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The elementwise half of backward; fp64 in fp64."""
    block_m, block_n = block_of(tl.program_id(0), rows, features, SUM_ROWS, BLOCK_N)
    col = block_n * BLOCK_N
    WIDE_DTYPE: tl.constexpr = tl.float64 if hidden.dtype.element_ty == tl.float64 else tl.float32
    all_sums_up = tl.zeros((BLOCK_N,), WIDE_DTYPE)
    all_sums_gate = tl.zeros((BLOCK_N,), WIDE_DTYPE)
    for row in range(block_m * SUM_ROWS, tl.minimum((block_m + 1) * SUM_ROWS, rows), BLOCK_M):
        ups = load_pre(up, up_row, b_up, row, col, rows, features, WIDE_DTYPE, BLOCK_M, BLOCK_N, WIDE)
        gates = ups
        if gate is not None:
            gates = load_pre(gate, gate_row, b_gate, row, col, rows, features, WIDE_DTYPE, BLOCK_M, BLOCK_N, WIDE)
        dhidden = load_pre(hidden, hidden_row, None, row, col, rows, features, WIDE_DTYPE, BLOCK_M, BLOCK_N, WIDE)
        sums_up, sums_gate = differentiate(
            ups, gates, dhidden, seed, row0, feature0, hidden_features, threshold, scale_bits,
            hidden, hidden_row, dup, dup_row, dgate, dgate_row, row, col, rows, features,
            ACTIVATION, BLOCK_M, BLOCK_N, WIDE,
        )  # fmt: skip
        all_sums_up += sums_up
        all_sums_gate += sums_gate
    store_sums(all_sums_up, partial_up, block_m, col, features, BLOCK_N)
    store_sums(all_sums_gate, partial_gate, block_m, col, features, BLOCK_N)
