"""Backward: dk and dv by tiles of keys, dq by tiles of queries. Probabilities come again from the known lse.

With p the probabilities and M the dropout factors: dv = (M p)^T dout; ds = p (M dp - delta), where dp = dout v^T plus
what comes in for the weights; dk = scale ds^T q; dq = scale ds k, where a cap's slope multiplies ds first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fused_remat.triton.attention_delta import load_weights
from fused_remat.triton.attention_tiles import (
    corrected,
    drop,
    gradient_of_products,
    kept,
    key_at,
    load_heads,
    load_row_numbers,
    number,
    probabilities,
    query_tile,
    row_units,
    scores_and_slopes,
    store_heads,
    visible_keys,
    visible_queries,
)


@triton.jit
def load_rows(lse, correction, delta, batch, head, i, n, SPEC: tl.constexpr):
    """(row, correction, delta) of the queries `i`; beyond the last, those of a row with nothing to attend to."""
    row = row_units(load_row_numbers(lse, batch, head, i, n.length_q, float("-inf")), SPEC)
    row_correction = load_row_numbers(correction, batch, head, i, n.length_q, 0.0)
    row_delta = load_row_numbers(delta, batch, head, i, n.length_q, 0.0)
    return corrected(row, row_correction, SPEC), row_correction, row_delta


@triton.jit
def without_padding(s, i, n, SPEC: tl.constexpr):
    """Queries beyond the last see nothing: sums over queries must not meet the NaN of a key that none sees."""
    if not SPEC.even_q:
        s = tl.where(i < n.length_q, s, float("-inf"))
    return s


@triton.jit
def gradient_of_scores(p, dp, keep, delta, i, j, batch, head, dweights, n, SPEC: tl.constexpr):
    """The gradient of the masked scores, from p before dropout and dp = dout v^T."""
    if SPEC.dweights:
        dp += load_weights(dweights, batch, head, i, j, n) * number(n.factor, SPEC)
    if SPEC.dropout:
        dp = drop(dp * number(n.keep_scale, SPEC), keep, SPEC)
    return p * (dp - delta)


@triton.jit(do_not_specialize=["n"])
def attention_dkdv_kernel(
    q, k, v, attn_mask, key_mask, lse, correction, delta, dout, dweights, dk, dv, n, SPEC: tl.constexpr
):  # fmt: skip
    """A program owns a tile of keys of one key-value head, and visits the query heads that share it in turn."""
    place = tl.program_id(0)
    key_tiles = tl.cdiv(n.length_k, SPEC.block_n)
    j0 = place % key_tiles * SPEC.block_n
    place = place // key_tiles
    kv_heads = n.heads // n.group
    kv_head = (place % kv_heads).to(tl.int64)
    batch = (place // kv_heads).to(tl.int64)
    j = j0 + tl.arange(0, SPEC.block_n)
    k_tile = load_heads(k, batch, kv_head, j0, n.length_k, SPEC.block_n, SPEC.width, SPEC.block_e, SPEC.even_k, SPEC)
    if SPEC.dk:
        v_tile = load_heads(
            v, batch, kv_head, j0, n.length_k, SPEC.block_n, SPEC.value_width, SPEC.block_v, SPEC.even_k, SPEC
        )
        dk_sums = tl.full([SPEC.block_n, SPEC.block_e], 0.0, SPEC.accumulate)
    dv_sums = tl.full([SPEC.block_n, SPEC.block_v], 0.0, SPEC.accumulate)
    first, tiles = visible_queries(j0, n, SPEC)
    # One flat loop over heads and tiles: nested ones cost registers.
    for step in tl.range(0, n.group * tiles, warp_specialize=SPEC.warp_specialize):
        head = kv_head * n.group + step // tiles
        i0 = (first + step % tiles) * SPEC.block_m
        i = i0 + tl.arange(0, SPEC.block_m)
        q_tile = load_heads(q, batch, head, i0, n.length_q, SPEC.block_m, SPEC.width, SPEC.block_e, SPEC.even_q, SPEC)
        row, row_correction, row_delta = load_rows(lse, correction, delta, batch, head, i, n, SPEC)
        s, slopes = scores_and_slopes(k_tile, q_tile, i[None, :], j[:, None], batch, head, attn_mask, key_mask, n, SPEC)
        s = without_padding(s, i[None, :], n, SPEC)
        p = probabilities(s, row[None, :], row_correction[None, :], SPEC)
        dout_tile = load_heads(
            dout, batch, head, i0, n.length_q, SPEC.block_m, SPEC.value_width, SPEC.block_v, SPEC.even_q, SPEC
        )
        keep = kept(i[None, :], j[:, None], batch, head, n, SPEC)
        if SPEC.dv:  # before dp is made: fewer tiles at a time want registers
            dropped = drop(p, keep, SPEC).to(dout_tile.dtype)
            dv_sums = tl.dot(dropped, dout_tile, dv_sums, input_precision=SPEC.precision, out_dtype=SPEC.accumulate)
        if SPEC.dk:
            dp = tl.dot(v_tile, tl.trans(dout_tile), input_precision=SPEC.precision, out_dtype=SPEC.accumulate)
            ds = gradient_of_scores(
                p, dp, keep, row_delta[None, :], i[None, :], j[:, None], batch, head, dweights, n, SPEC
            )
            ds = gradient_of_products(ds, slopes, n, SPEC).to(q_tile.dtype)
            dk_sums = tl.dot(ds, q_tile, dk_sums, input_precision=SPEC.precision, out_dtype=SPEC.accumulate)
    if SPEC.dv:
        if SPEC.dropout:
            dv_sums = dv_sums * number(n.keep_scale, SPEC)
        store_heads(dv, dv_sums, batch, kv_head, j0, n.length_k, SPEC.block_n, SPEC.value_width, SPEC.block_v, SPEC)
    if SPEC.dk:
        store_heads(dk, dk_sums, batch, kv_head, j0, n.length_k, SPEC.block_n, SPEC.width, SPEC.block_e, SPEC)


@triton.jit(do_not_specialize=["n"])
def attention_dq_kernel(
    q, k, v, attn_mask, key_mask, lse, correction, delta, dout, dweights, dq, n, SPEC: tl.constexpr
):  # fmt: skip
    batch, head, i0 = query_tile(n, SPEC)
    kv_head = head // n.group
    i = i0 + tl.arange(0, SPEC.block_m)
    q_tile = load_heads(q, batch, head, i0, n.length_q, SPEC.block_m, SPEC.width, SPEC.block_e, SPEC.even_q, SPEC)
    dout_tile = load_heads(
        dout, batch, head, i0, n.length_q, SPEC.block_m, SPEC.value_width, SPEC.block_v, SPEC.even_q, SPEC
    )
    row, row_correction, row_delta = load_rows(lse, correction, delta, batch, head, i, n, SPEC)
    sums = tl.full([SPEC.block_m, SPEC.block_e], 0.0, SPEC.accumulate)
    first, in_band, resume, steps = visible_keys(i0, n, SPEC)
    for step in tl.range(0, steps, warp_specialize=SPEC.warp_specialize):
        j0 = key_at(step, first, in_band, resume, SPEC)
        j = j0 + tl.arange(0, SPEC.block_n)
        k_tile = load_heads(
            k, batch, kv_head, j0, n.length_k, SPEC.block_n, SPEC.width, SPEC.block_e, SPEC.even_k, SPEC
        )
        v_tile = load_heads(
            v, batch, kv_head, j0, n.length_k, SPEC.block_n, SPEC.value_width, SPEC.block_v, SPEC.even_k, SPEC
        )
        s, slopes = scores_and_slopes(q_tile, k_tile, i[:, None], j[None, :], batch, head, attn_mask, key_mask, n, SPEC)
        p = probabilities(s, row[:, None], row_correction[:, None], SPEC)
        dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision=SPEC.precision, out_dtype=SPEC.accumulate)
        keep = kept(i[:, None], j[None, :], batch, head, n, SPEC)
        ds = gradient_of_scores(p, dp, keep, row_delta[:, None], i[:, None], j[None, :], batch, head, dweights, n, SPEC)
        ds = gradient_of_products(ds, slopes, n, SPEC).to(k_tile.dtype)
        sums = tl.dot(ds, k_tile, sums, input_precision=SPEC.precision, out_dtype=SPEC.accumulate)
    store_heads(dq, sums, batch, head, i0, n.length_q, SPEC.block_m, SPEC.width, SPEC.block_e, SPEC)
