"""How the CUDA C++ backend makes the backward of an MLP, told from facts of the call.

`csrc/cuda/mlp_route.cpp` decides stage 1 of each tile from the tensors themselves. Here they begin where an allocator
puts them, on 16 bytes, a tile is as wide as the whole layer unless told, and cuBLASLt, which is asked there, has an
algorithm for every product; otherwise the answers are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fused_remat import _cuda

if TYPE_CHECKING:
    from fused_remat.dispatch import Call

ONE_KERNEL, LIBRARY, CUTLASS, ELEMENTWISE = "one kernel", "library epilogues", "cutlass", "elementwise"
_HALVES = (torch.bfloat16, torch.float16)
_GEMM_MULTIPLE = 8  # elements of which rows of CUTLASS's operands are multiples, and those of the auxiliary matrix
_VECTOR_BYTES = 16


def table(call: Call) -> dict[str, list[str]]:
    """The ways of a whole pass: one kernel, or those of `stage1` in tiles. Operands have the compute dtype."""
    other = [] if call.against_one_kernel is None else [call.against_one_kernel]
    widths = torch.ops.fused_remat.mlp_small_why_not(1, *call.features, call.dtype, [call.dtype], False, False, False)
    return {ONE_KERNEL: [*widths, *other], **stage1(call)}


def stage1(call: Call, features: int | None = None) -> dict[str, list[str]]:
    """The ways in order of preference, each with the first reason against it; the first without one runs.

    `features` are those of a tile, all of F by default.
    """
    against = {LIBRARY: _against_library(call, features), CUTLASS: _against_gemm(call, features), ELEMENTWISE: None}
    return {way: [] if reason is None else [reason] for way, reason in against.items()}


def has_epilogue(call: Call) -> bool:
    """Whether stage 1 is a product whose epilogue makes the gradients, CUTLASS's or cuBLASLt's."""
    return _against_gemm(call, None) is None or _against_library(call, None) is None


def _against_library(call: Call, features: int | None) -> str | None:
    d_in, d_out, hidden = call.features
    if call.activation != "gelu_tanh":
        return "the activation is not gelu_tanh"
    if call.against_library is not None:
        return call.against_library
    if call.dtype not in (torch.float32, *_HALVES):
        return "the dtype is none of float32, float16 and bfloat16"
    if call.dtype == torch.float16 and _cuda.sums_in_half():
        return "sums in float16 are asked for"
    if min(d_in, d_out, hidden) < 2:
        return "a matrix is too small"
    vector = _VECTOR_BYTES // call.dtype.itemsize
    widths = (d_in, d_out, hidden, hidden if features is None else features)
    if any(width % vector for width in widths):
        return "rows of a matrix do not start at 16 bytes"
    if widths[-1] % _GEMM_MULTIPLE:
        return "rows of the auxiliary matrix do not start at 16 bytes"
    return None


def _against_gemm(call: Call, features: int | None) -> str | None:
    _, d_out, hidden = call.features
    features = hidden if features is None else features
    if not _cuda.has_gemm(call.arch):
        return "no kernel was compiled for this device"
    if call.dtype not in _HALVES:
        return "the dtype is neither float16 nor bfloat16"
    if features % _GEMM_MULTIPLE or hidden % _GEMM_MULTIPLE:
        return "the number of features is no multiple of 8"
    if d_out % _GEMM_MULTIPLE:
        return "the output width is no multiple of 8"
    if d_out == 0:
        return "the output width is 0"
    return call.against_gemm
