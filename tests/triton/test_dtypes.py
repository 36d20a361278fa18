"""Whole calls in every dtype, odd shapes and strides included: values and gradients beside float64 and plain torch.

Few cases, each with several features at once, because ttsem runs them too (`test_under_ttsem.py`), with the tiles of a
GPU, its rounding, and reports of what is read out of bounds or written twice. Plain interpreters skip bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable

import mlp_cases as cases
import pytest
import torch
from torch import Tensor

import fused_remat
from fused_remat import reference
from fused_remat.triton import targets

pytestmark = pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension))

# What an error may be where torch happens to make none, relative to the norm of the result.
FLOOR = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
DTYPE = pytest.mark.parametrize("dtype", FLOOR, ids=lambda dtype: str(dtype).removeprefix("torch."))

# name -> (batch, query heads, key heads, Lq, Lk, E, Ev, settings)
ATTENTION = {
    "full": (1, 2, 2, 65, 127, 40, 40, {}),
    "causal-grouped": (2, 4, 2, 129, 129, 64, 64, {"is_causal": True}),
    "causal-bottom-right-wide": (1, 1, 1, 17, 70, 80, 200, {"causal": "bottom_right"}),
    "window": (1, 2, 1, 63, 63, 16, 48, {"window": (20, 9)}),
    # Scores up to about 40: probabilities are the forward's only if they are made of the same, unrounded scores.
    "large-scores": (1, 2, 2, 65, 65, 64, 64, {"scale": 1.125}),
    "one-query": (2, 2, 1, 1, 33, 128, 128, {}),
    "bool-mask": (1, 2, 2, 34, 65, 32, 32, {"attn_mask": "bool"}),
    "float-mask": (2, 2, 2, 34, 65, 32, 32, {"attn_mask": "float"}),
    "padding": (2, 2, 1, 33, 40, 24, 24, {"key_padding_mask": "bool", "is_causal": True}),
    "dropout": (1, 2, 1, 33, 66, 64, 64, {"dropout_p": 0.3, "is_causal": True}),
    "everything": (1, 2, 1, 40, 41, 32, 16, {"attn_mask": "float", "key_padding_mask": "bool", "dropout_p": 0.2}),
}


def _masks(kind: str, shape: tuple[int, ...]) -> Tensor:
    if kind == "float":
        return torch.randn(shape, dtype=torch.float64)
    mask = torch.rand(shape) < 0.7
    mask[..., 0] = True
    return mask


def _attention(case: str) -> tuple[dict[str, Tensor], dict]:
    batch, heads, kv_heads, length_q, length_k, width, value_width, settings = ATTENTION[case]
    given = {
        # As a projection leaves them: heads lie behind lengths.
        "q": torch.randn(batch, length_q, heads, width, dtype=torch.float64).transpose(1, 2),
        "k": torch.randn(batch, kv_heads, length_k, width, dtype=torch.float64),
        "v": torch.randn(batch, length_k, kv_heads, value_width, dtype=torch.float64).transpose(1, 2),
    }
    shapes = {"attn_mask": (1, heads, length_q, length_k), "key_padding_mask": (batch, length_k)}
    settings = {
        name: _masks(value, shapes[name]) if name in shapes else value for name, value in settings.items()
    }  # fmt: skip
    return given, settings


# name -> (rows, D, F, Do, gated, settings)
MLP = {
    "gelu": (129, 40, 65, 40, False, {}),
    "tanh-dropout": (33, 63, 130, 17, False, {"activation": "tanh", "dropout_p": 0.3}),
    "relu-wide": (17, 1100, 34, 1030, False, {"activation": "relu"}),
    "silu-gated": (70, 48, 127, 48, True, {"activation": "silu"}),
    "gelu_tanh-gated-dropout": (65, 64, 33, 64, True, {"activation": "gelu_tanh", "dropout_p": 0.1}),
    "one-row": (1, 17, 341, 1, True, {"activation": "identity"}),
}


def _mlp(case: str) -> tuple[dict[str, Tensor], dict]:
    rows, width, hidden, out, gated, settings = MLP[case]
    return cases.operands(rows, width, hidden, out, gated=gated, requires_grad=False), settings


def _ours(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(**arguments):
        with fused_remat.backend("triton"):
            return op(**arguments)

    return call


def _reference_attention(**arguments):
    causal = arguments.pop("causal", None) or ("top_left" if arguments.pop("is_causal", False) else None)
    mask = arguments.pop("attn_mask", None)
    out, *_ = reference.attention(
        arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), causal=causal, attn_mask=mask,
        **{"scale": None, "key_padding_mask": None, "window": (None, None), "dropout_p": 0.0} | arguments,
    )  # fmt: skip
    return out


def _results(call, given: dict[str, Tensor], settings: dict, dtype: torch.dtype, dout: Tensor | None):
    """The output and the gradients of `given`, all made of what `dtype` holds of the same numbers."""
    leaves = {name: value.to(dtype).requires_grad_() for name, value in given.items()}
    cast = {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in settings.items()
    }
    torch.manual_seed(5)
    out = call(**leaves, **cast)
    dout = torch.randn_like(out) if dout is None else dout.to(dtype)
    return [out, *torch.autograd.grad(out, list(leaves.values()), dout)], dout


def _check(ours, plain, given, settings, dtype: torch.dtype, *, as_precise_as: torch.dtype | None = None) -> None:
    """Errors at most twice those of plain torch in `as_precise_as`, by default the dtype itself."""
    if dtype == torch.bfloat16 and targets.interpreted() and not targets.interpreter_multiplies(dtype):
        pytest.skip("this interpreter does not multiply bfloat16")
    narrow = as_precise_as or dtype
    given = {name: value.to(narrow).double() for name, value in given.items()}
    theirs, dout = _results(plain, given, settings, narrow, None)
    truth, _ = _results(plain, given, settings, torch.float64, dout)
    actual, _ = _results(ours, given, settings, dtype, dout)
    for name, a, t, right in zip(("out", *given), actual, theirs, truth, strict=True):
        error, allowed = cases.relative_error(a, right), 2 * cases.relative_error(t, right) + FLOOR[narrow]
        assert error <= allowed, f"{name}: {error:.2e}, allowed {allowed:.2e}"


@DTYPE
@pytest.mark.parametrize("case", ATTENTION)
def test_attention(case, dtype):
    _check(_ours(fused_remat.attention), _reference_attention, *_attention(case), dtype)


@DTYPE
@pytest.mark.parametrize("case", MLP)
def test_mlp(case, dtype):
    _check(_ours(fused_remat.mlp), reference.mlp, *_mlp(case), dtype)


@pytest.fixture
def tf32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("case", ("causal-grouped", "float-mask"))
def test_tf32_attention_is_as_precise_as_half(case, tf32):
    _check(
        _ours(fused_remat.attention), _reference_attention, *_attention(case), torch.float32,
        as_precise_as=torch.float16,
    )  # fmt: skip


@pytest.mark.parametrize("case", ("gelu", "silu-gated"))
def test_tf32_mlp_is_as_precise_as_half(case, tf32):
    _check(_ours(fused_remat.mlp), reference.mlp, *_mlp(case), torch.float32, as_precise_as=torch.float16)
