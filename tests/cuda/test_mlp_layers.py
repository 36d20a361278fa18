"""Whole MLP layers on the CUDA C++ backend: gradients against finite differences, and against the other backends."""

from __future__ import annotations

import math
from itertools import product

import mlp_cases as cases
import pytest
import torch
from torch.autograd import gradcheck

import fused_remat
from fused_remat.activations import ACTIVATIONS

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")
GATED = pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
WIDE = 136  # beyond the layers that one kernel computes
KEEPS = {False: ((), ("up",), 0.5), True: ((), ("up", "gate"), ("up",), ("gate",), 0.5)}


@pytest.mark.parametrize("axis", ("features", "tokens"))
@GATED
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation, gated, axis):
    rows, hidden, width = (3, 5, 3) if axis == "features" else (7, 2, 1)
    cases_of_bias = [(True, keep, p) for keep, p in product(KEEPS[gated], (0.0, 0.3))]
    for bias, keep, dropout_p in [*cases_of_bias, (False, 0.5, 0.3)]:
        given = cases.operands(rows, 2, hidden, 3, gated=gated, bias=bias)
        cost = {"dropout": dropout_p > 0, "activation": activation}
        workspace = cases.workspace_for(given, width, "cuda", **cost)
        settings = {"activation": activation, "keep": keep, "dropout_p": dropout_p, "workspace": workspace}

        def function(*values, names=tuple(given), settings=settings):
            return cases.run(dict(zip(names, values, strict=True)), backend="cuda", **settings)

        every_element = bias and keep == 0.5 and dropout_p > 0
        assert gradcheck(function, tuple(given.values()), fast_mode=not every_element), (bias, keep, dropout_p)
        if keep == ():
            y = function(*given.values())
            ran = cases.kernels_of(lambda y=y: y.backward(torch.ones_like(y)))
            assert ran.count("mlp_bwd_chunk_cuda") == _tiles(given, workspace, **cost)
            assert all(name.endswith("cuda") for name in ran if "chunk" in name or "sums" in name)


def _tiles(given, workspace: int, **cost) -> int:
    _, rows, features, _ = cases.plan(given, workspace, "cuda", **cost)
    return math.ceil(given["x"].shape[0] / rows) * math.ceil(given["w_up"].shape[0] / features)


def _results(given, backend: str, dy, **settings):
    y = cases.run(given, backend=backend, **settings)
    return {"y": y.detach()} | cases.gradients(y, given, dy)


@GATED
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("activation", ("gelu_tanh", "relu", "silu"))
def test_as_exact_as_torch(activation, dtype, gated):
    """At most twice the error of plain torch in that dtype, chunks on both axes, odd widths, parts kept."""
    floor = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for (rows, hidden), keep, p in product(((19, 40), (150, 24), (33, 37)), ((), 0.4), (0.0, 0.1)):
        exact = cases.operands(rows, WIDE, hidden, 24, gated=gated, dtype=dtype)
        exact = {name: value.detach().double().requires_grad_() for name, value in exact.items()}
        given = {name: value.detach().to(dtype).requires_grad_() for name, value in exact.items()}
        dy = torch.randn(rows, 24, dtype=torch.float64).to(dtype)
        settings = {"activation": activation, "dropout_p": p}
        truth_y, stock_y = (cases.run_reference(of, **settings) for of in (exact, given))
        truth = {"y": truth_y.detach()} | cases.gradients(truth_y, exact, dy.double())
        stock = {"y": stock_y.detach()} | cases.gradients(stock_y, given, dy)
        for workspace in (2**14, 2**20):
            made = _results(given, "cuda", dy, keep=keep, workspace=workspace, **settings)
            for name, value in made.items():
                allowed = 2 * cases.relative_error(stock[name], truth[name]) + floor
                assert cases.relative_error(value, truth[name]) <= allowed, (name, rows, keep, p, workspace)


@GATED
def test_dropout_is_that_of_the_other_backends(gated):
    given = cases.operands(40, 8, 50, gated=gated, dtype=torch.float32)
    dy = torch.randn(40, 8)
    settings = {"activation": "silu", "dropout_p": 0.4, "seed": 7}
    ours, theirs = (_results(given, backend, dy, **settings) for backend in ("cuda", "cpp"))
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name])


@pytest.mark.parametrize("activation", ("gelu", "gelu_tanh"))
@GATED
def test_same_bits_every_time(gated, activation, thread_order):
    given = cases.operands(70, WIDE, 96, gated=gated, dtype=torch.bfloat16)
    dy = torch.randn(70, WIDE).bfloat16()
    settings = {"activation": activation, "keep": 0.3 if gated else (), "workspace": 2**15}
    first = _results(given, "cuda", dy, **settings)
    assert cases.kernels_of(lambda: _results(given, "cuda", dy, **settings)).count("mlp_bwd_chunk_cuda") > 1
    for order in (3, 4):
        thread_order(order)
        for name, value in _results(given, "cuda", dy, **settings).items():
            assert torch.equal(value, first[name]), name


@GATED
def test_only_requested_gradients_are_computed(gated):
    given = cases.operands(5, 3, 6, 4, gated=gated)
    dy = torch.randn(5, 4, dtype=torch.float64)
    truth = cases.gradients(cases.run_reference(given), given, dy)
    names = list(given)
    for subset in product((False, True), repeat=len(names)):
        for name, wanted in zip(names, subset, strict=True):
            given[name].requires_grad_(wanted)
        wanted = {name: given[name] for name, chosen in zip(names, subset, strict=True) if chosen}
        if wanted:
            for name, gradient in cases.gradients(cases.run(given, backend="cuda"), wanted, dy).items():
                torch.testing.assert_close(gradient, truth[name], rtol=1e-10, atol=1e-12)


@GATED
def test_autocast_with_fp32_parameters(gated):
    """Weights are cast chunk by chunk; biases stay fp32 and are added before the one rounding."""
    given = cases.operands(21, 16, 40, gated=gated, dtype=torch.float32)
    dy = torch.randn(21, 16)
    exact = {name: value.detach().double().requires_grad_() for name, value in given.items()}
    for activation in ("gelu_tanh", "silu"):
        results = []
        for backend in ("cuda", "reference"):
            with torch.autocast("cpu", torch.bfloat16), fused_remat.backend(backend):
                y = fused_remat.mlp(**given, activation=activation)
            results.append({"y": y.detach()} | cases.gradients(y, given, dy.to(y.dtype)))
        y = cases.run_reference(exact, activation=activation)
        truth = {"y": y.detach()} | cases.gradients(y, exact, dy.bfloat16().double())
        for name, value in results[0].items():
            stock = results[1][name]
            assert value.dtype == stock.dtype
            allowed = 2 * cases.relative_error(stock, truth[name]) + 1e-3
            assert cases.relative_error(value, truth[name]) <= allowed, name


@pytest.mark.parametrize("shape", ((0,), (3, 0)))
def test_empty_batches(shape):
    given = cases.operands(shape, 4, 6, gated=True, dtype=torch.float32)
    y = cases.run(given, backend="cuda")
    assert y.shape == (*shape, 4)
    for gradient in cases.gradients(y, given, torch.empty_like(y)).values():
        assert (gradient == 0).all()
