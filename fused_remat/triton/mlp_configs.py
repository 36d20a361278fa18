"""Tiles of the MLP kernels, and which path a tile takes. Block sizes: rows, features, and what a product sums over.

Rows were found by compiling: no spills, and shared and tensor memory within the architecture. "masked" is dropout,
whose generator wants registers.
"""

from __future__ import annotations

import torch

from fused_remat.triton.configs import Config, Key, dtype_class
from fused_remat.triton.targets import INTERPRETER

# Up to this mean width of x and dy, writing pre-activations and reading them again costs more than what narrower tiles
# lose: 4.5 % of the GEMM time at 1024, 2.3 % at 2048, in proportion to 1 / width.
FUSED_WIDTH = 1024
# The interpreter takes every path within the sizes of tests.
FUSED_WIDTH_INTERPRETED = 32

# Of the elementwise kernels, which are bound by memory on every architecture; few elements a thread, so that it has
# registers for fp64.
_ELEMENTWISE, _ELEMENTWISE_INTERPRETED = Config(8, 128, num_warps=4), Config(32, 64, num_warps=4)


def elementwise(arch: int) -> Config:
    return _ELEMENTWISE_INTERPRETED if arch == INTERPRETER else _ELEMENTWISE


def forward_path(dtype: torch.dtype, arch: int, aligned: bool) -> str:
    """ "fused": one kernel; "elementwise": library GEMMs and one pass over what they made.

    `aligned`: every operand lies densely, its rows or columns starting at multiples of 16 bytes. Others can only be
    loaded element by element, which spills.
    """
    if arch == INTERPRETER:
        return "elementwise" if dtype == torch.float64 else "fused"
    return "fused" if aligned and dtype_class(dtype) != "ieee" else "elementwise"


def backward_path(depth: int, depth_out: int, dtype: torch.dtype, arch: int, aligned: bool) -> str:
    """How `hidden`, `dup` and `dgate` are made from x [.., depth] and dy [.., depth_out].

    "fused": one kernel, nothing but its results is stored. "epilogue": library GEMMs for the pre-activations, which the
    kernel of dhidden turns into gradients. "elementwise": library GEMMs for dhidden too.
    """
    if forward_path(dtype, arch, aligned) == "elementwise":
        return "elementwise"
    if arch == INTERPRETER:
        return "fused" if depth + depth_out <= 2 * FUSED_WIDTH_INTERPRETED else "epilogue"
    narrow = depth + depth_out <= 2 * FUSED_WIDTH
    return "fused" if narrow and dtype_class(dtype) == "half" else "epilogue"


def parts(op: str, config: Config) -> int:
    """Groups of columns that an epilogue works through: on a whole accumulator it would spill."""
    return max(1, config.block_n // (16 if op in ("mlp_dual", "mlp_triple") else 32))


GEMMS = ("mlp_fwd", "mlp_fwd_gated", "mlp_dual", "mlp_triple", "mlp_dhidden", "mlp_dhidden_gated")

_HALF = {
    80: {
        "mlp_fwd": Config(128, 128, 32, num_stages=4),
        "mlp_fwd_gated": Config(128, 64, 32, num_stages=4),
        "mlp_dual": Config(128, 128, 32, num_stages=4),
        "mlp_triple": Config(128, 64, 32, num_stages=4),
        "mlp_dhidden": Config(128, 128, 32, num_stages=4),
        "mlp_dhidden_gated": Config(128, 128, 32, num_stages=4),
    },
    90: {
        "mlp_fwd": Config(128, 256, 64, num_stages=4, tma=True),
        "mlp_fwd_gated": Config(128, 128, 64, num_stages=3, tma=True),
        # Through pointers: with descriptors Triton 3.6 serialises the products of kernels with two loops (C7515).
        "mlp_dual": Config(128, 128, 64, num_stages=3),
        "mlp_triple": Config(128, 128, 64, num_stages=3),
        "mlp_dhidden": Config(128, 256, 64, num_stages=4, tma=True),
        "mlp_dhidden_gated": Config(128, 256, 64, num_stages=3, tma=True),
    },
}
_HALF[100] = _HALF[90] | {
    "mlp_dual": Config(128, 128, 64, num_stages=3, tma=True),
    "mlp_triple": Config(128, 128, 64, num_stages=3, tma=True),
}
_HALF_MASKED = {
    80: _HALF[80] | {"mlp_dual": Config(128, 64, 32, num_stages=4)},
    90: {
        "mlp_fwd": Config(128, 128, 64, num_stages=3, tma=True),
        "mlp_fwd_gated": Config(128, 128, 64, num_stages=3, tma=True),
        "mlp_dual": Config(128, 64, 64, num_stages=3, tma=True),
        "mlp_triple": Config(128, 64, 64, num_stages=3, tma=True),
        "mlp_dhidden": Config(128, 128, 64, num_stages=3, tma=True),
        "mlp_dhidden_gated": Config(128, 128, 64, num_stages=3, tma=True),
    },
}
_HALF_MASKED[100] = _HALF_MASKED[90]
_TF32 = dict.fromkeys((80, 90), Config(128, 64, 32, num_stages=3)) | {100: Config(128, 64, 32, num_stages=3, tma=True)}
# Chosen by nobody but who names the path: without tensor cores the library's GEMMs are the better half.
_IEEE = dict.fromkeys((80, 90, 100), Config(64, 32, 16, num_warps=4))
# Small, so that small shapes have several tiles.
_INTERPRETED = Config(64, 32, 64, num_warps=4)

TABLE: dict[Key, Config] = (
    {
        (op, 0, "half", arch, variant): config
        for variant, archs in (("plain", _HALF), ("masked", _HALF_MASKED))
        for arch, ops in archs.items()
        for op, config in ops.items()
    }
    | {
        (op, 0, precision, arch, variant): config
        for precision, archs in (("tf32", _TF32), ("ieee", _IEEE))
        for arch, config in archs.items()
        for op in GEMMS
        for variant in ("plain", "masked")
    }
    | {
        (op, 0, precision, INTERPRETER, variant): _INTERPRETED
        for precision in ("half", "tf32", "ieee")
        for op in GEMMS
        for variant in ("plain", "masked")
    }
)
