"""What a layout says that a call of the small copy should have returned: the judge of `attention_probe`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat import reference
from fused_remat.convert.attention_call import Inputs, implementation, visible_by
from fused_remat.convert.attention_layer import own_biases, split_rows, with_bias
from fused_remat.convert.attention_layout import AttentionLayout
from fused_remat.convert.fused import Path, find

_TOLERANCE = 1e-5  # relative to the largest element: transformers' eager attention takes its softmax in float32
_ROUNDING = 1e-7
_LENGTH = 5


@dataclass(frozen=True)
class Scenario:
    """One call of the copy."""

    name: str  # of what it shows; in AttentionLayout.accepts
    training: bool = False
    mask: tuple[str, int] | None = None  # "bool" or "float", and its dims
    crossed: bool = False  # with other keys than its input
    dropped: bool = False  # half of the attention weights
    causal: bool = False  # asked to be
    biased: bool = True  # given a position bias, where it takes one
    length: int = _LENGTH  # tokens


@dataclass(frozen=True)
class Observation:
    """What one call returned: the copy, what it was given, its output and gradients for a random one."""

    scenario: Scenario
    copy: nn.Module
    inputs: Inputs
    returns: str
    dout: Tensor
    y: Tensor
    gradients: tuple[Tensor | None, ...]  # of x and the weights
    factors: dict[Path, float]
    context: Tensor  # [B, L, H Ev], what the output projection was given


class Recording(nn.Module):
    """A linear that remembers what it was given."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.__dict__["linear"], self.__dict__["given"] = linear, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.linear, name)

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["given"] = x
        return self.linear(x)


def leaves_of(copy: nn.Module, layout: AttentionLayout) -> list[Tensor]:
    linears = [find(copy, path) for path in layout.linears]
    return [t for linear in linears for t in (linear.weight, linear.bias) if t is not None]


def why_not_attention(layout: AttentionLayout, seen: Observation) -> str | None:
    if seen.scenario.dropped:
        return _why_not_dropped(layout, seen)
    expected = _expected(layout, seen)
    if isinstance(expected, str):
        return expected
    where = seen.scenario.name
    if not _close(seen.y, expected):
        return f"its forward computes something else {where}: outputs differ"
    leaves = [seen.inputs.x, *leaves_of(seen.copy, layout)]
    wanted = torch.autograd.grad(expected, leaves, seen.dout, allow_unused=True)
    # What is 0 in theory (the gradient of a key's bias) is the rounding of sums as large as the largest.
    rounding = _ROUNDING * max(float(t.abs().amax()) for t in wanted if t is not None)
    for got, want in zip(seen.gradients, wanted, strict=True):
        got, want = (torch.zeros(()) if t is None else t for t in (got, want))
        if not _close(got.expand(want.shape) if got.dim() == 0 else got, want, rounding):
            return f"its forward computes something else {where}: gradients differ"
    return None


def _why_not_dropped(layout: AttentionLayout, seen: Observation) -> str | None:
    """Every token was the same, so that all weights of a query drop out to one factor for all features of a head.

    Dropout of values, features or heads makes other patterns, and what drops the output is not what it is made from.
    """
    where = f"its forward computes something else {seen.scenario.name}"
    heads = seen.context.detach().unflatten(-1, (layout.num_heads, -1))
    kept = _expected_context(layout, seen)
    factors = (heads * kept).sum(-1, keepdim=True) / kept.square().sum(-1, keepdim=True)
    if not _close(heads, factors * kept):
        return f"{where}: it drops features or values"
    # Sums of some weights have many sizes, unlike those of heads dropped whole, or of weights made to sum up again.
    if factors.round(decimals=3).unique().numel() <= 2 or not 0.5 < factors.mean() < 1.5:
        return f"{where}: it drops none, all of a head, or makes the rest sum up again"
    y = F.linear(seen.context, _weight(find(seen.copy, layout.out)), find(seen.copy, layout.out).bias)
    return None if _close(seen.y, _after(layout, seen, y)) else f"{where}: it drops what comes after"


def _expected_context(layout: AttentionLayout, seen: Observation) -> Tensor:
    """What attention makes of equal tokens: their value, [1, 1, H, Ev]; the same for every query."""
    weights, biases = unpacked(seen.copy, layout)
    token = (seen.inputs.x if seen.inputs.keys is None else seen.inputs.keys)[:1, :1].detach()
    value = F.linear(token, weights[2], biases[2]).detach().unflatten(-1, (layout.num_kv_heads, -1))
    return value.repeat_interleave(layout.num_heads // layout.num_kv_heads, dim=2)


def _after(layout: AttentionLayout, seen: Observation, y: Tensor) -> Tensor:
    for path in layout.after:
        y = y * seen.factors[path]
    return (y + seen.inputs.x) * seen.factors[layout.norm] if layout.norm else y


def _close(actual: Tensor, expected: Tensor, rounding: float = 0.0) -> bool:
    scale = 1.0 + rounding + (expected.abs().amax() if expected.numel() else 0.0)
    same_shape = actual.shape == expected.shape or expected.dim() == 0
    return same_shape and bool(((actual - expected).abs() <= _TOLERANCE * scale).all())


def _expected(layout: AttentionLayout, seen: Observation) -> Tensor | str:
    copy = seen.copy
    inputs = with_bias(copy, layout, seen.inputs)
    visible = (
        inputs if isinstance(inputs, str) else visible_by(inputs, implementation(copy, layout.core), layout.causal)
    )
    if isinstance(visible, str):
        return visible
    mask, key_mask, causal = visible
    x = inputs.x
    weights, biases = unpacked(copy, layout)
    out = find(copy, layout.out)
    norms = [find(copy, path).norm if path else None for path in (layout.q_norm, layout.k_norm)]
    settings: dict[str, Any] = {} if layout.softcap is None else {"softcap": layout.softcap}
    y, _ = reference.multi_head_attention(
        x, inputs.keys, None, weights, biases, _weight(out), out.bias, layout.num_heads, layout.num_kv_heads,
        q_norm=norms[0] and norms[0].weight, k_norm=norms[1] and norms[1].weight,
        qk_norm_eps=norms[0].eps if norms[0] else 1e-6, rotary=inputs.rotary and _three_dims(inputs.rotary),
        rotary_interleaved=layout.interleaved, attn_mask=mask, key_padding_mask=key_mask,
        causal="top_left" if causal else None, scale=layout.scale, **settings,
    )  # fmt: skip
    return _after(layout, seen, y)


def _three_dims(rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return tuple(t if t.dim() == 3 else t.unsqueeze(0) for t in rotary)


def _weight(linear: nn.Module) -> Tensor:
    linear = linear.linear if isinstance(linear, Recording) else linear
    return linear.weight if isinstance(linear, nn.Linear) else linear.weight.t()


def unpacked(copy: nn.Module, layout: AttentionLayout) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Weights and biases of q, k and v, each [rows, columns] and [rows]."""
    linears = [find(copy, path) for path in (layout.q, layout.k, layout.v)]
    weights, biases = [_weight(linear) for linear in linears], [linear.bias for linear in linears]
    own = own_biases(copy, layout)
    if layout.packing:
        weights = [w.flatten(0, -2) for w in split_rows(layout, weights[0])]
        biases = biases if biases[0] is None else [b.flatten() for b in split_rows(layout, biases[0])]
    return tuple(weights), tuple(own or biases)
