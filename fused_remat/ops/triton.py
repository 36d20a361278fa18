"""The level-3 operators that Triton kernels implement: which host function runs each, imported when first called."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache

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


@cache
def register() -> torch.library.Library:
    """Implement the `_triton` operators, which must exist. Imports no Triton."""
    library = torch.library.Library("fused_remat", "IMPL")
    for op, module in IMPLEMENTERS.items():
        # On CPU tensors an interpreter runs the kernels; the dispatch table says when that may be chosen.
        for key in ("CPU", "CUDA"):
            library.impl(f"{op}_triton", _late(op, module), key)
    return library
