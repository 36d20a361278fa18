"""The operators of the attention core: fake kernels, reference kernel and FLOP formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fused_remat import reference

CAUSAL = (None, "top_left", "bottom_right")  # by the code that the ops take


def heads_like(t: Tensor, heads: int, length: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty [B, heads, length, width] that lies in memory as [B, length, heads, width]."""
    return t.new_empty((t.shape[0], length, heads, width), dtype=dtype).transpose(1, 2)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax statistics: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def split_masks(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[bool], list[bool]]:
    """The arguments of a `*_bwd` up to its masks, `output_mask` and `wide_mask`; one that says nothing is left out."""
    if isinstance(args[-2], list):
        return args[:-2], args[-2], args[-1] or [False] * len(args[-2])
    return args[:-1], args[-1], [False] * len(args[-1])


def window_of(left: int, right: int) -> tuple[int | None, int | None]:
    """A window as the functional calls spell it; -1 is a side without limit."""
    return (None if left < 0 else left), (None if right < 0 else right)


def _fake_fwd(q, k, v, attn_mask, key_mask, causal, window_left, window_right, dropout_p, scale, softcap, workspace,
              backend, compute_dtype=None, seed=None):  # fmt: skip
    dtype = compute_dtype or q.dtype
    out = heads_like(q, q.shape[1], q.shape[2], v.shape[3], dtype)
    return out, q.new_empty(q.shape[:3], dtype=wide(dtype))


def _fake_bwd(dout, dlse, q, k, v, attn_mask, key_mask, *args):
    output_mask = args[-1]

    def heads_gradient(t: Tensor) -> Tensor:
        return t.new_empty(t.shape) if t.is_contiguous() else heads_like(t, *t.shape[1:])

    heads = [
        heads_gradient(t) if wanted else t.new_empty((0,)) for t, wanted in zip((q, k, v), output_mask[:3], strict=True)
    ]
    masks = [
        torch.empty_like(mask, memory_format=torch.contiguous_format)
        if wanted
        else (q if mask is None else mask).new_empty((0,))
        for mask, wanted in zip((attn_mask, key_mask), output_mask[3:], strict=True)
    ]
    return (*heads, *masks)


def _reference(q, k, v, attn_mask, key_mask, causal, window_left, window_right, dropout_p, scale, softcap, workspace,
               backend, compute_dtype, seed):  # fmt: skip
    dtype = compute_dtype or q.dtype
    out, lse, _ = reference.attention(
        *(t.to(dtype) for t in (q, k, v)), attn_mask=attn_mask, key_padding_mask=key_mask, causal=CAUSAL[causal],
        window=window_of(window_left, window_right), dropout_p=dropout_p, scale=scale, softcap=softcap or None,
        seed=seed,
    )  # fmt: skip
    return out, lse


def register() -> None:
    """Give the operators their fake kernels, and the reference operator its implementation."""
    torch.library.register_fake("fused_remat::attention", _fake_fwd)
    torch.library.register_fake("fused_remat::attention_fwd", _fake_fwd)
    torch.library.register_fake("fused_remat::attention_bwd", _fake_bwd)
    torch.library.impl("fused_remat::attention_reference", "CompositeImplicitAutograd")(_reference)


def flop_formulas() -> dict[torch._ops.OpOverloadPacket, Callable[..., int]]:
    """FLOP of the products, masked ones included, as torch counts its own attention."""

    def products(q_shape, k_shape, v_shape) -> tuple[int, int]:
        batch, heads, length_q, width = q_shape
        scores = 2 * batch * heads * length_q * k_shape[2]
        return scores * width, scores * v_shape[3]

    def forward(q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
        return sum(products(q_shape, k_shape, v_shape))

    def backward(dout_shape, dlse_shape, q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
        by_width, by_value_width = products(q_shape, k_shape, v_shape)
        wants_dq, wants_dk, wants_dv = args[-1][:3]
        return by_width * (1 + wants_dq + wants_dk) + by_value_width * (1 + wants_dv)

    packets = torch.ops.fused_remat
    return {packets.attention: forward, packets.attention_fwd: forward, packets.attention_bwd: backward}
