"""The attention core, from q, k and v: inputs, truth, and everyone who computes it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks import attention_cases as cases
from benchmarks.attention_cases import CoreCase
from benchmarks.cases import OURS
from benchmarks.operation import CHECKPOINT, EAGER, Forward, Leaves, Operation
from fused_remat import functional


def _leaves(case: CoreCase, device: torch.device) -> Leaves:
    """q, k and v of order 1, in memory as a projection leaves them: [B, L, H, E]."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (case.batch, case.length, case.heads, case.width)
    return {
        name: torch.randn(shape, generator=generator, device=device).to(case.dtype).transpose(1, 2).requires_grad_()
        for name in ("q", "k", "v")
    }


def _stock(case: CoreCase, leaves: Leaves) -> Tensor:
    return F.scaled_dot_product_attention(*leaves.values(), is_causal=case.causal, dropout_p=case.dropout_p)


def _eager(case: CoreCase, leaves: Leaves) -> Forward:
    return lambda: _stock(case, leaves)


def _checkpoint(case: CoreCase, leaves: Leaves) -> Forward:
    def region(*values: Tensor) -> Tensor:
        return _stock(case, dict(zip(leaves, values, strict=True)))

    return lambda: checkpoint(region, *leaves.values(), use_reentrant=False)


def _ours(case: CoreCase, leaves: Leaves) -> Forward:
    return lambda: functional.attention(**leaves, is_causal=case.causal, dropout_p=case.dropout_p)


ATTENTION = Operation(
    name="attention",
    shape_help="B,H,L,E, causal:B,H,L,E or with ,p (batch, heads, length, head width, dropout probability)",
    cases=cases.CORE_CASES,
    quick_cases=cases.CORE_QUICK_CASES,
    parse=cases.parse_core,
    leaves=_leaves,
    truth=_stock,
    judged=cases.without_dropout,
    providers={EAGER: _eager, CHECKPOINT: _checkpoint, OURS: _ours},
)
