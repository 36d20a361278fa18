"""Bytes inside convolutions on the CPU: of ATen's own kernels, and of oneDNN's.

ATen hands most calls in fp32 to oneDNN, which has a list of kernels and takes the first that fits. Each wants its
operands in a form of its own: as they are, with their channels in blocks, or with their channels innermost; ATen makes
those, and puts results back. The rules here are those of its lists for AVX2 and AVX-512; `is_known` tells where they
hold.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fused_remat.recording import one_dnn
from fused_remat.recording.inside_layouts import by_channels, copied, made_contiguous, nbytes

_SMALL_CALL = 20480  # elements of an input that torch does not give to oneDNN, if it is a single image
_FEW = 3  # channels, of images for instance, that some kernels use as they lie
_WIDEST_OF_ONE = 7  # kernel with strides of one channel, for the gradient of it by AVX-512's kernels
_WIDEST_BY_CHANNEL = 3  # kernel of the weights' gradient that works on blocks, where each channel has its own weights
_PAGE = 4096  # bytes, or numbers, to which parts of scratch memory are rounded up
_PRODUCT = 40  # bytes that describe one of the products that a batch of them adds up
_MOST_SCRATCH = 2**30
_OUTER_PIXELS = 512  # for each thread, from which on products with unfolded inputs share images no more
_OUTER_PIXELS_OF_WEIGHTS = 256


def forward(
    out: Any, x: Tensor, weight: Tensor, bias: Any, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: Any, groups: int,
) -> int:  # fmt: skip
    """Beside the result."""
    if not _by_one_dnn(x, weight, stride, dilation, groups, transposed):
        copies = (made_contiguous if x.ndim == 5 else copied)(x) + copied(weight)
        return copies + _Own(x, weight, out, transposed, groups).forward()
    if _channels_innermost(x, weight):
        return _Innermost(x, weight, out, stride, padding, dilation, transposed, groups).forward(x)
    call = _Blocked(x, weight, out, stride, padding, dilation, transposed, groups)
    moments = call.gradient_of_source() if transposed else call.product()
    return copied(x) + max(moments) - nbytes(out)


def backward(
    out: Any, dy: Tensor, x: Tensor, weight: Tensor, bias: Any, stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, output_padding: Any, groups: int, wanted: list[bool],
) -> int:  # fmt: skip
    """Beside the gradients of the input and the weights, as far as they are wanted."""
    if not _by_one_dnn(x, weight, stride, dilation, groups, transposed):
        own = _Own(x, weight, dy, transposed, groups).backward()
        return own if groups > 1 else _copies(dy, x, weight) + max(own, _bias_sums(dy, weight, wanted))
    if _channels_innermost(x, weight):
        return _Innermost(x, weight, dy, stride, padding, dilation, transposed, groups).backward(x, dy, wanted)
    call = _Blocked(x, weight, dy, stride, padding, dilation, transposed, groups)
    dx = nbytes(x) if wanted[0] else 0
    moments = [0]
    if wanted[0]:
        moments += call.product() if transposed else call.gradient_of_source()
    if wanted[1]:
        moments += [dx + moment for moment in call.gradient_of_weights()]
    return _copies(dy, x, weight) + max(0, max(moments) - dx - (nbytes(weight) if wanted[1] else 0))


def is_known(x: Tensor, weight: Tensor, stride: list[int], dilation: list[int], groups: int, transposed: bool) -> bool:
    """Whether what such a call takes is known on this machine: from one of oneDNN's lists, or of ATen's own kernel."""
    own = not _by_one_dnn(x, weight, stride, dilation, groups, transposed)
    return own or (x.dtype == torch.float32 and one_dnn.kernels() is not None)


def _by_one_dnn(
    x: Tensor, weight: Tensor, stride: list[int], dilation: list[int], groups: int, transposed: bool
) -> bool:
    if not one_dnn.computes(x.dtype):
        return False
    if x.dtype != torch.float32:
        return True
    plain = all(s == 1 for s in stride) and all(d == 1 for d in dilation)
    pointwise = all(k == 1 for k in weight.shape[2:])
    worth = not plain or x.shape[0] >= 16 or not pointwise or torch.get_num_threads() > 1
    large = all(k > 3 for k in weight.shape[2:]) or x.shape[0] > 1 or x.numel() > _SMALL_CALL
    return worth and (groups > 1 or large)


def _copies(*tensors: Tensor) -> int:
    return sum(map(copied, tensors))


def _bias_sums(dy: Tensor, weight: Tensor, wanted: list[bool]) -> int:
    """Gradients of half precision in fp32, to be summed over images and pixels."""
    return 4 * dy.numel() - nbytes(weight) if wanted[2] and dy.element_size() < 4 else 0


def _channels_innermost(x: Tensor, weight: Tensor) -> bool:
    return by_channels(x) or by_channels(weight)


def _up(channels: int, block: int) -> int:
    return math.ceil(channels / block) * block


def _rounded(number: int) -> int:
    return math.ceil(number / _PAGE) * _PAGE


class _Own:
    """ATen's own kernels: products with the input unfolded, group by group."""

    def __init__(self, x: Tensor, weight: Tensor, y: Tensor, transposed: bool, groups: int):
        self._x, self._weight, self._y, self._transposed, self._groups = x, weight, y, transposed, groups

    def _unfolded(self) -> int:
        """Of all images; the smaller of both sides, as the larger is what is unfolded."""
        channels = self._weight.shape[1] * self._groups if self._transposed else self._x.shape[1]
        small = self._x if self._transposed else self._y
        pixels = small.shape[0] * math.prod(small.shape[2:])
        return channels * math.prod(self._weight.shape[2:]) * pixels * self._x.element_size()

    def _pointwise(self) -> bool:
        return all(k == 1 for k in self._weight.shape[2:])

    def forward(self) -> int:
        unfolded = 0 if self._pointwise() else self._unfolded()
        if self._groups == 1:
            return unfolded
        return max(nbytes(self._y), (nbytes(self._x) + unfolded) // self._groups)  # the groups' results, to be joined

    def backward(self) -> int:
        unfolded = 0 if self._pointwise() and self._x.ndim < 5 else self._unfolded()
        if self._transposed and self._x.ndim < 5:
            unfolded //= max(1, self._x.shape[0])
        if self._groups == 1:
            return max(0, unfolded - (nbytes(self._weight) if self._pointwise() else 0))
        x, y, weight = nbytes(self._x), nbytes(self._y), nbytes(self._weight)
        return max(x, (x + y + unfolded) // self._groups - weight)


class _Geometry:
    """A call as a convolution from a source to a destination; a transposed one goes from its output to its input."""

    def __init__(
        self, x: Tensor, weight: Tensor, y: Tensor, stride: list[int], padding: list[int], dilation: list[int],
        transposed: bool, groups: int,
    ):  # fmt: skip
        self.source, self.destination = (y, x) if transposed else (x, y)
        self.weight, self.groups = weight, groups
        self.each_in, self.each_out = self.source.shape[1] // groups, self.destination.shape[1] // groups
        self.kernel = math.prod(weight.shape[2:])
        self.by_channel = groups > 1 and self.each_in == self.each_out == 1
        self.volume = x.ndim == 5
        self.strided = any(s > 1 for s in stride)
        self.dilated = any(d > 1 for d in dilation)
        each = (list(v) * (x.ndim - 2 if len(v) == 1 else 1) for v in (stride, padding, dilation))
        self._steps = list(zip(*each, strict=True))
        self.pointwise = self.kernel == 1 and not any(padding)
        self.padded_depth = self.volume and padding[0] > 0
        self.threads = torch.get_num_threads()
        self.kernels = one_dnn.kernels() or one_dnn.AVX2
        self.few = self.groups == 1 and self.each_in <= _FEW and not self.pointwise

    def scratch_of_products(self) -> int:
        """Of kernels that add up a batch of products, one for each number of the kernel, in each thread."""
        return self.threads * _rounded(_PRODUCT * self.kernel) + _PAGE

    def scratch_of_strided_gradient(self) -> int:
        """The same, with room for the destination's gradient and what lies around it, and a mark for each row."""
        sizes = zip(self._steps, self.source.shape[2:], self.destination.shape[2:], self.weight.shape[2:], strict=True)
        pixels = 1
        for (stride, padding, dilation), source, length, kernel in sizes:
            reach = (kernel - 1) * dilation
            end = (length - 1) * stride + reach + 1 - source - padding
            pixels *= length + max(0, reach - padding) // stride + max(0, reach - end) // stride
        numbers = _rounded(pixels * self.destination.shape[1])
        room = self.threads * (numbers * self.destination.element_size() + _PAGE)
        if self.source.shape[-1] % self._steps[-1][0]:  # a row at a time, as strides do not fill it
            row = _rounded(self.source.shape[-1] * self.each_in)
            room += self.threads * row * self.source.element_size() + _PAGE
        return room + self.scratch_of_products() + 2 * _PAGE

    def block_of_data(self) -> int:
        """Channels in a block of the product and of the source's gradient; 0 where no kernel on blocks fits. Channels
        of a single group are filled up with zeros."""
        if self.groups == 1 or self.by_channel:
            return self.kernels.block
        return self._in_groups(self.kernels.blocks_in_groups)

    def block_of_weights(self) -> int:
        """The same of the weights' gradient. Where AVX-512's kernels refuse, those for AVX2 may fit."""
        return self._weights_for(self.kernels) or self._weights_for(one_dnn.AVX2)

    def _weights_for(self, kernels: one_dnn.Kernels) -> int:
        wide = kernels is one_dnn.AVX512
        one_channel = self.by_channel and not by_channels(self.source)
        if self.weight.shape[-1] > (_WIDEST_BY_CHANNEL if one_channel else kernels.widest):
            return 0
        if self.dilated and (not wide or self.strided or self.volume or self.by_channel):
            return 0
        if self.padded_depth and not wide:
            return 0
        if self.groups > 1 and not self.by_channel:
            return self._in_groups((kernels.block,))
        fills = self.each_in >= kernels.block or self.few or self.pointwise or self.by_channel
        return kernels.block if fills or not wide else 0

    def _in_groups(self, blocks: tuple[int, ...]) -> int:
        return next((b for b in blocks if self.each_in % b == 0 and self.each_out % b == 0), 0)

    def scratch_of_unfolding(self, *, weights: bool, innermost: bool = False) -> int:
        """Of products with one image (of a volume: one slice) unfolded by each thread; for the gradient of the weights
        oneDNN takes room for sums of them, and four times what that needs."""
        pixels = math.prod(self.destination.shape[-2:]) if self.source.ndim > 3 else self.destination.shape[-1]
        unit = self.source.element_size()
        one = 0 if self.pointwise and not self.strided else self.each_in * self.kernel * pixels * unit
        if innermost:
            one += self.each_in * math.prod(self.source.shape[2:]) * unit
        sums = 4 * nbytes(self.weight) if weights else 0
        everything = sum(map(nbytes, (self.source, self.weight, self.destination)))
        most = min(_MOST_SCRATCH, 15 * self.threads * everything)
        shared = self.source.shape[0] != 1 or self.groups > 2
        fits = self.threads * (sums // 4 + one) < most
        few = pixels // self.threads < (_OUTER_PIXELS_OF_WEIGHTS if weights else _OUTER_PIXELS)
        at_once = self.threads if fits and shared and few else 1
        return min(most, at_once * (sums + one))


class _Blocked(_Geometry):
    """Operands dense in the order of their dimensions. Each method returns bytes at the moments that may be the worst,
    the result included."""

    def _blocks(self, t: Tensor, block: int) -> int:
        alone = self.groups == 1 or self.by_channel
        return nbytes(t) // t.shape[1] * (_up(t.shape[1], block) if alone else t.shape[1])

    def _weights(self, block: int, *, few: bool) -> int:
        if self.groups > 1:
            return nbytes(self.weight)
        channels = (self.each_in if few else _up(self.each_in, block)) * _up(self.each_out, block)
        return channels * self.kernel * self.weight.element_size()

    def _weights_by_channels(self, block: int) -> int:
        if self.groups > 1:
            return nbytes(self.weight)
        if self.each_in == 1 and self.weight.shape[-1] > _WIDEST_OF_ONE:
            block = one_dnn.AVX2.block
        return nbytes(self.weight) // self.each_in * _up(self.each_in, block)

    def _of_strided_pointwise(self, block: int) -> int:
        """The pixels of one image that a strided pointwise kernel reads, in each thread."""
        if not (self.strided and self.pointwise and self.groups == 1):
            return 0
        pixels = math.prod(self.destination.shape[2:])
        return self.threads * _up(self.each_in, block) * pixels * self.source.element_size()

    def product(self) -> list[int]:
        """From the source to the destination."""
        source, result = nbytes(self.source), nbytes(self.destination)
        if self.by_channel and self.volume:  # by way of channels innermost
            return [source + nbytes(self.weight) + result, 3 * result]
        block = self.block_of_data()
        few = self.each_in < self.kernels.block and self.groups == 1 and not self.pointwise
        if not block and self.each_in <= _FEW and self.each_out % one_dnn.AVX2.block == 0:  # of every group
            block, few = one_dnn.AVX2.block, True
        if not block:
            return [self.scratch_of_unfolding(weights=False) + result, 2 * result]
        blocks = self._blocks(self.destination, block)
        taken = 0 if few else self._blocks(self.source, block) + self._of_strided_pointwise(block)
        return [taken + self._weights(block, few=few) + blocks, blocks + result]

    def gradient_of_source(self) -> list[int]:
        """From the destination's gradient."""
        result, block = nbytes(self.source), self.block_of_data()
        unfolds = (self.volume and self.by_channel) or (self.dilated and (self.strided or self.by_channel))
        if not block or unfolds:
            return [self.scratch_of_unfolding(weights=False) + result, 2 * result]
        if self.strided and not self.by_channel:  # by way of channels innermost, put back into order in two steps
            taken = nbytes(self.destination) + self._weights_by_channels(block) + self.scratch_of_strided_gradient()
            return [taken + result, 3 * result]
        blocks = self._blocks(self.source, block)
        return [self._blocks(self.destination, block) + self._weights(block, few=False) + blocks, blocks + result]

    def gradient_of_weights(self) -> list[int]:
        """From the source and the destination's gradient."""
        result, block = nbytes(self.weight), self.block_of_weights()
        if not block or (self.volume and self.by_channel):
            return [self.scratch_of_unfolding(weights=True) + result, 2 * result]
        few = self.few and (self.each_in == _FEW or block == one_dnn.AVX512.block)
        taken = self._blocks(self.destination, block)
        taken += 0 if few else self._blocks(self.source, block) + self._of_strided_pointwise(block)
        weights = self._weights(block, few=few)
        return [taken + weights, weights + result]


class _Innermost(_Geometry):
    """Images or weights with their channels innermost: images are used as they are, weights come in blocks."""

    def _ordered(self, *tensors: Tensor) -> int:
        """Copies of what lies otherwise."""
        layout = torch.channels_last_3d if self.volume else torch.channels_last
        return sum(nbytes(t) for t in tensors if not t.is_contiguous(memory_format=layout))

    def _weights(self) -> int:
        if self.by_channel:
            return nbytes(self.weight)
        return nbytes(self.weight) // self.each_out * _up(self.each_out, self.kernels.block)

    def forward(self, x: Tensor) -> int:
        """Of a call on `x`."""
        return self._ordered(x, self.weight) + self._of_data(up=x is self.source)

    def backward(self, x: Tensor, dy: Tensor, wanted: list[bool]) -> int:
        """The gradient of the weights is put into order in two steps."""
        result = nbytes(self.weight) if wanted[1] else 0
        moments = [0]
        if wanted[0]:
            moments.append(self._of_data(up=x is self.destination) - result)
        if wanted[1]:
            moments.append(self._blocks_of_weights() + result)
            if not self.block_of_weights():
                moments.append(self.scratch_of_unfolding(weights=True, innermost=True))
        return self._ordered(x, dy, self.weight) + max(moments)

    def _of_data(self, *, up: bool) -> int:
        """Of the product, or (not `up`) the gradient of the source."""
        if self.by_channel:
            return self._weights()
        strided = self.strided and not up
        return self._weights() + (self.scratch_of_strided_gradient() if strided else self.scratch_of_products())

    def _blocks_of_weights(self) -> int:
        if self.by_channel and self.weight.shape[-1] > _WIDEST_BY_CHANNEL:
            return nbytes(self.weight) * self.kernels.block**2
        return self._weights()
