"""What happens to q and k between projection and scores: an RMSNorm of each head, then a rotation of some features.

A rotation turns pairs (a, b): a program holds the two members of its pairs in two tiles and the features that are not
rotated in a third, so that what it overwrites nobody else needs. csrc/aten/head_transform.cpp says what is computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_remat.triton import launch
from fused_remat.triton.norm import TRITON_DTYPES, dense
from fused_remat.triton.sums import column_sums

# Elements of a program's block of rows, and its most rows.
TILE, MAX_ROWS = 2048, 32
# Rows whose gradients of the norm's weight go to one partial sum.
SUM_ROWS = 128


@triton.jit
def features(FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """Feature indices FIRST, FIRST + STEP, ..., and which of them count."""
    i = tl.arange(0, PADDED)
    return FIRST + i * STEP, i < COUNT


@triton.jit
def load_features(a, row, row_inside, feature, feature_inside, stride, DTYPE: tl.constexpr):
    """[rows, features]; `row` are the rows' first elements."""
    inside = row_inside[:, None] & feature_inside[None, :]
    return tl.load(a + row[:, None] + feature[None, :] * stride, mask=inside, other=0.0).to(DTYPE)


@triton.jit
def store_features(a, row, row_inside, feature, feature_inside, values):
    inside = row_inside[:, None] & feature_inside[None, :]
    tl.store(a + row[:, None] + feature[None, :], values.to(a.dtype.element_ty), mask=inside)


@triton.jit
def weighted(values, by, weight, feature, feature_inside):
    """The normalised values times the norm's weight."""
    return values * by[:, None] * tl.load(weight + feature, mask=feature_inside, other=0.0).to(values.dtype)[None, :]


@triton.jit
def row_of(program, heads, length, BLOCK_L: tl.constexpr):
    """Batch, head and positions of a block of rows of [B, H, L, E]."""
    blocks = tl.cdiv(length, BLOCK_L)
    block, of = program % blocks, program // blocks
    return (of // heads).to(tl.int64), (of % heads).to(tl.int64), block * BLOCK_L + tl.arange(0, BLOCK_L)


@triton.jit
def angles(
    t, b, position, b_stride, l_stride, e_stride, inside, first, is_pair, GAP: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """cos or sin of both members of the pairs."""
    row = b * b_stride + position.to(tl.int64) * l_stride
    return (
        load_features(t, row, inside, first, is_pair, e_stride, DTYPE),
        load_features(t, row, inside, first + GAP, is_pair, e_stride, DTYPE),
    )


@triton.jit
def transform_heads_kernel(
    heads, b_stride, h_stride, l_stride,  # [B, H, L, E], dense last dim, in place
    weight,  # [E] or None
    cos, cos_b, cos_l, cos_e, sin, sin_b, sin_l, sin_e,  # [B, L, ROTARY], stride 0 where shared by batches; or None
    n_heads, length,
    EPS: tl.constexpr, DTYPE: tl.constexpr,
    E: tl.constexpr, ROTARY: tl.constexpr, STEP: tl.constexpr, GAP: tl.constexpr,  # pairs (i STEP, i STEP + GAP)
    PAIRS: tl.constexpr, REST: tl.constexpr,  # sizes of the tiles: powers of two
    BLOCK_L: tl.constexpr,
):  # fmt: skip
    b, h, position = row_of(tl.program_id(0), n_heads, length, BLOCK_L)
    inside = position < length
    row = b * b_stride + h * h_stride + position.to(tl.int64) * l_stride
    first, is_pair = features(0, STEP, ROTARY // 2, PAIRS)
    rest, is_rest = features(ROTARY, 1, E - ROTARY, REST)
    x_first = load_features(heads, row, inside, first, is_pair, 1, DTYPE)
    x_second = load_features(heads, row, inside, first + GAP, is_pair, 1, DTYPE)
    x_rest = load_features(heads, row, inside, rest, is_rest, 1, DTYPE)
    if weight is not None:
        square = tl.sum(x_first * x_first, 1) + tl.sum(x_second * x_second, 1) + tl.sum(x_rest * x_rest, 1)
        by = 1.0 / tl.sqrt(square / E + EPS)
        # Rounded before it is turned, as separate modules would.
        STORED: tl.constexpr = heads.dtype.element_ty
        x_first = weighted(x_first, by, weight, first, is_pair).to(STORED).to(DTYPE)
        x_second = weighted(x_second, by, weight, first + GAP, is_pair).to(STORED).to(DTYPE)
        store_features(heads, row, inside, rest, is_rest, weighted(x_rest, by, weight, rest, is_rest))
    if cos is not None:
        cos_first, cos_second = angles(cos, b, position, cos_b, cos_l, cos_e, inside, first, is_pair, GAP, DTYPE)
        sin_first, sin_second = angles(sin, b, position, sin_b, sin_l, sin_e, inside, first, is_pair, GAP, DTYPE)
        store_features(heads, row, inside, first, is_pair, x_first * cos_first - x_second * sin_first)
        store_features(heads, row, inside, first + GAP, is_pair, x_second * cos_second + x_first * sin_second)


@triton.jit
def transform_heads_bwd_kernel(
    dheads, b_stride, h_stride, l_stride,  # [B, H, L, E] fp32 or fp64, dense last dim, in place
    raw, raw_b, raw_h, raw_l,  # what was transformed; read where there is a norm
    weight,
    cos, cos_b, cos_l, cos_e, sin, sin_b, sin_l, sin_e,
    partial,  # [programs, E] or None
    n_heads, length, row_blocks,
    EPS: tl.constexpr, DTYPE: tl.constexpr,
    E: tl.constexpr, ROTARY: tl.constexpr, STEP: tl.constexpr, GAP: tl.constexpr,
    PAIRS: tl.constexpr, REST: tl.constexpr,
    BLOCK_L: tl.constexpr, SUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    first, is_pair = features(0, STEP, ROTARY // 2, PAIRS)
    rest, is_rest = features(ROTARY, 1, E - ROTARY, REST)
    sum_first = tl.zeros((PAIRS,), DTYPE)
    sum_second = tl.zeros((PAIRS,), DTYPE)
    sum_rest = tl.zeros((REST,), DTYPE)
    start = tl.program_id(0) * SUM_BLOCKS
    for block in range(start, tl.minimum(start + SUM_BLOCKS, row_blocks)):
        b, h, position = row_of(block, n_heads, length, BLOCK_L)
        inside = position < length
        row = b * b_stride + h * h_stride + position.to(tl.int64) * l_stride
        d_first = load_features(dheads, row, inside, first, is_pair, 1, DTYPE)
        d_second = load_features(dheads, row, inside, first + GAP, is_pair, 1, DTYPE)
        if cos is not None:
            cos_first, cos_second = angles(cos, b, position, cos_b, cos_l, cos_e, inside, first, is_pair, GAP, DTYPE)
            sin_first, sin_second = angles(sin, b, position, sin_b, sin_l, sin_e, inside, first, is_pair, GAP, DTYPE)
            d_first, d_second = (
                d_first * cos_first + d_second * sin_second,
                d_second * cos_second - d_first * sin_first,
            )
        if weight is not None:
            d_rest = load_features(dheads, row, inside, rest, is_rest, 1, DTYPE)
            raw_row = b * raw_b + h * raw_h + position.to(tl.int64) * raw_l
            x_first = load_features(raw, raw_row, inside, first, is_pair, 1, DTYPE)
            x_second = load_features(raw, raw_row, inside, first + GAP, is_pair, 1, DTYPE)
            x_rest = load_features(raw, raw_row, inside, rest, is_rest, 1, DTYPE)
            square = tl.sum(x_first * x_first, 1) + tl.sum(x_second * x_second, 1) + tl.sum(x_rest * x_rest, 1)
            by = 1.0 / tl.sqrt(square / E + EPS)
            x_first, x_second, x_rest = x_first * by[:, None], x_second * by[:, None], x_rest * by[:, None]
            sum_first += tl.sum(d_first * x_first, 0)
            sum_second += tl.sum(d_second * x_second, 0)
            sum_rest += tl.sum(d_rest * x_rest, 0)
            # Times `by`, which the gradient needs anyway.
            d_first = weighted(d_first, by, weight, first, is_pair)
            d_second = weighted(d_second, by, weight, first + GAP, is_pair)
            d_rest = weighted(d_rest, by, weight, rest, is_rest)
            along = tl.sum(d_first * x_first, 1) + tl.sum(d_second * x_second, 1) + tl.sum(d_rest * x_rest, 1)
            along = (along / E)[:, None]
            d_first, d_second = d_first - x_first * along, d_second - x_second * along
            store_features(dheads, row, inside, rest, is_rest, d_rest - x_rest * along)
        store_features(dheads, row, inside, first, is_pair, d_first)
        store_features(dheads, row, inside, first + GAP, is_pair, d_second)
    if partial is not None:
        to = partial + tl.program_id(0).to(tl.int64) * E
        tl.store(to + first, sum_first, mask=is_pair)
        tl.store(to + first + GAP, sum_second, mask=is_pair)
        tl.store(to + rest, sum_rest, mask=is_rest)


def _rotation(cos: Tensor | None, sin: Tensor | None) -> tuple:
    """cos and sin with their strides along B, L, R."""
    if cos is None:
        return (None, 0, 0, 0) * 2
    return tuple(arg for t in (cos, sin) for arg in (t, 0 if t.shape[0] == 1 else t.stride(0), *t.stride()[1:]))


def _block_rows(width: int) -> int:
    return max(1, min(MAX_ROWS, TILE // triton.next_power_of_2(width)))


def _pairs(width: int, rotary: int, interleaved: bool) -> dict[str, int]:
    return {
        "E": width,
        "ROTARY": rotary,
        "STEP": 2 if interleaved else 1,
        "GAP": 1 if interleaved else rotary // 2,
        "PAIRS": triton.next_power_of_2(max(rotary // 2, 1)),
        "REST": triton.next_power_of_2(max(width - rotary, 1)),
    }


def transform_heads(
    heads: Tensor,  # [B, H, L, E], in place
    norm_weight: Tensor | None,  # [E]
    eps: float,
    cos: Tensor | None,  # [1 or B, L, R]
    sin: Tensor | None,
    interleaved: bool,
    scratch: int,
) -> None:
    """Computed in fp32 (fp64 for fp64), rounded to the dtype of `heads`; needs no scratch."""
    if heads.numel() == 0 or (norm_weight is None and cos is None):
        return
    batch, n_heads, length, width = heads.shape
    block_rows = _block_rows(width)
    launch.launch(
        transform_heads_kernel,
        (batch * n_heads * triton.cdiv(length, block_rows),),
        *(heads, *heads.stride()[:3], dense(norm_weight), *_rotation(cos, sin), n_heads, length),
        EPS=eps,
        DTYPE=tl.float64 if heads.dtype == torch.float64 else tl.float32,
        **_pairs(width, 0 if cos is None else cos.shape[-1], interleaved),
        BLOCK_L=block_rows,
        num_warps=4,
    )


def transform_heads_bwd(
    dheads: Tensor,  # [B, H, L, E] fp32 or fp64, in place
    raw: Tensor,  # [B, H, L, E]
    norm_weight: Tensor | None,  # [E]
    eps: float,
    cos: Tensor | None,  # [1 or B, L, R]
    sin: Tensor | None,
    interleaved: bool,
    scratch: int,
    dnorm_weight: Tensor | None,  # [E], added to
) -> None:
    if dheads.numel() == 0 or (norm_weight is None and cos is None):
        return
    batch, n_heads, length, width = dheads.shape
    block_rows = _block_rows(width)
    row_blocks = batch * n_heads * triton.cdiv(length, block_rows)
    sum_blocks = SUM_ROWS // block_rows
    programs = triton.cdiv(row_blocks, sum_blocks)
    has_sums = dnorm_weight is not None and norm_weight is not None
    partial = dnorm_weight.new_empty((programs, width)) if has_sums else None
    raw_args = (None, 0, 0, 0) if norm_weight is None else (raw, *raw.stride()[:3])
    launch.launch(
        transform_heads_bwd_kernel,
        (programs,),
        *(dheads, *dheads.stride()[:3], *raw_args, dense(norm_weight), *_rotation(cos, sin), partial),
        *(n_heads, length, row_blocks),
        EPS=eps,
        DTYPE=TRITON_DTYPES[dheads.dtype],
        **_pairs(width, 0 if cos is None else cos.shape[-1], interleaved),
        BLOCK_L=block_rows,
        SUM_BLOCKS=sum_blocks,
        num_warps=8,
    )
    if partial is not None:
        column_sums(partial, dnorm_weight)
