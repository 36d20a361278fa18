"""The operators of multi-head attention from x: fake kernels, reference kernel and FLOP formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fused_remat import reference
from fused_remat.ops.attention import CAUSAL, split_masks, wide, window_of
from fused_remat.settings import LowRank, Norm

OPERANDS = 29  # the leading arguments, all tensors or None
_MASKS = (19, 20)
_FIRST_FACTOR = OPERANDS - 8  # a and b of the adapters of q, k, v and the output projection
_BELOW_HEADS = (9, 10, OPERANDS - 2, OPERANDS - 1)  # of the output projection: their gradients need none of the heads


@cache
def _names() -> tuple[str, ...]:
    schema = torch.ops.fused_remat.multi_head_attention.default._schema
    return tuple(argument.name for argument in schema.arguments)


def _call(args: tuple[Any, ...]) -> SimpleNamespace:
    """The arguments of a call by name; the last one may be missing."""
    return SimpleNamespace(**dict(zip(_names(), (*args, None), strict=False)))


def _collapses(first: int, second: int, stride_first: int, stride_second: int) -> bool:
    return first == 1 or second == 1 or stride_first == second * stride_second


def _rows_like(x: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """[B, L, columns] in the memory order that the kernels choose for rows of x [B, L, D]."""
    (batch, length, _), (by_batch, by_length, _) = x.shape, x.stride()
    if not _collapses(batch, length, by_batch, by_length) and _collapses(length, batch, by_length, by_batch):
        return x.new_empty((length, batch, columns), dtype=dtype).transpose(0, 1)
    return x.new_empty((batch, length, columns), dtype=dtype)


def _adapters(call: SimpleNamespace) -> list[LowRank | None]:
    """The low-rank adapters of q, k, v and the output projection; those of a FLOP formula have shapes for factors."""
    named = vars(call)
    return [
        None if named[f"{part}_a"] is None else LowRank(named[f"{part}_a"], named[f"{part}_b"], scale)
        for part, scale in zip(("q", "k", "v", "out"), call.adapter_scales, strict=True)
    ]


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    call = _call(args)
    query, dtype = call.query, call.compute_dtype or call.query.dtype
    y = _rows_like(query, call.w_out.shape[0], dtype)
    key = query if call.key is None else call.key
    keys = key.shape[1] + (call.bias_k is not None) + call.add_zero_attn
    shape = {
        0: (0,),
        1: (query.shape[0], query.shape[1], keys),
        2: (query.shape[0], call.num_heads, query.shape[1], keys),
    }[int(call.need_weights)]
    return y, query.new_empty(shape, dtype=dtype)


def _fake_fwd(*args: Any) -> tuple[Tensor, ...]:
    call = _call(args)
    query, dtype = call.query, call.compute_dtype or call.query.dtype
    value_width = call.w_out.shape[1] // call.num_heads
    width = reference.head_width(call.w_q.shape, call.w_k is None, call.num_heads, call.num_kv_heads, value_width)
    key = query if call.key is None else call.key
    value = key if call.value is None else call.value

    def kept(wanted: bool, x: Tensor, heads: int, per_head: int) -> Tensor:
        if not wanted:
            return query.new_empty((0,), dtype=dtype)
        return _rows_like(x, heads * per_head, dtype).unflatten(-1, (heads, per_head))

    return (
        *_fake(*args[:-1]),
        kept(call.keep_q, query, call.num_heads, width),
        kept(call.keep_k, key, call.num_kv_heads, width),
        kept(call.keep_v, value, call.num_kv_heads, value_width),
        kept(call.keep_out, query, call.num_heads, value_width),
        query.new_empty((query.shape[0], call.num_heads, query.shape[1]), dtype=wide(dtype)),
    )


def _fake_bwd(dy: Tensor | None, dweights: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    rest, output_mask, wide_mask = split_masks(args)
    operands = rest[:OPERANDS]
    gradients = []
    for position, (operand, wanted, widened) in enumerate(zip(operands, output_mask, wide_mask, strict=True)):
        if not wanted:
            gradients.append(operands[0].new_empty((0,)))
        elif position < 3:
            gradients.append(_rows_like(operand, operand.shape[2], operand.dtype))
        else:
            dtype = wide(operand.dtype) if widened and position not in _MASKS else operand.dtype
            gradients.append(operand.new_empty(operand.shape, dtype=dtype))
    return tuple(gradients)


def _reference(*args: Any) -> tuple[Tensor, Tensor]:
    seed, call = args[-1], _call(args[:-1])
    dtype = call.compute_dtype or call.query.dtype
    cast = {
        name: operand.to(dtype) if isinstance(operand, Tensor) and "mask" not in name else operand
        for name, operand in zip(_names()[:OPERANDS], args[:OPERANDS], strict=True)
    }
    t = SimpleNamespace(**vars(call) | cast)
    weights, biases = reference.unpack_projections(
        (t.w_q, t.w_k, t.w_v), (t.b_q, t.b_k, t.b_v), call.num_heads, call.num_kv_heads,
        t.w_out.shape[1] // call.num_heads,
    )  # fmt: skip
    y, probabilities = reference.multi_head_attention(
        t.query, t.key, t.value, weights, biases, t.w_out, t.b_out, call.num_heads, call.num_kv_heads,
        bias_k=t.bias_k, bias_v=t.bias_v, add_zero_attn=call.add_zero_attn,
        norm=Norm(call.norm, t.norm_weight, t.norm_bias, call.norm_eps) if call.norm else None,
        q_norm=t.q_norm, k_norm=t.k_norm, qk_norm_eps=call.qk_norm_eps,
        rotary=None if t.cos is None else (t.cos, t.sin), rotary_interleaved=call.rotary_interleaved,
        average_attn_weights=call.need_weights == 1, attn_mask=t.attn_mask, key_padding_mask=t.key_mask,
        adapters=_adapters(t), causal=CAUSAL[call.causal], window=window_of(call.window_left, call.window_right),
        dropout_p=call.dropout_p, scale=call.scale, softcap=call.softcap or None, seed=seed,
    )  # fmt: skip
    return y, probabilities if call.need_weights else y.new_empty((0,))


def register() -> None:
    """Give the operators their fake kernels, and the reference operator its implementation."""
    torch.library.register_fake("fused_remat::multi_head_attention", _fake)
    torch.library.register_fake("fused_remat::multi_head_attention_fwd", _fake_fwd)
    torch.library.register_fake("fused_remat::multi_head_attention_bwd", _fake_bwd)
    torch.library.impl("fused_remat::multi_head_attention_reference", "CompositeImplicitAutograd")(_reference)


def _sizes(args: tuple[Any, ...]) -> tuple[int, tuple[int, int, int], int]:
    """FLOP of one product of scores per unit of width, of the projections of q, k and v, and of the output."""
    call = _call(args)
    batch, length_q, _ = call.query
    length_k = (call.key or call.query)[1]
    value_width = call.w_out[1] // call.num_heads
    width = reference.head_width(call.w_q, call.w_k is None, call.num_heads, call.num_kv_heads, value_width)
    widths_in = [(w or call.w_q)[-1] for w in (call.w_q, call.w_k, call.w_v)]
    rows = (call.num_heads * width, call.num_kv_heads * width, call.num_kv_heads * value_width)
    projections = tuple(
        2 * batch * length * n * d for length, n, d in zip((length_q, length_k, length_k), rows, widths_in, strict=True)
    )
    keys = length_k + (call.bias_k is not None) + bool(call.add_zero_attn)
    scores = 2 * batch * call.num_heads * length_q * keys
    out = 2 * batch * length_q * call.w_out[0] * call.w_out[1]
    return scores * (width + value_width), projections, out


def _narrow_products(args: tuple[Any, ...]) -> list[tuple[int, int]]:
    """FLOP of x a^T and of its product with b^T, for the adapters of q, k, v and the output projection."""
    call = _call(args)
    batch, length_q, _ = call.query
    length_k = (call.key or call.query)[1]
    tokens = [batch * length for length in (length_q, length_k, length_k, length_q)]
    return [
        (0, 0) if adapter is None else (2 * m * adapter.a[0] * adapter.a[1], 2 * m * adapter.b[0] * adapter.b[1])
        for m, adapter in zip(tokens, _adapters(call), strict=True)
    ]


def _forward_flop(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    core, projections, out = _sizes(args[: len(_names())])
    narrow = _narrow_products(args[: len(_names())])
    return core + sum(projections) + out + sum(sum(products) for products in narrow)


def _in_adapter(reduce: int, expand: int, da: bool, db: bool, dx: bool, *, kept: bool) -> int:
    """FLOP of the gradients of an adapter of q, k or v, and of dx through it."""
    return expand * (db + (da or dx)) + reduce * (da + dx + (db and kept))


def _out_adapter(reduce: int, expand: int, da: bool, db: bool) -> int:
    """Likewise of the output projection, which is rebuilt for db; dx is always made."""
    return (reduce + expand) * (1 + db) + reduce * da


def _backward_flop(dy: Any, dweights: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    core, projections, out = _sizes(args[: len(_names())])
    (*_, q, k, v, kept_out, _lse), wanted, _ = split_masks(args)
    through_heads = any(wanted[i] for i in range(OPERANDS) if i not in _BELOW_HEADS)
    rebuilt = sum(flop for flop, kept in zip(projections, (q, k, v), strict=True) if kept is None)
    total = rebuilt + out * (1 + wanted[9]) + (core if kept_out is None else 0)
    *narrow, narrow_out = _narrow_products(args[: len(_names())])
    total += _out_adapter(*narrow_out, *wanted[OPERANDS - 2 : OPERANDS])
    total += sum(sum(products) for products, kept in zip(narrow, (q, k, v), strict=True) if kept is None)
    if not through_heads:
        return total
    packed = args[4] is None
    for part, flop in enumerate(projections):
        source = 0 if args[1] is None else (part if args[part] is not None else 1)
        total += flop * (bool(wanted[source]) + bool(wanted[3 if packed else 3 + part]))
        factors = wanted[_FIRST_FACTOR + 2 * part :][:2]
        total += _in_adapter(*narrow[part], *factors, wanted[source], kept=(q, k, v)[part] is not None)
    return total + core * 5 // 2


def flop_formulas() -> dict[torch._ops.OpOverloadPacket, Callable[..., int]]:
    """FLOP of projections and of the products of attention, masked ones included, as torch counts its own."""
    packets = torch.ops.fused_remat
    return {
        packets.multi_head_attention: _forward_flop,
        packets.multi_head_attention_fwd: _forward_flop,
        packets.multi_head_attention_bwd: _backward_flop,
    }
