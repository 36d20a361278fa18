"""What the functional calls ask of their tensors, whatever the op."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fused_remat import _extension, dispatch, last_calls
from fused_remat.plain import is_dtensor, is_plain_input
from fused_remat.sharding import why_not_sharded

Operands = dict[str, Tensor | None]  # by argument name; the first one is the op's input


@dataclass(frozen=True)
class Prepared:
    """A checked call: what its backend depends on, and both ways to run it."""

    call: dispatch.Call
    arguments: tuple[Any, ...]  # of torch.ops.fused_remat.<call.op>, up to the workspace; the backend follows
    reference: Callable[[], Any]

    def run(self) -> Any:
        """The result on the backend that `dispatch.resolve` chooses."""
        backend = dispatch.resolve(self.call)
        if torch.compiler.is_compiling():
            return self._run(backend)
        last_calls.note_op(self, backend)
        if last_calls.watcher is None:
            return self._run(backend)
        with last_calls.watcher.op(self, backend):
            return self._run(backend)

    def _run(self, backend: str) -> Any:
        if backend == "reference":
            return self.reference()
        return getattr(torch.ops.fused_remat, self.call.op)(*self.arguments, backend)


def check_seed_is_drawn_once(dropout_p: float) -> None:
    """Raises RuntimeError where a compiler would draw the seed of a dropout mask again in backward.

    torch's partitioner does that below a full `activation_memory_budget`, to its own dropout too at small budgets; the
    gradients would be those of another mask.
    """
    if dropout_p > 0.0 and torch.compiler.is_compiling() and _memory_budget() < 1.0:
        raise RuntimeError(
            f"dropout_p is {dropout_p:g} under torch._functorch.config.activation_memory_budget={_memory_budget():g}, "
            "where backward would draw another mask than forward; train without dropout, or set the budget to 1"
        )


@_extension.constant_when_traced
def _memory_budget() -> float:
    config = sys.modules.get("torch._functorch.config")
    return float(getattr(config, "activation_memory_budget", 1.0))


def check_tensors(operands: Operands, *, required: Iterable[str]) -> None:
    """Raises TypeError for what is no tensor, or None where one is required."""
    for name, operand in operands.items():
        if not isinstance(operand, Tensor) and (operand is not None or name in required):
            raise TypeError(f"{name} must be a tensor, got {type(operand).__name__}")


def check_strided(operands: Operands) -> None:
    """Raises TypeError for sparse, nested and other tensors that are not laid out by strides."""
    for name, operand in operands.items():
        if operand is not None and (operand.layout != torch.strided or operand.is_nested):
            layout = "nested" if operand.is_nested else operand.layout
            raise TypeError(f"{name} must be a dense, strided tensor, got a {layout} one; convert it first")


def check_dtypes(operands: Operands, *, masks: Iterable[str] = (), factors: Iterable[str] = ()) -> torch.dtype:
    """The compute dtype, once devices and dtypes fit together.

    The operands named in `masks` may be bool or any real floating dtype, those in `factors` (of adapters) any floating
    dtype; all others share that of the first, except under autocast.

    Raises:
        TypeError: a dtype that is not floating point, or does not fit.
        ValueError: a tensor on another device than the first.
    """
    input_name, x = next(iter(operands.items()))
    device = x.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    autocast = autocast and x.dtype != torch.float64
    for name, operand in operands.items():
        if operand is None:
            continue
        if operand.device != x.device:
            raise ValueError(f"{name} is on {operand.device}, {input_name} on {x.device}; move them to one device")
        if name in masks:
            if operand.dtype != torch.bool and (not operand.is_floating_point() or operand.element_size() < 2):
                raise TypeError(f"{name} must be bool or floating point, got {operand.dtype}; convert it, e.g. .bool()")
            continue
        if not (operand.is_floating_point() or operand.is_complex()) or operand.element_size() < 2:
            raise TypeError(f"{name} must be floating point of at least 16 bits, got {operand.dtype}; convert it first")
        if name in factors and (x.is_complex() or not operand.is_complex()):
            continue
        if operand.dtype != x.dtype and not autocast:
            raise TypeError(f"{name} is {operand.dtype}, {input_name} is {x.dtype}; convert one, or use torch.autocast")
    return torch.get_autocast_dtype(device) if autocast else x.dtype


def why_reference_only(operands: Operands, *, dropout_p: float = 0.0, keeps_features: bool = False) -> str | None:
    """Why only plain, differentiable torch is right for these operands; None if the compiled op is.

    `dropout_p` and `keeps_features` (some hidden features, by number) restrict what DTensors may be.
    """
    if torch._C._are_functorch_transforms_active():
        return "a torch.func transform is active, and those differentiate or batch plain torch only"
    dual_level = forward_ad._current_level >= 0
    sharded = any(map(is_dtensor, operands.values()))
    if sharded:
        reason = why_not_sharded(operands.values(), dropout_p=dropout_p, keeps_features=keeps_features)
        if reason is not None:
            return reason
    for name, operand in operands.items():
        if operand is None:
            continue
        if not sharded and not is_plain_input(operand):
            return f"{name} is a {type(operand).__name__}, whose own meaning only plain torch preserves"
        if dual_level and forward_ad.unpack_dual(operand).tangent is not None:
            return f"{name} has a forward-mode tangent, and the compiled op has no forward-mode derivative"
    return None
