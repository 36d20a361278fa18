"""What all kernels are made of: activations, dropout masks, products; and where the kernels may run."""

from __future__ import annotations

import mlp_cases as cases
import pytest
import torch
import triton
import triton.language as tl

import fused_remat
from fused_remat import dispatch, reference
from fused_remat.activations import ACTIVATIONS
from fused_remat.triton import activations, dropout, targets

# An exponential that a GPU or NumPy rounds differently, seen through |x| <= 12.
FLOOR = {torch.float32: 2e-6, torch.float64: 1e-13}


@triton.jit
def _activate(x, value, slope, n, ACTIVATION: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    inside = at < n
    both = activations.value_and_slope(tl.load(x + at, mask=inside), ACTIVATION)
    tl.store(value + at, both[0], mask=inside)
    tl.store(slope + at, both[1], mask=inside)


@triton.jit
def _keep(seed, out, first, threshold, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, dropout.kept(tl.load(seed), first + at.to(tl.int64), threshold).to(tl.int8))


@triton.jit
def _multiply(a, b, out, m, n, SIZE: tl.constexpr):
    row, col = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    left = tl.load(a + row * n + col, mask=(row < m) & (col < n), other=0.0)
    right = tl.load(b + row * m + col, mask=(row < n) & (col < m), other=0.0)
    tl.store(out + row * m + col, tl.dot(left, right), mask=(row < m) & (col < m))


def _points(dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([torch.linspace(-12, 12, 999), torch.linspace(-0.4, 0.4, 999), torch.tensor([-200.0, 200.0])]).to(
        dtype
    )


def _value_and_slope(name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    value, slope = torch.empty_like(x), torch.empty_like(x)
    _activate[(1,)](x, value, slope, x.numel(), ACTIVATION=name, SIZE=triton.next_power_of_2(x.numel()))
    return value, slope


@pytest.mark.parametrize("dtype", FLOOR)
@pytest.mark.parametrize("name", activations.NAMES)
def test_activations_equal_torch(name, dtype):
    x = _points(dtype)
    truth, narrow = x.double().requires_grad_(), x.clone().requires_grad_()
    expected, same_dtype = ACTIVATIONS[name](truth), ACTIVATIONS[name](narrow)
    (slope,) = torch.autograd.grad(expected.sum(), truth)
    (narrow_slope,) = torch.autograd.grad(same_dtype.sum(), narrow)
    ours = _value_and_slope(name, x)
    for actual, right, torchs in zip(ours, (expected, slope), (same_dtype, narrow_slope), strict=True):
        allowed = 2 * (torchs.double() - right).abs().max() + FLOOR[dtype]
        assert (actual.double() - right).abs().max() <= allowed


@pytest.mark.parametrize("name", activations.NAMES)
def test_activations_pass_nan_on(name):
    value, slope = _value_and_slope(name, torch.tensor([float("nan"), 0.5]))
    expected = ACTIVATIONS[name](torch.tensor([float("nan"), 0.5]))
    assert torch.equal(value.isnan(), expected.isnan())
    assert not slope[1].isnan()


@pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension))
def test_every_compiled_activation_has_a_twin():
    assert tuple(torch.ops.fused_remat.activations()) == activations.NAMES


@pytest.mark.parametrize("first", (0, 3, 2**33 + 1, 2**45 + 6))
@pytest.mark.parametrize("p", (1e-12, 0.1, 0.5, 0.999))
def test_dropout_masks_have_the_bits_of_the_reference(p, first):
    seed, out = torch.tensor([-1234567890123]), torch.empty(512, dtype=torch.int8)
    _keep[(4,)](seed, out, first, dropout.drop_threshold(p), SIZE=128)
    index = torch.arange(512) + first
    word = torch.stack(reference.philox_words(seed, index >> 2))[index & 3, torch.arange(512)]
    assert torch.equal(out.bool(), word >= dropout.drop_threshold(p))


@pytest.mark.parametrize("shape", ((16, 16), (17, 19)), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_products_of_small_integers_are_exact(dtype, shape):
    if targets.interpreted() and not targets.interpreter_multiplies(dtype):
        pytest.skip(f"this interpreter does not multiply {dtype}")
    m, n = shape
    a, b = (torch.randint(-2, 3, size).to(dtype) for size in ((m, n), (n, m)))
    out = torch.empty(m, m)
    _multiply[(1,)](a, b, out, m, n, SIZE=32)
    assert torch.equal(out, a.float() @ b.float())


@pytest.mark.skipif(not targets.interpreted(), reason="an interpreter must run the kernels")
def test_an_interpreter_is_never_chosen_by_itself():
    call = dispatch.Call(op="mlp", device="cpu", dtype=torch.float32, activation="gelu")
    assert dispatch.resolve(call) != "triton"


WHY_NOT = {
    "is below 8.0": {"device": "cuda", "arch": 75},
    "the kernels are made for NVIDIA GPUs, the tensors are on xpu": {"device": "xpu"},
    "float64 attention is compiled well for": {"device": "cuda", "arch": 100, "width": 64, "dtype": torch.float64},
    "heads are 257 wide": {"device": "cpu", "width": 257},
}


@pytest.mark.parametrize("reason", WHY_NOT)
def test_a_call_that_the_kernels_cannot_run_says_why(reason, monkeypatch):
    monkeypatch.setattr(targets, "interpreted", lambda: WHY_NOT[reason]["device"] == "cpu")
    call = dispatch.Call(**{"op": "attention", "dtype": torch.float32} | WHY_NOT[reason])
    assert any(reason in given for given in dispatch.why_not("triton", call))
    with fused_remat.backend("triton"), pytest.raises(RuntimeError, match=reason):
        dispatch.resolve(call)
