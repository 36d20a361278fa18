"""Tests of the Triton kernels, executed on the CPU: by Triton's interpreter, or by ttsem where that runs pytest."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from fused_remat._triton import interpreter_wanted

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


# The others put their tensors on the CPU, where only an interpreter runs kernels.
ON_A_GPU_TOO = ("test_mlp_tiles.py", "test_mlp_launches.py", "test_norm.py", "test_heads.py", "test_sums.py")


def _needs_interpreter(name: str) -> bool:
    interpreter = interpreter_wanted() or "ttsem" in sys.modules
    return not interpreter and torch.cuda.is_available() and name not in ON_A_GPU_TOO


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            if _needs_interpreter(item.path.name):
                item.add_marker(pytest.mark.skip(reason="runs on CPU tensors: set TRITON_INTERPRET=1"))
            # The interpreter computes with NumPy, which warns about the infinities and NaNs that kernels mean.
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))


def _patch_once() -> None:
    """Have the interpreter replace Triton's functions once, and not again in every call of a device function."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    patch = interpreter._patch_lang

    def patch_lang(function):
        modules = (value for value in function.__globals__.values() if value is tl or value is tl.core)
        if any(tl.core.is_builtin(module.load) for module in modules):
            return patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_lang


_patch_once()
