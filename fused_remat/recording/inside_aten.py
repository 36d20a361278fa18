"""Bytes that ATen's own kernels for the CPU take inside themselves, beside arguments and results: `TAKEN` is the table.

Parts of it: `inside_convolution.py`, `inside_lstm.py`, and in `inside_layouts.py` copies of what lies or is typed
otherwise; `inside_autograd.py` knows formulas of autograd that go another way on fake tensors. What is seen to differ
and has no formula is named by `blind.py`; on a GPU that is what CUDA libraries take (cuDNN's workspaces).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fused_remat.recording import inside_convolution, inside_lstm, one_dnn
from fused_remat.recording.inside_layouts import (
    by_channels,
    converted,
    copied,
    gradient_of_spatial,
    made_contiguous,
    nbytes,
    of_products,
    summed_in_fp32,
)

_aten = torch.ops.aten
_LARGEST_BY_CHANNELS = 128  # height + width of an image that interpolation computes with its channels innermost


def transient_bytes(func: Any, args: tuple[Any, ...], out: Any, keywords: Mapping[str, Any] | None = None) -> int:
    """Of one call on the CPU, beside its arguments and results; 0 where nothing is known to be needed."""
    if any(isinstance(t, Tensor) and t.layout != torch.strided for t in args):
        return 0
    packet = func._overloadpacket
    formula = TAKEN.get(packet)
    read = (keywords or {}) if packet in _READ_KEYWORDS else {}
    taken = formula(out, *args, **read) if formula is not None else 0
    return taken + converted(func, args, out) + of_products(func, args)


def _copies(out: Any, *args: Any) -> int:
    return sum(copied(t) for t in args if isinstance(t, Tensor))


def _contiguous(out: Any, *args: Any) -> int:
    return made_contiguous(*args)


def _input(out: Any, x: Tensor, *_: Any) -> int:
    return nbytes(x)


def _attention_tiles(q: Tensor, k: Tensor) -> tuple[int, int]:
    """(queries, keys) of one tile of scores, as ATen's FlashAttentionKernel.cpp cuts them."""
    queries = 256 if q.shape[2] >= 768 else 64 if q.shape[2] >= 192 else 32
    return min(queries, q.shape[2]), min(512, k.shape[2])


def _attention(out: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> int:
    """Of each thread: scores, their maxima and sums, and outputs in fp32; the scores in half precision once more."""
    queries, keys = _attention_tiles(q, k)
    own = 4 * queries * (keys + 2 + v.shape[3]) + _reduced(q, queries * keys)
    return torch.get_num_threads() * own


def _attention_backward(out: Any, dout: Tensor, q: Tensor, k: Tensor, *_: Any) -> int:
    """Of each thread: scores and their gradients; beside them dout * out, and its sums over one tile."""
    queries, keys = _attention_tiles(q, k)
    own = 2 * (4 * queries * keys + _reduced(q, queries * keys))
    return torch.get_num_threads() * own + dout.numel() * dout.element_size() + 4 * queries


def _reduced(t: Tensor, elements: int) -> int:
    return elements * t.element_size() if t.element_size() < 4 else 0


def _loss(out: Any, x: Tensor, target: Tensor, reduction: int = 1, *_: Any) -> int:
    """The losses of all elements, before their mean or sum is taken."""
    return nbytes(x) if reduction != 0 else 0


def _cross_entropy_of_bits(out: Any, x: Tensor, target: Tensor, weight: Any = None, pos: Any = None, *rest: Any) -> int:
    """Two terms of the losses of all elements; the result is one of them if it is not reduced."""
    reduction = rest[0] if rest else 1
    return nbytes(x) * (2 if reduction != 0 else 1)


def _max_pool_backward(out: Any, dy: Tensor, x: Tensor, *rest: Any) -> int:
    """As of other pooling; the indices go the way of the result."""
    indices = nbytes(rest[-1]) if by_channels(x) != by_channels(dy) else 0
    return gradient_of_spatial(out, dy, x) + indices


def _mean(out: Any, x: Tensor, dims: list[int] | None = None, *_: Any) -> int:
    """Of half precision: the input and the sums in fp32."""
    if x.element_size() >= 4 or not x.is_floating_point():
        return 0
    return 4 * (x.numel() + x.numel() // max(1, math.prod(x.shape[d] for d in (dims or range(x.ndim)))))


def _interpolated(out: Tensor, x: Tensor, *_: Any) -> int:
    """Small images are computed with their channels innermost, and put back into order."""
    if by_channels(x) or sum(out.shape[2:]) > _LARGEST_BY_CHANNELS:
        return copied(x)
    return nbytes(x) + nbytes(out)


def _antialiased(out: Tensor, x: Tensor, *_: Any) -> int:
    """Between its two passes: resized along the width alone."""
    return x.shape[0] * x.shape[1] * x.shape[2] * out.shape[3] * x.element_size()


def _group_norm_backward(out: Any, dy: Tensor, x: Tensor, *_: Any) -> int:
    """Of the gradient and the input, in the order of the input."""
    return copied(x) + (nbytes(dy) if by_channels(x) != by_channels(dy) or copied(dy) else 0)


def _batch_norm_backward(out: Any, dy: Tensor, x: Tensor, *rest: Any) -> int:
    """Where both are dense the result is made twice."""
    dense = (x.is_contiguous() and dy.is_contiguous()) or (by_channels(x) and by_channels(dy))
    return nbytes(x) if dense and rest[-1][0] else 0


def _gelu_backward(out: Any, dy: Tensor, x: Tensor, *, approximate: str = "none") -> int:
    """oneDNN's takes dense gradients; ATen's own any."""
    by_one_dnn = approximate == "none" and one_dnn.computes(x.dtype)
    return made_contiguous(dy) if by_one_dnn and dy.stride() != x.stride() else 0


def _unfolded(out: Any, x: Tensor, *_: Any) -> int:
    return nbytes(x) + made_contiguous(x)


def _masked_selection(out: Tensor, x: Tensor, mask: Tensor, *_: Any) -> int:
    """The mask in int64 to be counted, before the result is made; beside it twice, if not all is dense."""
    count = 8 * max(x.numel(), mask.numel())
    return 2 * count if made_contiguous(x, mask) else max(0, count - nbytes(out))


def _embedding_bag_backward(
    out: Any, dy: Tensor, indices: Tensor, offsets: Tensor, bags: Tensor, sizes: Tensor, largest: Tensor, weights: int,
    by_frequency: bool, mode: int, sparse: bool, per_sample: Tensor | None = None, *_: Any,
) -> int:  # fmt: skip
    """The indices sorted, their order, and how often each occurs; in which bag each is, if that was not kept."""
    if sparse:
        return made_contiguous(dy)
    if mode == 2:
        return made_contiguous(dy) + nbytes(dy) + nbytes(largest)
    kept = 3 if bags.numel() else 4
    return made_contiguous(dy) + kept * nbytes(indices) + (nbytes(per_sample) if per_sample is not None else 0)


def _bilinear(
    out: Tensor, a: Tensor, b: Tensor, c: Tensor, expand_a: list[int], expand_b: list[int], expand_c: list[int],
    summed: list[int], unrolled: int = 1,
) -> int:  # fmt: skip
    """Of one slice along the unrolled dimension: the product of the first two factors, and the result."""
    whole = []
    for t, expanded in ((a, expand_a), (b, expand_b), (c, expand_c)):
        lengths = iter(t.shape)
        whole.append([1 if d in expanded else next(lengths) for d in range(t.ndim + len(expanded))])
    sizes = [1 if d == unrolled else max(shape[d] for shape in whole) for d in range(len(whole[0]))]
    pair = [
        max(whole[0][d], whole[1][d])
        for d in range(len(sizes))
        if d != unrolled and not (d in summed and d in expand_c)
    ]
    return a.element_size() * (math.prod(pair) + math.prod(s for d, s in enumerate(sizes) if d not in summed))


def _distances(out: Any, x: Tensor, y: Tensor) -> int:
    """Both with two columns more: norms and ones."""
    return sum(nbytes(t) + 2 * math.prod(t.shape[:-1]) * t.element_size() for t in (x, y))


def _scattered_mean(out: Any, x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *_: Any) -> int:
    """Counts, the quotient, and where a count is 0."""
    return 2 * nbytes(x) + x.numel() if reduce == "mean" else 0


def _complex_absolute(out: Tensor, x: Tensor) -> int:
    return nbytes(x) if x.is_complex() else 0


# By operator: bytes inside a call, from its result and its arguments. A new kernel's formula is a row here; a row with
# `blind.py` says that there is none.
TAKEN: dict[Any, Callable[..., int]] = {
    _aten.convolution: inside_convolution.forward,
    _aten.convolution_backward: inside_convolution.backward,
    _aten.mkldnn_rnn_layer: inside_lstm.forward,
    _aten.mkldnn_rnn_layer_backward: inside_lstm.backward,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._trilinear: _bilinear,
    # Norms.
    _aten.native_group_norm: _copies,
    _aten.native_group_norm_backward: _group_norm_backward,
    _aten.native_layer_norm: _contiguous,
    _aten.native_layer_norm_backward: _contiguous,
    _aten.native_batch_norm_backward: _batch_norm_backward,
    # Losses, and what they are made of.
    _aten.smooth_l1_loss: _loss,
    _aten.mse_loss: _loss,
    _aten.huber_loss: _loss,
    _aten.binary_cross_entropy_with_logits: _cross_entropy_of_bits,
    _aten.soft_margin_loss_backward: lambda out, dy, x, *_: 2 * nbytes(x),
    _aten._softmax: _contiguous,
    _aten._softmax_backward_data: _contiguous,
    _aten._log_softmax: _contiguous,
    _aten._log_softmax_backward_data: _contiguous,
    _aten._safe_softmax: lambda out, x, *_: x.numel(),  # where a row is masked
    _aten.gelu_backward: _gelu_backward,
    # Sums and orders.
    _aten.mean: _mean,
    _aten.sum: summed_in_fp32,
    _aten.logsumexp: _input,
    _aten.median: _input,
    _aten.dist: _input,
    _aten._euclidean_dist: _distances,
    _aten.abs: _complex_absolute,
    # A copy of the input, partly sorted, and where its elements come from.
    _aten.kthvalue: lambda out, x, *_: x.numel() * (x.element_size() + 8),
    # Pooling, padding and interpolation.
    _aten.avg_pool2d: _copies,
    _aten.max_pool2d_with_indices: _copies,
    _aten._adaptive_avg_pool2d: _copies,
    _aten.avg_pool2d_backward: gradient_of_spatial,
    _aten.avg_pool3d_backward: gradient_of_spatial,
    _aten._adaptive_avg_pool2d_backward: gradient_of_spatial,
    _aten.max_pool2d_with_indices_backward: _max_pool_backward,
    _aten.max_pool3d_with_indices_backward: _max_pool_backward,
    _aten.reflection_pad2d: _copies,
    _aten.reflection_pad1d_backward: gradient_of_spatial,
    _aten.reflection_pad2d_backward: gradient_of_spatial,
    _aten.reflection_pad3d_backward: gradient_of_spatial,
    _aten.replication_pad1d_backward: gradient_of_spatial,
    _aten.replication_pad2d_backward: gradient_of_spatial,
    _aten.replication_pad3d_backward: gradient_of_spatial,
    _aten.upsample_nearest2d: _interpolated,
    _aten._upsample_nearest_exact2d: _interpolated,
    _aten.upsample_bilinear2d: _interpolated,
    _aten._upsample_bilinear2d_aa: _antialiased,
    _aten._upsample_bicubic2d_aa: _antialiased,
    **dict.fromkeys(
        (
            _aten.upsample_nearest1d_backward,
            _aten.upsample_nearest2d_backward,
            _aten.upsample_nearest3d_backward,
            _aten._upsample_nearest_exact2d_backward,
            _aten.upsample_linear1d_backward,
            _aten.upsample_bilinear2d_backward,
            _aten.upsample_trilinear3d_backward,
        ),
        _copies,
    ),
    _aten.upsample_bicubic2d_backward: _contiguous,
    _aten._upsample_bilinear2d_aa_backward: _contiguous,
    _aten._upsample_bicubic2d_aa_backward: _contiguous,
    _aten.pixel_shuffle: _copies,
    _aten.pixel_unshuffle: _copies,
    _aten.channel_shuffle: _copies,
    _aten.im2col: _unfolded,
    _aten.col2im: _contiguous,
    _aten.grid_sampler_2d_backward: lambda out, dy, *_: made_contiguous(dy),
    _aten.affine_grid_generator: lambda out, theta, *_: nbytes(out) // theta.shape[1] * theta.shape[2],
    # Selections.
    _aten.index_select: lambda out, x, dim, *_: made_contiguous(x) if dim % max(1, x.ndim) == 1 else 0,
    _aten.roll: lambda out, x, shifts, dims=(): nbytes(x) if len(dims) > 1 else 0,  # one dimension after the other
    _aten.masked_scatter_backward: _masked_selection,
    _aten.scatter_add: lambda out, x, *_: 4 * x.numel() if x.element_size() < 4 and x.is_floating_point() else 0,
    _aten.scatter_reduce: _scattered_mean,
    _aten.embedding_dense_backward: lambda out, dy, *_: made_contiguous(dy),
    _aten._embedding_bag_backward: _embedding_bag_backward,
    _aten._embedding_bag_per_sample_weights_backward: lambda out, dy, weight, indices, offsets, bags, *_: (
        0 if bags.numel() else 2 * nbytes(indices)
    ),
    # Linear algebra that needs no work arrays of LAPACK.
    _aten.cholesky_solve: lambda out, x, factor, *_: nbytes(factor),
    _aten.linalg_inv_ex: _input,
    _aten._fft_r2c: lambda out, x, *_: made_contiguous(x),
}


_READ_KEYWORDS = {_aten.gelu_backward}  # by their formulas


def with_workspace(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """The results of a call on fake tensors, the workspace among them as large as it really is."""
    if func._overloadpacket is not _aten.mkldnn_rnn_layer or not torch.is_grad_enabled():
        return out
    workspace = torch.empty(inside_lstm.workspace_bytes(args), dtype=torch.uint8, device=args[0].device)
    return (*out[:3], workspace)


def held_by_result(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes by which the storage of the first result is larger than the result."""
    held = _HELD.get(func._overloadpacket)
    return held(*args) if held is not None else 0


def _losses_held(x: Tensor, *rest: Any) -> int:
    """Of all elements, computed into the storage that then holds their mean or sum."""
    return max(0, _loss(None, x, *rest) - x.element_size())


def _columns_held(x: Tensor, size: list[int], kernel: list[int], *_: Any) -> int:
    """The result is made like the columns, and shrunk."""
    return max(0, nbytes(x) - nbytes(x) // x.shape[-1] // math.prod(kernel) * math.prod(size))


_HELD: dict[Any, Callable[..., int]] = {
    _aten.mse_loss: _losses_held,
    _aten.smooth_l1_loss: _losses_held,
    _aten.soft_margin_loss: _losses_held,
    _aten.binary_cross_entropy: lambda x, target, weight=None, reduction=1: _losses_held(x, target, reduction),
    _aten.col2im: _columns_held,
}
