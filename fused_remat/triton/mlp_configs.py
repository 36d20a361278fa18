"""Tiles of the MLP kernels, and which path a tile takes. Block sizes: rows, features, and what a product sums over.

Rows were found by compiling: no spills, and shared memory within the architecture. "masked" is dropout, whose generator
wants registers.
"""

from __future__ import annotations

import torch

from fused_remat.triton import configs
from fused_remat.triton.configs import Config, Key, dtype_class
from fused_remat.triton.targets import INTERPRETER

# Up to this mean width of x and dy, writing pre-activations and reading them again costs more than what narrower tiles
# lose: 4.5 % of the GEMM time at 1024, 2.3 % at 2048, in proportion to 1 / width.
FUSED_WIDTH = 1024
# The interpreter takes every path within the sizes of tests.
FUSED_WIDTH_INTERPRETED = 32

# Of the elementwise kernels: they are bound by memory on every architecture.
ELEMENTWISE = Config(32, 128, num_warps=4)


def forward_path(dtype: torch.dtype, arch: int) -> str:
    """ "fused": one kernel; "elementwise": library GEMMs and one pass over what they made."""
    if dtype == torch.float64 or (arch != INTERPRETER and dtype_class(dtype) == "ieee"):
        return "elementwise"
    return "fused"


def backward_path(depth: int, depth_out: int, dtype: torch.dtype, arch: int) -> str:
    """How `hidden`, `dup` and `dgate` are made from x [.., depth] and dy [.., depth_out].

    "fused": one kernel, nothing but its results is stored. "epilogue": library GEMMs for the pre-activations, which the
    kernel of dhidden turns into gradients. "elementwise": library GEMMs for dhidden too.
    """
    if forward_path(dtype, arch) == "elementwise":
        return "elementwise"
    if arch == INTERPRETER:
        return "fused" if depth + depth_out <= 2 * FUSED_WIDTH_INTERPRETED else "epilogue"
    narrow = depth + depth_out <= 2 * FUSED_WIDTH
    return "fused" if narrow and dtype_class(dtype) == "half" else "epilogue"


GEMMS = ("mlp_fwd", "mlp_fwd_gated", "mlp_dual", "mlp_triple", "mlp_dhidden", "mlp_dhidden_gated")

TABLE: dict[Key, Config] = {
    (op, 0, precision, INTERPRETER, variant): Config(64, 32, 16, num_warps=4)
    for op in GEMMS
    for precision in ("half", "tf32", "ieee")
    for variant in ("plain", "masked")
}


def choose(op: str, dtype: torch.dtype, arch: int, dropout: bool) -> Config:
    return configs.choose(op, 0, dtype, arch, "masked" if dropout else "plain")
