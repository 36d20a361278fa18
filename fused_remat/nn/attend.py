"""What every module with nn.MultiheadAttention's parameters does in forward: check, rearrange, one fused call.

Inputs in any layout become batch-first views, masks in torch's convention (True = masked out) become those of
`fused_remat.multi_head_attention` (True = take part), in their own shapes. Dims: `B` batch, `L` queries, `S` keys, `H`
heads, `E` embed_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fused_remat import functional, last_calls
from fused_remat.plain import why_not_plain_linear
from fused_remat.settings import Norm

Result = tuple[Tensor, Tensor | None]


def forbid_bypass(module: nn.Module) -> None:
    """Have nn.TransformerEncoderLayer call `module`.

    In evaluation that layer reads the weights of its attention and never calls it, unless a module in it has a hook.
    """
    if _goes_through not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_goes_through)


def allow_bypass(module: nn.Module) -> None:
    """Undo `forbid_bypass`."""
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _goes_through]:
        del module._forward_pre_hooks[key]


def _goes_through(module: nn.Module, args: tuple[object, ...]) -> None:
    """A forward pre-hook that does nothing."""


def why_not_plain_out_proj(module: nn.Module) -> str | None:
    """Why reading the weight of `module.out_proj` may miss what calling it does; None if it does not."""
    out_proj = module.out_proj
    cls = nn.Linear if type(out_proj) is nn.Linear else NonDynamicallyQuantizableLinear
    return why_not_plain_linear(out_proj, cls)


def attend(
    module: nn.MultiheadAttention,
    query: Tensor,  # [L, E], [L, B, E] or, with batch_first, [B, L, E]
    key: Tensor,  # [S, kdim], ...
    value: Tensor,  # [S, vdim], ...
    key_padding_mask: Tensor | None = None,  # [S] or [B, S]
    need_weights: bool = True,
    attn_mask: Tensor | None = None,  # [L, S] or [B H, L, S]
    average_attn_weights: bool = True,
    is_causal: bool = False,
    *,
    keep: tuple[str, ...],
    norm: Norm | None = None,
    workspace: int | None = None,  # bytes
) -> Result:
    """Output and weights of nn.MultiheadAttention's forward by one fused call, by the rules of `MultiheadAttention`.

    `norm` is applied to the query first, and to the key and value where they are the query. An `out_proj` that is not
    plain is called on the output of the attention.

    Raises TypeError or ValueError as `check_call`, and as `fused_remat.multi_head_attention`.
    """
    check_call(module, query, key, value, key_padding_mask, attn_mask)
    batched = query.dim() == 3
    seq_first = batched and not module.batch_first
    query, key, value = _batch_first(query, key, value, batched, seq_first)
    if key_padding_mask is not None and not batched:
        key_padding_mask = key_padding_mask.unsqueeze(0)
    calls_out_proj = why_not_plain_out_proj(module) is not None
    weight, bias = _in_proj(module)
    last_calls.note_fused(module, query, *(() if key is query else (key,)))
    out = functional.multi_head_attention(
        query,
        key,
        value,
        weight,
        bias,
        torch.eye(module.embed_dim, dtype=query.dtype, device=query.device)
        if calls_out_proj
        else module.out_proj.weight,
        None if calls_out_proj else module.out_proj.bias,
        module.num_heads,
        attn_mask=_take_part(attn_mask, module.num_heads),
        key_padding_mask=_inverted(key_padding_mask),
        # A mask says it all: the flag beside one is a hint.
        is_causal=bool(is_causal) and attn_mask is None,
        dropout_p=module.dropout if module.training else 0.0,
        training=module.training,
        bias_k=None if module.bias_k is None else module.bias_k.flatten(),
        bias_v=None if module.bias_v is None else module.bias_v.flatten(),
        add_zero_attn=bool(module.add_zero_attn),
        norm=norm,
        need_weights=bool(need_weights),
        average_attn_weights=bool(average_attn_weights),
        keep=keep,
        workspace=workspace,
    )
    y, weights = out if need_weights else (out, None)
    if not batched:
        y, weights = y.squeeze(0), None if weights is None else weights.squeeze(0)
    elif seq_first:
        y = y.transpose(0, 1).contiguous()
    return (module.out_proj(y) if calls_out_proj else y), weights


def _batch_first(
    query: Tensor, key: Tensor, value: Tensor, batched: bool, seq_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """[B, length, features] views; what was one tensor stays one."""

    def view(x: Tensor) -> Tensor:
        if not batched:
            return x.unsqueeze(0)
        return x.transpose(0, 1) if seq_first else x

    q = view(query)
    k = q if key is query else view(key)
    return q, k, (q if value is query else k if value is key else view(value))


def _in_proj(
    module: nn.MultiheadAttention,
) -> tuple[Tensor | tuple[Tensor, ...], Tensor | tuple[Tensor, ...] | None]:
    bias = module.in_proj_bias
    if module._qkv_same_embed_dim:
        return module.in_proj_weight, bias
    weights = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    return weights, None if bias is None else bias.chunk(3)


def _inverted(mask: Tensor | None) -> Tensor | None:
    return ~mask if mask is not None and mask.dtype == torch.bool else mask


def _take_part(attn_mask: Tensor | None, num_heads: int) -> Tensor | None:
    """[L, S], or [B, H, L, S] of a mask per head; a bool one inverted, without what only repeats."""
    if attn_mask is None or attn_mask.dim() == 2:
        return _inverted(attn_mask)
    mask = attn_mask.unflatten(0, (attn_mask.shape[0] // num_heads, num_heads))
    if mask.dtype == torch.bool:
        for dim in range(2):
            if mask.stride(dim) == 0 and mask.shape[dim] > 1:
                mask = mask.narrow(dim, 0, 1)
    return _inverted(mask)


def check_call(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> None:
    """Raises unless these arguments of forward fit `module` and each other.

    TypeError: something is no tensor, or a mask is neither bool nor floating point. ValueError: a shape.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
        if mask is not None and not isinstance(mask, Tensor):
            raise TypeError(f"{name} must be a tensor or None, got {type(mask).__name__}")
        if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
            raise TypeError(
                f"{name} must be bool (True = masked out) or floating point (added to the scores), got {mask.dtype}; "
                "convert it, e.g. .bool()"
            )
    layout = "[B, length, features]" if module.batch_first else "[length, B, features]"
    if query.dim() not in (2, 3):
        raise ValueError(f"query must be [length, features] or {layout}, got {list(query.shape)}")
    for name, x, width_name in (
        ("query", query, "embed_dim"),
        ("key", key, "kdim"),
        ("value", value, "vdim"),
    ):
        if x.dim() != query.dim():
            raise ValueError(f"{name} must have {query.dim()} dims, as query has, got {list(x.shape)}")
        width = getattr(module, width_name)
        if x.shape[-1] != width:
            raise ValueError(f"{name} has {x.shape[-1]} features in its last dim, but {width_name} is {width}")
    _check_lengths(module, query, key, value, key_padding_mask, attn_mask, layout)


def _check_lengths(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    layout: str,
) -> None:
    batched, length_dim = query.dim() == 3, int(query.dim() == 3 and module.batch_first)
    length, keys = query.shape[length_dim], key.shape[length_dim]
    batch = query.shape[1 - length_dim] if batched else 1
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(
            f"key and value must have the same length{' and batch size' if batched else ''}, "
            f"got {list(key.shape)} and {list(value.shape)}"
        )
    if batched and key.shape[1 - length_dim] != batch:
        raise ValueError(
            f"query and key must have the same batch size, got {list(query.shape)} and {list(key.shape)} as {layout}; "
            f"batch_first is {module.batch_first}"
        )
    padding_shape = (batch, keys) if batched else (keys,)
    if key_padding_mask is not None and tuple(key_padding_mask.shape) != padding_shape:
        raise ValueError(
            f"key_padding_mask must be {'[B, S]' if batched else '[S]'} = {list(padding_shape)}, "
            f"got {list(key_padding_mask.shape)}"
        )
    shapes = (length, keys), (batch * module.num_heads, length, keys)
    if attn_mask is not None and tuple(attn_mask.shape) not in shapes:
        raise ValueError(
            f"attn_mask must be [L, S] = {list(shapes[0])} or, with one mask per head, "
            f"{'[B * num_heads, L, S]' if batched else '[num_heads, L, S]'} = {list(shapes[1])}, "
            f"got {list(attn_mask.shape)}"
        )
