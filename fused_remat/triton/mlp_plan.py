"""How GEMM kernels of the MLP are launched: grid, constants, and how each operand is loaded.

What depends on shapes, strides, dtype, architecture and the rows in force alone is made once and kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_remat.triton import configs, mlp_configs
from fused_remat.triton.configs import dtype_class
from fused_remat.triton.targets import arch_of


class Plan(NamedTuple):
    """What of a GEMM kernel's launch depends on shapes, strides, dtype and configuration alone."""

    grid: tuple[int]
    blocks_m: int
    meta: dict[str, Any]
    accesses: tuple[str | None, ...]
    blocks: tuple[tuple[int, int], ...]


# Which operands each op of `mlp_configs.GEMMS` takes, in order; those named W cut the features, the others the rows.
_FORWARD, _FUSED, _DHIDDEN = ("X", "W_UP", "W_GATE"), ("X", "W_UP", "W_GATE", "DY", "W_DOWN"), ("DY", "W_DOWN")
_OPERANDS = {
    "mlp_fwd": _FORWARD,
    "mlp_fwd_gated": _FORWARD,
    "mlp_dual": _FUSED,
    "mlp_triple": _FUSED,
    "mlp_dhidden": _DHIDDEN,
    "mlp_dhidden_gated": _DHIDDEN,
}
Key = tuple[torch.Size, tuple[int, ...], bool]  # shape, strides, whether TMA may start at its address


def _key(operand: Tensor | None) -> Key | None:
    return None if operand is None else (operand.shape, operand.stride(), operand.data_ptr() % 16 == 0)


def access_of(key: Key, itemsize: int, tma: bool) -> str:
    """How kernels load an operand: through a descriptor of it or its transpose, or through pointers."""
    shape, strides, aligned = key
    if tma and aligned and 0 not in shape:
        for access, inner in (("rows", 1), ("columns", 0)):
            outer = strides[1 - inner]
            if strides[inner] == 1 and outer >= shape[inner] and outer * itemsize % 16 == 0:
                return access
    return "pointers"


def aligned(*operands: Tensor | None) -> bool:
    """Whether each can be loaded in pieces of 16 bytes: where a descriptor could describe it."""
    return all(t is None or access_of(_key(t), t.dtype.itemsize, tma=True) != "pointers" for t in operands)


def overflows(offset: int) -> bool:
    """Whether an offset within a block needs more than 32 bits."""
    return offset >= 2**31


@configs.plan_cache
def plan(
    op: str,
    keys: tuple[Key | None, ...],
    row_strides: tuple[int, ...],
    dtype: torch.dtype,
    precision: str,
    arch: int,
    dropout: bool,
) -> Plan:
    config = configs.choose(op, 0, dtype, arch, "masked" if dropout else "plain")
    names = _OPERANDS[op]
    blocks = tuple((config.block_n if name.startswith("W") else config.block_m, config.block_k) for name in names)
    accesses = tuple(None if key is None else access_of(key, dtype.itemsize, config.tma) for key in keys)
    (rows, depth), features = keys[0][0], keys[1][0][0]
    strides = [(key[1], block) for key, block in zip(keys, blocks, strict=True) if key is not None]
    reached = [abs(row) * height + abs(col) * width for (row, col), (height, width) in strides]
    reached += [stride * config.block_m for stride in row_strides]
    meta = {f"{name}_ACCESS": access for name, access in zip(names, accesses, strict=True)} | {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "PARTS": mlp_configs.parts(op, config),
        "EVEN": depth % config.block_k == 0,
        "WIDE": overflows(max(reached)),
        "PRECISION": "tf32" if precision == "tf32" else "ieee",
        "WARP_SPECIALIZE": config.warp_specialize,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    if "DY" in names[1:]:
        meta["EVEN_OUT"] = keys[3][0][1] % config.block_k == 0
    blocks_m = triton.cdiv(rows, config.block_m)
    return Plan((blocks_m * triton.cdiv(features, config.block_n),), blocks_m, meta, accesses, blocks)


def gemm_plan(op: str, operands: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...], dropout: bool) -> Plan:
    """The plan of an op of `mlp_configs.GEMMS`; operands in the order of `_OPERANDS`, outputs with dense rows."""
    x = operands[0]
    row_strides = tuple(t.stride(0) for t in outputs if t is not None)
    keys = tuple(_key(operand) for operand in operands)
    return plan(op, keys, row_strides, x.dtype, dtype_class(x.dtype), arch_of(x), dropout)


def operand_args(operands: tuple[Tensor | None, ...], made: Plan) -> list:
    """Each operand as its kernel takes it, with its strides."""
    args: list = []
    for operand, access, block in zip(operands, made.accesses, made.blocks, strict=True):
        if operand is None:
            args += [None, 0, 0]
        elif access == "pointers":
            args += [operand, *operand.stride()]
        else:
            matrix, box = (operand, block) if access == "rows" else (operand.t(), block[::-1])
            args += [TensorDescriptor(matrix, matrix.shape, matrix.stride(), list(box)), *operand.stride()]
    return args
