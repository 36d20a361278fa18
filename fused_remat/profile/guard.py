"""When a profile would be wrong, and what it cannot see."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode


def refuse_to_lie(model: nn.Module, fake: bool, what: str = "profile") -> None:
    """Raises RuntimeError, naming the function `what`, where the surroundings would change what a step allocates or
    what is seen of it."""
    if torch.compiler.is_compiling() or _is_called_from_compiled_code():
        raise RuntimeError(f"{what} was called inside code that torch.compile compiles; call it outside")
    mode = _get_current_dispatch_mode()
    if mode is not None:
        raise RuntimeError(
            f"{what} was called under a dispatch mode ({type(mode).__name__}), which changes what is allocated; "
            "call it outside"
            + (" (fake=True makes fake tensors itself)" if type(mode).__name__ == "FakeTensorMode" else "")
        )
    if torch.autograd._profiler_enabled():
        raise RuntimeError(f"{what} needs torch's profiler, and one is already running; call it outside")
    if not torch.is_grad_enabled():
        raise RuntimeError(
            f"{what} was called with gradients off (no_grad or inference_mode); there is no backward then"
        )
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        raise RuntimeError(
            f"{what} was called under torch.autograd.graph.saved_tensors_hooks (save_on_cpu, for example), whose place "
            "its own hooks would take; call it outside"
        )
    if fake and isinstance(model, nn.Module) and compiled_modules(model):
        raise RuntimeError(
            f"{what}(fake=True) cannot run compiled code ({compiled_modules(model)[0] or 'the model'}); "
            "pass the model as it was before torch.compile"
        )


def _is_called_from_compiled_code() -> bool:
    """Whether torch.compile would compile the functions that are called here (after a break in its graph)."""
    eval_frame = sys.modules.get("torch._C._dynamo.eval_frame")
    return eval_frame is not None and bool(eval_frame.get_eval_frame_callback())


def compiled_modules(model: nn.Module) -> list[str]:
    """Paths of the modules that torch.compile runs."""
    return [path for path, module in model.named_modules() if _is_compiled(module)]


def _is_compiled(module: nn.Module) -> bool:
    wrapper = type(module).__module__.startswith("torch._dynamo") and hasattr(module, "_orig_mod")
    return wrapper or getattr(module, "_compiled_call_impl", None) is not None
