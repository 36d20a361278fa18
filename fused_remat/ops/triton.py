"""The level-3 operators that Triton kernels implement: which host function runs each, imported when first called."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

# op -> module of fused_remat.triton whose function of that name takes the op's arguments
IMPLEMENTERS = {
    "mlp_fwd_chunk": "mlp",
    "mlp_bwd_chunk": "mlp",
    "column_sums": "sums",
    "normalize_rows": "norm",
    "normalize_rows_bwd": "norm",
    "transform_heads": "heads",
    "transform_heads_bwd": "heads",
    "attention_fwd": "attention",
    "attention_delta": "attention",
    "attention_bwd": "attention",
    "attention_weights": "attention",
}


def _late(op: str, module: str) -> Callable[..., None]:
    @cache
    def host_function() -> Callable[..., None]:
        return getattr(importlib.import_module(f"fused_remat.triton.{module}"), op)

    return lambda *args: host_function()(*args)


def _on_its_gpu(function: Callable[..., None]) -> Callable[..., None]:
    """Triton launches on the current device, which need not be that of the tensors."""

    def call(*args: Any) -> None:
        with torch.cuda.device(args[0].device):
            function(*args)

    return call


@cache
def register() -> torch.library.Library:
    """Implement the `_triton` operators, which must exist. Imports no Triton."""
    library = torch.library.Library("fused_remat", "IMPL")
    for op, module in IMPLEMENTERS.items():
        function = _late(op, module)
        # On CPU tensors an interpreter runs the kernels; the dispatch table says when that may be chosen.
        library.impl(f"{op}_triton", function, "CPU")
        library.impl(f"{op}_triton", _on_its_gpu(function), "CUDA")
    return library
