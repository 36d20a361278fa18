"""Installed peers as providers. Both need a CUDA device, which the tests do not have: none of this has run yet."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from types import ModuleType

import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import MLPCase
from benchmarks.operation import Forward, NotRun

# Our activation names -> theirs, where both mean the same function.
_LIGER_GATED = {"silu": ("swiglu", "LigerSiLUMulFunction"), "gelu_tanh": ("geglu", "LigerGELUMulFunction")}
_QUACK_PLAIN = {"gelu_tanh": "gelu_tanh_approx", "relu": "relu", "relu2": "relu_sq", "silu": "silu"}


def liger_mlp(case: MLPCase, leaves: Mapping[str, Tensor]) -> Forward:
    """Liger's fused `act(gate) * up` between torch's matrix products. Raises NotRun with the reason."""
    if not case.gated or case.activation not in _LIGER_GATED:
        raise NotRun(f"Liger has gated MLPs with {' or '.join(_LIGER_GATED)} only")
    module, function = _LIGER_GATED[case.activation]
    combine = getattr(_import(f"liger_kernel.ops.{module}", leaves), function).apply

    def forward() -> Tensor:
        x = leaves["x"]
        return F.linear(combine(F.linear(x, leaves["w_gate"]), F.linear(x, leaves["w_up"])), leaves["w_down"])

    return forward


def quack_mlp(case: MLPCase, leaves: Mapping[str, Tensor]) -> Forward:
    """quack's plain MLP, which keeps the pre-activation and rebuilds the activation. Raises NotRun with the reason."""
    if case.gated:
        raise NotRun("quack wants w_gate and w_up interleaved in one weight")
    if case.activation not in _QUACK_PLAIN:
        raise NotRun(f"quack has no {case.activation}, only {', '.join(_QUACK_PLAIN)}")
    mlp_func = _import("quack.mlp", leaves).mlp_func
    if "bias1" not in inspect.signature(mlp_func).parameters:
        raise NotRun("this version of quack has no biases")

    def forward() -> Tensor:
        weights = (leaves["w_up"], leaves["w_down"])
        return mlp_func(
            leaves["x"], *weights, _QUACK_PLAIN[case.activation], bias1=leaves["b_up"], bias2=leaves["b_down"]
        )

    return forward


def _import(name: str, leaves: Mapping[str, Tensor]) -> ModuleType:
    if leaves["x"].device.type != "cuda":
        raise NotRun("needs a CUDA device")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotRun(f"not installed ({error})") from error
