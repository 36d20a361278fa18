"""The parts of torch that the guards need and that torch does not publish, each with what happens without it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor
from torch.autograd import forward_ad

_numbers = itertools.count()


@contextmanager
def saved_description(describe: Callable[[Tensor], Any]) -> Iterator[tuple[str, Callable[[], None]]]:
    """A value of `determinism_check` for one call of torch's checkpoint: it keeps `describe(x)` of each tensor it
    saves and compares that with `describe` of the rebuilt one. The second value forgets the name, once torch has
    looked it up.
    """
    table = getattr(torch_checkpoint, "_allowed_determinism_checks_to_fns", None)
    if table is None:
        raise RuntimeError(
            f"torch {torch.__version__} does not let fused_remat describe what a region saves: it has no "
            "torch.utils.checkpoint._allowed_determinism_checks_to_fns; use a torch that has, or torch's own checkpoint"
        )
    key = f"fused_remat region {next(_numbers)}"
    table[key] = describe
    try:
        yield key, lambda: table.pop(key, None)
    finally:
        table.pop(key, None)


def stops_early() -> bool:
    """Whether a replay stops at the last tensor that it needs: torch's default, which its user may change."""
    return getattr(torch_checkpoint, "_enable_checkpoint_early_stop", None) is not False


def after_backward(callback: Callable[[], None]) -> bool:
    """Calls `callback` when the backward that is running ends; False, and no call, if none is running here."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True


def while_tracing(fn: Callable[[], None]) -> Callable[[], None]:
    """As `torch.compiler.assume_constant_result`, which would import the whole compiler now: `torch.compile` runs `fn`
    when it traces a call of it, and compiles nothing of it.
    """
    fn._dynamo_marked_constant = True
    return fn


def why_not_replayed() -> str | None:
    """What differentiates or batches plain torch only, and is active; None if nothing is."""
    if torch._C._are_functorch_transforms_active():
        return "a torch.func transform"
    return "forward-mode differentiation" if forward_ad._current_level >= 0 else None


# As torch.backends names them: getters and setters of torch._C.
_FLAGS = (
    ("_get_cublas_allow_fp16_reduced_precision_reduction", "_set_cublas_allow_fp16_reduced_precision_reduction"),
    ("_get_cublas_allow_bf16_reduced_precision_reduction", "_set_cublas_allow_bf16_reduced_precision_reduction"),
    ("_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
    ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    ("_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"),
    ("_get_sdp_priority_order", "_set_sdp_priority_order"),
)
_PRECISIONS = (
    ("generic", "all"),
    *((backend, operation) for backend in ("cuda", "mkldnn") for operation in ("all", "matmul", "conv", "rnn")),
)


def settings() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """How to read and how to write each setting of this torch that decides what an operation gives."""
    yield _matmul_precision, lambda value: value and torch.set_float32_matmul_precision(value)
    if hasattr(torch._C, "_get_fp32_precision_getter"):
        for names in _PRECISIONS:
            yield (
                functools.partial(torch._C._get_fp32_precision_getter, *names),
                functools.partial(torch._C._set_fp32_precision_setter, *names),
            )
    for getter, setter in _FLAGS:
        if hasattr(torch._C, getter) and hasattr(torch._C, setter):
            yield getattr(torch._C, getter), functools.partial(_write, getattr(torch._C, setter))


def _matmul_precision() -> str | None:
    """None where only the newer settings of single backends were made: torch then has no word for all of them."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _write(setter: Callable[..., Any], value: Any) -> None:
    setter(*value) if isinstance(value, tuple) else setter(value)
