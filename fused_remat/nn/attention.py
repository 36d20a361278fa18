"""`MultiheadAttention`: nn.MultiheadAttention that keeps its input, its output and one number per query and head."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat import last_calls
from fused_remat.functional.multi_head_attention import RESIDUALS
from fused_remat.nn.attend import Result, attend, check_call, forbid_bypass
from fused_remat.settings import Norm, check_residuals

_DEFAULTS = {"keep": ("out",), "strict": False}


class MultiheadAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention whose q, k, v and probabilities are rebuilt inside backward, head group by head group.

    A drop-in: the same constructor, parameters, initial values, `state_dict`, forward arguments and results, also
    inside nn.Transformer's layers. Where nn.MultiheadAttention answers differently by mode, one rule holds here, in
    training and evaluation, with and without gradients and returned weights:

    - A query that may attend to nothing gets zeros before `out_proj`, weights of zero and finite gradients, never NaN.
    - `is_causal=True` without `attn_mask` means the triangle from the top left corner (query i sees keys 0 to i).
      Beside an `attn_mask` it is a hint: the mask is applied, and the flag changes nothing.
    - The keys that `add_bias_kv` and `add_zero_attn` append are visible to every query, whatever the masks say.
    - Masks of any mix of bool and floating point, of any floating dtype, are accepted, without a warning.
    - Outputs are contiguous.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as
            nn.MultiheadAttention's.
        keep: what backward need not rebuild: any of "q", "k", "v" (as projected) and "out" (of the attention).
        strict: answer as nn.MultiheadAttention does, NaN and errors included, wherever the rules above differ from
            it; such a call runs stock code and keeps what that keeps.

    Shapes: query [L, E], [L, B, E] or (batch_first) [B, L, E], key and value likewise with lengths S and widths kdim
    and vdim; key_padding_mask [S] or [B, S]; attn_mask [L, S] or [B * num_heads, L, S] ([num_heads, L, S] without a
    batch), never expanded. A bool mask is True where a key is masked out, a floating one is added to the scores and may
    require grad. Returns the output, shaped as query, and the weights after dropout, averaged over heads, [L, S + a] or
    [B, L, S + a] with a appended keys, or with a dim H before L unless `average_attn_weights`; None unless
    `need_weights`. Weights are differentiable, and averaged without a [B, H, L, S] tensor.

    An `out_proj` that is not plain (adapter, hook, parametrisation, quantised) is called on the attention's output.

    Raises:
        ValueError: a size below 1, `dropout` outside [0, 1], an unknown name in `keep`; in forward a shape that does
            not fit.
        TypeError: `keep` is not a tuple; in forward a dtype that does not fit.
        AssertionError: embed_dim is no multiple of num_heads.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        keep: tuple[str, ...] = ("out",),
        strict: bool = False,
    ) -> None:
        keep = check_residuals(keep, RESIDUALS, "MultiheadAttention")
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout must be a number in [0, 1], got {dropout!r}")
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.keep = keep
        self.strict = strict
        if not strict:
            forbid_bypass(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(_DEFAULTS | state)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Result:
        args = query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        if torch.compiler.is_compiling() or last_calls.watcher is None:
            return self._run(*args, keep=self.keep)
        with last_calls.watched(self, "forward"):
            return self._run(*args, keep=self.keep)

    def _run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        keep: tuple[str, ...],
        source: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Norm | None]] | None = None,
        workspace: int | None = None,
    ) -> Result:
        """`source`: says what a norm made these inputs from, and that norm, which the fused call then applies."""
        if must_run_stock(self, query):
            last_calls.note_own(self, "the query is nested, or every probability is dropped")
            return super().forward(query, key, value, *args)
        if self.strict and self._stock_differs(query, key, value, *args):
            last_calls.note_own(self, "strict=True, and nn.MultiheadAttention answers this call in its own way")
            return super().forward(query, key, value, *args)
        norm = None
        if source is not None:
            query, key, value, norm = source(query, key, value)
        return attend(self, query, key, value, *args, keep=keep, norm=norm, workspace=workspace)

    def _stock_differs(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> bool:
        """Whether nn.MultiheadAttention may answer this call otherwise than the rules do, with an error included."""
        if is_causal:
            return True
        try:
            check_call(self, query, key, value, key_padding_mask, attn_mask)
        except (TypeError, ValueError):
            return True
        masks = [mask for mask in (key_padding_mask, attn_mask) if mask is not None]
        if need_weights and any(mask.dtype not in (torch.bool, query.dtype) for mask in masks):
            return True
        appended = self.bias_k is not None or self.add_zero_attn
        return not appended and _hides_a_row(key_padding_mask, attn_mask, self.num_heads)

    def extra_repr(self) -> str:
        return f"keep={self.keep}{', strict=True' if self.strict else ''}"


def must_run_stock(module: nn.MultiheadAttention, query: Tensor) -> bool:
    """Whether nn.MultiheadAttention's own code has to take this call: no fused one does the same.

    Nested tensors (inside nn.TransformerEncoder in evaluation), and dropping every probability.
    """
    return getattr(query, "is_nested", False) or (module.training and module.dropout >= 1.0)


def _hides_a_row(key_padding_mask: Tensor | None, attn_mask: Tensor | None, num_heads: int) -> bool:
    """Whether some query of some head may attend to none of at least one key."""
    hidden = None
    if attn_mask is not None:
        hidden = _is_hidden(attn_mask)
        hidden = hidden.unflatten(0, (-1, num_heads)) if hidden.dim() == 3 else hidden
    if key_padding_mask is not None:
        padded = _is_hidden(key_padding_mask).unsqueeze(-2)
        padded = padded.unsqueeze(1) if padded.dim() == 3 else padded
        hidden = padded if hidden is None else hidden | padded
    return hidden is not None and hidden.shape[-1] > 0 and bool(hidden.all(-1).any())


def _is_hidden(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask == -math.inf
