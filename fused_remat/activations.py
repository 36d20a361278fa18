"""The activations by name: one row per activation, plain differentiable torch.

A row is all that the reference path, the module converter, the tests and the benchmarks need. The fast twins
(`csrc/activations.h`) carry the same names; a name without a twin runs on the reference path and `explain` says so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def quick_gelu(x: Tensor) -> Tensor:
    """`x * sigmoid(1.702 x)` (Hendrycks and Gimpel, "Gaussian Error Linear Units", section 2)."""
    return x * torch.sigmoid(1.702 * x)


def relu2(x: Tensor) -> Tensor:
    """`relu(x)^2` (So et al., "Primer", section 4)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "relu2": relu2,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.01),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": lambda x: x,
}
