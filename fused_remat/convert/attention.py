"""A converted nn.MultiheadAttention: whether it can run fused, and the fused call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fused_remat.convert.fused import note_own_code
from fused_remat.convert.keep import of_workspace
from fused_remat.convert.norms import source_of
from fused_remat.convert.rebind import original_class
from fused_remat.nn.attend import Result, attend, why_not_plain_out_proj
from fused_remat.nn.attention import must_run_stock
from fused_remat.plain import PLAIN_TENSOR_TYPES, class_name, is_plain_input, why_weights_unfit
from fused_remat.settings import Norm

_IN_PROJ = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v")


@dataclass(frozen=True)
class FusedAttention:
    """What the fused call of an attention relies on: `keep`, and whether it ever makes weights."""

    keep: tuple[str, ...]
    need_weights: bool = True
    workspace: int | None = None  # bytes; None: whatever is in force when it is called
    method: ClassVar[str] = "forward"
    kind: ClassVar[str] = "attention"
    takes_norm: ClassVar[bool] = True

    def describe(self) -> str:
        return f"attention, keep={self.keep}{of_workspace(self.workspace)}{'' if self.need_weights else ', no weights'}"

    def run(
        self,
        layer: nn.MultiheadAttention,
        stock: Callable[[], Result],
        /,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Result:
        reason = _why_stock(layer, query, key, value)
        if reason is not None:
            note_own_code(layer, reason)
            y, weights = stock()
            return y, weights if self.need_weights else None
        query, key, value, norm = before_norm(query, key, value)
        return attend(
            layer, query, key, value, key_padding_mask, need_weights and self.need_weights, attn_mask,
            average_attn_weights, is_causal, keep=self.keep, norm=norm, workspace=self.workspace,
        )  # fmt: skip


def before_norm(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Norm | None]:
    """What a norm made these inputs from, and that norm, if a fused call can start there; else they themselves."""
    source, norm = source_of(query) or (query, None)
    # A norm of the query goes to key and value where they are the query; not to the value alone, and not to what it
    # was made from.
    if norm is not None and ((value is query and key is not query) or key is source or value is source):
        source, norm = query, None
    key, value = (source if x is query else x for x in (key, value))
    return source, key, value, norm


def _why_stock(layer: nn.MultiheadAttention, *inputs: Tensor) -> str | None:
    """Why this call must run the layer's own code; None if the fused one computes the same."""
    for x in inputs:
        if isinstance(x, Tensor) and not is_plain_input(x):
            return "an input is a nested tensor" if x.is_nested else f"an input is a {type(x).__name__}"
    return "every probability is dropped" if must_run_stock(layer, inputs[0]) else why_changed(layer)


def why_changed(layer: nn.MultiheadAttention) -> str | None:
    """Why `layer` must run its own code: a part is not plain; None if all are."""
    if "parametrizations" in layer._modules:  # whose code runs whenever a weight is read, and may change them
        return "has parametrizations"
    reason = why_not_plain_out_proj(layer)
    if reason is not None:
        return f"out_proj {reason}"
    tensors = [layer.out_proj.weight]
    for name in _IN_PROJ:
        tensor = getattr(layer, name)
        if tensor is None:
            continue
        if type(tensor) not in PLAIN_TENSOR_TYPES:
            return f"{name} is a {type(tensor).__name__}"
        tensors.append(tensor)
    return why_weights_unfit(*tensors)


def examine_attention(layer: nn.Module, keep: tuple[str, ...], need_weights: bool) -> FusedAttention | str | None:
    """The record with which `layer` can run fused, the reason why it cannot, or None if it is no attention."""
    if not isinstance(layer, nn.MultiheadAttention):
        return None
    cls = original_class(layer)
    if cls is not nn.MultiheadAttention:
        return f"is a {class_name(cls)}, a subclass of nn.MultiheadAttention that may compute something else"
    if "forward" in vars(layer):
        return "has a forward of its own on the instance"
    return why_changed(layer) or FusedAttention(keep, need_weights)
