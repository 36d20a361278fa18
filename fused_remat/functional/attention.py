"""`attention`: the core, from q, k and v."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_remat import budget, dispatch, reference
from fused_remat._triton import arch_of
from fused_remat.functional.masks import Corner, Window, broadcast_mask, check_band, check_key_padding_mask
from fused_remat.functional.operands import (
    Prepared,
    check_dtypes,
    check_seed_is_drawn_once,
    check_strided,
    check_tensors,
    why_reference_only,
)
from fused_remat.settings import check_dropout, check_size, is_finite

MASKS = ("attn_mask", "key_padding_mask")


def attention(
    q: Tensor,  # [B, H, Lq, E]
    k: Tensor,  # [B, Hk, Lk, E]
    v: Tensor,  # [B, Hk, Lk, Ev]
    *,
    attn_mask: Tensor | None = None,  # broadcasts to [B, H, Lq, Lk]
    key_padding_mask: Tensor | None = None,  # [B, Lk]
    is_causal: bool = False,
    causal: Corner | None = None,
    window: Window | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    softcap: float | None = None,
    training: bool = True,
    return_lse: bool = False,
    workspace: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`dropout(softmax(q k^T scale + masks)) v` without a [Lq, Lk] tensor; backward rebuilds probabilities in tiles.

    Backward needs q, k, v, out and lse (Dao, "FlashAttention-2", 2023; Milakov and Gimelshein 2018 for the online
    softmax of forward). A row with nothing to attend to gives zeros and zero gradients, in every mode.

    Args:
        q, k, v: shapes above, any strides; Hk divides H and each key-value head serves H / Hk consecutive query heads.
            One device and one dtype of float64, float32, bfloat16, float16; under autocast the dtypes may differ.
        attn_mask: bool, True = take part (as in F.scaled_dot_product_attention), or floating, added to the scaled
            scores; a floating one may require grad. It keeps its own shape, nothing is expanded.
        key_padding_mask: likewise, for keys alone: True = take part.
        is_causal: query i sees keys 0..i: aligned to the top left corner, as F.scaled_dot_product_attention does.
        causal: names the corner instead; "bottom_right" aligns the last query with the last key.
        window: (left, right), the keys that a query sees before and after its own position, None = no limit; positions
            are compared in the corner of `causal`, else the top left one.
        dropout_p: probability in [0, 1) of zeroing a probability, only if `training`. The mask is Philox4x32-10 of one
            seed drawn from torch's generator (Salmon et al., SC 2011) and of the element (b, h, i, j).
        scale: of the scores; E ** -0.5 if None.
        softcap: bounds the scaled scores before masks: they become `softcap * tanh(scores / softcap)` (Gemma Team,
            "Gemma 2", 2024, which takes 50); a number in [1e-30, 1e30], None for no bound.
        return_lse: also return the log-sum-exp of each row of scores; it is differentiable.
        workspace: bytes of scratch, see `fused_remat.workspace`.

    Returns:
        out [B, H, Lq, Ev] in q's dtype or autocast's; with `return_lse`, (out, lse): lse [B, H, Lq] in natural log,
        float32 (float64 for float64), -inf for rows with nothing to attend to.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong rank, shape, device, probability, corner, window, scale, softcap or budget.
        RuntimeError: a named backend (`fused_remat.backend`) cannot run this call.
    """
    out, lse = prepare_attention(
        q, k, v, attn_mask=attn_mask, key_padding_mask=key_padding_mask, is_causal=is_causal, causal=causal,
        window=window, dropout_p=dropout_p, scale=scale, softcap=softcap, training=training, workspace=workspace,
    ).run()  # fmt: skip
    return (out, lse) if return_lse else out


def prepare_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    causal: Corner | None,
    window: Window | None,
    dropout_p: float,
    scale: float | None,
    softcap: float | None,
    training: bool,
    workspace: int | None,
) -> Prepared:
    """Refuse what cannot be meant, before anything is computed; arguments as `attention`."""
    operands = {"q": q, "k": k, "v": v, "attn_mask": attn_mask, "key_padding_mask": key_padding_mask}
    check_tensors(operands, required=("q", "k", "v"))
    check_strided(operands)
    _check_shapes(q, k, v)
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    mask = broadcast_mask("attn_mask", attn_mask, shape)
    check_key_padding_mask(key_padding_mask, shape[0], shape[3])
    band = check_band(is_causal, causal, window)
    p = check_dropout(dropout_p, name="dropout_p") * bool(training)
    check_seed_is_drawn_once(p)
    scale = check_scale(scale, q.shape[-1])
    softcap = check_softcap(softcap)
    nbytes = budget.resolve(workspace, q.device.type)
    call = dispatch.Call(
        op="attention",
        device=q.device.type,
        arch=arch_of(q.device),
        width=max(q.shape[-1], v.shape[-1]),
        dtype=check_real(check_dtypes(operands, masks=MASKS)),
        reference_only=why_reference_only(operands, dropout_p=p),
    )

    def on_reference() -> tuple[Tensor, Tensor]:
        out, lse, _ = reference.attention(
            *(t.to(call.dtype) for t in (q, k, v)), attn_mask=mask, key_padding_mask=key_padding_mask,
            causal=band.causal, window=band.window, dropout_p=p, scale=scale, softcap=softcap or None,
        )  # fmt: skip
        return out, lse

    return Prepared(call, (q, k, v, mask, key_padding_mask, *band.codes(), p, scale, softcap, nbytes), on_reference)


def check_scale(scale: float | None, width: int) -> float:
    """`scale`, or width ** -0.5 where it is None. Raises ValueError unless it is a finite number."""
    if scale is None:
        return max(width, 1) ** -0.5
    if not is_finite(scale):
        raise ValueError(f"scale must be a finite number or None, got {scale!r}")
    return float(scale)


def check_softcap(softcap: float | None) -> float:
    """`softcap`, or 0.0, which is none to the ops. Raises ValueError unless a float32 can divide by it."""
    if softcap is None:
        return 0.0
    if not is_finite(softcap) or not 1e-30 <= softcap <= 1e30:
        raise ValueError(f"softcap must be a number in [1e-30, 1e30], or None for none, got {softcap!r}")
    return float(softcap)


def check_real(dtype: torch.dtype) -> torch.dtype:
    """`dtype` if a softmax exists for it. Raises TypeError for complex ones."""
    if dtype.is_complex:
        raise TypeError(f"attention takes real floating-point tensors, got {dtype}; a softmax needs ordered numbers")
    return dtype


def check_head_counts(num_heads: int, num_kv_heads: int | None) -> int:
    """The number of key-value heads. Raises ValueError unless it divides the number of query heads."""
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_size("num_heads", num_heads)
    check_size("num_kv_heads", num_kv_heads)
    _check_groups(num_heads, num_kv_heads)
    return num_kv_heads


def _check_groups(num_heads: int, num_kv_heads: int) -> None:
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"the number of query heads must be a multiple of that of key-value heads, got H={num_heads}, "
            f"Hk={num_kv_heads}"
        )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            raise ValueError(f"{name} must be [B, heads, length, width] with 4 dims, got {list(t.shape)}")
    if k.shape[0] != q.shape[0] or v.shape[0] != q.shape[0]:
        raise ValueError(f"q, k and v must share the batch size, got {q.shape[0]}, {k.shape[0]} and {v.shape[0]}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must be as wide as q, got E={k.shape[-1]} and E={q.shape[-1]}")
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(f"v must have the heads and length of k, {list(k.shape[1:3])}, got {list(v.shape[1:3])}")
    _check_groups(q.shape[1], k.shape[1])
