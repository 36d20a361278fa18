"""Copies that kernels of ATen for the CPU make of operands that lie, or are typed, otherwise than they compute."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_BY_CHANNELS = {4: torch.channels_last, 5: torch.channels_last_3d}
# Pointwise operators that convert operands of several dtypes to one before they compute.
_PROMOTING = {
    _aten.add, _aten.sub, _aten.mul, _aten.div, _aten.pow, _aten.rsub, _aten.fmod, _aten.remainder, _aten.floor_divide,
    _aten.add_, _aten.sub_, _aten.mul_, _aten.div_, _aten.pow_, _aten.fmod_, _aten.remainder_, _aten.floor_divide_,
    _aten.eq, _aten.ne, _aten.lt, _aten.le, _aten.gt, _aten.ge, _aten.maximum, _aten.minimum, _aten.fmax, _aten.fmin,
    _aten.atan2, _aten.hypot, _aten.copysign, _aten.logaddexp, _aten.xlogy, _aten.addcmul, _aten.addcdiv,
    _aten.addcmul_, _aten.addcdiv_,
}  # fmt: skip
_REDUCING = {_aten.sum, _aten.nansum, _aten.prod, _aten.cumsum, _aten.cumprod}
PRODUCTS = {
    _aten.mm: (0, 1), _aten.bmm: (0, 1), _aten.addmm: (1, 2), _aten.baddbmm: (1, 2), _aten.addbmm: (1, 2),
    _aten.mv: (0,), _aten.addmv: (1,),
}  # fmt: skip


def nbytes(t: Tensor, element_size: int | None = None) -> int:
    """Of a dense copy."""
    return t.numel() * (element_size or t.element_size())


def by_channels(t: Tensor) -> bool:
    """Whether its channels lie innermost, and it is not dense in the order of its dimensions as well."""
    layout = _BY_CHANNELS.get(t.ndim)
    return layout is not None and not t.is_contiguous() and t.is_contiguous(memory_format=layout)


def copied(t: Tensor) -> int:
    """Bytes of the copy by a kernel that takes dense operands in either order."""
    return 0 if t.is_contiguous() or by_channels(t) else nbytes(t)


def made_contiguous(*tensors: Any) -> int:
    """Bytes of the copies by a kernel that takes operands dense in the order of their dimensions."""
    return sum(nbytes(t) for t in tensors if isinstance(t, Tensor) and not t.is_contiguous())


def gradient_of_spatial(out: Any, dy: Tensor, x: Tensor, *_: Any) -> int:
    """A kernel that goes by the order of `dy`: `dy` where it is not dense, and the result once more where `x`, whose
    order it has, lies otherwise."""
    return copied(dy) + (nbytes(x) if by_channels(x) != by_channels(dy) else 0)


def converted(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Bytes of operands in another dtype: of mixed ones, and of what a sum reads in the dtype of its result."""
    packet = func._overloadpacket
    if packet in _PROMOTING:
        return _promoted(func, args, out)
    if packet is _aten.where and func is _aten.where.self:
        return _promoted(func, args[1:], out)
    if packet in _REDUCING and isinstance(out, Tensor) and args[0].dtype != out.dtype:
        return nbytes(args[0], out.element_size())
    return 0


def _promoted(func: Any, args: tuple[Any, ...], out: Any) -> int:
    tensors = [a for a in args if isinstance(a, Tensor)]
    if len({t.dtype for t in tensors}) == 1 and (out.dtype == tensors[0].dtype or out.dtype == torch.bool):
        return 0
    common = torch.result_type(*args[:2])
    for other in args[2:]:
        if isinstance(other, Tensor):
            common = torch.promote_types(common, other.dtype)
    in_place = func._schema.is_mutable
    if out.dtype != torch.bool and not in_place:
        common = torch.promote_types(common, out.dtype)
    taken = sum(nbytes(t, common.itemsize) for t in tensors if t.dtype != common and t.numel() > 1)
    return taken + (nbytes(out, common.itemsize) if in_place and out.dtype != common else 0)


def of_products(func: Any, args: tuple[Any, ...]) -> int:
    """Copies of matrices that BLAS cannot read: with strides between the numbers of both rows and columns, or none.
    Batches are multiplied one by one."""
    taken = 0
    for position in PRODUCTS.get(func._overloadpacket, ()):
        matrix = args[position]
        if not _is_readable(matrix):
            taken = max(taken, nbytes(matrix) // (max(1, matrix.shape[0]) if matrix.ndim == 3 else 1))
    return taken


def _is_readable(matrix: Tensor) -> bool:
    rows, columns = matrix.shape[-2:]
    row, column = matrix.stride()[-2:]
    return (column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows))


def summed_in_fp32(out: Any, x: Tensor, dims: list[int] | None = None, *_: Any) -> int:
    """A sum of half precision over dimensions that are not neighbours: the input and the sums in fp32."""
    if x.element_size() >= 4 or not x.is_floating_point() or not dims:
        return 0
    reduced = {d % x.ndim for d in dims if x.shape[d] > 1}
    runs = sum(d - 1 not in reduced for d in reduced)
    return 4 * (x.numel() + x.numel() // max(1, math.prod(x.shape[d] for d in reduced))) if runs > 1 else 0
