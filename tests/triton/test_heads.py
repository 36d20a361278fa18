"""Norms and rotations of heads on Triton, forward and backward, against the reference in float64 and ATen."""

from __future__ import annotations

from itertools import product

import mlp_cases as cases
import pytest
import torch
from mlp_chunks import DEVICE
from torch import Tensor

from fused_remat import reference
from fused_remat.triton.heads import transform_heads, transform_heads_bwd

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")
EPS = 1e-6
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3}
# B, H, L, E, R
SHAPES = ((1, 1, 1, 2, 2), (2, 3, 17, 63, 40), (1, 2, 129, 16, 16), (2, 1, 33, 24, 0), (1, 1, 17, 129, 6))
SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)
INTERLEAVED = pytest.mark.parametrize("interleaved", (False, True), ids=("halves", "interleaved"))
NORM = pytest.mark.parametrize("norm", (False, True), ids=("rotation", "norm"))


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, device=DEVICE).to(dtype)


def _angles(shape, dtype: torch.dtype, per_batch: bool) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """cos and sin whose halves differ: nothing says that a pair shares its angle."""
    batch, _, length, _, rotary = shape
    if rotary == 0:
        return None, None
    angles = torch.rand(batch if per_batch else 1, length, rotary, dtype=torch.float64, device=DEVICE) * 6
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _truth(heads: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, interleaved: bool) -> Tensor:
    heads = heads if weight is None else reference._rms_norm(heads, weight, EPS)
    return heads if cos is None else reference.rotate(heads, cos, sin, interleaved)


def _double(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.detach().double() for t in tensors]


def _close(actual: Tensor, truth: Tensor, dtype: torch.dtype, factor: float = 1) -> None:
    assert not actual.isnan().any()
    assert (actual.double() - truth).abs().max() <= factor * TOLERANCES[dtype] * (truth.abs().max() + 1)


@SHAPE
@NORM
@INTERLEAVED
def test_forward(shape, norm, interleaved):
    for dtype, per_batch in ((torch.float32, True), (torch.float16, False), (torch.float64, False)):
        heads = _random(*shape[:4], dtype=dtype)
        weight = _random(shape[3], dtype=torch.float32) if norm else None
        cos, sin = _angles(shape, torch.float32, per_batch)
        truth = _truth(*_double(heads, weight, cos, sin), interleaved)
        transform_heads(heads, weight, EPS, cos, sin, interleaved, 0)
        _close(heads, truth, dtype)


@SHAPE
@NORM
@INTERLEAVED
def test_backward(shape, norm, interleaved):
    for dtype, wide in ((torch.float32, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)):
        raw = _random(*shape[:4], dtype=dtype)
        weight = _random(shape[3], dtype=dtype) if norm else None
        cos, sin = _angles(shape, wide, per_batch=True)
        exact_raw, exact_weight, *angles = _double(raw, weight, cos, sin)
        given = [t.requires_grad_() for t in (exact_raw, exact_weight) if t is not None]
        d = _random(*shape[:4], dtype=wide)
        made = _truth(exact_raw, exact_weight, *angles, interleaved)
        truth = torch.autograd.grad(made, given, d.double()) if made.requires_grad else (d.double(),)
        sums = torch.full((shape[3],), 2.0, dtype=wide, device=DEVICE) if norm else None
        transform_heads_bwd(d, raw if norm else None, weight, EPS, cos, sin, interleaved, 0, sums)
        _close(d, truth[0], wide, factor=4)
        if norm:
            _close(sums - 2, truth[1], wide, factor=4)


@NORM
@INTERLEAVED
def test_strided_heads_and_reruns(norm, interleaved):
    """Heads as a projection leaves them, [B, L, H, E] turned; angles of any strides; the same bits again."""
    shape = (2, 2, 70, 24, 16)
    packed = _random(2, 70, 4, 24, dtype=torch.float32)
    weight = _random(24, dtype=torch.float32) if norm else None
    cos, sin = _angles(shape, torch.float32, per_batch=True)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (cos, sin)]
    rest = packed[:, :, 2:].clone()
    heads, dense = packed[:, :, :2].transpose(1, 2), packed[:, :, :2].transpose(1, 2).contiguous()
    again = dense.clone()
    transform_heads(heads, weight, EPS, *strided, interleaved, 0)
    for other in (dense, again):
        transform_heads(other, weight, EPS, cos, sin, interleaved, 0)
        assert torch.equal(heads, other)
    assert torch.equal(packed[:, :, 2:], rest)
    gradients = []
    raw = _random(2, 70, 2, 24, dtype=torch.float32).transpose(1, 2)
    d = _random(2, 2, 70, 24, dtype=torch.float32)
    for dheads, given in ((d.transpose(1, 2).contiguous().transpose(1, 2), raw), (d.clone(), raw.contiguous())):
        sums = torch.zeros(24, device=DEVICE) if norm else None
        transform_heads_bwd(dheads, given, weight, EPS, cos, sin, interleaved, 0, sums)
        gradients.append((dheads, sums))
    assert torch.equal(gradients[0][0], gradients[1][0])
    if norm:
        assert torch.equal(gradients[0][1], gradients[1][1])
        without = d.clone()
        transform_heads_bwd(without, raw, weight, EPS, cos, sin, interleaved, 0, None)
        assert torch.equal(without, gradients[0][0])


@pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension))
@INTERLEAVED
def test_as_the_aten_composition(interleaved):
    """The norm's result is rounded before it is turned, there and here."""
    ops = torch.ops.fused_remat
    shape = (2, 3, 33, 24, 16)
    for dtype, norm in product((torch.float32, torch.float16), (False, True)):
        raw = _random(*shape[:4], dtype=dtype)
        weight = _random(24, dtype=torch.float32) if norm else None
        angles = _angles(shape, torch.float32, per_batch=False)
        ours, theirs = raw.clone(), raw.clone()
        transform_heads(ours, weight, EPS, *angles, interleaved, 0)
        ops.transform_heads_aten(theirs, weight, EPS, *angles, interleaved, 2**20)
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
        d = _random(*shape[:4], dtype=torch.float32)
        ours, theirs = d.clone(), d.clone()
        sums = [torch.ones(24, device=DEVICE) if norm else None for _ in range(2)]
        transform_heads_bwd(ours, raw, weight, EPS, *angles, interleaved, 0, sums[0])
        ops.transform_heads_bwd_aten(theirs, raw, weight, EPS, *angles, interleaved, 2**20, sums[1])
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        if norm:
            torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-5)


def test_nothing_to_do():
    heads = _random(1, 2, 3, 4, dtype=torch.float32)
    before = heads.clone()
    transform_heads(heads, None, EPS, None, None, False, 0)
    transform_heads_bwd(heads, None, None, EPS, None, None, False, 0, None)
    assert torch.equal(heads, before)
    empty = torch.empty(1, 2, 0, 4, device=DEVICE)
    sums = torch.ones(4, device=DEVICE)
    transform_heads(empty, sums, EPS, None, None, False, 0)
    transform_heads_bwd(empty, empty, sums, EPS, None, None, False, 0, sums)
    assert (sums == 1).all()
