"""Plain, differentiable torch for every op: the specification that each kernel is judged against.

No tricks and no memory savings: everything is materialised. It runs on any device and dtype, is differentiable as
often as one likes, and is what functorch transforms, forward-mode AD, tensor subclasses, complex dtypes and
installs without the compiled extension use.

Dims: `M` token rows, `D` model width, `F` hidden width; `B` batch, `Lq`/`Lk` lengths, `H`/`Hk` query / key-value heads,
`E` head width, `Ev` value width. Maths: docs/math.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_remat.activations import ACTIVATIONS
from fused_remat.plain import is_dtensor
from fused_remat.settings import LowRank, Norm

# Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, table 2 and section 3.3).
_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW_32 = 0xFFFFFFFF


def draw_seed(device: torch.device) -> Tensor:
    """One int64 [1] draw from torch's default generator of `device`: the key of a call's dropout mask."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def philox_words(seed: Tensor, counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four 32-bit words (as int64) of Philox4x32-10 for each 64-bit `counter`, keyed by int64 `seed` [1].

    The high counter words are 0. int64 products wrap modulo 2^64, which keeps both halves of a 32 x 32 product exact.
    """
    key = [seed & _LOW_32, (seed >> 32) & _LOW_32]
    words = [counter & _LOW_32, (counter >> 32) & _LOW_32, torch.zeros_like(counter), torch.zeros_like(counter)]
    for _ in range(_PHILOX_ROUNDS):
        product0 = words[0] * _PHILOX_MULTIPLIERS[0]
        product1 = words[2] * _PHILOX_MULTIPLIERS[1]
        words = [
            ((product1 >> 32) & _LOW_32) ^ words[1] ^ key[0],
            product1 & _LOW_32,
            ((product0 >> 32) & _LOW_32) ^ words[3] ^ key[1],
            product0 & _LOW_32,
        ]
        key = [(key[0] + _PHILOX_WEYL[0]) & _LOW_32, (key[1] + _PHILOX_WEYL[1]) & _LOW_32]
    return words[0], words[1], words[2], words[3]


def dropout_mask(seed: Tensor, p: float, shape: Sequence[int]) -> Tensor:
    """Bool of that shape, True = kept; each element by `seed` and its row-major linear index alone."""
    index = torch.arange(math.prod(shape), dtype=torch.int64, device=seed.device)
    lanes = torch.stack(philox_words(seed, index >> 2), dim=-1)
    word = lanes.gather(-1, (index & 3).unsqueeze(-1)).squeeze(-1)
    return (word >= round(p * 2**32)).view(shape)


def dropout(values: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """`values` with dropped elements 0 and the others scaled by 1 / (1 - p); a seed is drawn where none is given."""
    if p == 0.0:
        return values
    seed = draw_seed(values.device) if seed is None else seed
    mask = dropout_mask(seed, p, values.shape)
    if is_dtensor(values):  # a rank has all of the mask, as it numbers all of the values
        mask = type(values).from_local(mask, values.device_mesh, run_check=False)
    return torch.where(mask, values * (1.0 / (1.0 - p)), 0.0)


def normalize(x: Tensor, norm: Norm | None) -> Tensor:
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019) of the last dim; x itself without a norm."""
    if norm is None:
        return x
    if norm.kind == "layer_norm":
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    return _rms_norm(x, norm.weight, norm.eps)


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled if weight is None else scaled * weight).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, adapter: LowRank | None = None) -> Tensor:
    """`x weight^T + bias + scale (x a^T) b^T`, the factors of the adapter in x's dtype (Hu et al. 2021)."""
    y = F.linear(x, weight, bias)
    if adapter is None:
        return y
    return y + F.linear(F.linear(x, adapter.a.to(x.dtype)), adapter.b.to(x.dtype)) * adapter.scale


def mlp(
    x: Tensor,  # [..., D]
    w_up: Tensor,  # [F, D]
    w_down: Tensor,  # [D_out, F]
    b_up: Tensor | None = None,  # [F]
    b_down: Tensor | None = None,  # [D_out]
    *,
    w_gate: Tensor | None = None,  # [F, D]
    b_gate: Tensor | None = None,  # [F]
    up_adapter: LowRank | None = None,
    gate_adapter: LowRank | None = None,
    down_adapter: LowRank | None = None,
    norm: Norm | None = None,
    activation: str = "gelu",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,  # int64 [1]; drawn here when dropout is on and none is given
) -> Tensor:
    """`dropout(act(n w_up^T + b_up)) w_down^T + b_down` of `n = norm(x)`, or gated: `hidden = act(gate) * up`.

    An adapter adds its product to that of its weight. Returns [..., D_out].
    """
    act = ACTIVATIONS[activation]
    x = normalize(x, norm)
    up = linear(x, w_up, b_up, up_adapter)
    hidden = act(up) if w_gate is None else act(linear(x, w_gate, b_gate, gate_adapter)) * up
    return linear(dropout(hidden, dropout_p, seed), w_down, b_down, down_adapter)


def visible(
    length_q: int, length_k: int, causal: str | None, window: tuple[int | None, int | None], device: torch.device
) -> Tensor | None:
    """Bool [Lq, Lk], True where a query may see a key by position; None where it may see all of them.

    Positions are compared in the corner that `causal` names ("top_left", also for None, or "bottom_right").
    """
    left, right = window
    if causal is not None:
        right = 0 if right is None else min(right, 0)
    if left is None and right is None:
        return None
    shift = length_k - length_q if causal == "bottom_right" else 0
    distance = torch.arange(length_k, device=device) - torch.arange(length_q, device=device).unsqueeze(1) - shift
    seen = torch.ones(length_q, length_k, dtype=torch.bool, device=device)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


def attention(
    q: Tensor,  # [B, H, Lq, E]
    k: Tensor,  # [B, Hk, Lk, E]
    v: Tensor,  # [B, Hk, Lk, Ev]
    *,
    attn_mask: Tensor | None = None,  # 4-D, each dim 1 or that of [B, H, Lq, Lk]: bool, True = take part, or added
    key_padding_mask: Tensor | None = None,  # [B, Lk], likewise
    causal: str | None = None,  # "top_left" or "bottom_right"
    window: tuple[int | None, int | None] = (None, None),
    extra_keys: int = 0,  # this many last keys are beyond masks, causality and window: always visible
    dropout_p: float = 0.0,
    scale: float | None = None,
    softcap: float | None = None,
    seed: Tensor | None = None,  # int64 [1]; drawn here when dropout is on and none is given
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax attention (Vaswani et al. 2017), key-value heads shared by groups of query heads (Ainslie et al. 2023).

    Returns out [B, H, Lq, Ev]; lse [B, H, Lq], the log of the sum of exponentials, -inf for a row with nothing to
    attend to; and the probabilities after dropout [B, H, Lq, Lk]. Half-precision inputs are computed in float32. A row
    with nothing to attend to gives zeros, and zero gradients. With `softcap` the scaled scores become
    `softcap * tanh(scores / softcap)` before masks (Gemma Team, "Gemma 2", 2024, section 2).
    """
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    repeats = q.shape[1] // max(k.shape[1], 1)
    q, k, v = q.to(wide), *(t.to(wide).repeat_interleave(repeats, dim=1) for t in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q @ k.transpose(-2, -1)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    masked = k.shape[2] - extra_keys
    seen = visible(q.shape[2], masked, causal, window, q.device)
    for mask in (seen, attn_mask, None if key_padding_mask is None else key_padding_mask[:, None, None]):
        if mask is None:
            continue
        if extra_keys:
            mask = F.pad(mask.expand(*mask.shape[:-1], masked), (0, extra_keys), value=mask.dtype == torch.bool)
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(wide)
    # Rows of -inf alone: their softmax and its gradient would be NaN, so they enter as zeros and leave as zeros.
    empty = (scores == -math.inf).all(-1, keepdim=True)
    lse = torch.where(empty.squeeze(-1), -math.inf, torch.logsumexp(scores.masked_fill(empty, 0.0), dim=-1))
    probabilities = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
    probabilities = dropout(probabilities, dropout_p, seed)
    return (probabilities @ v).to(dtype), lse, probabilities.to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding (Su et al. 2021) of the first R features of x [B, H, L, E]; cos and sin are [1 or B, L, R].

    `x cos + turned(x) sin`, where `turned` maps a pair (a, b) to (-b, a). Pairs are (i, i + R / 2), as in Llama, or
    (2 i, 2 i + 1) where `interleaved`, as in GPT-J.
    """
    rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if interleaved:
        turned = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = rotated.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    return torch.cat((rotated * cos.unsqueeze(1) + turned * sin.unsqueeze(1), rest), dim=-1)


def head_width(w_q: Sequence[int], packed: bool, num_heads: int, num_kv_heads: int, value_width: int) -> int:
    """E, from the shape of w_q: [heads, E, D], or rows of q alone, or those of k and v too where it is `packed`."""
    if len(w_q) == 3:
        return w_q[1]
    if packed:
        return (w_q[0] - num_kv_heads * value_width) // (num_heads + num_kv_heads)
    return w_q[0] // num_heads


def unpack_projections(
    weights: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    num_heads: int,
    num_kv_heads: int,
    value_width: int,
) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """Weights [rows, D] and biases [rows] of q, k and v, from what `multi_head_attention` of the package takes."""
    packed = weights[1] is None
    width = head_width(weights[0].shape, packed, num_heads, num_kv_heads, value_width)
    rows = (num_heads * width, num_kv_heads * width, num_kv_heads * value_width)
    if packed:
        weights = weights[0].split(rows)
    if biases[0] is not None and biases[0].numel() != rows[0]:
        biases = biases[0].split(rows)
    weights = [w.flatten(0, 1) if w.dim() == 3 else w for w in weights]
    return weights, [b.flatten() if b is not None and b.dim() == 2 else b for b in biases]


def multi_head_attention(
    query: Tensor,  # [B, Lq, Dq]
    key: Tensor | None,  # [B, Lk, Dk]; None: the (normalised) query
    value: Tensor | None,  # [B, Lk, Dv]; None: the key
    weights: tuple[Tensor, Tensor, Tensor],  # of q [H E, Dq], k [Hk E, Dk], v [Hk Ev, Dv]
    biases: tuple[Tensor | None, Tensor | None, Tensor | None],
    w_out: Tensor,  # [Do, H Ev]
    b_out: Tensor | None,  # [Do]
    num_heads: int,
    num_kv_heads: int,
    *,
    bias_k: Tensor | None = None,  # [Hk E]: one more key, the same in every sample, after those of `key`
    bias_v: Tensor | None = None,  # [Hk Ev]
    add_zero_attn: bool = False,  # one more key and value of zeros, last
    norm: Norm | None = None,
    q_norm: Tensor | None = None,  # [E]: weight of an RMSNorm over each query head
    k_norm: Tensor | None = None,  # [E]
    qk_norm_eps: float = 1e-6,
    rotary: tuple[Tensor, Tensor] | None = None,  # cos and sin, [1 or B, L, R]
    rotary_interleaved: bool = False,
    average_attn_weights: bool = True,
    adapters: Sequence[LowRank | None] = (None,) * 4,  # of q, k, v and the output projection
    **attention_settings: object,  # masks, causal, window, dropout_p, scale, softcap, seed of `attention`
) -> tuple[Tensor, Tensor]:
    """Projections, attention and output projection; returns y [B, Lq, Do] and the attention weights after dropout.

    The weights are [B, Lq, Lk + extra], averaged over heads, or [B, H, Lq, Lk + extra].
    """
    query = normalize(query, norm)
    key = query if key is None else key
    value = key if value is None else value
    q, k, v = (
        linear(x, weight, bias, adapter).unflatten(-1, (heads, -1)).transpose(1, 2)
        for x, weight, bias, adapter, heads in zip(
            (query, key, value), weights, biases, adapters[:3], (num_heads, num_kv_heads, num_kv_heads), strict=True
        )
    )
    q, k = (t if n is None else _rms_norm(t, n, qk_norm_eps) for t, n in ((q, q_norm), (k, k_norm)))
    if rotary is not None:
        q, k = (rotate(t, *rotary, rotary_interleaved) for t in (q, k))
    extra = []
    if bias_k is not None:
        extra.append(tuple(b.view(1, num_kv_heads, 1, -1).expand(k.shape[0], -1, -1, -1) for b in (bias_k, bias_v)))
    if add_zero_attn:
        extra.append(tuple(t.new_zeros(t.shape[0], t.shape[1], 1, t.shape[3]) for t in (k, v)))
    for extra_k, extra_v in extra:
        k, v = torch.cat((k, extra_k), dim=2), torch.cat((v, extra_v), dim=2)
    out, _, probabilities = attention(q, k, v, extra_keys=len(extra), **attention_settings)
    y = linear(out.transpose(1, 2).flatten(-2), w_out, b_out, adapters[3])
    return y, probabilities.mean(dim=1) if average_attn_weights else probabilities
