"""Gradients of the attention op against finite differences in float64, in the smallest tiles and in whole ones."""

from __future__ import annotations

import math
from itertools import product

import attention_cases as cases
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
]
# batch, heads, kv heads, Lq, Lk, E, Ev; the last crosses the tiles of every kernel
SHAPES = ((2, 2, 2, 3, 3, 2, 2), (1, 4, 2, 2, 4, 3, 1), (1, 3, 1, 4, 3, 1, 3))
LONG = (1, 2, 1, 67, 70, 3, 2)
MASK_KINDS = ("none", "bool", "bool-empty-row", "bool-keys", "padding", "bool+padding")
LEARNED_KINDS = ("float", "float-per-head", "float-per-query", "float-keys", "float-padding", "float+float-padding")
BAND_NAMES = ("full", "is_causal", "bottom_right", "causal-window", "window")


def _case(shape, mask):
    batch, heads, kv_heads, length_q, length_k, width, value_width = shape
    given = cases.operands(
        batch, heads, length_q, length_k, width, kv_heads=kv_heads, value_width=value_width, dtype=torch.float64
    )
    masks = cases.masks(mask, given)
    return given | cases.learned(masks), {name: m for name, m in masks.items() if not m.requires_grad}


def _function(names, fixed, **settings):
    """The op as a function of the tensors of these names; lse where it is finite."""

    def function(*values):
        tensors = dict(zip(names, values, strict=True))
        given = {name: tensors.pop(name) for name in ("q", "k", "v")}
        out, lse = cases.run(given, **tensors, **fixed, return_lse=True, **settings)
        return out, lse[lse.detach() > -math.inf]

    return function


def _assert_ran(backend, functions):
    """Every one of these functions, forward and backward, on that backend and no other."""

    def every_case():
        for function, tensors in functions:
            out, lse = function(*tensors.values())
            torch.autograd.backward((out, lse), (torch.randn_like(out), torch.randn_like(lse)))

    ran = cases.kernels_of(every_case)
    assert cases.backends_of(ran) == {backend}
    assert ran.count("attention_fwd") == ran.count("attention_bwd") == len(functions)


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("dropout_p", (0.0, 0.3))
@pytest.mark.parametrize("mask", (*MASK_KINDS, *LEARNED_KINDS))
def test_gradcheck(mask, dropout_p, backend):
    functions = []
    grid = product(SHAPES, BAND_NAMES) if backend == "cpp" else ((SHAPES[1], "full"), (SHAPES[2], "causal-window"))
    for shape, band in grid:
        tensors, fixed = _case(shape, mask)
        settings = cases.BANDS[band] | {"dropout_p": dropout_p, "backend": backend, "workspace": 1}
        function = _function(tensors, fixed, **settings)
        # One case per test element by element; a random projection of the Jacobian finds the same mistakes in the rest.
        every_element = shape == SHAPES[1] and band == "bottom_right"
        assert gradcheck(function, tuple(tensors.values()), fast_mode=not every_element), (shape, band)
        functions.append((function, tensors))
    _assert_ran(backend, functions)


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("workspace", (1, 2**20))
@pytest.mark.parametrize("mask", ("none", "bool-empty-row", "float+float-padding"))
def test_gradcheck_across_tiles(mask, workspace, backend):
    functions = []
    for band, dropout_p in (("full", 0.3), ("bottom_right", 0.0), ("window", 0.0)):
        tensors, fixed = _case(LONG, mask)
        function = _function(
            tensors, fixed, **cases.BANDS[band], dropout_p=dropout_p, backend=backend, workspace=workspace
        )
        assert gradcheck(function, tuple(tensors.values()), fast_mode=True), (band, dropout_p)
        functions.append((function, tensors))
    _assert_ran(backend, functions)


@pytest.mark.parametrize("mask", ("none", "bool-empty-row", "bool+padding", "float", "float-keys", "float-padding"))
def test_gradgradcheck(mask):
    for shape, band, dropout_p in product(SHAPES[1:], ("full", "bottom_right"), (0.0, 0.3)):
        tensors, fixed = _case(shape, mask)
        function = _function(tensors, fixed, **cases.BANDS[band], dropout_p=dropout_p, backend="cpp")
        every_element = shape == SHAPES[2] and band == "full"
        assert gradgradcheck(function, tuple(tensors.values()), fast_mode=not every_element), (shape, band, dropout_p)


def test_second_derivatives_are_those_of_the_reference():
    """Also where q, k and v are one tensor, which must not pass its gradient on twice."""
    x = torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    results = []
    for attention in (cases.run, cases.run_reference):
        out = attention({"q": x, "k": 2 * x, "v": x}, is_causal=True)
        (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        results.append((dx, *torch.autograd.grad(dx.square().sum(), x)))
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-11, atol=1e-11)
