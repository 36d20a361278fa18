"""The attention block, from x: projections, attention, output projection; inputs, truth, everyone who computes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from benchmarks import attention_cases as cases
from benchmarks.attention_cases import STOCK, STOCK_WEIGHTS, BlockCase
from benchmarks.cases import OURS
from benchmarks.operation import CHECKPOINT, EAGER, Forward, Leaves, Operation
from fused_remat import functional


def _leaves(case: BlockCase, device: torch.device) -> Leaves:
    """x and parameters; weights are scaled by 1 / sqrt(fan-in), so that every value is of order 1."""
    generator = torch.Generator(device).manual_seed(0)
    model = case.model
    shapes = {
        "x": (case.batch, case.length, model),
        "in_proj_weight": (3 * model, model),
        "in_proj_bias": (3 * model,),
        "out_proj_weight": (model, model),
        "out_proj_bias": (model,),
    }
    leaves = {}
    for name, shape in shapes.items():
        scale = 1 / math.sqrt(shape[-1]) if name.endswith("weight") else 1.0
        values = scale * torch.randn(shape, generator=generator, device=device)
        leaves[name] = values.to(case.dtype).requires_grad_()
    return leaves


def _linear_and_sdpa(case: BlockCase, leaves: Leaves) -> Tensor:
    packed = F.linear(leaves["x"], leaves["in_proj_weight"], leaves["in_proj_bias"])
    q, k, v = packed.unflatten(-1, (3, case.heads, -1)).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, dropout_p=case.dropout_p)
    return F.linear(out.transpose(1, 2).flatten(-2), leaves["out_proj_weight"], leaves["out_proj_bias"])


def _eager(case: BlockCase, leaves: Leaves) -> Forward:
    return lambda: _linear_and_sdpa(case, leaves)


def _checkpoint(case: BlockCase, leaves: Leaves, *, reentrant: bool) -> Forward:
    def region(*values: Tensor) -> Tensor:
        return _linear_and_sdpa(case, dict(zip(leaves, values, strict=True)))

    # Reentrant checkpointing carries gradients through positional tensors only.
    return lambda: checkpoint(region, *leaves.values(), use_reentrant=reentrant)


def _stock(case: BlockCase, leaves: Leaves, *, need_weights: bool) -> Forward:
    """nn.MultiheadAttention; its averaged weights are made where `need_weights`, and thrown away."""
    layer = nn.MultiheadAttention(case.model, case.heads, case.dropout_p, batch_first=True, device="meta")
    x, parameters = leaves["x"], {name.replace("proj_", "proj."): t for name, t in leaves.items() if "out" in name}
    parameters |= {name: leaves[name] for name in ("in_proj_weight", "in_proj_bias")}
    options = {"need_weights": need_weights}
    if case.causal:
        mask = nn.Transformer.generate_square_subsequent_mask(case.length, device=x.device, dtype=x.dtype)
        options |= {"attn_mask": mask, "is_causal": True}
    return lambda: functional_call(layer, parameters, (x, x, x), options)[0]


def _ours(options: Callable[[BlockCase], dict[str, Any]]) -> Callable[[BlockCase, Leaves], Forward]:
    """fused_remat with the options that the case asks for."""

    def provider(case: BlockCase, leaves: Leaves) -> Forward:
        x, *parameters = leaves.values()
        return lambda: functional.multi_head_attention(
            x, None, None, *parameters, case.heads, is_causal=case.causal, dropout_p=case.dropout_p, **options(case)
        )

    return provider


MHA = Operation(
    name="mha",
    shape_help="B,L,D,H, causal:B,L,D,H or with ,p (batch, length, model width, heads, dropout probability)",
    cases=cases.BLOCK_CASES,
    quick_cases=cases.BLOCK_QUICK_CASES,
    parse=cases.parse_block,
    leaves=_leaves,
    truth=_linear_and_sdpa,
    judged=cases.without_dropout,
    providers={
        EAGER: _eager,
        CHECKPOINT: lambda case, leaves: _checkpoint(case, leaves, reentrant=False),
        "checkpoint-reentrant": lambda case, leaves: _checkpoint(case, leaves, reentrant=True),
        STOCK: lambda case, leaves: _stock(case, leaves, need_weights=False),
        STOCK_WEIGHTS: lambda case, leaves: _stock(case, leaves, need_weights=True),
        OURS: _ours(lambda case: {"keep": ("out",)}),
        f"{OURS}-keep-none": _ours(lambda case: {"keep": ()}),
        f"{OURS}-keep-all": _ours(lambda case: {"keep": ("q", "k", "v", "out")}),
        f"{OURS}-U": _ours(lambda case: {"keep": ("out",), "workspace": case.unit_bytes}),
    },
)
