"""The MLP operators: fake kernels, reference kernel and FLOP formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fused_remat import reference
from fused_remat.ops.attention import split_masks, wide
from fused_remat.settings import LowRank, Norm

# Level-3 ops that make a whole pass of a narrow layer, on the one backend that has them.
ONE_KERNEL = ("mlp_small_fwd_cuda", "mlp_small_bwd_cuda")

_OPERANDS = 15  # the leading arguments, all tensors or None
# Positions among the arguments after x, w_up and w_down.
_KEEP_UP, _COMPUTE_DTYPE = 19, 23


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


def _reference(x, w_up, w_down, *args):
    operands, settings = (x, w_up, w_down, *args[: _OPERANDS - 3]), args[_OPERANDS - 3 :]
    *scales, norm, norm_eps, activation, dropout_p, _, _, _, _, compute_dtype, seed = settings
    x, w_up, w_down, b_up, b_down, w_gate, b_gate, norm_weight, norm_bias, *factors = (
        operand if operand is None or compute_dtype is None else operand.to(compute_dtype) for operand in operands
    )
    up, gate, down = (
        None if a is None else LowRank(a, b, scale)
        for a, b, scale in zip(factors[::2], factors[1::2], scales, strict=True)
    )
    return reference.mlp(
        x, w_up, w_down, b_up, b_down, w_gate=w_gate, b_gate=b_gate, up_adapter=up, gate_adapter=gate,
        down_adapter=down, norm=Norm(norm, norm_weight, norm_bias, norm_eps) if norm else None, activation=activation,
        dropout_p=dropout_p, seed=seed,
    )  # fmt: skip


def register() -> None:
    """Give the operators their fake kernels, and the reference operator its implementation."""
    torch.library.register_fake("fused_remat::mlp", _fake)
    torch.library.register_fake("fused_remat::mlp_fwd", _fake_fwd)
    torch.library.register_fake("fused_remat::mlp_bwd", _fake_bwd)
    torch.library.impl("fused_remat::mlp_reference", "CompositeImplicitAutograd")(_reference)


def flop_formulas() -> dict[torch._ops.OpOverloadPacket, Callable[..., int]]:
    packets = torch.ops.fused_remat
    return {packets.mlp: _forward_flop, packets.mlp_fwd: _forward_flop, packets.mlp_bwd: _backward_flop}


def _ranks(operand_shapes) -> tuple[int, int, int]:
    """Of the adapters of up, gate and down, 0 where there is none."""
    return tuple(0 if a is None else a[0] for a in operand_shapes[_OPERANDS - 6 : _OPERANDS : 2])


def _forward_flop(*args, out_shape=None, **kwargs) -> int:
    x_shape, (features, d_in), (d_out, _) = args[:3]
    inputs = 1 if args[5] is None else 2
    up, gate, down = _ranks(args)
    # As stage 1 makes them: each projection of the input meets the columns of both adapters.
    per_row = features * (inputs * (d_in + up + gate) + d_out + down) + (up + gate) * d_in + down * d_out
    return 2 * math.prod(x_shape[:-1]) * per_row


def _backward_flop(dy_shape, *args, out_shape=None, **kwargs) -> int:
    x_shape, (features, d_in), (d_out, _) = args[:3]
    inputs = 1 if args[5] is None else 2
    up, gate, down = _ranks(args)
    (*_, up_shape, gate_shape), wanted, _ = split_masks(args)
    wants_dx, wants_up, wants_down, wants_b_up, _, wants_gate, wants_b_gate, *rest = wanted
    wants_dx = wants_dx or any(rest[:2])
    wants_up_a, wants_up_b, wants_gate_a, wants_gate_b, wants_down_a, wants_down_b = rest[2:]
    through_activation = wants_dx or wants_up or wants_b_up or wants_gate or wants_b_gate or any(rest[2:6])
    if not through_activation and not (wants_down or wants_down_a or wants_down_b):
        return 0
    kept_up, kept_gate = (0 if shape is None else shape[1] for shape in (up_shape, gate_shape))
    rebuilt = inputs * features - kept_up - kept_gate
    per_row = rebuilt * (d_in + up + gate) + features * through_activation * (d_out + down)
    per_row += features * (d_in * (wants_up + wants_gate + inputs * wants_dx) + d_out * wants_down)
    per_row += (up + gate) * d_in + down * d_out  # the narrow columns of x and dy
    for rank, wants_a, wants_b in ((up, wants_up_a, wants_up_b), (gate, wants_gate_a, wants_gate_b)):
        per_row += rank * (features * (wants_b + (wants_a or wants_dx)) + d_in * (wants_a + wants_dx))
    per_row += down * (features * (wants_down_a + wants_down_b) + d_out * wants_down_b)
    return 2 * math.prod(x_shape[:-1]) * per_row
