"""Attention weights and the gradients of float masks: sums of tiles of scores over the dims that the result lacks.

A program owns a tile of the result and visits what is summed in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fused_remat.triton.attention_bwd import gradient_of_scores, load_rows, without_padding
from fused_remat.triton.attention_delta import exponential_sums
from fused_remat.triton.attention_tiles import (
    corrected,
    drop,
    is_large,
    kept,
    load_heads,
    load_row_numbers,
    number,
    probabilities,
    row_units,
    scores,
    visible_keys,
    visible_queries,
)


@triton.jit(do_not_specialize=["n"])
def attention_weights_kernel(q, k, attn_mask, key_mask, lse, weights, repeats, n, SPEC: tl.constexpr):
    """weights += factor times the dropped probabilities of the `repeats` heads that they are averaged over."""
    place = tl.program_id(0)
    tiles_k, tiles_q = tl.cdiv(n.length_k, SPEC.block_n), tl.cdiv(n.length_q, SPEC.block_m)
    j0 = place % tiles_k * SPEC.block_n
    place = place // tiles_k
    i0 = place % tiles_q * SPEC.block_m
    place = place // tiles_q
    owners = n.heads // repeats
    owner = place % owners
    batch = (place // owners).to(tl.int64)
    i = i0 + tl.arange(0, SPEC.block_m)
    j = j0 + tl.arange(0, SPEC.block_n)
    sums = tl.full([SPEC.block_m, SPEC.block_n], 0.0, SPEC.accumulate)
    first, tiles = visible_queries(j0, n, SPEC)
    seen = (i0 // SPEC.block_m >= first) & (i0 // SPEC.block_m < first + tiles)
    for step in tl.range(0, tl.where(seen, repeats, 0)):
        head = (owner + step).to(tl.int64)
        kv_head = head // n.group
        row_lse = load_row_numbers(lse, batch, head, i, n.length_q, float("-inf"))
        row, large = row_units(row_lse, SPEC), is_large(row_lse)
        total, _, _ = exponential_sums(
            q, k, None, attn_mask, key_mask, None, row, batch, head, i0, tl.max(large.to(tl.int32), 0), n, SPEC
        )
        correction = tl.where(large, tl.log(tl.where(total == 0.0, 1.0, total)), 0.0)
        q_tile = load_heads(q, batch, head, i0, n.length_q, SPEC.block_m, SPEC.width, SPEC.block_e, SPEC.even_q, SPEC)
        k_tile = load_heads(
            k, batch, kv_head, j0, n.length_k, SPEC.block_n, SPEC.width, SPEC.block_e, SPEC.even_k, SPEC
        )
        s = scores(q_tile, k_tile, i[:, None], j[None, :], batch, head, attn_mask, key_mask, n, SPEC)
        p = probabilities(s, corrected(row, correction, SPEC)[:, None], correction[:, None], SPEC)
        sums += drop(p, kept(i[:, None], j[None, :], batch, head, n, SPEC), SPEC)
    factor = number(n.factor, SPEC)
    if SPEC.dropout:
        factor = factor * number(n.keep_scale, SPEC)
    at = weights.ptr + batch * weights.batch + owner.to(tl.int64) * weights.head
    at += i[:, None].to(tl.int64) * weights.row + j[None, :].to(tl.int64) * weights.col
    inside = (i[:, None] < n.length_q) & (j[None, :] < n.length_k)
    tl.store(at, tl.load(at, mask=inside) + sums * factor, mask=inside)


@triton.jit(do_not_specialize=["n"])
def attention_dmask_kernel(
    q, k, v, attn_mask, key_mask, lse, correction, delta, dout, dweights, dmask, batches, heads, n, SPEC: tl.constexpr
):  # fmt: skip
    """dmask += the gradient of the masked scores, summed over `batches` and `heads` for each of its own, and over
    queries, over keys where it has one for all."""
    place = tl.program_id(0)
    tiles_k, tiles_q = tl.cdiv(n.masked_keys, SPEC.block_n), tl.cdiv(n.length_q, SPEC.block_m)
    own_k, own_q = 0, 0
    if not SPEC.sum_keys:
        own_k = place % tiles_k
        place = place // tiles_k
    if not SPEC.sum_queries:
        own_q = place % tiles_q
        place = place // tiles_q
    own_heads = n.heads // heads
    own_head = (place % own_heads).to(tl.int64)
    own_batch = (place // own_heads).to(tl.int64)
    first_k, count_k, first_q, count_q = visited_tiles(own_k, tiles_k, own_q, tiles_q, n, SPEC)
    sums = tl.full([SPEC.block_m, SPEC.block_n], 0.0, SPEC.accumulate)
    for step in tl.range(0, batches * heads * count_q * count_k):
        j0 = (first_k + step % count_k) * SPEC.block_n
        i0 = (first_q + step // count_k % count_q) * SPEC.block_m
        pair = step // (count_k * count_q)
        head = own_head + pair % heads
        batch = own_batch + pair // heads
        sums += tile_gradient(
            q, k, v, attn_mask, key_mask, lse, correction, delta, dout, dweights, batch, head, i0, j0, n, SPEC
        )
    add_to_mask(dmask, sums, own_batch, own_head, own_q * SPEC.block_m, own_k * SPEC.block_n, n, SPEC)


@triton.jit
def visited_tiles(own_k, tiles_k, own_q, tiles_q, n, SPEC: tl.constexpr):
    """(first, count) of the key tiles and of the query tiles that go into a tile of a mask's gradient."""
    first_k, count_k, first_q, count_q = 0, tiles_k, 0, tiles_q
    if not SPEC.sum_keys:
        first_k, count_k = own_k, 1
        first_q, count_q = visible_queries(own_k * SPEC.block_n, n, SPEC)
        if not SPEC.sum_queries:
            seen = (own_q >= first_q) & (own_q < first_q + count_q)
            first_q, count_q = own_q, tl.where(seen, 1, 0)
    elif not SPEC.sum_queries:
        first_q, count_q = own_q, 1
        first_k, count_k, _, _ = visible_keys(own_q * SPEC.block_m, n, SPEC)
    return first_k, count_k, first_q, count_q


@triton.jit
def tile_gradient(
    q, k, v, attn_mask, key_mask, lse, correction, delta, dout, dweights, batch, head, i0, j0, n, SPEC: tl.constexpr
):  # fmt: skip
    """The gradient of the masked scores of the queries from i0 and the keys from j0; 0 for extra keys."""
    kv_head = head // n.group
    i = i0 + tl.arange(0, SPEC.block_m)
    j = j0 + tl.arange(0, SPEC.block_n)
    q_tile = load_heads(q, batch, head, i0, n.length_q, SPEC.block_m, SPEC.width, SPEC.block_e, SPEC.even_q, SPEC)
    k_tile = load_heads(k, batch, kv_head, j0, n.length_k, SPEC.block_n, SPEC.width, SPEC.block_e, SPEC.even_k, SPEC)
    s = scores(q_tile, k_tile, i[:, None], j[None, :], batch, head, attn_mask, key_mask, n, SPEC)
    s = without_padding(s, i[:, None], n, SPEC)
    row, row_correction, row_delta = load_rows(lse, correction, delta, batch, head, i, n, SPEC)
    p = probabilities(s, row[:, None], row_correction[:, None], SPEC)
    dout_tile = load_heads(
        dout, batch, head, i0, n.length_q, SPEC.block_m, SPEC.value_width, SPEC.block_v, SPEC.even_q, SPEC
    )
    v_tile = load_heads(
        v, batch, kv_head, j0, n.length_k, SPEC.block_n, SPEC.value_width, SPEC.block_v, SPEC.even_k, SPEC
    )
    dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision=SPEC.precision, out_dtype=SPEC.accumulate)
    keep = kept(i[:, None], j[None, :], batch, head, n, SPEC)
    ds = gradient_of_scores(p, dp, keep, row_delta[:, None], i[:, None], j[None, :], batch, head, dweights, n, SPEC)
    if SPEC.extra_keys:
        ds = tl.where(j[None, :] < n.masked_keys, ds, 0.0)
    return ds


@triton.jit
def add_to_mask(dmask, sums, batch, head, i0, j0, n, SPEC: tl.constexpr):
    at = dmask.ptr + batch * dmask.batch + head * dmask.head
    i = i0 + tl.arange(0, SPEC.block_m)
    j = j0 + tl.arange(0, SPEC.block_n)
    if SPEC.sum_queries and SPEC.sum_keys:
        total = tl.sum(tl.sum(sums, 1), 0)
        tl.store(at, tl.load(at) + total)
    elif SPEC.sum_queries:
        at += j.to(tl.int64) * dmask.col
        inside = j < n.masked_keys
        tl.store(at, tl.load(at, mask=inside) + tl.sum(sums, 0), mask=inside)
    elif SPEC.sum_keys:
        at += i.to(tl.int64) * dmask.row
        inside = i < n.length_q
        tl.store(at, tl.load(at, mask=inside) + tl.sum(sums, 1), mask=inside)
    else:
        at += i[:, None].to(tl.int64) * dmask.row + j[None, :].to(tl.int64) * dmask.col
        inside = (i[:, None] < n.length_q) & (j[None, :] < n.masked_keys)
        tl.store(at, tl.load(at, mask=inside) + sums, mask=inside)
