"""Operators that take or keep memory of which fake kernels, and this package's formulas, know nothing.

A prediction leaves these bytes out, so it names the operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_remat.recording import inside_convolution

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


def is_blind(func: Any, device_type: str, args: tuple[Any, ...] = ()) -> bool:
    """Whether this call on such a device takes memory that a prediction leaves out."""
    if func.namespace not in _KNOWN_NAMESPACES:
        return True
    packet = func._overloadpacket
    if device_type == "cpu" and args and packet in _PARTLY_UNKNOWN:
        return _PARTLY_UNKNOWN[packet](*args)
    return packet in _UNKNOWN.get(device_type, ())


def _convolution(
    x: Tensor, weight: Tensor, _: Any, stride: list[int], __: Any, dilation: list[int], *rest: Any
) -> bool:
    return not inside_convolution.is_known(x, weight, stride, dilation, rest[2], rest[0])


# On the CPU: calls of these operators with such arguments.
_PARTLY_UNKNOWN = {
    _aten.convolution: _convolution,  # the kernels that oneDNN chooses for other processors than those with AVX2
    _aten.convolution_backward: lambda dy, *rest: _convolution(*rest),
    _aten.mkldnn_rnn_layer: lambda x, *_: x.element_size() < 4,
    _aten.mkldnn_rnn_layer_backward: lambda x, *_: x.element_size() < 4,
    _aten._embedding_bag_backward: lambda *args: args[9],  # a sparse gradient, whose values are made for it
}
