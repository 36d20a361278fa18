"""Regions, policies and plans under what differentiates or batches plain torch only: `torch.func`, forward mode."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import fused_remat
from fused_remat.audit import audit
from fused_remat.policy import Arrangement, Assignment

X = torch.linspace(-1, 1, 5 * 3 * 8).view(5, 3, 8).sin()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])


def in_region(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: fused_remat.region(model, x, verify="always")


def full(model: nn.Module) -> nn.Module:
    assert fused_remat.convert(model, policy="full").count("region") == 3
    return model


def segment(model: nn.Module) -> nn.Module:
    Arrangement(model).set(Assignment(regions=(("0", "1", "2"),)))
    return model


def planned(model: nn.Module) -> nn.Module:
    """With regions, by a plan that went through a file."""
    plan = fused_remat.plan(model, X.repeat(1, 50, 1), budget="min", fake=True)
    assert plan.assignment.regions
    type(plan).from_json(plan.to_json()).apply(model)
    return model


def forward_mode(fn: Callable[[Tensor], Tensor]) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(fn(forward_ad.make_dual(X, X))).tangent.detach()


WAYS = {
    "vmap": lambda fn: torch.func.vmap(fn)(X),
    "grad": lambda fn: torch.func.grad(lambda x: fn(x).sum())(X),
    "per sample": lambda fn: torch.func.vmap(torch.func.grad(lambda x: fn(x).sum()))(X),
    "jacrev": lambda fn: torch.func.jacrev(fn)(X[0, 0]),
    "functionalize": lambda fn: torch.func.functionalize(fn)(X),
    "forward mode": forward_mode,
}


# Torch scripts its rules of forward mode when they are first asked for.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
@pytest.mark.parametrize("arrange", [in_region, full, segment, planned])
def test_transforms_take_the_plain_call_and_say_so(arrange) -> None:
    stock = net()
    run = arrange(copy.deepcopy(stock))
    for name, way in WAYS.items():
        with pytest.warns(
            fused_remat.guards.RematWarning, match="regions are plain calls under (a torch.func|forward-m)"
        ):
            found = way(run)
        assert torch.equal(found, way(stock)), name


@pytest.mark.parametrize("arrange", [in_region, full, segment])
def test_backward_may_be_batched(arrange) -> None:
    """The forward is not transformed, so it is a region, which is replayed while backward is vmapped."""
    stock = net()
    run, x = arrange(copy.deepcopy(stock)), X[0, 0].clone().requires_grad_()
    found = torch.autograd.grad(run(x), x, torch.eye(8), is_grads_batched=True)[0]
    assert torch.allclose(found, torch.autograd.grad(stock(x), x, torch.eye(8), is_grads_batched=True)[0])


@pytest.mark.parametrize("arrange", [full, segment])
def test_an_audit_names_the_transform(arrange) -> None:
    model = arrange(net())
    with pytest.warns(fused_remat.guards.RematWarning):
        torch.func.grad(lambda x: model(x).sum())(X)
    assert all("a torch.func transform was active" in row.sentence for row in audit(model).rows)
    model(X).sum().backward()
    assert audit(model).ok
