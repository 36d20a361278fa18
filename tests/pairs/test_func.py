"""torch.func: grad, vmap(grad), functional_call, jvp, vjp and hessians of layers and of converted models."""

from __future__ import annotations

import pytest
import torch
from pair_cases import MODELS, assert_same, every_model, tokens
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching"),
]


def _loss(model: nn.Module):
    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, parameters, (x,)).square().mean()

    return loss


def _detached(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


@every_model
def test_per_sample_gradients(name):
    ours, stock = MODELS[name].pair(dtype=torch.float64)
    x = tokens(batch=3, dtype=torch.float64).unsqueeze(1)
    parameters = _detached(ours)
    batched = vmap(grad(_loss(ours)), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        stock.zero_grad()
        stock(sample).square().mean().backward()
        want = {key: p.grad for key, p in stock.named_parameters() if p.grad is not None}
        assert_same({key: batched[key][i] for key in want}, want, 1e-5)
        one = grad(_loss(ours))(parameters, sample)
        assert_same({key: one[key] for key in want}, want, 1e-5)


@every_model
def test_functional_call_trains_the_given_weights(name):
    ours, stock = MODELS[name].pair(dtype=torch.float64)
    other = {key: (p.detach() * 1.5).requires_grad_() for key, p in ours.named_parameters()}
    x = tokens(dtype=torch.float64)
    loss = _loss(ours)(other, x)
    got = torch.autograd.grad(loss, list(other.values()), allow_unused=True)
    want = grad(_loss(stock))({key: p.detach() for key, p in other.items()}, x)
    assert_same(
        {key: g for key, g in zip(other, got, strict=True) if g is not None},
        {key: g for (key, g), mine in zip(want.items(), got, strict=True) if mine is not None},
        1e-5,  # norms of transformers compute in float32
    )
    assert all(p.grad is None for p in ours.parameters())


@every_model
def test_jvp_and_vjp(name):
    ours, stock = MODELS[name].pair(dtype=torch.float64)
    x = tokens(dtype=torch.float64)
    tangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    # Torch's fused attention, which a converted language model may still call, has no forward-mode derivative.
    with sdpa_kernel(SDPBackend.MATH):
        for got, want in zip(jvp(ours, (x,), (tangent,)), jvp(stock, (x,), (tangent,)), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    (dx,) = vjp(ours, x)[1](tangent)
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(stock(leaf), leaf, tangent)
    torch.testing.assert_close(dx, want, rtol=1e-6, atol=1e-6)


@every_model
def test_second_derivatives(name):
    """Through create_graph and through torch.func, both equal to stock's."""
    ours, stock = MODELS[name].pair(dtype=torch.float64)
    x = tokens(3, 1, dtype=torch.float64)

    def penalty(model: nn.Module) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(model(leaf).square().mean(), leaf, create_graph=True)
        wanted = [leaf, *(p for p in model.parameters() if p.requires_grad)]
        return torch.autograd.grad(dx.square().sum(), wanted, allow_unused=True)

    with sdpa_kernel(SDPBackend.MATH):
        for got, want in zip(penalty(ours), penalty(stock), strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                assert (got - want).norm() <= 1e-6 * want.norm() + 1e-9
        v = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        hvp = lambda model: jvp(grad(lambda x: model(x).square().mean()), (x,), (v,))[1]
        torch.testing.assert_close(hvp(ours), hvp(stock), rtol=1e-6, atol=1e-7)


@every_model
def test_jacobian(name):
    ours, stock = MODELS[name].pair(dtype=torch.float64)
    x = tokens(2, 1, dtype=torch.float64)
    pooled = lambda model: lambda x: model(x).sum(1).flatten()[:3]
    torch.testing.assert_close(jacrev(pooled(ours))(x), jacrev(pooled(stock))(x), rtol=1e-6, atol=1e-7)
