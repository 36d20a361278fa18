"""Forward: out and lse of a tile of queries, by the online softmax (Milakov and Gimelshein 2018) over tiles of keys."""

from __future__ import annotations

import triton
import triton.language as tl

from fused_remat.triton.attention_tiles import (
    LN2,
    drop,
    exponentials,
    kept,
    key_at,
    load_heads,
    number,
    query_tile,
    scores,
    store_heads,
    visible_keys,
)


@triton.jit(do_not_specialize=["n"])
def attention_fwd_kernel(q, k, v, attn_mask, key_mask, out, lse, n, SPEC: tl.constexpr):
    batch, head, i0 = query_tile(n, SPEC)
    kv_head = head // n.group
    i = i0 + tl.arange(0, SPEC.block_m)
    q_tile = load_heads(q, batch, head, i0, n.length_q, SPEC.block_m, SPEC.width, SPEC.block_e, SPEC.even_q, SPEC)
    highest = tl.full([SPEC.block_m], float("-inf"), SPEC.accumulate)
    total = tl.full([SPEC.block_m], 0.0, SPEC.accumulate)
    sums = tl.full([SPEC.block_m, SPEC.block_v], 0.0, SPEC.accumulate)
    first, in_band, resume, steps = visible_keys(i0, n, SPEC)
    for step in tl.range(0, steps, warp_specialize=SPEC.warp_specialize):
        j0 = key_at(step, first, in_band, resume, SPEC)
        j = j0 + tl.arange(0, SPEC.block_n)
        k_tile = load_heads(
            k, batch, kv_head, j0, n.length_k, SPEC.block_n, SPEC.width, SPEC.block_e, SPEC.even_k, SPEC
        )
        s = scores(q_tile, k_tile, i[:, None], j[None, :], batch, head, attn_mask, key_mask, n, SPEC)
        above = tl.maximum(highest, tl.max(s, 1))
        # No key so far: -inf minus -inf would be NaN.
        shift = tl.where(above == float("-inf"), 0.0, above)
        p = exponentials(s, shift[:, None], SPEC)
        shrink = exponentials(highest, shift, SPEC)
        total = total * shrink + tl.sum(p, 1)
        highest = above
        p = drop(p, kept(i[:, None], j[None, :], batch, head, n, SPEC), SPEC)
        v_tile = load_heads(
            v, batch, kv_head, j0, n.length_k, SPEC.block_n, SPEC.value_width, SPEC.block_v, SPEC.even_k, SPEC
        )
        sums = sums * shrink[:, None]
        sums = tl.dot(p.to(v_tile.dtype), v_tile, sums, input_precision=SPEC.precision, out_dtype=SPEC.accumulate)
    # By the sum and not by the maximum: a row of NaN has no maximum, but it is not empty.
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    factor = 1.0 / divisor
    if SPEC.dropout:
        factor = factor * number(n.keep_scale, SPEC)
    sums = sums * factor[:, None]
    store_heads(out, sums, batch, head, i0, n.length_q, SPEC.block_m, SPEC.value_width, SPEC.block_v, SPEC)
    unit: tl.constexpr = 1.0 if SPEC.natural else LN2
    row_lse = tl.where(empty, float("-inf"), highest * unit + tl.log(divisor))
    tl.store(lse.ptr + batch * lse.batch + head * lse.head + i, row_lse, mask=i < n.length_q)
