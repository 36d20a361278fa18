"""Operators that take or keep memory of which fake kernels, and this package's formulas, know nothing.

A prediction leaves these bytes out, so it names the operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_remat.ops import memory
from fused_remat.recording import inside_convolution, one_dnn
from fused_remat.recording.inside_layouts import PRODUCTS

_aten = torch.ops.aten
# By kind of device; each was seen to differ from its fake kernel, or hands its work to a library.
_UNKNOWN = {
    "cpu": {
        _aten._linalg_eigh, _aten._linalg_svd, _aten.linalg_eig, _aten._linalg_eigvals,  # LAPACK's work arrays
        _aten.linalg_lstsq, _aten.linalg_pinv, _aten.linalg_lu_factor_ex, _aten.linalg_householder_product,
        _aten.linalg_matrix_exp,  # as many terms as the values need
        _aten._transformer_encoder_layer_fwd, _aten._native_multi_head_attention,  # whole layers in one operator
    },
    "cuda": {
        _aten.convolution, _aten.convolution_backward,  # cuDNN's workspace, by the algorithm that it chooses
        _aten._cudnn_rnn, _aten._cudnn_rnn_backward,  # and its reserve, kept
        _aten._cudnn_ctc_loss, _aten.miopen_rnn, _aten.miopen_rnn_backward,
        _aten._linalg_eigh, _aten._linalg_svd, _aten.linalg_eig, _aten._linalg_eigvals,
        _aten._transformer_encoder_layer_fwd, _aten._native_multi_head_attention,
    },
}  # fmt: skip
# Of torch itself, or followed into by formulas; operators of others have fake kernels that tell of results alone.
_KNOWN_NAMESPACES = {"aten", "prim", "prims", "profiler", "fused_remat", "c10d", "_c10d_functional"}
# They hand matrices to BLAS or oneDNN, by dtype.
_MULTIPLYING = {
    *PRODUCTS, _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
}  # fmt: skip


def is_blind(func: Any, device_type: str, args: tuple[Any, ...] = ()) -> bool:
    """Whether this call on such a device takes memory that a prediction leaves out."""
    if func.namespace not in _KNOWN_NAMESPACES:
        return True
    packet = func._overloadpacket
    if device_type == "cpu" and (packet in _MULTIPLYING or memory.is_fused(func)) and memory.is_here():
        # oneDNN packs operands in half precision into blocks of sizes that it weighs for each call.
        return any(_multiplied_in_half(a) for a in args)
    if device_type == "cpu" and args and packet in _PARTLY_UNKNOWN:
        return _PARTLY_UNKNOWN[packet](*args)
    return packet in _UNKNOWN.get(device_type, ())


def _convolution(
    x: Tensor, weight: Tensor, _: Any, stride: list[int], __: Any, dilation: list[int], *rest: Any
) -> bool:
    return not inside_convolution.is_known(x, weight, stride, dilation, rest[2], rest[0])


def _multiplied_in_half(argument: Any) -> bool:
    dtype = argument.dtype if isinstance(argument, Tensor) else argument
    return isinstance(dtype, torch.dtype) and dtype.itemsize < 4 and one_dnn.computes(dtype)


def _lstm(x: Tensor, *_: Any) -> bool:
    """In half precision; and by AVX-512's kernels for what nothing is kept of."""
    return x.element_size() < 4 or (not torch.is_grad_enabled() and one_dnn.kernels() is one_dnn.AVX512)


# On the CPU: calls of these operators with such arguments.
_PARTLY_UNKNOWN = {
    _aten.convolution: _convolution,  # what oneDNN chooses for processors without AVX2, and in half precision
    _aten.convolution_backward: lambda dy, *rest: _convolution(*rest),
    _aten.mkldnn_rnn_layer: _lstm,
    _aten.mkldnn_rnn_layer_backward: lambda x, *_: x.element_size() < 4,
    _aten._embedding_bag_backward: lambda *args: args[9],  # a sparse gradient, whose values are made for it
}
