"""What the attention kernels share: how they are told what to do, which tiles they visit, and the scores of a tile.

Every kernel makes its scores with `scores`, so that backward sees what forward saw. A new kind of mask goes there, with
its flag in `Spec`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import triton
import triton.language as tl

from fused_remat.triton import activations, dropout

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LARGE_LSE = tl.constexpr(64.0)  # kLargeLse of csrc/attention.h


class Heads(NamedTuple):
    """A [B, heads, L, width] operand with dense rows: where it starts and its strides in elements."""

    ptr: Any
    batch: int
    head: int
    row: int


class Grid(NamedTuple):
    """What has a number per (batch, head, query, key), or is broadcast to it: strides of 0 where it does not vary."""

    ptr: Any
    batch: int
    head: int
    row: int
    col: int


class Rows(NamedTuple):
    """[B, H, Lq] numbers with dense rows: lse, delta, correction."""

    ptr: Any
    batch: int
    head: int


class Numbers(NamedTuple):
    """What one call may change without another kernel. Of float64 calls, fractions are passed as their 64 bits."""

    length_q: int
    length_k: int
    masked_keys: int  # the first ones, which masks and band concern
    heads: int
    group: int  # query heads that share a key-value head
    low: int  # query i may see key j iff low <= j - i <= high
    high: int
    scale: Any  # of the scores' unit, see `Spec.natural`
    unit: Any  # the scale of the scores in natural units
    softcap: Any  # in the scores' unit; `scale` makes what `tanh` takes then. None without one
    seed: Any  # pointer, or None without dropout
    threshold: int
    keep_scale: Any  # 1 / (1 - dropout_p)
    head0: int
    num_heads: int
    factor: Any  # of a probability in a weight


@dataclass(frozen=True)
class Spec:
    """What a kernel is compiled for."""

    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    width: int
    value_width: int
    double: bool = False
    precision: str = "ieee"  # of float32 products
    attn_mask: str = ""  # "", "bool" or "float"
    mask_rows: bool = False  # attn_mask differs from query to query
    key_mask: str = ""
    low: bool = False  # the band has a lower, an upper limit
    high: bool = False
    extra_keys: bool = False
    dropout: bool = False
    cap: str = ""  # how the tanh of capped scores is made: "quick" or "exact"
    even_q: bool = False  # queries, keys fill their tiles
    even_k: bool = False
    wide: bool = False  # a tile may span 2^31 elements
    tma: bool = False
    warp_specialize: bool = False
    dweights: bool = False  # the weights have a gradient
    rebuild: bool = False  # out was not kept
    dk: bool = False  # wanted
    dv: bool = False
    sum_queries: bool = False  # a mask's gradient has one row, one column for all
    sum_keys: bool = False
    # What follows from the others is a field too: Triton's cache on disk knows a compiled kernel by this object's text.
    block_e: int = field(init=False)
    block_v: int = field(init=False)
    # Scores are in natural units: a float mask times log2(e) could overflow. Otherwise they are in log2 units.
    natural: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_e", _block(self.width))
        object.__setattr__(self, "block_v", _block(self.value_width))
        object.__setattr__(self, "natural", "float" in (self.attn_mask, self.key_mask))

    @property
    def accumulate(self) -> tl.dtype:
        return tl.float64 if self.double else tl.float32


def _block(width: int) -> int:
    """The power of two, at least 16, whose tiles hold rows of that width."""
    return max(16, 1 << max(width - 1, 0).bit_length())


@triton.jit
def number(x, SPEC: tl.constexpr):
    """A fraction of `Numbers`."""
    if SPEC.double:
        x = x.to(tl.int64).to(tl.float64, bitcast=True)
    return x


# Which program does what ----------------------------------------------------------------------------------------------


@triton.jit
def query_tile(n, SPEC: tl.constexpr):
    """(batch, head, first query) of a program. Query heads that share keys are neighbours, then come the tiles of a
    head, those with the most keys first."""
    place = tl.program_id(0)
    tiles = tl.cdiv(n.length_q, SPEC.block_m)
    member = place % n.group
    place = place // n.group
    tile = place % tiles
    place = place // tiles
    kv_heads = n.heads // n.group
    if SPEC.high:
        tile = tiles - 1 - tile
    head = place % kv_heads * n.group + member
    return (place // kv_heads).to(tl.int64), head.to(tl.int64), tile * SPEC.block_m


@triton.jit
def visible_keys(i0, n, SPEC: tl.constexpr):
    """(first, in_band, resume, steps): the key tiles that the queries from i0 visit are `in_band` ones from `first`,
    then those from `resume` that hold extra keys."""
    first = 0
    last = tl.cdiv(n.masked_keys, SPEC.block_n)
    if SPEC.low:
        first = tl.maximum(i0 + n.low, 0) // SPEC.block_n
    if SPEC.high:
        end = tl.minimum(i0 + SPEC.block_m + n.high, n.masked_keys)
        last = tl.cdiv(tl.maximum(end, 0), SPEC.block_n)
    in_band = tl.maximum(last - first, 0)
    resume = last
    steps = in_band
    if SPEC.extra_keys:
        mixed = n.masked_keys // SPEC.block_n  # the first tile with extra keys, which the band may reach too
        resume = tl.where(in_band > 0, tl.maximum(last, mixed), mixed)
        steps = in_band + tl.cdiv(n.length_k, SPEC.block_n) - resume
    return first, in_band, resume, steps


@triton.jit
def key_at(step, first, in_band, resume, SPEC: tl.constexpr):
    """The first key of the tile of that step."""
    tile = first + step
    if SPEC.extra_keys:
        tile = tl.where(step < in_band, tile, resume + step - in_band)
    return tile * SPEC.block_n


@triton.jit
def visible_queries(j0, n, SPEC: tl.constexpr):
    """(first, tiles): the query tiles that see any key of the tile from j0."""
    first = 0
    end = n.length_q
    if SPEC.high:
        first = tl.maximum(j0 - n.high, 0)
    if SPEC.low:
        end = tl.minimum(end, tl.maximum(tl.minimum(j0 + SPEC.block_n, n.masked_keys) - n.low, 0))
    if SPEC.extra_keys:
        has_extra = j0 + SPEC.block_n > n.masked_keys
        first = tl.where(has_extra, 0, first)
        end = tl.where(has_extra, n.length_q, end)
    first = first // SPEC.block_m
    return first, tl.maximum(tl.cdiv(end, SPEC.block_m) - first, 0)


# Loads and stores -----------------------------------------------------------------------------------------------------


@triton.jit
def offsets(SIZE: tl.constexpr, SPEC: tl.constexpr):
    """0, 1, ... SIZE - 1, for addresses within a tile."""
    at = tl.arange(0, SIZE)
    if SPEC.wide:
        at = at.to(tl.int64)
    return at


@triton.jit
def load_heads(x, batch, head, row0, length, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
               EVEN: tl.constexpr, SPEC: tl.constexpr):  # fmt: skip
    """[ROWS, BLOCK] of `x`: rows from row0; zeros beyond its length and its width."""
    if SPEC.tma:
        tile = x.load([batch.to(tl.int32), head.to(tl.int32), row0, 0]).reshape(ROWS, BLOCK)
    else:
        base = x.ptr + batch * x.batch + head * x.head + row0.to(tl.int64) * x.row
        row, col = offsets(ROWS, SPEC)[:, None], tl.arange(0, BLOCK)[None, :]
        at = base + row * x.row + col
        if EVEN and WIDTH == BLOCK:
            tile = tl.load(at)
        elif EVEN:
            tile = tl.load(at, mask=col < WIDTH, other=0.0)
        elif WIDTH == BLOCK:
            tile = tl.load(at, mask=row0 + row < length, other=0.0)
        else:
            tile = tl.load(at, mask=(row0 + row < length) & (col < WIDTH), other=0.0)
    return tile


@triton.jit
def store_heads(x, tile, batch, head, row0, length, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                SPEC: tl.constexpr):  # fmt: skip
    """`tile` [ROWS, BLOCK] to `x`."""
    base = x.ptr + batch * x.batch + head * x.head + row0.to(tl.int64) * x.row
    row, col = offsets(ROWS, SPEC)[:, None], tl.arange(0, BLOCK)[None, :]
    seen = (row0 + row < length) & (col < WIDTH)
    tl.store(base + row * x.row + col, tile.to(x.ptr.dtype.element_ty), mask=seen)


@triton.jit
def load_row_numbers(x, batch, head, i, length, OTHER: tl.constexpr):
    """`x` at the queries `i`; OTHER beyond the last."""
    return tl.load(x.ptr + batch * x.batch + head * x.head + i, mask=i < length, other=OTHER)


@triton.jit
def load_grid(x, batch, head, i, j, n, BY_ROW: tl.constexpr, IN_BOUNDS: tl.constexpr, OTHER: tl.constexpr):
    """`x` at the queries `i` and keys `j`, which broadcast; OTHER beyond the masked keys."""
    at = x.ptr + batch * x.batch + head * x.head + j.to(tl.int64) * x.col
    if BY_ROW:
        at += i.to(tl.int64) * x.row
    # Comparing keys costs loads of several numbers at once.
    if BY_ROW and IN_BOUNDS:
        numbers = tl.load(at, mask=i < n.length_q, other=OTHER)
    elif BY_ROW:
        numbers = tl.load(at, mask=(i < n.length_q) & (j < n.masked_keys), other=OTHER)
    elif IN_BOUNDS:
        numbers = tl.load(at)
    else:
        numbers = tl.load(at, mask=j < n.masked_keys, other=OTHER)
    return numbers


# Scores and probabilities ---------------------------------------------------------------------------------------------


@triton.jit
def scores(a, b, i, j, batch, head, attn_mask, key_mask, n, SPEC: tl.constexpr):
    """The masked scores a b^T: of q and k with i [M, 1] and j [1, N], or of k and q with i [1, M] and j [N, 1]."""
    s, _ = scores_and_slopes(a, b, i, j, batch, head, attn_mask, key_mask, n, SPEC)
    return s


@triton.jit
def scores_and_slopes(a, b, i, j, batch, head, attn_mask, key_mask, n, SPEC: tl.constexpr):
    """`scores`, and their derivative by the scaled products: that of the cap, 1 without one."""
    nothing: tl.constexpr = float("-inf")
    inside: tl.constexpr = SPEC.even_k and not SPEC.extra_keys
    s = tl.dot(a, tl.trans(b), input_precision=SPEC.precision, out_dtype=SPEC.accumulate) * number(n.scale, SPEC)
    slopes = 1.0
    if SPEC.cap != "":
        s, slopes = tanh(s, SPEC)
        s = s * number(n.softcap, SPEC)
    if SPEC.attn_mask == "float":
        s += load_grid(attn_mask, batch, head, i, j, n, SPEC.mask_rows, inside, 0.0).to(SPEC.accumulate)
    if SPEC.key_mask == "float":
        s += load_grid(key_mask, batch, head, i, j, n, False, inside, 0.0).to(SPEC.accumulate)
    if SPEC.attn_mask == "bool":
        s = tl.where(load_grid(attn_mask, batch, head, i, j, n, SPEC.mask_rows, inside, True), s, nothing)
    if SPEC.key_mask == "bool":
        s = tl.where(load_grid(key_mask, batch, head, i, j, n, False, inside, True), s, nothing)
    if SPEC.low or SPEC.high:
        s = tl.where(in_band(i, j, n, SPEC), s, nothing)
    if not SPEC.even_k:
        s = tl.where(j < n.length_k, s, nothing)
    return s, slopes


@triton.jit
def tanh(x, SPEC: tl.constexpr):
    """tanh(x) and its slope; the quick one is given 2 log2(e) x."""
    if SPEC.cap == "quick":
        # Exact to an absolute 1e-7 and not to the digits of a small x.
        t = 1.0 - 2.0 / (1.0 + tl.exp2(x))
        result = t, 1.0 - t * t
    else:
        result = activations.value_and_slope(x, "tanh")
    return result


@triton.jit
def gradient_of_products(ds, slopes, n, SPEC: tl.constexpr):
    """The gradient of q k^T from that of the scores."""
    if SPEC.cap != "":
        ds = ds * slopes
    return ds * number(n.unit, SPEC)


@triton.jit
def in_band(i, j, n, SPEC: tl.constexpr):
    """Whether the band lets the queries `i` see the keys `j`."""
    distance = j - i
    if SPEC.low and SPEC.high:
        seen = (distance >= n.low) & (distance <= n.high)
    elif SPEC.low:
        seen = distance >= n.low
    else:
        seen = distance <= n.high
    if SPEC.extra_keys:
        seen = seen | (j >= n.masked_keys)
    return seen


@triton.jit
def exponentials(s, row, SPEC: tl.constexpr):
    """exp(s - row), both in the unit of the scores."""
    exponents = s - row
    if SPEC.natural:
        exponents = exponents * LOG2E
    return tl.exp2(exponents)


@triton.jit
def row_units(lse, SPEC: tl.constexpr):
    """A known lse in the unit of the scores. Where there is nothing to attend to, +inf: the probabilities are 0."""
    row = tl.where(lse == float("-inf"), float("inf"), lse)
    if not SPEC.natural:
        row = row * LOG2E
    return row


@triton.jit
def corrected(row, correction, SPEC: tl.constexpr):
    """`row` with the correction in it; in natural units, beside a mask of -3e38, it would vanish there."""
    if not SPEC.natural:
        row = row + correction * LOG2E
    return row


@triton.jit
def probabilities(s, row, correction, SPEC: tl.constexpr):
    """exp(s - lse - correction) before dropout, from a `corrected` row."""
    exponents = s - row
    if SPEC.natural:
        exponents = (exponents - correction) * LOG2E
    return tl.exp2(exponents)


@triton.jit
def is_large(lse):
    """Whether the log of a sum keeps too few digits beside scores of this size."""
    return (tl.abs(lse) > LARGE_LSE) & (tl.abs(lse) < float("inf"))


@triton.jit
def kept(i, j, batch, head, n, SPEC: tl.constexpr):
    """Which probabilities dropout keeps; None without dropout."""
    keep = None
    if SPEC.dropout:
        first = (batch * n.num_heads + n.head0 + head) * n.length_q
        keep = dropout.kept(tl.load(n.seed), (first + i) * n.length_k + j, n.threshold)
    return keep


@triton.jit
def drop(values, keep, SPEC: tl.constexpr):
    """`values` where `kept`; not scaled."""
    if SPEC.dropout:
        values = tl.where(keep, values, 0.0)
    return values
