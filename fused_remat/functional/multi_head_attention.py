"""`multi_head_attention`: the block, from x: projections, attention, output projection."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_remat import budget, dispatch, reference
from fused_remat._triton import arch_of
from fused_remat.functional.attention import MASKS, check_head_counts, check_real, check_scale, check_softcap
from fused_remat.functional.heads import ADAPTERS, check_shapes
from fused_remat.functional.masks import Corner, Window, broadcast_mask, check_band, check_key_padding_mask
from fused_remat.functional.operands import (
    Operands,
    Prepared,
    check_dtypes,
    check_seed_is_drawn_once,
    check_strided,
    check_tensors,
    why_reference_only,
)
from fused_remat.settings import (
    LowRank,
    Norm,
    check_dropout,
    check_eps,
    check_flags,
    check_low_rank,
    check_norm,
    check_residuals,
)

RESIDUALS = ("q", "k", "v", "out")
_FACTORS = tuple(f"{name}.{factor}" for name in ADAPTERS for factor in "ab")

Three = tuple[Tensor | None, Tensor | None, Tensor | None]


def multi_head_attention(
    query: Tensor,  # [B, Lq, Dq]
    key: Tensor | None,  # [B, Lk, Dk]
    value: Tensor | None,  # [B, Lk, Dv]
    in_proj_weight: Tensor | tuple[Tensor, Tensor, Tensor],  # [H E + Hk E + Hk Ev, Dq], or its three parts
    in_proj_bias: Tensor | Three | None,  # [H E + Hk E + Hk Ev], or its three parts
    out_proj_weight: Tensor,  # [Do, H Ev]
    out_proj_bias: Tensor | None,  # [Do]
    num_heads: int,
    num_kv_heads: int | None = None,
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
    bias_k: Tensor | None = None,  # [Hk E]
    bias_v: Tensor | None = None,  # [Hk Ev]
    add_zero_attn: bool = False,
    norm: Norm | None = None,
    q_norm: Tensor | None = None,  # [E]
    k_norm: Tensor | None = None,  # [E]
    qk_norm_eps: float = 1e-6,
    rotary: tuple[Tensor, Tensor] | None = None,  # cos and sin, [L, R] or [1 or B, L, R]
    rotary_interleaved: bool = False,
    q_adapter: LowRank | None = None,
    k_adapter: LowRank | None = None,
    v_adapter: LowRank | None = None,
    out_adapter: LowRank | None = None,
    need_weights: bool = False,
    average_attn_weights: bool = True,
    keep: tuple[str, ...] = ("out",),
    workspace: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head attention from x whose q, k and v are rebuilt inside backward, head group by head group.

    Backward needs the inputs, the weights, the log-sum-exp of each row of scores, and what `keep` names; neither pass
    holds q, k, v or a [Lq, Lk] tensor whole unless it was kept or asked for. A row with nothing to attend to gives
    zeros before the output projection, zero weights and zero gradients, in every mode.

    Args:
        query, key, value: inputs. `key` None: self-attention, of the query (after `norm`); `value` None: the key.
            The same tensor passed twice counts as None.
        in_proj_weight, in_proj_bias: rows of q, then k, then v, as nn.MultiheadAttention packs them, or a tuple of
            three; a packed weight needs key and value as wide as the query. Any part of a bias tuple may be None. A
            part may also be [heads, width, D] (bias: [heads, width]) of any strides, as a view of a weight that holds
            q, k and v of a head together gives it; such a part is never copied whole.
        num_kv_heads: Hk, which divides num_heads (Ainslie et al. 2023); num_heads if None.
        attn_mask, key_padding_mask, is_causal, causal, window, dropout_p, scale, softcap, training: as
            `fused_remat.attention`.
        bias_k, bias_v: one more key and value for every sample, added after projection, norm and rotation (both or
            neither); `add_zero_attn`: one more of zeros, last. Masks, causality and window do not apply to these.
        norm: applied to the query first, and so to what key and value default to; its result is not kept.
        q_norm, k_norm: weights of an RMSNorm over each head (Zhang and Sennrich 2019), before rotation.
        rotary: cos and sin of a rotary embedding (Su et al. 2021) of the first R features of q and k, which then need
            equal lengths; pairs are (i, i + R / 2), or (2 i, 2 i + 1) where `rotary_interleaved`.
        q_adapter, k_adapter, v_adapter, out_adapter: low-rank adapters beside the projections, with factors of any
            floating dtype; the first three go with three weights. Base weights that need no gradient cost none of its
            products, and the rows between the factors are rebuilt too.
        need_weights: also return the probabilities after dropout, [B, Lq, Lk + extra keys] averaged over heads without
            a [B, H, Lq, Lk] tensor, or [B, H, Lq, Lk + extra keys] unless `average_attn_weights`; differentiable.
        keep: residuals that backward need not rebuild: any of "q", "k", "v" (as projected) and "out" (of the
            attention). Rebuilding out costs one more pass over the scores.
        workspace: bytes of scratch, see `fused_remat.workspace`.

    Returns:
        y [B, Lq, Do] in the query's dtype or autocast's; with `need_weights`, (y, weights).

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong rank, shape, device, name, probability, corner, window, scale, softcap or budget.
        RuntimeError: a named backend (`fused_remat.backend`) cannot run this call.
    """
    y, probabilities = prepare_multi_head_attention(
        query, key, value, in_proj_weight, in_proj_bias, out_proj_weight, out_proj_bias, num_heads, num_kv_heads,
        attn_mask=attn_mask, key_padding_mask=key_padding_mask, is_causal=is_causal, causal=causal, window=window,
        dropout_p=dropout_p, scale=scale, softcap=softcap, training=training, bias_k=bias_k, bias_v=bias_v,
        add_zero_attn=add_zero_attn, norm=norm, q_norm=q_norm, k_norm=k_norm, qk_norm_eps=qk_norm_eps, rotary=rotary,
        rotary_interleaved=rotary_interleaved, q_adapter=q_adapter, k_adapter=k_adapter, v_adapter=v_adapter,
        out_adapter=out_adapter, need_weights=need_weights, average_attn_weights=average_attn_weights, keep=keep,
        workspace=workspace,
    ).run()  # fmt: skip
    return (y, probabilities) if need_weights else y


def prepare_multi_head_attention(
    query: Tensor, key: Tensor | None, value: Tensor | None,
    in_proj_weight: Tensor | tuple[Tensor, Tensor, Tensor], in_proj_bias: Tensor | Three | None,
    out_proj_weight: Tensor, out_proj_bias: Tensor | None, num_heads: int, num_kv_heads: int | None,
    *, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool, causal: Corner | None,
    window: Window | None, dropout_p: float, scale: float | None, softcap: float | None,
    training: bool, bias_k: Tensor | None, bias_v: Tensor | None, add_zero_attn: bool, norm: Norm | None,
    q_norm: Tensor | None, k_norm: Tensor | None, qk_norm_eps: float, rotary: tuple[Tensor, Tensor] | None,
    rotary_interleaved: bool, q_adapter: LowRank | None, k_adapter: LowRank | None, v_adapter: LowRank | None,
    out_adapter: LowRank | None, need_weights: bool, average_attn_weights: bool, keep: tuple[str, ...],
    workspace: int | None,
) -> Prepared:  # fmt: skip
    """Refuse what cannot be meant, before anything is computed; arguments as `multi_head_attention`."""
    key, value = (None if key is query else key), (None if value is key or (key is None and value is query) else value)
    num_kv_heads = check_head_counts(num_heads, num_kv_heads)
    weights, biases = _three("in_proj_weight", in_proj_weight), _three("in_proj_bias", in_proj_bias)
    cos, sin = _check_rotary(rotary)
    check_norm(norm)
    adapters = (q_adapter, k_adapter, v_adapter, out_adapter)
    _check_adapters(adapters, weights)
    operands = _named_operands(
        query, key, value, weights, biases, out_proj_weight, out_proj_bias, bias_k, bias_v, norm, q_norm, k_norm, cos,
        sin, attn_mask, key_padding_mask, adapters,
    )  # fmt: skip
    check_flags(
        add_zero_attn=add_zero_attn, rotary_interleaved=rotary_interleaved, need_weights=need_weights,
        average_attn_weights=average_attn_weights,
    )  # fmt: skip
    qk_norm_eps = check_eps("qk_norm_eps", qk_norm_eps)
    sizes = check_shapes(operands, weights, biases, num_heads, num_kv_heads)
    mask = broadcast_mask("attn_mask", attn_mask, (sizes.batch, num_heads, sizes.length_q, sizes.length_k))
    check_key_padding_mask(key_padding_mask, sizes.batch, sizes.length_k)
    band = check_band(is_causal, causal, window)
    p = check_dropout(dropout_p, name="dropout_p") * bool(training)
    check_seed_is_drawn_once(p)
    scale = check_scale(scale, sizes.width)
    softcap = check_softcap(softcap)
    keep = check_residuals(keep, RESIDUALS, "multi_head_attention")
    call = dispatch.Call(
        op="multi_head_attention",
        device=query.device.type,
        arch=arch_of(query.device),
        width=max(sizes.width, sizes.value_width),
        dtype=check_real(check_dtypes(operands, masks=MASKS, factors=_FACTORS)),
        reference_only=why_reference_only(operands, dropout_p=p) or _why_rotary_is_learned(cos, sin),
    )
    cos, sin = (t if t is None or t.dim() == 3 else t.unsqueeze(0) for t in (cos, sin))

    def on_reference() -> tuple[Tensor, Tensor]:
        return _reference(
            call.dtype, query, key, value, weights, biases, out_proj_weight, out_proj_bias, num_heads, num_kv_heads,
            bias_k=bias_k, bias_v=bias_v, add_zero_attn=add_zero_attn, norm=norm, q_norm=q_norm, k_norm=k_norm,
            qk_norm_eps=qk_norm_eps, rotary=None if cos is None else (cos, sin), rotary_interleaved=rotary_interleaved,
            average_attn_weights=average_attn_weights, adapters=adapters, attn_mask=mask,
            key_padding_mask=key_padding_mask, causal=band.causal, window=band.window, dropout_p=p, scale=scale,
            softcap=softcap or None,
        )  # fmt: skip

    arguments = (
        query, key, value, *_padded(weights), *_padded(biases), out_proj_weight, out_proj_bias, bias_k, bias_v,
        operands["norm.weight"], operands["norm.bias"], q_norm, k_norm, cos, sin, mask, key_padding_mask,
        *(operands[name] for name in _FACTORS),
        num_heads, num_kv_heads, add_zero_attn, norm.kind if norm else "", norm.eps if norm else 0.0, qk_norm_eps,
        rotary_interleaved, *band.codes(), p, scale, softcap, need_weights and (1 if average_attn_weights else 2),
        [1.0 if adapter is None else float(adapter.scale) for adapter in adapters],
        *(name in keep for name in RESIDUALS), budget.resolve(workspace, query.device.type),
    )  # fmt: skip
    return Prepared(call, arguments, on_reference)


def _named_operands(
    query: Tensor, key: Tensor | None, value: Tensor | None, weights: dict[str, Tensor],
    biases: dict[str, Tensor | None], out_proj_weight: Tensor, out_proj_bias: Tensor | None, bias_k: Tensor | None,
    bias_v: Tensor | None, norm: Norm | None, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor | None,
    sin: Tensor | None, attn_mask: Tensor | None, key_padding_mask: Tensor | None,
    adapters: tuple[LowRank | None, ...],
) -> Operands:  # fmt: skip
    """The tensors by the names that messages use, once they are tensors."""
    operands = {
        "query": query, "key": key, "value": value,
        **{f"in_proj_weight{part}": w for part, w in weights.items()},
        **{f"in_proj_bias{part}": b for part, b in biases.items()},
        "out_proj_weight": out_proj_weight, "out_proj_bias": out_proj_bias, "bias_k": bias_k, "bias_v": bias_v,
        "norm.weight": norm.weight if norm else None, "norm.bias": norm.bias if norm else None,
        "q_norm": q_norm, "k_norm": k_norm, "rotary[0]": cos, "rotary[1]": sin,
        "attn_mask": attn_mask, "key_padding_mask": key_padding_mask,
    }  # fmt: skip
    for name, adapter in zip(ADAPTERS, adapters, strict=True):
        operands |= {f"{name}.a": adapter and adapter.a, f"{name}.b": adapter and adapter.b}
    required = [f"in_proj_weight{part}" for part in weights]
    check_tensors(operands, required=("query", "out_proj_weight", *required))
    check_strided(operands)
    return operands


def _three(name: str, value: Tensor | Three | None) -> dict[str, Tensor | None]:
    """The parts of a projection by the suffix that names them: one packed tensor, or those of q, k and v."""
    if not isinstance(value, (tuple, list)):
        return {"": value}
    if len(value) != 3:
        raise ValueError(f"{name} must be one packed tensor or a tuple of three (q, k, v), got {len(value)} parts")
    return {f"[{i}]": part for i, part in enumerate(value)}


def _padded(parts: dict[str, Tensor | None]) -> list[Tensor | None]:
    return [*parts.values(), None, None][:3]


def _check_adapters(adapters: tuple[LowRank | None, ...], weights: dict[str, Tensor]) -> None:
    for name, adapter in zip(ADAPTERS, adapters, strict=True):
        check_low_rank(name, adapter)
        if adapter is not None and name != "out_adapter" and len(weights) == 1:
            raise ValueError(
                f"{name} adapts one of three projections, but in_proj_weight is one packed tensor; pass a tuple of "
                "three weights, e.g. in_proj_weight.split(rows)"
            )


def _check_rotary(rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    if rotary is None:
        return None, None
    is_pair = isinstance(rotary, (tuple, list)) and len(rotary) == 2
    if not is_pair or not all(isinstance(t, Tensor) for t in rotary):
        got = [type(t).__name__ for t in rotary] if is_pair else type(rotary).__name__
        raise TypeError(f"rotary must be a pair (cos, sin) of tensors, got {got}")
    return tuple(rotary)


def _why_rotary_is_learned(cos: Tensor | None, sin: Tensor | None) -> str | None:
    learned = any(t is not None and t.requires_grad for t in (cos, sin)) and torch.is_grad_enabled()
    return "rotary angles that require grad have no fused gradient" if learned else None


def _reference(
    dtype: torch.dtype, query: Tensor, key: Tensor | None, value: Tensor | None, weights: dict[str, Tensor],
    biases: dict[str, Tensor | None], w_out: Tensor, b_out: Tensor | None, num_heads: int, num_kv_heads: int,
    *, norm: Norm | None, **settings: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`reference.multi_head_attention` of operands in the compute dtype, with packed projections taken apart."""

    def cast(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.to(dtype)

    weights, biases = reference.unpack_projections(
        [cast(w) for w in _padded(weights)], [cast(b) for b in _padded(biases)], num_heads, num_kv_heads,
        w_out.shape[1] // num_heads,
    )  # fmt: skip
    settings["adapters"] = [a and LowRank(cast(a.a), cast(a.b), a.scale) for a in settings["adapters"]]
    tensors = ("bias_k", "bias_v", "q_norm", "k_norm")
    settings = {name: cast(t) if name in tensors else t for name, t in settings.items()}
    if settings["rotary"] is not None:
        settings["rotary"] = tuple(cast(t) for t in settings["rotary"])
    norm = norm and Norm(norm.kind, cast(norm.weight), cast(norm.bias), norm.eps)
    return reference.multi_head_attention(
        cast(query), cast(key), cast(value), weights, biases, cast(w_out), cast(b_out), num_heads,
        num_kv_heads, norm=norm, **settings,
    )  # fmt: skip
