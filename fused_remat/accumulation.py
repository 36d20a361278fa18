"""Gradients summed over micro-batches in fp32, whatever the dtype of the parameters.

The protocol of `main_grad` is that of Megatron-Core: a buffer per parameter that receives every gradient and that the
optimizer reads in the place of `.grad`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fused_remat.plain import is_plain_input

_INTO = ("grad", "main_grad")


def accumulate_in_fp32(
    parameters: nn.Module | Iterable[Tensor], *, into: Literal["grad", "main_grad"] = "grad"
) -> Accumulation:
    """Let half-precision parameters sum their gradients over micro-batches in float32.

    The backward of fused layers then hands over the float32 sums of their weight gradients as they are, where it would
    round them to the dtype of the weight. Gradients of other layers, and of compiled ones, arrive rounded by torch and
    are summed in float32. See docs/training.md.
    Parameters of 32 bits and more keep their dtype in all that follows; those without `requires_grad` are left out.

    Args:
        parameters: a module, or tensors that require gradients. A tensor that occurs twice (tied weights) counts once.
        into: `"grad"`: `.grad` becomes float32 (`Tensor.grad_dtype`). `"main_grad"`: `.grad` is added to the float32
            `p.main_grad` and freed as soon as it is complete. A `main_grad` that exists is used, else one of zeros is
            made. Under Megatron-Core's DistributedDataParallel, whose parameters have `grad_added_to_main_grad`, the
            addition is left to Megatron's own hook.

    Returns:
        The handle: `parameters`, `zero_grad()` and `remove()`.

    Raises:
        TypeError: `parameters` is no module and holds no tensors, or one with a meaning of its own (a DTensor).
        ValueError: no parameter, not a leaf, an unknown `into`, a `main_grad` of another dtype, shape or device, a
            parameter that another handle sums into `main_grad`, or a module inside DistributedDataParallel, which
            reduces `.grad` in the dtype of the parameter.
    """
    if into not in _INTO:
        raise ValueError(f"into must be one of {', '.join(map(repr, _INTO))}, got {into!r}")
    chosen = _trainable(parameters)
    if into == "main_grad":
        for name, p in chosen.items():
            _check_main_grad(name, p)
    return Accumulation(tuple(chosen.values()), into)


class Accumulation:
    """What `accumulate_in_fp32` has set up, and how to undo it.

    Attributes:
        parameters: those that take part, each once.
        into: "grad" or "main_grad".
    """

    def __init__(self, parameters: tuple[Tensor, ...], into: str) -> None:
        self.parameters = parameters
        self.into = into
        self._grad_dtypes = [p.grad_dtype for p in parameters]
        self._main_grads: dict[Tensor, Tensor] = {}  # those made here
        self._hooks = []
        for p in parameters:
            _set_grad_dtype(p, _sum_dtype(p))
            if into == "main_grad":
                if getattr(p, "main_grad", None) is None:
                    p.main_grad = self._main_grads[p] = torch.zeros_like(p, dtype=_sum_dtype(p), requires_grad=False)
                self._hooks.append(p.register_post_accumulate_grad_hook(_add_to_main_grad))

    def zero_grad(self) -> None:
        """Forget all sums: `.grad` becomes None, `main_grad` zeros."""
        for p in self.parameters:
            p.grad = None
            if self.into == "main_grad":
                p.main_grad.zero_()

    def remove(self) -> None:
        """Undo it all: a `.grad` is rounded to the dtype it had, a `main_grad` made here is dropped.

        torch cannot unset `grad_dtype`: it is what it was, also if the dtype of the parameter changes later.
        """
        for hook in self._hooks:
            hook.remove()
        for p, dtype in zip(self.parameters, self._grad_dtypes, strict=True):
            _set_grad_dtype(p, dtype)
            if p in self._main_grads and p.main_grad is self._main_grads[p]:
                del p.main_grad
        self.parameters, self._grad_dtypes, self._hooks = (), [], []
        self._main_grads.clear()


def _add_to_main_grad(p: Tensor) -> None:
    # Megatron-Core's DistributedDataParallel sets this attribute on its parameters and adds `.grad` in a hook of its
    # own, which runs after this one and may insist on finding `.grad`.
    if p.grad is None or hasattr(p, "grad_added_to_main_grad"):
        return
    p.main_grad.add_(p.grad)
    p.grad = None


def _sum_dtype(p: Tensor) -> torch.dtype:
    return torch.float32 if p.is_floating_point() and p.element_size() < 4 else p.dtype


def _set_grad_dtype(p: Tensor, dtype: torch.dtype | None) -> None:
    # torch refuses to change it beside a gradient of another dtype.
    grad, p.grad = p.grad, None
    p.grad_dtype = dtype
    if grad is not None:
        p.grad = grad if dtype is None else grad.to(dtype)


def _trainable(parameters: nn.Module | Iterable[Tensor]) -> dict[str, Tensor]:
    """The checked parameters by a name for messages."""
    if isinstance(parameters, nn.Module):
        for name, module in parameters.named_modules():
            if isinstance(module, DistributedDataParallel):
                raise ValueError(
                    f"{name or 'the module'} is a DistributedDataParallel, which reduces .grad in the dtype of the "
                    "parameter; pass its `.module` without wrapping it and reduce the sums with torch.distributed"
                )
        named = dict(parameters.named_parameters())
    elif isinstance(parameters, Iterable) and not isinstance(parameters, Tensor):
        named = {f"parameters[{i}]": p for i, p in enumerate(parameters)}
    else:
        raise TypeError(f"parameters must be a module or an iterable of tensors, got {type(parameters).__name__}")
    seen: set[Tensor] = set()
    chosen = {}
    for name, p in named.items():
        if not isinstance(p, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(p).__name__}")
        if not p.requires_grad or p in seen:
            continue
        if not is_plain_input(p):
            raise TypeError(f"{name} is a {type(p).__name__}, whose gradients have a way of their own; leave it out")
        if not p.is_leaf:
            raise ValueError(f"{name} is the result of an operation and has no .grad; pass the parameter it came from")
        seen.add(p)
        chosen[name] = p
    if not chosen:
        raise ValueError("parameters holds nothing that requires a gradient; check requires_grad")
    return chosen


def _check_main_grad(name: str, p: Tensor) -> None:
    if _add_to_main_grad in (p._post_accumulate_grad_hooks or {}).values():
        raise ValueError(f"{name} is summed into main_grad already; remove() the handle of that first")
    there = getattr(p, "main_grad", None)
    if there is None:
        return
    found, expected = (there.dtype, there.shape, there.device), (_sum_dtype(p), p.shape, p.device)
    if found != expected:
        describe = [f"{dtype} {list(shape)} on {device}" for dtype, shape, device in (found, expected)]
        raise ValueError(
            f"{name}.main_grad is {describe[0]}, expected {describe[1]}; in Megatron-Core set "
            "grad_reduce_in_fp32=True, else delete the attribute"
        )
