"""A checksum of a tensor's bits: 16 bytes that differ when values or their order differ.

The elements are read as whole numbers, in their logical order, as the rows and columns of a table. Every row and every
column is summed, and the sums are added up with odd weights, modulo 2^64. Sums are exact, so NaN and infinity are bits
like any others, the order of additions does not matter, and two runs of one program give the same checksum. Exchanging
two different elements changes two row sums or two column sums.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_COLUMNS = 1024
_SLICE = 1 << 20  # bytes of a strided tensor that are made dense at a time
_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15, as a signed number


def can_sum(x: Tensor) -> bool:
    """Whether `x` has bits to read: not so on the meta device, in fake tensors and in tensors that wrap others."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and x.layout is torch.strided
        and x.device.type != "meta"
        and not x.is_quantized
    )


def checksum(x: Tensor) -> Tensor:
    """Two int64 on the device of `x`: weighted sums of its rows and of its columns. Makes no copy of a dense `x`."""
    with torch.no_grad():
        x = x.detach().resolve_conj().resolve_neg()
        total = torch.zeros(2, dtype=torch.int64, device=x.device)
        for number, part in enumerate(_dense_parts(x)):
            total += _of_dense(part) * (2 * number + 1)
        return total


def _dense_parts(x: Tensor) -> Iterator[Tensor]:
    """Dense vectors of its elements: one if it is dense, else its slices along the first dimension that has several."""
    if x.is_contiguous() or x.dim() == 0:
        yield x.reshape(-1)
        return
    while x.shape[0] == 1 and x.dim() > 1:
        x = x[0]
    rows = max(1, _SLICE // max(1, x[:1].numel() * x.element_size()))
    for part in x.split(rows):
        yield part.reshape(-1).contiguous()


def _of_dense(flat: Tensor) -> Tensor:
    """Of a dense vector of any dtype."""
    octets = flat.view(torch.uint8)
    whole = octets.numel() // 8 * 8
    words = octets[:whole]
    words = words.view(torch.int64) if words.storage_offset() % 8 == 0 else words.clone().view(torch.int64)
    result = torch.zeros(2, dtype=torch.int64, device=flat.device)
    rows = words.numel() // _COLUMNS
    if rows:
        table = words[: rows * _COLUMNS].view(rows, _COLUMNS)
        result += torch.stack([_weighted(table.sum(1)), _weighted(table.sum(0))])
    rest = words[rows * _COLUMNS :]
    result += _weighted(rest) * 3
    result += _weighted(octets[whole:].to(torch.int64)) * 5
    return result


def _weighted(sums: Tensor) -> Tensor:
    """Their sum with the weights 1, 1 + c, 1 + 2c, ..., which wraps around on purpose."""
    weights = torch.arange(sums.numel(), device=sums.device, dtype=torch.int64) * (_ODD - 1) + 1
    return (sums * weights).sum()
