"""What a number was measured or predicted of: model, shapes, dtypes, optimizer, device and versions."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.training_step import TrainingStep


def about_model(model: nn.Module, device: torch.device | str | None = None) -> dict[str, Any]:
    """Plain values, for JSON: its class, parameters by dtype, mode, device (None: of its first tensor), versions."""
    import fused_remat

    dtypes: Counter[str] = Counter()
    for parameter in model.parameters():
        dtypes[dtype_name(parameter)] += parameter.numel()
    if device is None:
        device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    autocast = torch.is_autocast_enabled(torch.device(device).type)
    return {
        "model": type(model).__name__,
        "parameters": dict(dtypes),
        "training": model.training,
        "autocast": dtype_name(torch.get_autocast_dtype(torch.device(device).type)) if autocast else None,
        "device": str(device),
        "versions": {
            "fused_remat": fused_remat.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def about_step(step: TrainingStep, device: torch.device | str | None = None) -> dict[str, Any]:
    """The same, with the tensors that the model is called with, the loss and the optimizer."""
    named = [(str(i), value) for i, value in enumerate(step.args)] + list(step.kwargs.items())
    loss = "the model's own" if step.loss is None else getattr(step.loss, "__qualname__", type(step.loss).__name__)
    return {
        **about_model(step.model, device),
        "inputs": [
            {"name": name, "shape": list(value.shape), "dtype": dtype_name(value)}
            for name, value in named
            if isinstance(value, Tensor)
        ],
        "loss": loss,
        "optimizer": None if step.optimizer is None else type(step.optimizer).__name__,
    }


def in_words(about: Mapping[str, Any]) -> str:
    """One line of everything."""
    return "; ".join([f"{about['model']} on {about['device']}", trained(about), versions(about)])


def trained(about: Mapping[str, Any]) -> str:
    """What is trained on what, as far as `about` says it."""
    parts = ["parameters: " + (", ".join(f"{n:,} {dtype}" for dtype, n in about["parameters"].items()) or "none")]
    if "inputs" in about:
        parts.append("inputs: " + (", ".join(f"{i['dtype']} {i['shape']}" for i in about["inputs"]) or "no tensors"))
    if "optimizer" in about:
        parts += [f"loss: {about['loss']}", f"optimizer: {about['optimizer'] or 'none'}"]
    parts += [f"autocast: {about['autocast']}"] if about["autocast"] else []
    return "; ".join(parts)


def versions(about: Mapping[str, Any]) -> str:
    """Of torch and this package."""
    return f"torch {about['versions']['torch']}, fused_remat {about['versions']['fused_remat']}"


def dtype_name(of: Tensor | torch.dtype) -> str:
    """Without "torch."."""
    return str(of.dtype if isinstance(of, Tensor) else of).removeprefix("torch.")
