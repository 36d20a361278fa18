"""The linears of a layer as a fused call takes them: plain ones, and PEFT's LoRA around plain ones.

PEFT's `lora.Linear` computes `base(x) + B(A(dropout(x))) * scaling`. Where that is all it does (one active adapter, not
merged, no variant, no dropout in force, every part plain) it is a base weight with a `LowRank`; all else is a reason
to run the layer's own code. Asked at every call, as adapters are added, switched, disabled and merged after conversion.
PEFT is never imported: a class is known by its name.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from torch import nn

from fused_remat import _extension
from fused_remat.plain import class_name, why_not_plain, why_not_plain_linear, why_weights_unfit
from fused_remat.settings import LowRank

_LORA_MODULE, _LORA_LINEAR = "peft.tuners.lora.layer", "Linear"


@dataclass(frozen=True)
class Adapted:
    """A plain linear, and what an adapter adds to it."""

    linear: nn.Module
    adapter: LowRank | None = None


def is_lora(module: nn.Module | None) -> bool:
    """Whether `module` is PEFT's LoRA around a linear, and no subclass of it."""
    cls = type(module)
    return cls.__qualname__ == _LORA_LINEAR and cls.__module__ == _LORA_MODULE


def base_of(module: nn.Module | None) -> nn.Module | None:
    """What LoRA wraps, however many of them; the module itself where it is none."""
    while is_lora(module):
        module = module._modules.get("base_layer")
    return module


def adapted(module: nn.Module | None, cls: type[nn.Module]) -> Adapted | str:
    """`module` as a plain linear of class `cls` with at most one adapter, or why it is not."""
    if not is_lora(module):
        reason = why_not_plain_linear(module, cls)
        return Adapted(module) if reason is None else reason
    base = module._modules.get("base_layer")
    reason = _why_not_simple(module) or why_not_plain_linear(base, cls)
    if reason is not None:
        return reason
    names = [name for name in _active(module) if name in module.lora_A._modules]
    if not names:
        return Adapted(base)
    if len(names) > 1:
        return f"has several active adapters: {', '.join(names)}"
    return _with_adapter(module, base, names[0])


def _active(lora: nn.Module) -> list[str]:
    active = lora._active_adapter
    return [active] if isinstance(active, str) else list(active)


@_extension.constant_when_traced
def _runs_its_own_forward() -> bool:
    """Whether the forward of PEFT's class is the one it was written with. A trace asks once."""
    forward = getattr(sys.modules[_LORA_MODULE], _LORA_LINEAR).forward
    return (forward.__module__, forward.__qualname__) == (_LORA_MODULE, f"{_LORA_LINEAR}.forward")


def _why_not_simple(lora: nn.Module) -> str | None:
    """What PEFT's forward would do besides adding the active adapters to its base layer."""
    reason = why_not_plain(lora, type(lora))
    if reason is not None:
        return reason
    if not _runs_its_own_forward():
        return f"runs a patched {class_name(type(lora))}.forward"
    if lora._disable_adapters:
        return "has its adapters disabled"
    if lora.merged_adapters:
        return f"has merged adapters: {', '.join(lora.merged_adapters)}"
    if not getattr(lora, "cast_input_dtype_enabled", True):
        return "does not cast its input to the dtype of its adapter"
    return None


def _with_adapter(lora: nn.Module, base: nn.Module, name: str) -> Adapted | str:
    if name in getattr(lora, "lora_variant", ()) or getattr(lora, "use_dora", {}).get(name, False):
        variant = getattr(lora, "lora_variant", {}).get(name)
        return f"has an adapter {name} of another kind than LoRA ({type(variant).__name__})"
    a, b, dropout = (getattr(lora, part)._modules.get(name) for part in ("lora_A", "lora_B", "lora_dropout"))
    for part, factor in (("lora_A", a), ("lora_B", b)):
        reason = why_not_plain_linear(factor)
        if reason is not None:
            return f"has a {part} that {reason}"
        if factor.bias is not None:
            return f"has a {part} with a bias"
        reason = why_weights_unfit(factor.weight)
        if reason is not None:
            return f"has a {part} of which {reason}"
        if factor.weight.device != base.weight.device:
            return f"has a {part} on {factor.weight.device}, its weight on {base.weight.device}"
    if why_not_plain(dropout, nn.Identity) is not None:
        reason = why_not_plain(dropout, nn.Dropout)
        if reason is not None:
            return f"has a lora_dropout that {reason}"
        if dropout.training and dropout.p > 0.0:
            return f"drops {dropout.p:g} of what its adapter takes in"
    return Adapted(base, LowRank(a.weight, b.weight, lora.scaling[name]))
