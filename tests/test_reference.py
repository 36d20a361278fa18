"""The reference path: the formulas written out, dropout's generator against published numbers."""

from __future__ import annotations

import math

import mlp_cases as cases
import pytest
import torch
import torch.nn.functional as F

from fused_remat import reference
from fused_remat.activations import ACTIVATIONS

FORMULAS = {
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "relu2": lambda x: torch.where(x > 0, x * x, 0.0),
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "tanh": lambda x: (torch.exp(2 * x) - 1) / (torch.exp(2 * x) + 1),
    "identity": lambda x: x,
}


def test_every_activation_has_its_formula():
    x = torch.linspace(-4, 4, 1001, dtype=torch.float64)
    assert FORMULAS.keys() == ACTIVATIONS.keys()
    for name, formula in FORMULAS.items():
        torch.testing.assert_close(ACTIVATIONS[name](x), formula(x), rtol=1e-12, atol=1e-12)


def test_the_two_gelus_differ():
    x = torch.linspace(-4, 4, 1001, dtype=torch.float64)
    assert (ACTIVATIONS["gelu"](x) - ACTIVATIONS["gelu_tanh"](x)).abs().max().item() == pytest.approx(4.73e-4, rel=1e-3)


def test_philox_known_answers():
    """Random123's known-answer vectors for philox4x32-10 with the high counter words 0."""
    zero = torch.zeros(1, dtype=torch.int64)
    words = [word.item() for word in reference.philox_words(zero, zero)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_dropout_mask_depends_on_seed_and_element_alone():
    seed = torch.tensor([-1234567890123456789])
    whole = reference.dropout_mask(seed, 0.3, (6, 10)).flatten()
    assert torch.equal(whole, reference.dropout_mask(seed, 0.3, (4, 15)).flatten())
    assert torch.equal(whole[:30], reference.dropout_mask(seed, 0.3, (3, 10)).flatten())
    assert not torch.equal(whole, reference.dropout_mask(seed + 1, 0.3, (6, 10)).flatten())


def test_dropout_rate_is_exact():
    n = 400_000
    for p in (0.1, 0.5, 0.9):
        dropped = 1 - reference.dropout_mask(torch.tensor([7]), p, (1000, n // 1000)).double().mean().item()
        assert abs(dropped - p) < 5 * math.sqrt(p * (1 - p) / n)


@pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
def test_mlp_is_the_written_formula(gated):
    given = cases.operands((2, 5), 3, 7, 4, gated=gated)
    up = F.linear(given["x"], given["w_up"], given["b_up"])
    hidden = torch.sigmoid(F.linear(given["x"], given["w_gate"], given["b_gate"])) * up if gated else torch.sigmoid(up)
    seed = torch.tensor([99])
    keep = reference.dropout_mask(seed, 0.4, (10, 7)).view(2, 5, 7)
    y = torch.where(keep, hidden / 0.6, 0.0) @ given["w_down"].t() + given["b_down"]
    ours = reference.mlp(**given, activation="sigmoid", dropout_p=0.4, seed=seed)
    torch.testing.assert_close(ours, y, rtol=1e-12, atol=1e-12)


def test_complex_and_twice_differentiable():
    x = torch.randn(3, 4, dtype=torch.complex128, requires_grad=True)
    w_up, w_down = (torch.randn(s, dtype=torch.complex128, requires_grad=True) for s in ((5, 4), (4, 5)))

    def function(x, w_up, w_down):
        return reference.mlp(x, w_up, w_down, activation="tanh")

    assert torch.autograd.gradcheck(function, (x, w_up, w_down))
    assert torch.autograd.gradgradcheck(function, (x, w_up, w_down))
