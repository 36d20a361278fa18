"""What a fused layer keeps for backward by formula: its inputs, and the residuals that its op was told to keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fused_remat import reference
from fused_remat.audit.promises import Promise
from fused_remat.convert.adapters import base_of
from fused_remat.convert.fused import Path, find
from fused_remat.convert.patterns import features
from fused_remat.functional.mlp import kept_features
from fused_remat.functional.operands import Prepared
from fused_remat.last_calls import LastCall
from fused_remat.ops.attention import wide
from fused_remat.settings import Keep

_SEED = 8  # bytes, where there is dropout
# Leading arguments of the ops that are tensors: `ops.mlp` and `ops.multi_head_attention` list them.
_OPERANDS = {"mlp": 15, "multi_head_attention": 29}


@dataclass(frozen=True)
class Need:
    """Of one call of an op: bytes of residuals, and the storages that it reads again: address -> bytes it needs."""

    residual_bytes: int
    operands: dict[int, int]


def need_of(prepared: Prepared, keep: Keep) -> Need:
    """What backward of this call needs, if it will have one, where the layer promised to keep `keep` besides the inputs
    (whatever the op was told)."""
    operands = [t for t in prepared.arguments[: _OPERANDS[prepared.call.op]] if isinstance(t, Tensor)]
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in operands):
        return Need(0, {})
    storages: dict[int, int] = {}
    for t in operands:
        storage = t.untyped_storage()
        read = min(storage.nbytes(), t.numel() * t.element_size())
        storages[storage.data_ptr()] = max(read, storages.get(storage.data_ptr(), 0))
    residuals = _mlp_residuals if prepared.call.op == "mlp" else _attention_residuals
    return Need(residuals(prepared, keep), storages)


def _mlp_residuals(prepared: Prepared, keep: Keep) -> int:
    x, w_up, w_gate, p = (prepared.arguments[i] for i in (0, 1, 5, -4))
    kept = sum(kept_features(keep, w_up.shape[0], gated=w_gate is not None))
    return x.shape[:-1].numel() * kept * prepared.call.dtype.itemsize + _SEED * (p > 0)


def _attention_residuals(prepared: Prepared, keep: Keep) -> int:
    query, key, value, w_q, w_k, *_ = prepared.arguments
    w_out, (heads, kv_heads) = prepared.arguments[9], prepared.arguments[29:31]
    p = prepared.arguments[-10]
    value_width = w_out.shape[1] // heads
    width = reference.head_width(w_q.shape, w_k is None, heads, kv_heads, value_width)
    key = query if key is None else key
    value = key if value is None else value
    rows_q, rows_k, rows_v = (x.shape[0] * x.shape[1] for x in (query, key, value))
    sizes = {
        "q": rows_q * heads * width,
        "k": rows_k * kv_heads * width,
        "v": rows_v * kv_heads * value_width,
        "out": rows_q * heads * value_width,
    }
    elements = sum(sizes[name] for name in keep)
    return _with_lse(elements, rows_q * heads, prepared.call.dtype) + _SEED * (p > 0)


def _with_lse(elements: int, rows: int, dtype: torch.dtype) -> int:
    return elements * dtype.itemsize + rows * wide(dtype).itemsize


def predicted(promise: Promise, call: LastCall) -> int | None:
    """Bytes that a fused call keeps, its inputs included: from what was noted of it alone; None if that is too little.

    Masks, positions and seeds are left out.
    """
    if call.reason is not None or call.op is None or call.backend == "reference":
        return None
    inputs = sum(elements * dtype.itemsize for elements, dtype in call.sizes)
    if call.op.op == "mlp":
        width, _, features = call.op.features
        kept = sum(kept_features(promise.keep, features, gated=promise.kind == "gated mlp"))
        return inputs + call.sizes[0][0] // width * kept * call.op.dtype.itemsize
    shape, widths = _heads(promise), _widths(promise)
    if shape is None or None in widths:
        return None
    heads, kv_heads, width = shape
    rows = [elements // in_features for (elements, _), in_features in zip(call.sizes, widths, strict=False)]
    rows_q, rows_k = rows[0], rows[-1]
    per_row = {"q": rows_q * heads, "k": rows_k * kv_heads, "v": rows_k * kv_heads, "out": rows_q * heads}
    elements = sum(width * count for name, count in per_row.items() if name in promise.keep)
    return inputs + _with_lse(elements, rows_q * heads, call.op.dtype)


def _heads(promise: Promise) -> tuple[int, int, int] | None:
    """Heads, key-value heads and width of a head."""
    if isinstance(promise.layer, nn.MultiheadAttention):
        heads = promise.layer.num_heads
        return heads, heads, promise.layer.embed_dim // heads
    layout = getattr(promise.record, "layout", None)
    width = None if layout is None else _in_features(promise, layout.out)
    if width is None:
        return None
    return layout.num_heads, layout.num_kv_heads, width // layout.num_heads


def _widths(promise: Promise) -> tuple[int | None, int | None]:
    """Of the query and of the key."""
    if isinstance(promise.layer, nn.MultiheadAttention):
        return promise.layer.embed_dim, promise.layer.kdim
    layout = getattr(promise.record, "layout", None)
    return (None, None) if layout is None else (_in_features(promise, layout.q), _in_features(promise, layout.k))


def _in_features(promise: Promise, path: Path) -> int | None:
    """Of the linear at `path`, from its settings: a weight may be made anew whenever it is read."""
    found = features(base_of(find(promise.layer, path)))
    return None if found is None else found[0]
