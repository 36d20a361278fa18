"""What the tests of the attention op share: operands, masks of every kind, the formula written out, gradients."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import torch
from mlp_cases import REFUSED_ON_A_CPU, kernels_of, needs_extension, refused_on_a_cpu, relative_error
from torch import Tensor

import fused_remat
from fused_remat import reference

__all__ = ["REFUSED_ON_A_CPU", "kernels_of", "needs_extension", "refused_on_a_cpu", "relative_error"]
BACKENDS = ("cpp", "aten")


def operands(
    batch: int = 2,
    heads: int = 4,
    length_q: int = 5,
    length_k: int | None = None,
    width: int = 3,
    *,
    kv_heads: int | None = None,
    value_width: int | None = None,
    dtype: torch.dtype = torch.float64,
    requires_grad: bool = True,
) -> dict[str, Tensor]:
    """q, k and v by the argument names of `fused_remat.attention`."""
    kv_heads, length_k = kv_heads or heads, length_q if length_k is None else length_k
    shapes = {
        "q": (batch, heads, length_q, width),
        "k": (batch, kv_heads, length_k, width),
        "v": (batch, kv_heads, length_k, width if value_width is None else value_width),
    }
    return {
        name: torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)
        for name, shape in shapes.items()
    }


def _keys(*shape: int) -> Tensor:
    """Random bool with the first key always open: no row is empty unless a test empties it."""
    mask = torch.rand(shape) < 0.7
    mask[..., 0] = True
    return mask


def _with_an_empty_row(mask: Tensor) -> Tensor:
    mask[..., -1, :] = False if mask.dtype == torch.bool else -math.inf
    return mask


# kind -> (B, H, Lq, Lk, floating dtype) -> mask arguments of the call
MASKS = {
    "none": lambda b, h, i, j, t: {},
    "bool": lambda b, h, i, j, t: {"attn_mask": _keys(b, h, i, j)},
    "bool-shared": lambda b, h, i, j, t: {"attn_mask": _keys(i, j)},
    "bool-per-sample": lambda b, h, i, j, t: {"attn_mask": _keys(b, 1, i, j)},
    "bool-keys": lambda b, h, i, j, t: {"attn_mask": _keys(b, 1, 1, j)},
    "bool-empty-row": lambda b, h, i, j, t: {"attn_mask": _with_an_empty_row(_keys(b, h, i, j))},
    "float": lambda b, h, i, j, t: {"attn_mask": torch.randn(b, h, i, j).to(t)},
    "float-per-head": lambda b, h, i, j, t: {"attn_mask": torch.randn(h, i, j).to(t)},
    "float-per-query": lambda b, h, i, j, t: {"attn_mask": torch.randn(b, 1, i, 1).to(t)},
    "float-keys": lambda b, h, i, j, t: {"attn_mask": torch.randn(1, h, 1, j).to(t)},
    "float-empty-row": lambda b, h, i, j, t: {"attn_mask": _with_an_empty_row(torch.randn(h, i, j).to(t))},
    "padding": lambda b, h, i, j, t: {"key_padding_mask": _keys(b, j)},
    "float-padding": lambda b, h, i, j, t: {"key_padding_mask": torch.randn(b, j).to(t)},
    "empty-sample": lambda b, h, i, j, t: {"key_padding_mask": _with_an_empty_row(_keys(b, j))},
    "bool+padding": lambda b, h, i, j, t: {"attn_mask": _keys(b, h, i, j), "key_padding_mask": _keys(b, j)},
    "float+padding": lambda b, h, i, j, t: {"attn_mask": torch.randn(i, j).to(t), "key_padding_mask": _keys(b, j)},
    "float+float-padding": lambda b, h, i, j, t: {
        "attn_mask": torch.randn(b, 1, i, j).to(t),
        "key_padding_mask": torch.randn(b, j).to(t),
    },
}
# Named by the arguments that ask for them.
BANDS = {
    "full": {},
    "is_causal": {"is_causal": True},
    "top_left": {"causal": "top_left"},
    "bottom_right": {"causal": "bottom_right"},
    "window": {"window": (2, 1)},
    "left-window": {"window": (1, None)},
    "causal-window": {"causal": "bottom_right", "window": (2, 0)},
    "causal-wide-window": {"is_causal": True, "window": (None, 3)},
}


def masks(kind: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mask arguments of that kind for these operands."""
    (batch, heads, length_q, _), length_k = given["q"].shape, given["k"].shape[2]
    return MASKS[kind](batch, heads, length_q, length_k, given["q"].dtype)


def learned(masks: dict[str, Tensor]) -> dict[str, Tensor]:
    """The floating masks among these, requiring gradients."""
    return {name: mask.requires_grad_() for name, mask in masks.items() if mask.is_floating_point()}


def band(length_q: int, length_k: int, *, is_causal=False, causal=None, window=None) -> Tensor:
    """Which key each query may see by position, pair by pair."""
    corner = causal or ("top_left" if is_causal else None)
    shift = length_k - length_q if corner == "bottom_right" else 0
    left, right = window or (None, None)

    def sees(i: int, j: int) -> bool:
        if corner is not None and j > i + shift:
            return False
        return (left is None or j >= i + shift - left) and (right is None or j <= i + shift + right)

    rows = [[sees(i, j) for j in range(length_k)] for i in range(length_q)]
    return torch.tensor(rows, dtype=torch.bool).view(length_q, length_k)


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    kept: Tensor | None = None,  # bool [B, H, Lq, Lk]: what dropout keeps
    dropout_p: float = 0.0,
    **position,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and probabilities by exponentials and sums over whole score tensors."""
    group = q.shape[1] // k.shape[1]
    k, v = (torch.stack([t[:, head // group] for head in range(q.shape[1])], dim=1) for t in (k, v))
    scores = torch.einsum("bhie,bhje->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = softcap - 2 * softcap / ((2 * scores / softcap).exp() + 1)
    seen = band(q.shape[2], k.shape[2], **position).expand(scores.shape)
    padding = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
    for mask in (attn_mask, padding):
        if mask is not None and mask.dtype == torch.bool:
            seen = seen & mask
        elif mask is not None:
            scores = scores + mask
            seen = seen & (mask > -math.inf)
    scores = torch.where(seen, scores, 0.0)
    lowest = torch.finfo(q.dtype).min
    highest = torch.where(seen, scores, lowest).amax(-1, keepdim=True).detach()
    exponentials = torch.where(seen, (scores - highest).exp(), 0.0)
    total = exponentials.sum(-1, keepdim=True)
    empty = ~seen.any(-1, keepdim=True)
    probabilities = exponentials / torch.where(empty, 1.0, total)
    lse = torch.where(empty, -math.inf, torch.where(empty, 1.0, total).log() + highest).squeeze(-1)
    if kept is not None:
        probabilities = torch.where(kept, probabilities / (1 - dropout_p), 0.0)
    return torch.einsum("bhij,bhjf->bhif", probabilities, v), lse, probabilities


def dropout_kept(seed: Tensor, p: float, shape: tuple[int, int, int, int]) -> Tensor:
    """The mask element by element, at the index ((b H + h) Lq + i) Lk + j."""
    _, heads, length_q, length_k = shape
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij")
    index = ((b * heads + h) * length_q + i) * length_k + j
    words = torch.stack(reference.philox_words(seed, index // 4), dim=-1)
    return words.gather(-1, (index % 4).unsqueeze(-1)).squeeze(-1) >= round(p * 2**32)


def run(given: dict[str, Tensor], *, backend: str | None = None, seed: int = 0, **settings):
    """`fused_remat.attention` on a named backend, with torch's generator at `seed`."""
    torch.manual_seed(seed)
    if backend is None:
        return fused_remat.attention(**given, **settings)
    with fused_remat.backend(backend):
        return fused_remat.attention(**given, **settings)


def run_reference(given: dict[str, Tensor], *, seed: int = 0, workspace: int | None = None, **settings):
    return run(given, backend="reference", seed=seed, **settings)


def gradients(outputs: Tensor | Iterable[Tensor], given: dict[str, Tensor], douts, **settings) -> dict[str, Tensor]:
    """Gradients of the operands that require them, by name."""
    wanted = {name: value for name, value in given.items() if value.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(outputs, list(wanted.values()), douts, **settings), strict=True))


def backends_of(names: list[str]) -> set[str]:
    """Which backends the attention kernels among these ops belong to."""
    found = (re.fullmatch(r"attention_\w+_(cpp|aten)", name) for name in names)
    return {match[1] for match in found if match}


def assert_same(ours: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float, label: object = "") -> None:
    assert ours.keys() == truth.keys()
    for name in truth:
        torch.testing.assert_close(
            ours[name], truth[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{label} {n}: {m}"
        )
