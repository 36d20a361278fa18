"""Autocast around forward, backward or both, with and without checkpoints, and the gradient scaler."""

from __future__ import annotations

import copy

import pytest
import torch
from pair_cases import MODELS, Replaced, assert_same, every_model, needs_extension, own, saved, step, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
WRAPPERS = {
    "plain": lambda model, x: model(x),
    "non-reentrant": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "reentrant": lambda model, x: checkpoint(model, x, use_reentrant=True),
}


def _step(
    model: nn.Module, before: nn.Linear | None, dtype: torch.dtype | None, wrap, backward: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """One step; `before` uses the same input first; `dtype` and `backward` are the autocasts around the two passes."""
    leaf = tokens().requires_grad_()
    model.zero_grad()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        first = 0 if before is None else before(leaf)  # fills autocast's cache
        y = wrap(model, leaf) + first
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y.dtype)
    with torch.autocast("cpu", backward or torch.bfloat16, enabled=backward is not None):
        y.backward(dy)
    gradients = {f"d{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": y.detach(), "dx": leaf.grad} | gradients


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return (got.double() - want.double()).norm().item()


@DTYPES
@every_model
def test_around_forward_only(name, dtype):
    """Outputs and gradients have stock's dtypes, and are no further from float32 than twice stock's."""
    ours, stock = MODELS[name].pair()
    before = nn.Linear(tokens().shape[-1], tokens().shape[-1])
    truth = _step(stock, before, None, WRAPPERS["plain"])
    expected = _step(stock, before, dtype, WRAPPERS["plain"])
    for how, wrap in WRAPPERS.items():
        actual = _step(ours, before, dtype, wrap)
        assert actual.keys() == expected.keys()
        for key, want in expected.items():
            assert actual[key].dtype == want.dtype, (how, key)
            bound = 2 * _error(want, truth[key]) + 5e-3 * truth[key].norm().item() + 1e-4
            assert _error(actual[key], truth[key]) <= bound, (how, key)


@DTYPES
@every_model
def test_around_backward_too_or_only(name, dtype):
    """Backward computes as forward did, whatever surrounds it."""
    ours, _ = MODELS[name].pair()
    for forward in (None, dtype):
        outside = _step(ours, None, forward, WRAPPERS["plain"])
        inside = _step(ours, None, forward, WRAPPERS["plain"], backward=dtype)
        for key, want in outside.items():
            assert inside[key].dtype == want.dtype
            # The stock parts of a converted language model compute as what surrounds their backward says.
            tolerance = 2e-2 if name == "Llama" and key != "output" else 0.0
            assert _error(inside[key], want) <= tolerance * want.double().norm().item(), key


@needs_extension
@every_model
def test_no_copy_in_the_lower_precision_is_kept_of_a_weight(name):
    ours, _ = MODELS[name].pair()
    owned = {p.data_ptr() for p in ours.parameters()}
    weights = {tuple(p.shape) for n, p in ours.named_parameters() if p.dim() == 2 and _is_fused(n)}
    with torch.autocast("cpu", torch.bfloat16), saved() as tensors:
        ours(tokens())
    copies = [t.shape for t in tensors if t.data_ptr() not in owned and tuple(t.shape) in weights and t.numel()]
    assert tensors and copies == []


def _is_fused(parameter: str) -> bool:
    """Whether every model runs the layer of this parameter fused: Llama's attention may be stock."""
    return not any(part in parameter for part in ("q_proj.", "k_proj.", "v_proj.", "o_proj."))


# GradScaler ----------------------------------------------------------------------------------------------------------


def _train(model: nn.Module, steps: int = 3) -> tuple[dict[str, torch.Tensor], float]:
    """Parameters after a few scaled steps in fp16 with unscaling and clipping, and the scale reached."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for i in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(tokens(5 + i)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return dict(model.named_parameters()), scaler.get_scale()


@every_model
def test_scaled_training(name):
    ours, stock = MODELS[name].pair()
    start = dict(stock.named_parameters())
    (got, scale), (want, expected_scale) = _train(ours), _train(stock)
    assert scale == expected_scale > 2.0**10
    for key, value in want.items():
        moved = (value - start[key]).norm()
        assert (got[key] - value).norm() <= 5e-2 * moved + 1e-5, key


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@every_model
def test_an_overflow_skips_the_step(name, bad):
    """Infinities and NaNs of the incoming gradient reach the gradients of the weights; the scaler steps back."""
    ours, _ = MODELS[name].pair()
    optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = {key: p.detach().clone() for key, p in ours.named_parameters()}
    x = tokens().requires_grad_()
    with torch.autocast("cpu", torch.float16):
        y = ours(x)
    factor = torch.ones_like(y, dtype=torch.float32)
    factor[0, 2, 1] = bad
    scaler.scale((y.float() * factor).sum()).backward()
    broken = [key for key, p in ours.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    assert broken and x.grad[1].isfinite().all() and not x.grad[0].isfinite().all()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(p, before[key]) for key, p in ours.named_parameters())


@every_model
def test_a_scaled_loss_scales_the_gradients_alone(name):
    """In float32 a power of two changes exponents only."""
    ours, _ = MODELS[name].pair()
    plain = step(ours, tokens())
    scaled = step(Replaced(ours, lambda x: ours(x) * 1024.0), tokens())
    assert_same({key: value / 1024.0 for key, value in own(scaled).items()}, plain, 1e-6)
