"""Norms and rotations of heads in CUDA C++, forward and backward, against the reference in float64 and ATen."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from guarded import guards
from torch import Tensor

from fused_remat import reference

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")
ops = torch.ops.fused_remat
EPS = 1e-6
FLOORS = {torch.float64: 1e-14, torch.float32: 3e-7, torch.float16: 2e-4, torch.bfloat16: 2e-3}
DTYPES = tuple(FLOORS)
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# B, H, L, E, R: one lane, lanes that hold part of a piece, whole pieces, several warps, several blocks of rows.
SHAPES = (
    (1, 1, 1, 1, 0),
    (1, 1, 1, 2, 2),
    (2, 3, 17, 63, 40),
    (1, 2, 129, 16, 16),
    (2, 1, 33, 24, 0),
    (1, 1, 17, 129, 6),
    (2, 2, 5, 128, 128),
    (1, 3, 3, 512, 256),
    (1, 1, 3, 509, 500),
    (1, 2, 2, 512, 0),
)
SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)
INTERLEAVED = pytest.mark.parametrize("interleaved", (False, True), ids=("halves", "interleaved"))
NORM = pytest.mark.parametrize("norm", (False, True), ids=("rotation", "norm"))


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _angles(shape, dtype: torch.dtype, per_batch: bool) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """cos and sin whose halves differ: nothing says that a pair shares its angle."""
    batch, _, length, _, rotary = shape
    if rotary == 0:
        return None, None
    angles = torch.rand(batch if per_batch else 1, length, rotary, dtype=torch.float64) * 6
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _truth(heads: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, interleaved: bool) -> Tensor:
    heads = heads if weight is None else reference._rms_norm(heads, weight, EPS)
    return heads if cos is None else reference.rotate(heads, cos, sin, interleaved)


def _double(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.detach().double() for t in tensors]


def _no_worse(name: str, ours: Tensor, stock: Tensor, truth: Tensor) -> None:
    """An error of at most twice that of the ATen composition, and a tiny floor."""
    scale = truth.abs().max().item() + 1e-30
    error, allowed = ((t.double() - truth).abs().max().item() / scale for t in (ours, stock))
    assert error <= 2 * allowed + FLOORS[ours.dtype], (name, error, allowed)


@SHAPE
@NORM
@INTERLEAVED
@DTYPE
def test_forward(shape, norm, interleaved, dtype):
    heads = _random(*shape[:4], dtype=dtype)
    weight = _random(shape[3]) if norm else None
    for per_batch in (False, True):
        angles = _angles(shape, _wide(dtype), per_batch)
        truth = _truth(*_double(heads, weight, *angles), interleaved)
        stock = heads.clone()
        ops.transform_heads_aten(stock, weight, EPS, *angles, interleaved, 2**20)
        with guards() as guarded:
            ours = guarded.place(heads)
            ops.transform_heads_cuda(ours, weight, EPS, *angles, interleaved, 0)
        _no_worse("heads", ours, stock, truth)


@SHAPE
@NORM
@INTERLEAVED
@DTYPE
def test_backward(shape, norm, interleaved, dtype):
    raw, wide = _random(*shape[:4], dtype=dtype), _wide(dtype)
    weight = _random(shape[3], dtype=dtype) if norm else None
    angles = _angles(shape, wide, per_batch=True)
    exact_raw, exact_weight, *exact_angles = _double(raw, weight, *angles)
    given = [t.requires_grad_() for t in (exact_raw, exact_weight) if t is not None]
    d = _random(*shape[:4], dtype=wide)
    made = _truth(exact_raw, exact_weight, *exact_angles, interleaved)
    truth = torch.autograd.grad(made, given, d.double()) if norm or shape[4] else (d.double(),)
    results = []
    for backend in ("aten", "cuda"):
        with guards() as guarded:
            dheads = guarded.place(d)
            sums = guarded.place(torch.full((shape[3],), 2.0, dtype=wide)) if norm else None
            transform = getattr(ops, f"transform_heads_bwd_{backend}")
            transform(dheads, raw if norm else None, weight, EPS, *angles, interleaved, 2**20, sums)
        results.append((dheads, sums))
    _no_worse("dheads", results[1][0], results[0][0], truth[0])
    if norm:
        _no_worse("dnorm_weight", results[1][1] - 2, results[0][1] - 2, truth[1])


LAYOUTS = {  # of heads; batches, heads and lengths as they lie in memory
    "aligned": ((0, 1, 2), {"gap": 16}),
    "length before heads": ((0, 2, 1), {"gap": 16}),
    "misaligned": ((0, 2, 1), {"offset": 1}),
    "misaligned rows": ((2, 1, 0), {"gap": 3}),
    "strided features": ((0, 1, 2), {"step": 3}),
}


def _laid(guarded, t: Tensor, layout: str) -> Tensor:
    order, where = LAYOUTS[layout]
    placed = guarded.place(t.permute(*order, 3), **where)
    return placed.permute(*(order.index(dim) for dim in range(3)), 3)


@NORM
@INTERLEAVED
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_give_the_same_bits(layout, norm, interleaved):
    """Of every tensor: which lane adds what depends on shapes alone."""
    for shape in ((2, 3, 21, 64, 32), (2, 3, 7, 50, 42)):
        dtype = torch.float16
        raw, d = _random(*shape[:4], dtype=dtype), _random(*shape[:4])
        weight = _random(shape[3], dtype=torch.bfloat16) if norm else None
        angles = _angles(shape, torch.float32, per_batch=True)
        results = []
        for way in (None, layout):
            with guards() as guarded:
                put = (lambda t: t.clone()) if way is None else (lambda t, g=guarded: _laid(g, t, layout))
                vector = (lambda t: t.clone()) if way is None else (lambda t, g=guarded: g.place(t, step=2, offset=1))
                turns = angles if way is None else [guarded.place(t, last=1, gap=1) for t in angles]
                given = None if weight is None else vector(weight)
                heads, dheads = put(raw), put(d)
                ops.transform_heads_cuda(heads, given, EPS, *turns, interleaved, 0)
                sums = vector(torch.ones(shape[3])) if norm else None
                unchanged = put(raw) if norm else None
                ops.transform_heads_bwd_cuda(dheads, unchanged, given, EPS, *turns, interleaved, 0, sums)
                without = put(d)
                ops.transform_heads_bwd_cuda(without, unchanged, given, EPS, *turns, interleaved, 0, None)
            results.append([t for t in (heads, dheads, sums, without) if t is not None])
        for ours, dense in zip(*results, strict=True):
            assert torch.equal(ours, dense)
        assert torch.equal(without, dheads)
        if norm:
            assert torch.equal(unchanged, raw)


@NORM
@INTERLEAVED
def test_other_thread_orders_give_the_same_bits(norm, interleaved, thread_order):
    for shape in ((2, 3, 60, 24, 16), (1, 2, 2, 700, 32)):
        raw, d = _random(*shape[:4]), _random(*shape[:4])
        weight = _random(shape[3]) if norm else None
        angles = _angles(shape, torch.float32, per_batch=False)
        results = []
        for seed in range(3):
            thread_order(seed)
            heads, dheads, sums = raw.clone(), d.clone(), torch.ones(shape[3]) if norm else None
            ops.transform_heads_cuda(heads, weight, EPS, *angles, interleaved, 0)
            ops.transform_heads_bwd_cuda(dheads, raw if norm else None, weight, EPS, *angles, interleaved, 0, sums)
            results.append([t for t in (heads, dheads, sums) if t is not None])
        for again in results[1:]:
            for ours, first in zip(again, results[0], strict=True):
                assert torch.equal(ours, first)


@INTERLEAVED
def test_every_combination_of_dtypes(interleaved):
    """Of heads, the norm's weight, angles and the weight's gradient."""
    shape = (2, 2, 5, 10, 6)
    for dtype, of_weight, of_angles, of_sums in product(DTYPES, repeat=4):
        raw, weight = _random(*shape[:4], dtype=dtype), _random(10, dtype=of_weight)
        angles = _angles(shape, of_angles, per_batch=False)
        d, made = _random(*shape[:4], dtype=_wide(dtype)), []
        for backend in ("cuda", "aten"):
            made.append([raw.clone(), d.clone(), torch.ones(10, dtype=of_sums)])
            heads, dheads, sums = made[-1]
            getattr(ops, f"transform_heads_{backend}")(heads, weight, EPS, *angles, interleaved, 2**20)
            backward = getattr(ops, f"transform_heads_bwd_{backend}")
            backward(dheads, raw, weight, EPS, *angles, interleaved, 2**20, sums)
        for ours, theirs in zip(*made, strict=True):
            # Values on either side of a rounding boundary.
            eps = max(torch.finfo(t).eps for t in (ours.dtype, d.dtype))
            torch.testing.assert_close(ours, theirs, rtol=8 * eps, atol=16 * eps)


@INTERLEAVED
def test_what_a_rotation_leaves_keeps_its_bits(interleaved):
    """NaNs with payloads included: features beyond the rotary ones are not written at all."""
    heads = torch.full((1, 2, 3, 40), 0x7E01, dtype=torch.int16).view(torch.float16)
    angles = _angles((1, 2, 3, 40, 4), torch.float32, per_batch=False)
    ops.transform_heads_cuda(heads, None, EPS, *angles, interleaved, 0)
    assert (heads.view(torch.int16)[..., 4:] == 0x7E01).all()
    assert heads[..., :4].isnan().all()


@NORM
@INTERLEAVED
@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_what_is_not_finite_stays_in_its_head(bad, norm, interleaved):
    shape = (1, 3, 5, 20, 12)
    raw, d = _random(*shape[:4]), _random(*shape[:4])
    weight = _random(20) if norm else None
    angles = _angles(shape, torch.float32, per_batch=False)

    def run(backend: str) -> list[Tensor]:
        heads, dheads = raw.clone(), d.clone()
        getattr(ops, f"transform_heads_{backend}")(heads, weight, EPS, *angles, interleaved, 2**20)
        backward = getattr(ops, f"transform_heads_bwd_{backend}")
        backward(dheads, raw if norm else None, weight, EPS, *angles, interleaved, 2**20, None)
        return [heads, dheads]

    before = run("cuda")
    raw[0, 1, 2, 3] = d[0, 1, 3, 4] = bad
    for ours, theirs, clean in zip(run("cuda"), run("aten"), before, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.isinf(), theirs.isinf())
        touched = torch.zeros(1, 3, 5, dtype=torch.bool)
        touched[0, 1, 2] = touched[0, 1, 3] = True
        assert torch.equal(ours[~touched], clean[~touched])


def test_the_widest_heads_and_wider_ones():
    for dtype, most in ((torch.float16, 2048), (torch.float32, 1024), (torch.float64, 512)):
        raw = _random(1, 1, 2, most, dtype=dtype)
        weight, ours, theirs = torch.ones(most), raw.clone(), raw.clone()
        angles = _angles((1, 1, 2, most, 6), torch.float32, per_batch=False)
        ops.transform_heads_cuda(ours, weight, EPS, *angles, False, 0)
        ops.transform_heads_aten(theirs, weight, EPS, *angles, False, 2**20)
        eps = max(torch.finfo(dtype).eps, 1e-9)
        torch.testing.assert_close(ours, theirs, rtol=4 * eps, atol=4 * eps)
        d = [_random(1, 1, 2, most, dtype=_wide(dtype))]
        d.append(d[0].clone())
        sums = torch.ones(2, most, dtype=_wide(dtype))
        ops.transform_heads_bwd_cuda(d[0], raw, weight, EPS, *angles, False, 0, sums[0])
        ops.transform_heads_bwd_aten(d[1], raw, weight, EPS, *angles, False, 2**20, sums[1])
        torch.testing.assert_close(*d, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-5)
        wider = torch.zeros(1, 1, 2, most + 1, dtype=dtype)
        message = f"head width must be at most {most} .* got {most + 1}; use backend triton or aten"
        with pytest.raises(ValueError, match=message):
            ops.transform_heads_cuda(wider, torch.ones(most + 1), EPS, None, None, False, 0)
        with pytest.raises(ValueError, match=message):
            wide = wider.to(_wide(dtype))
            ops.transform_heads_bwd_cuda(wide, wider, torch.ones(most + 1), EPS, None, None, False, 0, None)


def test_gradients_in_another_dtype_than_the_heads_add_up_in_are_refused():
    heads, weight = torch.ones(1, 1, 2, 4), torch.ones(4)
    with pytest.raises(TypeError, match="dheads must be Double for raw of Double, got Float"):
        ops.transform_heads_bwd_cuda(heads, heads.double(), weight, EPS, None, None, False, 0, None)
    with pytest.raises(TypeError, match="dheads must be Float or Double, got Half"):
        ops.transform_heads_bwd_cuda(heads.half(), heads, weight, EPS, None, None, False, 0, None)
    with pytest.raises(ValueError, match="raw must be given where there is a norm_weight"):
        ops.transform_heads_bwd_cuda(heads, None, weight, EPS, None, None, False, 0, None)


def test_nothing_to_do():
    heads = _random(1, 2, 3, 4)
    before = heads.clone()
    ops.transform_heads_cuda(heads, None, EPS, None, None, False, 0)
    ops.transform_heads_bwd_cuda(heads, None, None, EPS, None, None, False, 0, None)
    assert torch.equal(heads, before)
    for shape in ((0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)):
        empty, sums = torch.empty(shape), torch.ones(shape[3])
        ops.transform_heads_cuda(empty, sums, EPS, None, None, False, 0)
        ops.transform_heads_bwd_cuda(empty, empty, sums, EPS, None, None, False, 0, sums)
        assert (sums == 1).all()
