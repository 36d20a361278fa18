"""What the tests of wide gradients and of their sums share: layers in bf16, micro-batches, sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import fused_remat

BF16 = torch.bfloat16
MICRO_BATCHES = 8
# A library product that writes bf16 has rounded already; one tile of one term is then all there is to a gradient.
rounds_products = torch.cpu._is_avx512_bf16_supported()


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    tokens: tuple[int, int]
    width: int = 16

    def layer(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().to(BF16).train()

    def batches(self, dtype: torch.dtype = BF16) -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(1)
        shape = (MICRO_BATCHES, 2, *self.tokens, self.width)
        return [(x.to(dtype), dy.to(dtype)) for x, dy in torch.randn(shape).to(BF16)]


class Attention(nn.Module):
    """Self-attention with packed projections, or attention to some features of x with separate ones."""

    def __init__(self, features: int = 16, **settings) -> None:
        super().__init__()
        self.features = features
        self.attention = fused_remat.MultiheadAttention(
            16, 2, batch_first=True, kdim=features, vdim=features, **settings
        )
        for p in self.parameters():  # biases start as zeros
            nn.init.normal_(p, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        key = x[..., : self.features] if self.features < 16 else x
        return self.attention(x, key, key, need_weights=False)[0]


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, norm_first=True, batch_first=True)
    assert len(fused_remat.convert(layer).converted) >= 2
    return layer


CASES = {
    "mlp-features": Case(lambda: fused_remat.MLP(16, 48), (2, 7)),
    "mlp-tokens": Case(lambda: fused_remat.MLP(16, 24, 16, activation="relu"), (5, 31)),
    "gated-features": Case(lambda: fused_remat.GatedMLP(16, 40, bias=True), (2, 9)),
    "gated-tokens": Case(lambda: fused_remat.GatedMLP(16, 24, bias=True), (5, 33)),
    "attention-packed": Case(Attention, (3, 11)),
    "attention-separate": Case(lambda: Attention(12, add_bias_kv=True), (3, 11)),
    "converted-block": Case(_encoder, (3, 11)),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
# The op takes views of these parameters, and torch rounds the gradient of a view.
VIEWED = {"attention-separate": ("attention.bias_k", "attention.bias_v", "attention.in_proj_bias")}


def gradients(layer: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*layer.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(layer(x), parameters, dy), strict=True))


def sums(case: Case, **settings) -> dict[str, Tensor]:
    """What eight backward passes leave, by the name of the parameter."""
    layer = case.layer()
    if settings:
        fused_remat.accumulate_in_fp32(layer, **settings)
    for x, dy in case.batches():
        layer(x).backward(dy)
    attribute = settings.get("into", "grad")
    return {name: getattr(p, attribute) for name, p in layer.named_parameters()}


def is_rounded(t: Tensor) -> bool:
    return torch.equal(t, t.to(BF16).to(t.dtype))
