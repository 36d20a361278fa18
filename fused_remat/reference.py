"""Plain, differentiable torch for every op: the specification that each kernel is judged against.

No tricks and no memory savings: everything is materialised. It runs on any device and dtype, is differentiable as
often as one likes, and is what functorch transforms, forward-mode AD, tensor subclasses, complex dtypes and
installs without the compiled extension use.

Dims: `M` token rows, `D` model width, `F` hidden width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_remat.activations import ACTIVATIONS

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


def dropout_mask(seed: Tensor, p: float, rows: int, features: int) -> Tensor:
    """Bool [rows, features], True = kept; element (row, feature) by `seed` and `row * features + feature` alone."""
    index = torch.arange(rows * features, dtype=torch.int64, device=seed.device)
    lanes = torch.stack(philox_words(seed, index >> 2), dim=-1)
    word = lanes.gather(-1, (index & 3).unsqueeze(-1)).squeeze(-1)
    return (word >= round(p * 2**32)).view(rows, features)


def mlp(
    x: Tensor,  # [..., D]
    w_up: Tensor,  # [F, D]
    w_down: Tensor,  # [D_out, F]
    b_up: Tensor | None = None,  # [F]
    b_down: Tensor | None = None,  # [D_out]
    *,
    w_gate: Tensor | None = None,  # [F, D]
    b_gate: Tensor | None = None,  # [F]
    activation: str = "gelu",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,  # int64 [1]; drawn here when dropout is on and none is given
) -> Tensor:
    """`dropout(act(x w_up^T + b_up)) w_down^T + b_down`, or gated: `hidden = act(gate) * up`. Returns [..., D_out]."""
    act = ACTIVATIONS[activation]
    up = F.linear(x, w_up, b_up)
    hidden = act(up) if w_gate is None else act(F.linear(x, w_gate, b_gate)) * up
    if dropout_p > 0.0:
        seed = draw_seed(x.device) if seed is None else seed
        kept = dropout_mask(seed, dropout_p, hidden.shape[:-1].numel(), hidden.shape[-1]).view(hidden.shape)
        hidden = torch.where(kept, hidden * (1.0 / (1.0 - dropout_p)), 0.0)
    return F.linear(hidden, w_down, b_down)
