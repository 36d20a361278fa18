"""The registered operators as Python sees them: loading, fake kernels, reference kernels and FLOP formulas.

`torch.ops.fused_remat.{mlp, attention, multi_head_attention}` are differentiable; `*_fwd` and `*_bwd` are the stable
names for selective-checkpoint policies, sharding rules and FLOP counts. Schemas: `csrc/library*.cpp`.
"""

from __future__ import annotations

import sys
import threading
from functools import cache

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from fused_remat import _extension
from fused_remat.ops import attention, mlp, multi_head_attention, triton

_OPS = (mlp, attention, multi_head_attention)
LEVEL3_BACKENDS = ("aten", "cpp", "cuda", "triton")
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
                for op in _OPS:
                    op.register()
                _register_level3()
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


def _register_level3() -> None:
    """Ops that only fill buffers have nothing to tell a tracer."""
    for op in triton.IMPLEMENTERS:
        for backend in LEVEL3_BACKENDS:
            torch.library.register_fake(f"fused_remat::{op}_{backend}", lambda *args: None)
    for op in mlp.ONE_KERNEL:
        torch.library.register_fake(f"fused_remat::{op}", lambda *args: None)
    triton.register()


def _register_flops() -> None:
    from torch.utils import flop_counter

    formulas = {packet: formula for op in _OPS for packet, formula in op.flop_formulas().items()}
    for packet, formula in formulas.items():
        flop_counter.register_flop_formula(packet)(formula)
    # A counter copies the registry when it is made, so one that is counting already has to be told.
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, flop_counter._FlopCounterMode):
            for packet in formulas:
                mode.counter.flop_registry[packet] = flop_counter.flop_registry[packet]
