"""The MLP operators: fake kernels and FLOP formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch


def register() -> None:
    def fake_mlp(x, w_up, w_down, b_up, b_down, w_gate, b_gate, activation, dropout_p, keep_up, keep_gate, workspace,
                 backend, compute_dtype=None):  # fmt: skip
        return x.new_empty((*x.shape[:-1], w_down.shape[0]), dtype=compute_dtype or x.dtype)

    def fake_fwd(x, w_up, w_down, b_up, b_down, w_gate, b_gate, seed, activation, dropout_p, keep_up, keep_gate,
                 workspace, compute_dtype, backend):  # fmt: skip
        rows = math.prod(x.shape[:-1])
        return (
            x.new_empty((*x.shape[:-1], w_down.shape[0]), dtype=compute_dtype),
            x.new_empty((rows, keep_up), dtype=compute_dtype),
            x.new_empty((rows, keep_gate), dtype=compute_dtype),
        )

    def fake_bwd(dy, x, w_up, w_down, b_up, b_down, w_gate, b_gate, up, gate, seed, activation, dropout_p, workspace,
                 compute_dtype, backend, output_mask):  # fmt: skip
        parameters = (w_up, w_down, b_up, b_down, w_gate, b_gate)
        return (
            x.new_empty(x.shape if output_mask[0] else (0,)),
            *(
                torch.empty_like(parameter) if wanted else (x if parameter is None else parameter).new_empty((0,))
                for parameter, wanted in zip(parameters, output_mask[1:], strict=True)
            ),
        )

    def fake_tile(*args) -> None:
        return None

    torch.library.register_fake("fused_remat::mlp", fake_mlp)
    torch.library.register_fake("fused_remat::mlp_fwd", fake_fwd)
    torch.library.register_fake("fused_remat::mlp_bwd", fake_bwd)
    for backend in ("aten", "cpp"):
        for op in ("mlp_fwd_chunk", "mlp_bwd_chunk", "column_sums"):
            torch.library.register_fake(f"fused_remat::{op}_{backend}", fake_tile)


def flop_formulas() -> dict[torch._ops.OpOverloadPacket, Callable[..., int]]:
    def forward(x_shape, w_up_shape, w_down_shape, b_up=None, b_down=None, w_gate_shape=None, *args, out_shape=None,
                **kwargs) -> int:  # fmt: skip
        rows, (features, d_in), d_out = math.prod(x_shape[:-1]), w_up_shape, w_down_shape[0]
        return 2 * rows * features * (d_in * (1 if w_gate_shape is None else 2) + d_out)

    def backward(dy_shape, x_shape, w_up_shape, w_down_shape, b_up, b_down, w_gate_shape, b_gate, up_shape, gate_shape,
                 *args, out_shape=None, **kwargs) -> int:  # fmt: skip
        rows, (features, d_in), d_out = math.prod(x_shape[:-1]), w_up_shape, w_down_shape[0]
        wants_dx, wants_dw_up, wants_dw_down, wants_db_up, _, wants_dw_gate, wants_db_gate = args[-1]
        through_activation = wants_dx or wants_dw_up or wants_db_up or wants_dw_gate or wants_db_gate
        if not through_activation and not wants_dw_down:
            return 0
        rebuilt = features - up_shape[1] + (0 if w_gate_shape is None else features - gate_shape[1])
        inputs = 1 if w_gate_shape is None else 2
        products_in = rebuilt + features * (wants_dw_up + wants_dw_gate + (inputs if wants_dx else 0))
        products_out = features * (through_activation + wants_dw_down)
        return 2 * rows * (products_in * d_in + products_out * d_out)

    packets = torch.ops.fused_remat
    return {packets.mlp: forward, packets.mlp_fwd: forward, packets.mlp_bwd: backward}
