"""A replay computes under the settings of its forward, and leaves those of its backward as they were."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fused_remat
from fused_remat import budget, dispatch
from fused_remat.guards.flags import _SETTINGS

region = fused_remat.region


class Probe:
    """Notes what the settings are whenever a region runs, out of sight of its guards."""

    __module__ = "torch"

    def __init__(self) -> None:
        self.found: list[list] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.found.append(current())
        return (x.exp() * 2).exp()


def current() -> list:
    return [*(get() for get, _ in _SETTINGS), budget.in_context.value, dispatch.in_context.value]


@contextmanager
def precision(value: str):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def attribute(holder, name: str, value):
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


CHANGES = {
    "TF32": lambda: precision("high"),
    "bfloat16 products": lambda: precision("medium"),
    "TF32 of convolutions": lambda: attribute(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "reductions": lambda: attribute(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "cudnn": lambda: attribute(torch.backends.cudnn, "deterministic", True),
    "deterministic": deterministic,
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "workspace": lambda: fused_remat.workspace(12345),
    "backend": lambda: fused_remat.backend("aten"),
}


@pytest.mark.parametrize("around", ["forward", "backward"])
@pytest.mark.parametrize("what", CHANGES)
def test_replay_has_the_settings_of_the_forward(what: str, around: str) -> None:
    probe, x = Probe(), torch.ones(3, requires_grad=True)
    before = current()
    if around == "forward":
        with CHANGES[what]():
            changed = current()
            y = region(probe, x).sum()
        around_backward = current()
        y.backward()
        assert current() == around_backward != changed
        expected = changed
    else:
        y = region(probe, x).sum()
        with CHANGES[what]():
            changed = current()
            y.backward()
            assert current() == changed
        expected = before
    assert changed != before
    assert probe.found == [expected, expected]


def test_settings_come_back_when_a_replay_fails() -> None:
    class Failing(Probe):
        __module__ = "torch"

        def __call__(self, x: Tensor) -> Tensor:
            if self.found:
                raise MemoryError("out of memory")
            return super().__call__(x)

    with precision("high"):
        y = region(Failing(), torch.ones(3, requires_grad=True)).sum()
    before = current()
    with pytest.raises(MemoryError):
        y.backward()
    assert current() == before


def test_attention_kernel_of_the_forward() -> None:
    q = torch.randn(1, 2, 8, 16, requires_grad=True)

    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q).sin()

    grads = []
    for run in (lambda fn, x: fn(x), region):
        with sdpa_kernel(SDPBackend.MATH):
            y = run(attend, q)
        grads.extend(torch.autograd.grad(y.sum(), q))
    assert torch.equal(*grads)


def test_tensor_of_inference_mode_is_an_input() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    with torch.inference_mode():
        shift, other = torch.ones(4), torch.full((4,), 2.0)

    def shifted(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return ((linear(x) + first).exp() + second).exp()

    grads = []
    for run in (lambda fn, *args: fn(*args), region):
        grads.append(torch.autograd.grad(run(shifted, x, shift, other).sum(), [x, linear.weight]))
    assert all(map(torch.equal, *grads))
