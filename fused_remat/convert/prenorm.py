"""Blocks whose pre-norms are folded into the fused calls behind them, so that only the residual stream is kept.

Each block here is stock code written again with `attention(norm(x))` and `mlp(norm(x))` as one step, which is one
fused call where norm and layer are plain, and the two calls where they are not. `examine_block` believes it only after
both versions gave the same result on a tiny block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fused_remat.convert.attention import FusedAttention
from fused_remat.convert.behaviour import isolated
from fused_remat.convert.fused import Fused, run, why_stock
from fused_remat.convert.rebind import bind, original_class, records_of, runs_record
from fused_remat.nn.attend import has_own_pre_hooks
from fused_remat.plain import PLAIN_TENSOR_TYPES, is_plain_input, why_not_plain, why_watched
from fused_remat.settings import Norm

_NORM_FORWARDS = {cls: cls.forward for cls in (nn.LayerNorm, nn.RMSNorm)}


def foldable(norm: nn.Module, x: Tensor) -> Norm | None:
    """What a fused call needs in order to apply `norm` to `x` itself; None if `norm` has to be called."""
    if not is_plain_input(x) or why_watched() is not None:
        return None
    cls = type(norm)
    if cls not in _NORM_FORWARDS or cls.forward is not _NORM_FORWARDS[cls] or why_not_plain(norm, cls) is not None:
        return None
    if norm.normalized_shape != tuple(x.shape[-1:]):
        return None
    weight, bias = norm.weight, getattr(norm, "bias", None)
    for tensor in (weight, bias):
        if tensor is not None and (type(tensor) not in PLAIN_TENSOR_TYPES or tensor.dtype != x.dtype):
            return None
    if cls is nn.LayerNorm:
        return Norm("layer_norm", weight, bias, norm.eps)
    return Norm("rms_norm", weight, None, torch.finfo(x.dtype).eps if norm.eps is None else norm.eps)


def _is_called_plainly(module: nn.Module) -> bool:
    """Whether nothing but its fused forward happens when the converted `module` is called."""
    hooks = module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    return not hooks and not has_own_pre_hooks(module) and runs_record(module, "forward")


def _attention(
    norm: nn.Module, attention: nn.Module, x: Tensor, memory: Tensor | None = None, **options: Any
) -> Tensor:
    """The output of `attention(norm(x), memory, memory, need_weights=False)`; of `norm(x)` alone without memory."""
    record = records_of(attention).get("forward")
    folded = foldable(norm, x) if isinstance(record, FusedAttention) and _is_called_plainly(attention) else None

    def stock() -> tuple[Tensor, None]:
        query = norm(x)
        inputs = (query, query, query) if memory is None else (query, memory, memory)
        return attention(*inputs, need_weights=False, **options)

    if folded is None:
        return stock()[0]
    inputs = (x, x, x) if memory is None else (x, memory, memory)
    return record.run(attention, stock, *inputs, need_weights=False, norm=folded, **options)[0]


def _mlp(norm: nn.Module, owner: nn.Module, method: str, x: Tensor) -> Tensor:
    """`owner.method(norm(x))`, which is a call of `owner` for "forward"."""
    record = records_of(owner).get(method)
    plainly = _is_called_plainly(owner) if method == "forward" else runs_record(owner, method)
    if isinstance(record, Fused) and record.takes_norm and plainly and why_stock(owner, record, x) is None:
        folded = foldable(norm, x)
        if folded is not None:
            return run(owner, record, x, folded)
    return owner(norm(x)) if method == "forward" else getattr(owner, method)(norm(x))


def _encoder_layer(
    layer: nn.TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask, "is_causal": is_causal}
    x = src + layer.dropout1(_attention(layer.norm1, layer.self_attn, src, **masks))
    return x + _mlp(layer.norm2, layer, "_ff_block", x)


def _decoder_layer(
    layer: nn.TransformerDecoderLayer,
    tgt: Tensor,
    memory: Tensor,
    tgt_mask: Tensor | None = None,
    memory_mask: Tensor | None = None,
    tgt_key_padding_mask: Tensor | None = None,
    memory_key_padding_mask: Tensor | None = None,
    tgt_is_causal: bool = False,
    memory_is_causal: bool = False,
) -> Tensor:
    masks = {"attn_mask": tgt_mask, "key_padding_mask": tgt_key_padding_mask, "is_causal": tgt_is_causal}
    x = tgt + layer.dropout1(_attention(layer.norm1, layer.self_attn, tgt, **masks))
    masks = {"attn_mask": memory_mask, "key_padding_mask": memory_key_padding_mask, "is_causal": memory_is_causal}
    x = x + layer.dropout2(_attention(layer.norm2, layer.multihead_attn, x, memory, **masks))
    return x + _mlp(layer.norm3, layer, "_ff_block", x)


def _vision_block(layer: nn.Module, input: Tensor) -> Tensor:
    x = input + layer.dropout(_attention(layer.ln_1, layer.self_attention, input))
    return x + _mlp(layer.ln_2, layer.mlp, "forward", x)


@dataclass(frozen=True)
class Block:
    """A kind of block: its code written again, and where norms meet fused layers."""

    forward: Callable[..., Tensor]
    attentions: tuple[str, ...]  # children
    mlp: str  # the child, "" where the block's own `_ff_block` is the MLP
    inlined: dict[str, Callable[..., Tensor]]  # methods whose work `forward` does, as they were at import
    make: Callable[[type[nn.Module]], nn.Module]  # a tiny one of that class
    inputs: int  # tensors that its forward takes


def _methods(cls: type[nn.Module], *names: str) -> dict[str, Callable[..., Tensor]]:
    return {name: getattr(cls, name) for name in names}


def _tiny_transformer_layer(cls: type[nn.Module]) -> nn.Module:
    return cls(4, 2, 6, dropout=0.0, norm_first=True, batch_first=True)


BLOCKS = {  # by the class
    "torch.nn.modules.transformer.TransformerEncoderLayer": Block(
        _encoder_layer,
        attentions=("self_attn",),
        mlp="",
        inlined=_methods(nn.TransformerEncoderLayer, "_sa_block"),
        make=_tiny_transformer_layer,
        inputs=1,
    ),
    "torch.nn.modules.transformer.TransformerDecoderLayer": Block(
        _decoder_layer,
        attentions=("self_attn", "multihead_attn"),
        mlp="",
        inlined=_methods(nn.TransformerDecoderLayer, "_sa_block", "_mha_block"),
        make=_tiny_transformer_layer,
        inputs=2,
    ),
    "torchvision.models.vision_transformer.EncoderBlock": Block(
        _vision_block,
        attentions=("self_attention",),
        mlp="mlp",
        inlined={},
        make=lambda cls: cls(2, 4, 6, 0.0, 0.0),
        inputs=1,
    ),
}


@dataclass(frozen=True)
class FusedBlock:
    """The record of a block with pre-norms, by its name in BLOCKS."""

    name: str
    method: ClassVar[str] = "forward"
    kind: ClassVar[str] = "block"
    takes_norm: ClassVar[bool] = False

    def describe(self) -> str:
        return "block, pre-norms folded into what they feed"

    def run(self, layer: nn.Module, stock: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Any:
        block = BLOCKS[self.name]
        x = args[0] if args else None
        if not isinstance(x, Tensor) or not is_plain_input(x) or _is_changed(layer, block):
            return stock()
        return block.forward(layer, *args, **kwargs)


def _is_changed(layer: nn.Module, block: Block) -> bool:
    """Whether `layer` no longer does what `block.forward` does."""
    replaced = any(
        name in vars(layer) or getattr(type(layer), name) is not method for name, method in block.inlined.items()
    )
    return replaced or not getattr(layer, "norm_first", True)


def examine_block(layer: nn.Module) -> FusedBlock | None:
    """The record with which `layer` folds its pre-norms; None if it is no block that is known to have some."""
    cls = original_class(layer)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if name not in BLOCKS or "forward" in vars(layer) or _is_changed(layer, BLOCKS[name]):
        return None
    return FusedBlock(name) if _computes_the_same(name, cls, cls.forward) else None


def fused_below(layer: nn.Module, record: FusedBlock) -> list[tuple[nn.Module, str]]:
    """The layers (with their methods) into which the block's norms fold, if those are converted."""
    block = BLOCKS[record.name]
    below = [(layer._modules.get(name), "forward") for name in block.attentions]
    below.append((layer._modules.get(block.mlp), "forward") if block.mlp else (layer, "_ff_block"))
    return [(module, method) for module, method in below if module is not None]


@functools.cache
def _computes_the_same(name: str, cls: type[nn.Module], stock: Callable[..., Any]) -> bool:
    """Whether `stock`, the forward of `cls`, returns on a tiny block what our version does, in either mode."""
    block = BLOCKS[name]
    with isolated():
        try:
            tiny = block.make(cls).double()
            for parameter in tiny.parameters():
                nn.init.normal_(parameter)
            for child in block.attentions:
                bind(tiny._modules[child], FusedAttention(("out",)))
            inputs = [torch.randn(2, 3, 4, dtype=torch.float64) for _ in range(block.inputs)]
            for training in (True, False):
                tiny.train(training)
                ours, theirs = FusedBlock(name).run(tiny, lambda: None, *inputs), stock(tiny, *inputs)
                if ours is None or not torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9):
                    return False
        except Exception:  # another version of the class: other arguments, other children
            return False
    return True
