"""What backward needs of every row: delta, the correction of a large lse, and `out` where it was not kept."""

from __future__ import annotations

import triton
import triton.language as tl

from fused_remat.triton.attention_tiles import (
    drop,
    exponentials,
    is_large,
    kept,
    key_at,
    load_heads,
    load_row_numbers,
    number,
    query_tile,
    row_units,
    scores,
    store_heads,
    visible_keys,
)


@triton.jit
def exponential_sums(
    q, k, v, attn_mask, key_mask, dweights, row, batch, head, i0, passes, n, SPEC: tl.constexpr
):  # fmt: skip
    """Over the keys of the rows from i0, with p = exp(s - lse): sums of p, of dropped p times dweights, and of dropped
    p times v. `passes` is 0 where no row needs them."""
    kv_head = head // n.group
    i = i0 + tl.arange(0, SPEC.block_m)
    q_tile = load_heads(q, batch, head, i0, n.length_q, SPEC.block_m, SPEC.width, SPEC.block_e, SPEC.even_q, SPEC)
    total = tl.full([SPEC.block_m], 0.0, SPEC.accumulate)
    weighed = tl.full([SPEC.block_m], 0.0, SPEC.accumulate)
    sums = tl.full([SPEC.block_m, SPEC.block_v], 0.0, SPEC.accumulate)
    first, in_band, resume, steps = visible_keys(i0, n, SPEC)
    for step in tl.range(0, steps * passes, warp_specialize=SPEC.warp_specialize):
        j0 = key_at(step, first, in_band, resume, SPEC)
        j = j0 + tl.arange(0, SPEC.block_n)
        k_tile = load_heads(
            k, batch, kv_head, j0, n.length_k, SPEC.block_n, SPEC.width, SPEC.block_e, SPEC.even_k, SPEC
        )
        s = scores(q_tile, k_tile, i[:, None], j[None, :], batch, head, attn_mask, key_mask, n, SPEC)
        p = exponentials(s, row[:, None], SPEC)
        total += tl.sum(p, 1)
        if SPEC.rebuild or SPEC.dweights:
            p = drop(p, kept(i[:, None], j[None, :], batch, head, n, SPEC), SPEC)
        if SPEC.dweights:
            weighed += tl.sum(p * load_weights(dweights, batch, head, i[:, None], j[None, :], n), 1)
        if SPEC.rebuild:
            v_tile = load_heads(
                v, batch, kv_head, j0, n.length_k, SPEC.block_n, SPEC.value_width, SPEC.block_v, SPEC.even_k, SPEC
            )
            sums = tl.dot(p.to(v_tile.dtype), v_tile, sums, input_precision=SPEC.precision, out_dtype=SPEC.accumulate)
    return total, weighed, sums


@triton.jit
def load_weights(x, batch, head, i, j, n):
    """Of weights or their gradient, which have extra keys too."""
    at = x.ptr + batch * x.batch + head * x.head + i.to(tl.int64) * x.row + j.to(tl.int64) * x.col
    return tl.load(at, mask=(i < n.length_q) & (j < n.length_k), other=0.0)


@triton.jit(do_not_specialize=["n"])
def attention_delta_kernel(
    q, k, v, attn_mask, key_mask, lse, dout, dweights, out, delta, correction, n, SPEC: tl.constexpr
):  # fmt: skip
    batch, head, i0 = query_tile(n, SPEC)
    i = i0 + tl.arange(0, SPEC.block_m)
    row_lse = load_row_numbers(lse, batch, head, i, n.length_q, float("-inf"))
    large = is_large(row_lse)
    passes = 1 if SPEC.rebuild or SPEC.dweights else tl.max(large.to(tl.int32), 0)
    total, weighed, sums = exponential_sums(
        q, k, v, attn_mask, key_mask, dweights, row_units(row_lse, SPEC), batch, head, i0, passes, n, SPEC
    )
    # The known lse is rounded and probabilities sum to 1 only nearly: out and delta are those of normalised ones, or
    # the gradient of the scores would not sum to 0.
    divisor = tl.where(total == 0.0, 1.0, total)
    factor = 1.0 / divisor
    if SPEC.dropout:
        factor = factor * number(n.keep_scale, SPEC)
    if SPEC.rebuild:
        out_tile = sums * factor[:, None]
        store_heads(out, out_tile, batch, head, i0, n.length_q, SPEC.block_m, SPEC.value_width, SPEC.block_v, SPEC)
    else:
        out_tile = load_out(out, batch, head, i0, n, SPEC)
    row_delta = tl.sum(out_tile * load_out(dout, batch, head, i0, n, SPEC), 1)
    if SPEC.dweights:
        row_delta += weighed * factor * number(n.factor, SPEC)
    at = batch * delta.batch + head * delta.head + i
    tl.store(delta.ptr + at, row_delta, mask=i < n.length_q)
    at = batch * correction.batch + head * correction.head + i
    tl.store(correction.ptr + at, tl.where(large, tl.log(divisor), 0.0), mask=i < n.length_q)


@triton.jit
def load_out(x, batch, head, i0, n, SPEC: tl.constexpr):
    """A tile of out or of its gradient, in the accumulation dtype."""
    base = x.ptr + batch * x.batch + head * x.head + i0.to(tl.int64) * x.row
    row = tl.arange(0, SPEC.block_m)[:, None].to(tl.int64)
    col = tl.arange(0, SPEC.block_v)[None, :]
    seen = (i0 + row < n.length_q) & (col < SPEC.value_width)
    return tl.load(base + row * x.row + col, mask=seen, other=0.0).to(SPEC.accumulate)
