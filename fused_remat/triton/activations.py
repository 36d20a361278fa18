"""The activations on Triton tiles: value, and value and slope together.

To add one: a function that returns (value, slope), its branch in `value_and_slope` and its name in `NAMES`. The names
are those of `fused_remat/activations.py`; formulas and sources: docs/math.md, section "Activations".
"""

from __future__ import annotations

import triton
import triton.language as tl

NAMES = (
    "gelu",
    "gelu_tanh",
    "quick_gelu",
    "relu",
    "relu2",
    "leaky_relu",
    "silu",
    "sigmoid",
    "tanh",
    "identity",
)


@triton.jit
def value(x, ACTIVATION: tl.constexpr):
    """act(x) of a tile in fp32 or fp64. What `value_and_slope` computes beside it is not used and compiles away."""
    result, _ = value_and_slope(x, ACTIVATION)
    return result


@triton.jit
def value_and_slope(x, ACTIVATION: tl.constexpr):
    """act(x) and d act / d x of a tile in fp32 or fp64. Backward never evaluates an activation twice."""
    if ACTIVATION == "gelu":
        result = _gelu(x)
    elif ACTIVATION == "gelu_tanh":
        result = _gelu_tanh(x)
    elif ACTIVATION == "quick_gelu":
        result = _scaled_silu(x, 1.702)
    elif ACTIVATION == "silu":
        result = _scaled_silu(x, 1.0)
    elif ACTIVATION == "relu":
        # NaN is not <= 0, so that it stays NaN.
        result = tl.where(x <= 0, 0.0, x), tl.where(x <= 0, 0.0, 1.0)
    elif ACTIVATION == "relu2":
        positive = tl.where(x <= 0, 0.0, x)
        result = positive * positive, 2.0 * positive
    elif ACTIVATION == "leaky_relu":
        slope = tl.where(x <= 0, tl.full(x.shape, 0.01, x.dtype), 1.0)
        result = x * slope, slope
    elif ACTIVATION == "sigmoid":
        s = _sigmoid(x)
        result = s, s * (1.0 - s)
    elif ACTIVATION == "tanh":
        result = _tanh(x)
    else:
        tl.static_assert(ACTIVATION == "identity", "no activation of that name")
        result = x, tl.full(x.shape, 1.0, x.dtype)
    return result


@triton.jit
def _sigmoid(x):
    # exp of what is never positive does not overflow.
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def _tanh(x):
    """tanh and its slope."""
    # 1 - |tanh|: of a large x it is small and so are its rounding errors, and the slope keeps all of its digits.
    e = tl.exp(-2.0 * tl.abs(x))
    gap = 2.0 * e / (1.0 + e)
    # The difference loses the digits of a small x, where the series has them all.
    reach: tl.constexpr = 0.2 if x.dtype == tl.float64 else 0.3
    small = tl.abs(x) < reach
    near = tl.where(small, x, 0.0)
    square = near * near
    series = 0.0035921280365724808 - square * (0.0014558343870513183 - square * 0.000590027440945586)
    series = 0.02186948853615520 - square * (0.008863235529902197 - square * series)
    series = 0.3333333333333333 - square * (0.13333333333333333 - square * (0.05396825396825397 - square * series))
    return (
        tl.where(small, near - near * square * series, tl.where(x < 0, gap - 1.0, 1.0 - gap)),
        gap * (2.0 - gap),
    )


@triton.jit
def _gelu(x):
    cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    pdf = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return x * cdf, cdf + x * pdf


@triton.jit
def _gelu_tanh(x):
    square = x * x
    t, slope = _tanh(0.7978845608028654 * (x + 0.044715 * square * x))
    half = 0.5 * (1.0 + t)
    inner = 0.7978845608028654 * (1.0 + 0.134145 * square)
    return x * half, half + 0.5 * x * slope * inner


@triton.jit
def _scaled_silu(x, by: tl.constexpr):
    s = _sigmoid(by * x)
    return x * s, s + by * x * s * (1.0 - s)
