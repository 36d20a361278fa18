"""Norms of token rows in CUDA C++, forward and backward, against the reference in float64 and the ATen composition."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from guarded import guards
from torch import Tensor

from fused_remat import Norm, reference
from fused_remat.measure import measure

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")
ops = torch.ops.fused_remat
KINDS = ("layer_norm", "rms_norm")
KIND = pytest.mark.parametrize("kind", KINDS)
EPS = 1e-5
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# A lane for each row, a few, a warp, a warp in several steps, a block.
SHAPES = ((1, 1), (5, 3), (17, 63), (131, 17), (130, 128), (3, 1024), (2, 1025), (2, 4104), (1, 16387))
SHAPE = pytest.mark.parametrize(("rows", "width"), SHAPES)
FLOORS = {torch.float64: 1e-14, torch.float32: 3e-7, torch.float16: 2e-4, torch.bfloat16: 2e-3}


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def _parameters(width: int, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return _random(width, dtype=dtype), _random(width, dtype=dtype) if kind == "layer_norm" else None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _double(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.detach().double() for t in tensors]


def _gradients(d: Tensor, x: Tensor, kind: str, weight: Tensor | None, bias: Tensor | None) -> list[Tensor | None]:
    """Exact ones of the rows, of the weight and of the bias."""
    given = [None if t is None else t.requires_grad_() for t in _double(x, weight, bias)]
    made = reference.normalize(given[0], Norm(kind, given[1], given[2], EPS))
    wanted = [t for t in given if t is not None]
    found = iter(torch.autograd.grad(made, wanted, d.double()))
    return [None if t is None else next(found) for t in given]


def _no_worse(name: str, ours: Tensor, stock: Tensor, truth: Tensor) -> None:
    """An error of at most twice that of the ATen composition, and a tiny floor."""
    scale = truth.abs().max().item() + 1e-30
    error, allowed = ((t.double() - truth).abs().max().item() / scale for t in (ours, stock))
    assert error <= 2 * allowed + FLOORS[ours.dtype], (name, error, allowed)


@KIND
@DTYPE
@SHAPE
def test_forward(kind, dtype, rows, width):
    x = _random(rows, width, dtype=dtype) * 2 + 3
    for parameters in (_parameters(width, kind, dtype), (None, None)):
        truth = reference.normalize(x.double(), Norm(kind, *_double(*parameters), EPS))
        stock = torch.empty_like(x)
        ops.normalize_rows_aten(x, kind, *parameters, EPS, dtype, stock)
        with guards() as guarded:
            out = guarded.place(torch.full_like(x, float("nan")))
            ops.normalize_rows_cuda(x, kind, *parameters, EPS, dtype, out)
        _no_worse("out", out, stock, truth)


@KIND
@DTYPE
@SHAPE
def test_backward(kind, dtype, rows, width):
    x = _random(rows, width, dtype=dtype) * 2 + 3
    d = _random(rows, width, dtype=_wide(dtype))
    for weight, bias in (_parameters(width, kind, dtype), (None, None)):
        truth = _gradients(d, x, kind, weight, bias)
        results = []
        for backend in ("aten", "cuda"):
            sums = [None if t is None else torch.full((width,), 2.0, dtype=d.dtype) for t in (weight, bias)]
            with guards() as guarded:
                drows = guarded.place(torch.full_like(d, float("nan")))
                sums = [None if t is None else guarded.place(t) for t in sums]
                given = d.clone()
                getattr(ops, f"normalize_rows_bwd_{backend}")(given, x, kind, weight, bias, EPS, drows, *sums)
                assert torch.equal(given, d)
            results.append([drows, *(None if t is None else t - 2 for t in sums)])
        for name, stock, ours, right in zip(("drows", "dweight", "dbias"), *results, truth, strict=True):
            if right is not None:
                _no_worse(name, ours, stock, right)


@KIND
def test_in_place_of_wanted_gradients_alone_and_in_other_thread_orders(kind, thread_order):
    x, d = _random(300, 70, dtype=torch.float16), _random(300, 70)
    weight, bias = _random(70, dtype=torch.float16), _random(70)
    results = []
    for seed in range(3):
        thread_order(seed)
        drows, sums = d.clone(), [torch.ones(70), torch.ones(70)]
        ops.normalize_rows_bwd_cuda(drows, x, kind, weight, bias, EPS, drows, *sums)
        results.append([drows, *sums])
    apart = [torch.empty_like(d), torch.ones(70), torch.ones(70)]
    ops.normalize_rows_bwd_cuda(d, x, kind, weight, bias, EPS, *apart)
    for result in (*results, apart):
        for name, ours, first in zip(("drows", "dweight", "dbias"), result, results[0], strict=True):
            assert torch.equal(ours, first), name
    for wanted in range(1, 8):
        targets = [torch.ones_like(t) if wanted >> i & 1 else None for i, t in enumerate(apart)]
        ops.normalize_rows_bwd_cuda(d, x, kind, weight, bias, EPS, *targets)
        for target, right in zip(targets, apart, strict=True):
            assert target is None or torch.equal(target, right), wanted


@KIND
def test_forward_in_other_thread_orders(kind, thread_order):
    for rows, width in ((37, 70), (3, 1500)):
        x, outs = _random(rows, width, dtype=torch.bfloat16), []
        for seed in range(3):
            thread_order(seed)
            outs.append(torch.empty_like(x))
            ops.normalize_rows_cuda(x, kind, None, None, EPS, torch.bfloat16, outs[-1])
        for out in outs[1:]:
            assert torch.equal(out, outs[0])


LAYOUTS = {
    "aligned": {"offset": 0, "gap": 8},
    "misaligned": {"offset": 1},
    "misaligned rows": {"gap": 3},
    "strided": {"step": 2},
    "columns first": {"last": 0},
}


@KIND
@pytest.mark.parametrize("width", (33, 64, 1056))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_give_the_same_bits(layout, width, kind):
    """Of every tensor at once: which lane adds what depends on shapes alone."""
    dtype = torch.float16
    x, d = _random(9, width, dtype=dtype), _random(9, width)
    weight, bias = _random(width, dtype=torch.bfloat16), _random(width)
    results = []
    for where in (None, LAYOUTS[layout]):
        with guards() as guarded:
            put = (lambda t: t.clone()) if where is None else (lambda t, w=where: guarded.place(t, **w))
            vector = (lambda t: t.clone()) if where is None else (lambda t: guarded.place(t, step=3, offset=1))
            given = put(x), kind, vector(weight), vector(bias), EPS
            out = put(torch.zeros(9, width, dtype=dtype))
            ops.normalize_rows_cuda(*given, dtype, out)
            made = [put(torch.zeros(9, width)), vector(torch.ones(width)), vector(torch.ones(width))]
            ops.normalize_rows_bwd_cuda(put(d), *given, *made)
            alone = put(torch.zeros(9, width))
            ops.normalize_rows_bwd_cuda(put(d), *given, alone, None, None)
        results.append([out, *made, alone])
    for ours, dense in zip(*results, strict=True):
        assert torch.equal(ours, dense)


def test_overlapping_rows():
    x = _random(1, 40).expand(7, 40)
    out, first = torch.empty(7, 40), torch.empty(1, 40)
    ops.normalize_rows_cuda(x, "rms_norm", None, None, EPS, torch.float32, out)
    ops.normalize_rows_cuda(x[:1], "rms_norm", None, None, EPS, torch.float32, first)
    assert torch.equal(out, first.expand(7, 40))


@KIND
def test_every_combination_of_dtypes(kind):
    """Of rows, parameters, results and what is computed in."""
    for of, parameter, compute, to in product(DTYPES, repeat=4):
        x = _random(3, 20, dtype=of)
        weight, bias = _random(20, dtype=parameter), _random(20, dtype=parameter)
        outs = [torch.empty(3, 20, dtype=to) for _ in range(2)]
        for backend, out in zip(("cuda", "aten"), outs, strict=True):
            getattr(ops, f"normalize_rows_{backend}")(x, kind, weight, bias, EPS, compute, out)
        # Values on either side of a rounding boundary.
        eps = max(torch.finfo(t).eps for t in (compute, to))
        torch.testing.assert_close(*outs, rtol=4 * eps, atol=4 * eps)
    for of, parameter, to, sums in product(DTYPES, repeat=4):
        for wide in (torch.float32, torch.float64):
            x, d = _random(3, 20, dtype=of), _random(3, 20, dtype=wide)
            weight, made = _random(20, dtype=parameter), []
            for backend in ("cuda", "aten"):
                made.append([torch.empty(3, 20, dtype=to), torch.ones(20, dtype=sums), torch.ones(20, dtype=sums)])
                getattr(ops, f"normalize_rows_bwd_{backend}")(d, x, kind, weight, None, EPS, *made[-1])
            for ours, theirs in zip(*made, strict=True):
                eps = max(torch.finfo(ours.dtype).eps, torch.finfo(wide).eps)
                torch.testing.assert_close(ours, theirs, rtol=8 * eps, atol=16 * eps)


@KIND
def test_results_are_rounded_before_they_are_stored_wider(kind):
    x, (weight, bias) = _random(33, 40), _parameters(40, kind, torch.float32)
    wide, half = torch.empty(33, 40), torch.empty(33, 40, dtype=torch.float16)
    ops.normalize_rows_cuda(x, kind, weight, bias, EPS, torch.float16, wide)
    ops.normalize_rows_cuda(x, kind, weight, bias, EPS, torch.float16, half)
    assert torch.equal(wide, half.float())


def test_a_variance_is_taken_around_the_mean():
    """A large mean must not swallow it."""
    x = torch.full((2, 64), 4096.0)
    x[:, ::2] += 1
    out = torch.empty_like(x)
    ops.normalize_rows_cuda(x, "layer_norm", None, None, EPS, torch.float32, out)
    torch.testing.assert_close(out, torch.where(x > 4096, 1.0, -1.0), rtol=1e-4, atol=1e-4)


def test_an_rms_norm_has_no_bias():
    x, out, without = _random(2, 6), torch.empty(2, 6), torch.empty(2, 6)
    ops.normalize_rows_cuda(x, "rms_norm", None, torch.ones(6), EPS, torch.float32, out)
    ops.normalize_rows_cuda(x, "rms_norm", None, None, EPS, torch.float32, without)
    assert torch.equal(out, without)


@KIND
@pytest.mark.parametrize("bad", (float("nan"), float("inf"), -float("inf")))
@pytest.mark.parametrize("width", (9, 40, 1100))
def test_what_is_not_finite_stays_in_its_row(width, bad, kind):
    x, d = _random(5, width), _random(5, width)
    clean = [torch.empty(5, width) for _ in range(2)]
    ops.normalize_rows_cuda(x, kind, None, None, EPS, torch.float32, clean[0])
    ops.normalize_rows_bwd_cuda(d, x, kind, None, None, EPS, clean[1], None, None)
    x[2, width // 2] = bad
    for backend in ("cuda", "aten"):
        out, drows = torch.empty(5, width), torch.empty(5, width)
        getattr(ops, f"normalize_rows_{backend}")(x, kind, None, None, EPS, torch.float32, out)
        getattr(ops, f"normalize_rows_bwd_{backend}")(d, x, kind, None, None, EPS, drows, None, None)
        if backend == "cuda":
            ours = out, drows
    for mine, theirs, before in zip(ours, (out, drows), clean, strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert mine[2].isnan().any()
        rest = [0, 1, 3, 4]
        assert torch.equal(mine[rest], before[rest])


def _peak(call) -> int:
    made = torch.zeros(1)
    return measure(lambda: (call(), made)[1], backward=False, repeats=0).forward_peak_above_output_bytes


def test_temporaries_are_those_that_the_plan_counts():
    """At most 4 values a feature of each row (csrc/norm.h); none where no sum over rows is wanted, nor in forward."""
    for rows, width in ((1, 2), (129, 2), (300, 65)):
        x, sums, drows = _random(rows, width), torch.zeros(2, width), torch.empty(rows, width)
        given = x, x, "layer_norm", sums[0], None, EPS, drows
        blocks = -(-rows // 128)
        expected = 4 * (4 * rows + 2 * blocks * width)
        assert expected <= _peak(lambda g=given, s=sums: ops.normalize_rows_bwd_cuda(*g, *s)) <= 16 * rows * width
    assert _peak(lambda: ops.normalize_rows_bwd_cuda(*given, None, None)) == 0
    assert _peak(lambda: ops.normalize_rows_cuda(x, "rms_norm", None, None, EPS, torch.float32, drows)) == 0


def test_nothing_to_do_and_unknown_kinds():
    sums = torch.ones(5)
    empty = torch.empty(0, 5)
    ops.normalize_rows_cuda(empty, "rms_norm", None, None, EPS, torch.float32, empty)
    ops.normalize_rows_bwd_cuda(empty, empty, "layer_norm", sums, None, EPS, empty, sums, sums)
    assert (sums == 1).all()
    no_features = torch.empty(5, 0)
    ops.normalize_rows_cuda(no_features, "layer_norm", None, None, EPS, torch.float32, no_features)
    ops.normalize_rows_bwd_cuda(no_features, no_features, "layer_norm", None, None, EPS, no_features, None, None)
    ops.normalize_rows_bwd_cuda(_random(2, 3), _random(2, 3), "layer_norm", None, None, EPS, None, None, None)
    for call in (
        lambda: ops.normalize_rows_cuda(empty, "batch_norm", None, None, EPS, torch.float32, empty),
        lambda: ops.normalize_rows_bwd_cuda(empty, empty, "batch_norm", None, None, EPS, empty, None, None),
    ):
        with pytest.raises(ValueError, match="layer_norm or rms_norm, got batch_norm"):
            call()
    half = _random(2, 3, dtype=torch.float16)
    with pytest.raises(TypeError, match="dnormalized must be Float or Double, got Half"):
        ops.normalize_rows_bwd_cuda(half, half, "rms_norm", None, None, EPS, half, None, None)
