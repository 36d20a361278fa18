"""Half-precision attention as torch's own fused kernels compute it: what the error of other kernels is compared with.

Softmax's backward subtracts from each row of dP its `delta`, which is `sum(P dP)` and just as well `sum(dout out)`. The
reference, which has P, sums the first in float32; kernels that rebuild P, torch's and ours alike, sum the second, of
the `out` that was rounded. Where a row of P is nearly one-hot, `dP - delta` cancels, and that rounding is most of the
error of dq and dk: with normalised q and k it makes the gradients of these norms three times as wrong as the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fused_remat import reference


@contextmanager
def rounded_delta() -> Iterator[None]:
    """The reference's attention takes delta from the rounded `out` meanwhile; forward stays what it is."""
    law = reference.attention

    def attention(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse, probabilities = law(q.to(wide), k.to(wide), v.to(wide), **settings)
        return *_RoundedOut.apply(out, lse, q.dtype), probabilities.to(q.dtype)

    reference.attention = attention
    try:
        yield
    finally:
        reference.attention = law


class _RoundedOut(torch.autograd.Function):
    """Rounds `out` [B, H, L, E] and adds to the gradient of `lse` [B, H, L], which softmax's backward multiplies by P,
    what delta loses by it."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rounded = out.to(dtype)
        ctx.save_for_backward(out - rounded)
        return rounded, lse.clone()

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, None]:
        (lost,) = ctx.saved_tensors
        dout = dout.to(lost.dtype)
        return dout, dlse + (dout * lost).sum(-1), None
