"""Is a child module still exactly what it looks like?

A fused layer reads the weights of its children and does their work itself. That is only the same thing while each
child is plain: an adapter, a hook, a parametrisation, a quantised or sharded weight or a replaced `forward` does
something that reading `.weight` misses. All of those may arrive after a layer was built or converted, so the fused
layers ask these questions at every call, and take their unfused path when the answer is a reason. The checks cost
microseconds and trace under `torch.compile(fullgraph=True)`, which turns them into guards (a hook added after
compilation is the exception: torch.compile does not see those in stock code either).
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.modules import module as _registry

# Tracing puts fake and functional tensors in the place of plain ones; every other subclass (DTensor, quantised
# weights, lazy parameters) has a meaning of its own.
PLAIN_TENSOR_TYPES = (Tensor, nn.Parameter, FakeTensor, FunctionalTensor)

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# torch's own bookkeeping (FlopCounterMode installs the first, CommDebugMode the last): it watches which module runs
# and changes nothing.
_HARMLESS_HOOK_OWNERS = (
    "torch.utils.module_tracker",
    "torch.distributed._tools.mod_tracker",
    "torch.distributed.tensor.debug._comm_mode",
)

_LINEAR_FORWARD = nn.Linear.forward


def class_name(cls: type) -> str:
    """`cls` as a person would import it: with its module, except for torch's own layers."""
    return f"nn.{cls.__name__}" if getattr(nn, cls.__name__, None) is cls else f"{cls.__module__}.{cls.__qualname__}"


def held(module: nn.Module | None, name: str, default: Any = None) -> Any:
    """The tensor `name` that `module` holds as a parameter, a buffer or an attribute; else `default`.

    Runs nothing. What a parametrization (or a property) makes anew whenever it is read is not held: reading it may
    change the model, as that of `spectral_norm` does with its buffers.
    """
    if module is not None:
        for holder in (module._parameters, module._buffers, module.__dict__):
            if name in holder:
                return holder[name]
    return default


def why_not_plain(module: nn.Module, cls: type[nn.Module]) -> str | None:
    """Why doing the maths of class `cls` would differ from calling `module`; None if it would not."""
    if type(module) is not cls:
        return f"is a {class_name(type(module))}, not a plain {class_name(cls)}"
    if module._forward_hooks or module._forward_pre_hooks:
        return "has forward hooks"
    if module._backward_hooks or module._backward_pre_hooks:
        return "has backward hooks"
    # hasattr is always true, but makes torch.compile guard on the attribute as well as on what it saw in the dict.
    if hasattr(module, "forward") and "forward" in module.__dict__:
        return "has a forward of its own on the instance"
    return None


def why_not_plain_linear(linear: nn.Module, cls: type[nn.Module] = nn.Linear) -> str | None:
    """As `why_not_plain`, and the weight and bias have to be plain tensors too.

    `cls` is nn.Linear, or a class of the same meaning with `weight` and `bias` (transformers' Conv1D).
    """
    reason = why_not_plain(linear, cls)
    if reason is not None:
        return reason
    if cls is nn.Linear and nn.Linear.forward is not _LINEAR_FORWARD:
        return "runs a patched nn.Linear.forward"
    weight, bias = linear.weight, linear.bias
    if type(weight) not in PLAIN_TENSOR_TYPES:
        return f"has a {type(weight).__name__} as weight"
    if bias is not None and type(bias) not in PLAIN_TENSOR_TYPES:
        return f"has a {type(bias).__name__} as bias"
    return None


def why_weights_unfit(*weights: Tensor) -> str | None:
    """Why these weights cannot enter one op together; None if they can.

    They share one device and one dtype, which is a real floating-point one of at least 16 bits.
    """
    dtype, device = weights[0].dtype, weights[0].device
    if dtype not in _DTYPES:
        return f"the weights are {dtype}, not one of {', '.join(map(str, _DTYPES))}"
    for weight in weights:
        if weight.dtype != dtype:
            return f"the weights have different dtypes, {dtype} and {weight.dtype}"
        if weight.device != device:
            return f"the weights are on different devices, {device} and {weight.device}"
    return None


def why_watched() -> str | None:
    """Why children must be called one by one for now: a hook on all modules; None if there is none.

    `torch.nn.modules.module.register_module_forward_hook` and its relatives expect to see every module run.
    """
    for hooks in (
        _registry._global_forward_hooks,
        _registry._global_forward_pre_hooks,
        _registry._global_backward_hooks,
        _registry._global_backward_pre_hooks,
    ):
        for hook in hooks.values():
            if type(getattr(hook, "__self__", None)).__module__ not in _HARMLESS_HOOK_OWNERS:
                return "a hook is registered on all modules"
    return None


def is_plain_input(x: Tensor) -> bool:
    """Whether `x` is a tensor without a meaning of its own (not a DTensor, a nested tensor, a tracing proxy ...)."""
    return type(x) in PLAIN_TENSOR_TYPES and not x.is_nested


def has_values(tensor: Tensor) -> bool:
    """Whether there is something to read in `tensor`: it is neither on the meta device nor fake."""
    return not tensor.is_meta and not isinstance(tensor, (FakeTensor, FunctionalTensor))


def without_fake_mode() -> contextlib.AbstractContextManager[object]:
    """Tensors made meanwhile are real, also where a fake mode is on."""
    return unset_fake_temporarily()


def is_dtensor(tensor: object) -> bool:
    """Whether `tensor` is a DTensor. Imports nothing: before someone imports DTensor there are none."""
    if tensor is None or type(tensor) in PLAIN_TENSOR_TYPES:  # asked often, and under torch.compile
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
