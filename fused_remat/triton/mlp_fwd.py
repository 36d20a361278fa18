"""Forward kernels of an MLP tile: GEMMs for pre-activations; activation, gate product and dropout behind them."""

from __future__ import annotations

import triton
import triton.language as tl

from fused_remat.triton.activations import value
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
def with_bias(pre, bias, col0, features, COLS: tl.constexpr):
    """pre + bias [features] for features from col0 on, in the dtype of `pre`."""
    if bias is not None:
        cols = col0 + tl.arange(0, COLS)
        pre += tl.load(bias + cols, mask=cols < features, other=0.0).to(pre.dtype)[None, :]
    return pre


@triton.jit
def pre_activations(
    x, x_row, x_col,
    w_up, w_up_row, w_up_col,
    w_gate, w_gate_row, w_gate_col,
    b_up, b_gate,
    m0, f0, rows, features, depth,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    X_ACCESS: tl.constexpr, W_UP_ACCESS: tl.constexpr, W_GATE_ACCESS: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """up and gate of a block, one loop for both; rounded as they would be stored, which is what every pass must see.

    A plain layer has no w_gate; its `gate` is `up`.
    """
    # Sums start at the bias: behind the loop it would want registers next to two accumulators.
    up = with_bias(tl.zeros((BLOCK_M, BLOCK_N), tl.float32), b_up, f0, features, BLOCK_N)
    gate = with_bias(tl.zeros((BLOCK_M, BLOCK_N), tl.float32), b_gate, f0, features, BLOCK_N)
    for d0 in tl.range(0, depth, BLOCK_K, warp_specialize=WARP_SPECIALIZE):
        a = operand(x, m0, d0, rows, depth, x_row, x_col, BLOCK_M, BLOCK_K, X_ACCESS, EVEN, WIDE)
        b = operand(w_up, f0, d0, features, depth, w_up_row, w_up_col, BLOCK_N, BLOCK_K, W_UP_ACCESS, EVEN, WIDE)
        up = tl.dot(a, b.T, up, input_precision=PRECISION)
        if w_gate is not None:
            b = operand(
                w_gate, f0, d0, features, depth, w_gate_row, w_gate_col, BLOCK_N, BLOCK_K, W_GATE_ACCESS, EVEN, WIDE
            )
            gate = tl.dot(a, b.T, gate, input_precision=PRECISION)
    if w_gate is not None:
        return up.to(DTYPE), gate.to(DTYPE)
    else:
        return up.to(DTYPE), up.to(DTYPE)


@triton.jit(do_not_specialize=CHUNK_ARGUMENTS)
def mlp_fwd_kernel(
    x, x_row, x_col,  # [rows, depth]: a matrix and its strides
    w_up, w_up_row, w_up_col,  # [features, depth]
    w_gate, w_gate_row, w_gate_col,  # [features, depth] or None
    b_up, b_gate,  # [features] or None
    seed, row0, feature0, hidden_features, threshold, scale_bits,  # seed: None without dropout
    up, up_row, keep_up,  # residual [rows, keep_up], or None
    gate, gate_row, keep_gate,
    hidden, hidden_row,  # [rows, features]
    rows, features, depth,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    X_ACCESS: tl.constexpr, W_UP_ACCESS: tl.constexpr, W_GATE_ACCESS: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """hidden = dropout(act(x w_up^T + b_up)), or dropout(act(gate) * up); leading columns of up and gate are kept."""
    block_m, block_n = block_of(tl.program_id(0), rows, features, BLOCK_M, BLOCK_N)
    m0, f0 = block_m * BLOCK_M, block_n * BLOCK_N
    DTYPE: tl.constexpr = hidden.dtype.element_ty
    all_up, all_gate = pre_activations(
        x, x_row, x_col, w_up, w_up_row, w_up_col, w_gate, w_gate_row, w_gate_col, b_up, b_gate,
        m0, f0, rows, features, depth, DTYPE, BLOCK_M, BLOCK_N, BLOCK_K,
        X_ACCESS, W_UP_ACCESS, W_GATE_ACCESS, EVEN, WIDE, PRECISION, WARP_SPECIALIZE,
    )  # fmt: skip
    COLS: tl.constexpr = BLOCK_N // PARTS
    for part in tl.static_range(PARTS):
        col = f0 + part * COLS
        up_part, gate_part = part_of(all_up, part, PARTS), part_of(all_gate, part, PARTS)
        if up is not None:
            inside = within(m0, col, rows, keep_up, BLOCK_M, COLS)
            tl.store(tile_at(up, m0, col, up_row, 1, BLOCK_M, COLS, WIDE), up_part, mask=inside)
        if gate is not None:
            inside = within(m0, col, rows, keep_gate, BLOCK_M, COLS)
            tl.store(tile_at(gate, m0, col, gate_row, 1, BLOCK_M, COLS, WIDE), gate_part, mask=inside)
        made = value(gate_part.to(tl.float32), ACTIVATION)
        if w_gate is not None:
            made *= up_part.to(tl.float32)
        keep = kept_elements(seed, m0, col, row0, feature0, hidden_features, threshold, BLOCK_M, COLS)
        made = dropped(made, keep, scale_bits)
        inside = within(m0, col, rows, features, BLOCK_M, COLS)
        tl.store(tile_at(hidden, m0, col, hidden_row, 1, BLOCK_M, COLS, WIDE), made.to(DTYPE), mask=inside)


@triton.jit
def load_pre(
    pre, pre_row, bias, row, col, rows, features, WIDE_DTYPE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A pre-activation from memory; with a bias, what a GEMM left there, and rounded again once the bias is added."""
    inside = within(row, col, rows, features, ROWS, COLS)
    stored = tl.load(tile_at(pre, row, col, pre_row, 1, ROWS, COLS, WIDE), mask=inside, other=0.0)
    if bias is not None:
        stored = with_bias(stored.to(WIDE_DTYPE), bias, col, features, COLS).to(pre.dtype.element_ty)
    return stored.to(WIDE_DTYPE)


@triton.jit(do_not_specialize=CHUNK_ARGUMENTS)
def mlp_act_kernel(
    up, up_row,  # pre-activations [rows, features]; `up` may be `hidden` itself
    gate, gate_row,  # or None
    b_up, b_gate,  # what is still to be added to them, or None
    seed, row0, feature0, hidden_features, threshold, scale_bits,
    kept_up, kept_up_row, keep_up,  # residual [rows, keep_up] to be written, or None
    kept_gate, kept_gate_row, keep_gate,
    hidden, hidden_row,
    rows, features,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The elementwise half of forward, for dtypes whose GEMMs are the library's; fp64 in fp64."""
    block_m, block_n = block_of(tl.program_id(0), rows, features, BLOCK_M, BLOCK_N)
    row, col = block_m * BLOCK_M, block_n * BLOCK_N
    DTYPE: tl.constexpr = hidden.dtype.element_ty
    WIDE_DTYPE: tl.constexpr = tl.float64 if hidden.dtype.element_ty == tl.float64 else tl.float32
    made = load_pre(up, up_row, b_up, row, col, rows, features, WIDE_DTYPE, BLOCK_M, BLOCK_N, WIDE)
    if kept_up is not None:
        inside = within(row, col, rows, keep_up, BLOCK_M, BLOCK_N)
        at = tile_at(kept_up, row, col, kept_up_row, 1, BLOCK_M, BLOCK_N, WIDE)
        tl.store(at, made.to(DTYPE), mask=inside)
    if gate is not None:
        gates = load_pre(gate, gate_row, b_gate, row, col, rows, features, WIDE_DTYPE, BLOCK_M, BLOCK_N, WIDE)
        if kept_gate is not None:
            inside = within(row, col, rows, keep_gate, BLOCK_M, BLOCK_N)
            at = tile_at(kept_gate, row, col, kept_gate_row, 1, BLOCK_M, BLOCK_N, WIDE)
            tl.store(at, gates.to(DTYPE), mask=inside)
        made *= value(gates, ACTIVATION)
    else:
        made = value(made, ACTIVATION)
    keep = kept_elements(seed, row, col, row0, feature0, hidden_features, threshold, BLOCK_M, BLOCK_N)
    made = dropped(made, keep, scale_bits)
    inside = within(row, col, rows, features, BLOCK_M, BLOCK_N)
    tl.store(tile_at(hidden, row, col, hidden_row, 1, BLOCK_M, BLOCK_N, WIDE), made.to(DTYPE), mask=inside)
