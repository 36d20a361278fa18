"""The MLP operators: fake kernels, reference kernel and FLOP formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fused_remat import reference
from fused_remat.ops.attention import split_masks, wide
from fused_remat.settings import Norm

_OPERANDS = 9  # the leading arguments, all tensors or None
# Positions among the arguments after x, w_up and w_down.
_KEEP_UP, _COMPUTE_DTYPE = 10, 14


def _fake(x, w_up, w_down, *args):
    # The last argument may be left out.
    compute_dtype = args[_COMPUTE_DTYPE] if len(args) > _COMPUTE_DTYPE else None
    return x.new_empty((*x.shape[:-1], w_down.shape[0]), dtype=compute_dtype or x.dtype)


def _fake_fwd(x, w_up, w_down, *args):
    y, rows = _fake(x, w_up, w_down, *args), math.prod(x.shape[:-1])
    keep_up, keep_gate = args[_KEEP_UP : _KEEP_UP + 2]
    return y, y.new_empty((rows, keep_up)), y.new_empty((rows, keep_gate))


def _fake_bwd(dy, *args):
    (x, *others), output_mask, wide_mask = split_masks(args)
    return (
        x.new_empty(x.shape if output_mask[0] else (0,)),
        *(
            torch.empty_like(operand, dtype=wide(operand.dtype) if widened else operand.dtype)
            if wanted
            else (x if operand is None else operand).new_empty((0,))
            for operand, wanted, widened in zip(others[: _OPERANDS - 1], output_mask[1:], wide_mask[1:], strict=True)
        ),
    )


def _reference(x, w_up, w_down, b_up, b_down, w_gate, b_gate, norm_weight, norm_bias, norm, norm_eps, activation,
               dropout_p, keep_up, keep_gate, workspace, backend, compute_dtype, seed):  # fmt: skip
    operands = (x, w_up, w_down, b_up, b_down, w_gate, b_gate, norm_weight, norm_bias)
    x, w_up, w_down, b_up, b_down, w_gate, b_gate, norm_weight, norm_bias = (
        operand if operand is None or compute_dtype is None else operand.to(compute_dtype) for operand in operands
    )
    return reference.mlp(
        x, w_up, w_down, b_up, b_down, w_gate=w_gate, b_gate=b_gate,
        norm=Norm(norm, norm_weight, norm_bias, norm_eps) if norm else None, activation=activation,
        dropout_p=dropout_p, seed=seed,
    )  # fmt: skip


def register() -> None:
    """Give the operators their fake kernels, and the reference operator its implementation."""
    torch.library.register_fake("fused_remat::mlp", _fake)
    torch.library.register_fake("fused_remat::mlp_fwd", _fake_fwd)
    torch.library.register_fake("fused_remat::mlp_bwd", _fake_bwd)
    torch.library.impl("fused_remat::mlp_reference", "CompositeImplicitAutograd")(_reference)


def flop_formulas() -> dict[torch._ops.OpOverloadPacket, Callable[..., int]]:
    def forward(x_shape, w_up_shape, w_down_shape, b_up=None, b_down=None, w_gate_shape=None, *args, out_shape=None,
                **kwargs) -> int:  # fmt: skip
        rows, (features, d_in), d_out = math.prod(x_shape[:-1]), w_up_shape, w_down_shape[0]
        return 2 * rows * features * (d_in * (1 if w_gate_shape is None else 2) + d_out)

    def backward(dy_shape, x_shape, w_up_shape, w_down_shape, b_up, b_down, w_gate_shape, *args, out_shape=None,
                 **kwargs) -> int:  # fmt: skip
        rows, (features, d_in), d_out = math.prod(x_shape[:-1]), w_up_shape, w_down_shape[0]
        (*_, up_shape, gate_shape), wanted, _ = split_masks(args)
        wants_dx, wants_dw_up, wants_dw_down, wants_db_up, _, wants_dw_gate, wants_db_gate = wanted[:7]
        wants_dx = wants_dx or any(wanted[7:])
        kept_up, kept_gate = (0 if shape is None else shape[1] for shape in (up_shape, gate_shape))
        through_activation = wants_dx or wants_dw_up or wants_db_up or wants_dw_gate or wants_db_gate
        if not through_activation and not wants_dw_down:
            return 0
        rebuilt = features - kept_up + (0 if w_gate_shape is None else features - kept_gate)
        inputs = 1 if w_gate_shape is None else 2
        products_in = rebuilt + features * (wants_dw_up + wants_dw_gate + (inputs if wants_dx else 0))
        products_out = features * (through_activation + wants_dw_down)
        return 2 * rows * (products_in * d_in + products_out * d_out)

    packets = torch.ops.fused_remat
    return {packets.mlp: forward, packets.mlp_fwd: forward, packets.mlp_bwd: backward}
