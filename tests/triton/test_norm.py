"""Norms of token rows on Triton, forward and backward, against their formulas in float64 and the ATen composition."""

from __future__ import annotations

import mlp_cases as cases
import pytest
import torch
from mlp_chunks import DEVICE
from torch import Tensor

from fused_remat.triton.norm import normalize_rows, normalize_rows_bwd

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")
KIND = pytest.mark.parametrize("kind", ("layer_norm", "rms_norm"))
# One block, several blocks, several blocks of which the last is nearly empty.
SHAPES = ((1, 1), (17, 63), (341, 17), (129, 129), (1, 4096), (2, 4097), (1, 8200))
SHAPE = pytest.mark.parametrize(("rows", "width"), SHAPES)
EPS = 1e-5
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3}


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, device=DEVICE).to(dtype)


def _formula(x: Tensor, kind: str, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    centred = x - x.mean(1, keepdim=True) if kind == "layer_norm" else x
    made = centred / (centred.square().mean(1, keepdim=True) + EPS).sqrt()
    made = made if weight is None else made * weight
    return made if bias is None else made + bias


def _parameters(width: int, kind: str, dtype: torch.dtype, which: str) -> tuple[Tensor | None, Tensor | None]:
    weight = _random(width, dtype=dtype) if which != "none" else None
    return weight, _random(width, dtype=dtype) if which == "both" and kind == "layer_norm" else None


def _double(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.double() for t in tensors]


@KIND
@SHAPE
def test_forward(kind, rows, width):
    for dtype, which in ((torch.float32, "both"), (torch.float16, "weight"), (torch.float64, "none")):
        x = _random(rows, width, dtype=dtype) * 2 + 3
        weight, bias = _parameters(width, kind, torch.float32, which)
        out = torch.full_like(x, float("nan"))
        normalize_rows(x, kind, weight, bias, EPS, dtype, out)
        truth = _formula(*_double(x), kind, *_double(weight, bias))
        torch.testing.assert_close(out.double(), truth, rtol=4 * TOLERANCES[dtype], atol=4 * TOLERANCES[dtype])


@KIND
def test_results_are_rounded_before_they_are_stored_wider(kind):
    x = _random(33, 40, dtype=torch.float32)
    weight, bias = _parameters(40, kind, torch.float32, "both")
    wide, half = torch.empty(33, 40, device=DEVICE), torch.empty(33, 40, dtype=torch.float16, device=DEVICE)
    normalize_rows(x, kind, weight, bias, EPS, torch.float16, wide)
    normalize_rows(x, kind, weight, bias, EPS, torch.float16, half)
    assert torch.equal(wide, half.float())


@KIND
@SHAPE
def test_backward(kind, rows, width):
    for dtype, wide, which in ((torch.float32, torch.float32, "both"), (torch.float64, torch.float64, "weight")):
        x = _random(rows, width, dtype=dtype) * 2 + 3
        weight, bias = _parameters(width, kind, dtype, which)
        dnormalized = _random(rows, width, dtype=wide)
        sums = [None if t is None else torch.full((width,), 2.0, dtype=wide, device=DEVICE) for t in (weight, bias)]
        drows = torch.full_like(x, float("nan"))
        kept = dnormalized.clone()
        normalize_rows_bwd(dnormalized, x, kind, weight, bias, EPS, drows, *sums)
        assert torch.equal(dnormalized, kept)
        exact = [t.requires_grad_() for t in _double(x, weight, bias) if t is not None]
        made = _formula(exact[0], kind, *exact[1:], *[None] * (3 - len(exact)))
        truth = torch.autograd.grad(made, exact, dnormalized.double())
        actual = [drows, *(t - 2 for t in sums if t is not None)]
        for value, right in zip(actual, truth, strict=True):
            scale = right.abs().max() + 1
            assert (value.double() - right).abs().max() <= 20 * TOLERANCES[dtype] * scale


@KIND
def test_backward_in_place_of_wanted_gradients_alone_and_again(kind):
    x = _random(150, 70, dtype=torch.float16)
    weight, bias = _parameters(70, kind, torch.float16, "both")
    dnormalized = _random(150, 70, dtype=torch.float32)
    results = []
    for drows in (torch.full_like(dnormalized, float("nan")), dnormalized.clone()):
        dweight, dbias = torch.zeros(2, 70, device=DEVICE)
        d = dnormalized if not results else drows  # the second time over its input
        normalize_rows_bwd(d, x, kind, weight, bias, EPS, drows, dweight, dbias)
        results.append((drows, dweight, dbias))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
    for wanted in range(3):
        targets = [torch.zeros_like(t) if i == wanted else None for i, t in enumerate(results[0])]
        normalize_rows_bwd(dnormalized, x, kind, weight, bias, EPS, *targets)
        assert torch.equal(targets[wanted], results[0][wanted])
    half = torch.empty_like(x)
    normalize_rows_bwd(dnormalized, x, kind, weight, bias, EPS, half, None, None)
    assert torch.equal(half, results[0][0].half())


@KIND
def test_any_strides(kind):
    wide = _random(40, 66, dtype=torch.float32)
    weight, _ = _parameters(33, kind, torch.float32, "weight")
    for x in (wide[:, ::2], wide[:, :33], wide.t()[:33, :33], wide[:1, :33].expand(40, 33)):
        outs = [torch.empty(x.shape, device=DEVICE) for _ in range(2)]
        for given, out in zip((x, x.contiguous()), outs, strict=True):
            normalize_rows(given, kind, weight, None, EPS, torch.float32, out)
        assert torch.equal(*outs)
        d = _random(*x.shape, dtype=torch.float32)
        drows = [torch.empty(x.shape, device=DEVICE) for _ in range(2)]
        normalize_rows_bwd(d, x, kind, weight, None, EPS, drows[0], None, None)
        normalize_rows_bwd(d.t().contiguous().t(), x.contiguous(), kind, weight, None, EPS, drows[1], None, None)
        assert torch.equal(*drows)


@pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension))
@KIND
def test_as_the_aten_composition(kind):
    ops = torch.ops.fused_remat
    x = _random(129, 63, dtype=torch.float16)
    weight, bias = _parameters(63, kind, torch.float32, "both")
    outs = [torch.empty(129, 63, device=DEVICE) for _ in range(2)]
    d = _random(129, 63, dtype=torch.float32)
    gradients = []
    for out, forward, backward in (
        (outs[0], normalize_rows, normalize_rows_bwd),
        (outs[1], ops.normalize_rows_aten, ops.normalize_rows_bwd_aten),
    ):
        forward(x, kind, weight, bias, EPS, torch.float16, out)
        made = [torch.empty_like(d), *torch.ones(2, 63, device=DEVICE)]
        backward(d, x, kind, weight, bias, EPS, *made)
        gradients.append(made)
    # fp16 values on either side of a rounding boundary.
    torch.testing.assert_close(outs[0], outs[1], rtol=2e-3, atol=1e-3)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_variance_is_taken_around_the_mean():
    """A large mean must not swallow it."""
    x = torch.full((2, 64), 4096.0, device=DEVICE)
    x[:, ::2] += 1
    out = torch.empty_like(x)
    normalize_rows(x, "layer_norm", None, None, EPS, torch.float32, out)
    torch.testing.assert_close(out, torch.where(x > 4096, 1.0, -1.0), rtol=1e-4, atol=1e-4)


def test_nothing_to_do_and_unknown_kinds():
    empty = torch.empty(0, 5, device=DEVICE)
    sums = torch.ones(5, device=DEVICE)
    normalize_rows(empty, "rms_norm", None, None, EPS, torch.float32, empty)
    normalize_rows_bwd(empty, empty, "layer_norm", sums, None, EPS, empty, sums, None)
    assert (sums == 1).all()
    with pytest.raises(ValueError, match="layer_norm or rms_norm, got batch_norm"):
        normalize_rows(empty, "batch_norm", None, None, EPS, torch.float32, empty)
