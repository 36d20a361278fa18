"""The registered operators as Python sees them: loading, fake kernels and FLOP formulas.

`torch.ops.fused_remat.mlp` is differentiable; `mlp_fwd` and `mlp_bwd` are the stable names for selective-checkpoint
policies, sharding rules and FLOP counts. Schemas and shapes: `csrc/library.cpp` and `csrc/mlp.h`.
"""

from __future__ import annotations

import math
import sys
import threading
from functools import cache

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from fused_remat import _extension

_lock = threading.Lock()
_has_fakes = False
_has_flops = False


@_extension.constant_when_traced
def ready() -> str | None:
    """None once the operators are loaded and described to torch; else one sentence why they are not."""
    global _has_fakes, _has_flops
    reason = _extension.load()
    # Not imported here: without a working Triton that module logs a line or cannot be imported at all. Whoever counts
    # has imported it before the call to be counted.
    countable = "torch.utils.flop_counter" in sys.modules
    if reason is None and not (_has_fakes and (_has_flops or not countable)):
        with _lock:
            if not _has_fakes:
                _register_fakes()
                _has_fakes = True
            if countable and not _has_flops:
                _register_flops()
                _has_flops = True
    return reason


@_extension.constant_when_traced
def compiled_activations() -> tuple[str, ...]:
    """Names of the activations that the compiled kernels know. Needs `ready()`."""
    return _compiled_activations()


@cache
def _compiled_activations() -> tuple[str, ...]:
    # Outside of every mode: a tracer would record the question and answer with a stand-in.
    with _disable_current_modes():
        return tuple(torch.ops.fused_remat.activations())


def _register_fakes() -> None:
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


def _register_flops() -> None:
    from torch.utils import flop_counter

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
    formulas = {packets.mlp: forward, packets.mlp_fwd: forward, packets.mlp_bwd: backward}
    for packet, formula in formulas.items():
        flop_counter.register_flop_formula(packet)(formula)
    # A counter copies the registry when it is made, so one that is counting already has to be told.
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, flop_counter._FlopCounterMode):
            for packet in formulas:
                mode.counter.flop_registry[packet] = flop_counter.flop_registry[packet]
