"""Gradients of the MLP op against finite differences in float64, with tiles forced on both axes."""

from __future__ import annotations

import math
from itertools import product

import mlp_cases as cases
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from fused_remat.activations import ACTIVATIONS
from fused_remat.measure import measure

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
]

# One plain and one gated layer's usual choice say that a torch works; the others are rows of the same table.
EVERY_ACTIVATION = pytest.mark.parametrize(
    "activation",
    [name if name in ("gelu", "silu") else pytest.param(name, marks=pytest.mark.once) for name in ACTIVATIONS],
)
KEEPS = {False: ((), ("up",), 0.5), True: ((), ("up", "gate"), ("up",), ("gate",), 0.5)}


def _operands(axis: str, gated: bool, bias: bool):
    # Feature chunks iff M < 2 F (plain) or 3 F (gated).
    rows, hidden = (3, 5) if axis == "features" else (7, 2)
    return cases.operands(rows, 2, hidden, 3, gated=gated, bias=bias)


def _as_function(given, **settings):
    return lambda *values: cases.run(dict(zip(given, values, strict=True)), **settings)


def _expected_tiles(given, workspace: int, backend: str, axis: str, width: int, dropout: bool) -> int:
    """Tiles of a backward whose chunks are `width` wide on `axis`, as the plan must have it."""
    cut, rows, features, _ = cases.plan(given, workspace, backend, dropout=dropout)
    assert cut == axis and (features if axis == "features" else rows) == width
    return math.ceil(given["x"].shape[0] / rows) * math.ceil(given["w_up"].shape[0] / features)


@pytest.mark.parametrize("width", (1, 3))
@pytest.mark.parametrize("axis", ("features", "tokens"))
@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
@EVERY_ACTIVATION
def test_gradcheck(activation, gated, backend, axis, width):
    expected, runs = 0, []
    grid = product((True, False), KEEPS[gated], (0.0, 0.3))
    if backend == "aten":  # its own code alone; the rest of the grid is about the streaming above it
        grid = ((True, (), 0.0), (True, 0.5, 0.0), (True, (), 0.3))
    for bias, keep, dropout_p in grid:
        given = _operands(axis, gated, bias)
        workspace = cases.workspace_for(given, width, backend, dropout=dropout_p > 0)
        settings = {"activation": activation, "keep": keep, "dropout_p": dropout_p}
        function = _as_function(given, backend=backend, workspace=workspace, **settings)
        # One case per test element by element; a random projection of the Jacobian finds the same mistakes in the rest.
        every_element = bias and keep == 0.5 and dropout_p > 0
        assert gradcheck(function, tuple(given.values()), fast_mode=not every_element), (bias, keep, dropout_p)
        expected += _expected_tiles(given, workspace, backend, axis, width, dropout_p > 0)
        runs.append((function, given))

    def every_case():
        for function, given in runs:
            y = function(*given.values())
            y.backward(torch.randn_like(y))

    ran = cases.kernels_of(every_case)
    assert ran.count(f"mlp_bwd_chunk_{backend}") == expected
    assert all(name.endswith(backend) for name in ran if "chunk" in name)


@pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
@EVERY_ACTIVATION
def test_gradgradcheck(activation, gated):
    for bias, keep, dropout_p in product((True, False), KEEPS[gated], (0.0, 0.3)):
        given = _operands("features", gated, bias)
        function = _as_function(given, backend="cpp", activation=activation, keep=keep, dropout_p=dropout_p)
        every_element = bias and keep == 0.5 and dropout_p > 0
        assert gradgradcheck(function, tuple(given.values()), fast_mode=not every_element), (bias, keep, dropout_p)


def test_second_derivative_does_not_run_through_dependent_operands():
    """A weight computed from x must not leak its own gradient into that of x a second time."""

    def loss(mlp):
        x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3).requires_grad_()
        w_up = torch.outer(torch.arange(1.0, 5, dtype=torch.float64), x.sum(0))
        w_down = torch.ones(2, 4, dtype=torch.float64)
        (dx,) = torch.autograd.grad(mlp({"x": x, "w_up": w_up, "w_down": w_down}).sum(), x, create_graph=True)
        (ddx,) = torch.autograd.grad(dx.square().sum(), x)
        return dx, ddx

    for ours, truth in zip(loss(cases.run), loss(cases.run_reference), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
def test_only_requested_gradients_are_computed(gated, backend):
    given = cases.operands(5, 3, 6, 4, gated=gated)
    dy = torch.randn(5, 4, dtype=torch.float64)
    truth = cases.gradients(cases.run_reference(given), given, dy)
    names = list(given)
    for subset in product((False, True), repeat=len(names)):
        for name, wanted in zip(names, subset, strict=True):
            given[name].requires_grad_(wanted)
        y = cases.run(given, backend=backend)
        assert y.requires_grad == any(subset)
        wanted = {name: given[name] for name, chosen in zip(names, subset, strict=True) if chosen}
        if wanted:
            for name, gradient in cases.gradients(y, wanted, dy).items():
                torch.testing.assert_close(gradient, truth[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("trainable", "products"), (("x", 3), ("w_up", 3), ("w_down", 2), ("b_up", 2), ("b_down", 0)))
def test_frozen_operands_skip_their_products(trainable, products):
    """FLOP of backward in units of 2 M D F: the rebuild, dhidden where it is needed, one for the gradient itself."""
    given = cases.operands(32, 16, 64, dtype=torch.float32, requires_grad=False)
    given[trainable].requires_grad_()
    measured = measure(lambda: cases.run(given, backend="cpp"), repeats=1)
    assert measured.backward_gemm_flop == products * 2 * 32 * 16 * 64
