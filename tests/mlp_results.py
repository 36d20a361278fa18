"""Forward and backward of plain and gated MLPs from fixed inputs, as numbers; `python mlp_results.py` prints JSON."""

from __future__ import annotations

import json

import torch

import fused_remat
from fused_remat import _extension


def compute() -> dict[str, list[list[float]]]:
    """`{case: [y, dx, dw_up, dw_down(, dw_gate)]}`, each tensor flattened."""
    results = {}
    for dtype in (torch.float32, torch.float64):
        for activation in ("gelu", "silu"):
            for gated in (False, True):
                results[f"{activation} {'gated' if gated else 'plain'} {dtype}"] = _run(dtype, activation, gated=gated)
    return results


def _run(dtype: torch.dtype, activation: str, *, gated: bool) -> list[list[float]]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((7, 24), (40, 24), (24, 40), (40, 24), (7, 24))
    x, w_up, w_down, w_gate, dy = (torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes)
    inputs = [tensor.requires_grad_() for tensor in ([x, w_up, w_down, w_gate] if gated else [x, w_up, w_down])]
    y = fused_remat.mlp(x, w_up, w_down, w_gate=w_gate if gated else None, activation=activation)
    return [tensor.flatten().tolist() for tensor in (y, *torch.autograd.grad(y, inputs, dy))]


if __name__ == "__main__":
    found = {"results": compute(), "capability": torch.backends.cpu.get_cpu_capability()}
    print(json.dumps(found | {"origin": _extension.status().origin}))
