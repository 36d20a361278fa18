"""Gradients of multi-head attention from x against finite differences in float64, with head groups of one."""

from __future__ import annotations

from itertools import chain, combinations, product

import mha_cases as cases
import pytest
import torch
from mha_cases import RESIDUALS, Block
from torch.autograd import gradcheck, gradgradcheck

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
]
SMALL = {"batch": 1, "length": 3, "model": 3, "width": 2}
BLOCKS = {
    "plain": Block(**SMALL, value_width=3),
    "shared heads": Block(**SMALL, heads=4, kv_heads=2, out=2),
    "no bias": Block(**SMALL, bias=False, heads=1, kv_heads=1),
    "cross": Block(**SMALL, length_k=4, mask="float-per-head"),
    "three inputs": Block(**SMALL, length_k=2, model_k=2, model_v=4, separate_value=True, packed=False),
    "extra keys": Block(**SMALL, bias_kv=True, zero_key=True, mask="bool-empty-row"),
    "layer norm": Block(**SMALL, norm="layer_norm", mask="padding"),
    "rms norm": Block(**SMALL, norm="rms_norm", bias=False, mask="float+float-padding"),
    "norm and cross": Block(**SMALL, norm="layer_norm", length_k=4),
    "q/k norm": Block(**SMALL, heads=4, kv_heads=2, qk_norm=True),
    "rotary": Block(**SMALL, rotary=2, heads=4, kv_heads=1),
    "everything": Block(
        batch=2, length=2, model=3, width=4, heads=2, kv_heads=1, value_width=1, norm="rms_norm", qk_norm=True,
        rotary=2, interleaved=True, bias_kv=True, zero_key=True, mask="float+padding",
    ),
}  # fmt: skip
SETTINGS = ({}, {"is_causal": True}, {"causal": "bottom_right", "dropout_p": 0.3}, {"window": (1, 0)})
SUBSETS = tuple(chain.from_iterable(combinations(RESIDUALS, n) for n in range(5)))


def _function(block, given, **settings):
    leaves = {name: value for name, value in given.items() if value.requires_grad}

    def function(*values):
        return block.call(given | dict(zip(leaves, values, strict=True)), **settings)

    return function, tuple(leaves.values())


def _assert_ran(backend, functions, groups):
    """Every one of these functions, forward and backward, in that many head groups each, on that backend alone."""

    def every_case():
        for function, values in functions:
            outputs = function(*values)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])

    ran = cases.kernels_of(every_case)
    assert cases.backends_of(ran) == {backend}
    assert ran.count("multi_head_attention_fwd") == ran.count("multi_head_attention_bwd") == len(functions)
    assert ran.count(f"attention_bwd_{backend}") == groups * len(functions)


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("need_weights", (False, True), ids=("y", "y+weights"))
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_gradcheck(block, need_weights, backend):
    functions = []
    given = block.operands()
    grid = (*product(SETTINGS, ((), ("out",))), (SETTINGS[1], ("q", "v")))
    if backend == "aten":  # its own code alone; the rest of the grid is about the streaming above it
        grid = ((SETTINGS[0], ()), (SETTINGS[2], ("out",)))
    for settings, keep in grid:
        function, values = _function(
            block, given, backend=backend, keep=keep, workspace=1, need_weights=need_weights, **settings
        )
        # One case per test element by element; a random projection of the Jacobian finds the same mistakes in the rest.
        every_element = keep == ("out",) and "dropout_p" in settings and backend == "cpp"
        assert gradcheck(function, values, fast_mode=not every_element), (settings, keep)
        functions.append((function, values))
    _assert_ran(backend, functions, groups=block.kv_heads)


@pytest.mark.parametrize("need_weights", (None, "averaged", "per head"))
def test_gradcheck_of_every_subset_of_residuals(need_weights):
    block = Block(**SMALL, norm="rms_norm", qk_norm=True, zero_key=True)
    given = block.operands()
    settings = {"need_weights": need_weights is not None, "average_attn_weights": need_weights == "averaged"}
    functions = []
    for keep in SUBSETS:
        function, values = _function(block, given, backend="cpp", keep=keep, workspace=1, dropout_p=0.2, **settings)
        assert gradcheck(function, values, fast_mode=True), keep
        functions.append((function, values))
    _assert_ran("cpp", functions, groups=2)


@pytest.mark.parametrize("need_weights", (False, True), ids=("y", "y+weights"))
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_gradgradcheck(block, need_weights):
    given = block.operands()
    for settings, keep in ((SETTINGS[0], ("out",)), (SETTINGS[2], ())):
        function, values = _function(block, given, backend="cpp", keep=keep, need_weights=need_weights, **settings)
        assert gradgradcheck(function, values, fast_mode=True), settings


def test_second_derivative_does_not_run_through_dependent_operands():
    """A weight computed from x must not leak its own gradient into that of x a second time."""
    block = Block(**SMALL)
    given = {name: value.detach() for name, value in block.operands().items()}
    x = given["query"].clone().requires_grad_()
    results = []
    for backend in ("cpp", "reference"):
        dependent = given | {"query": x, "in_proj_weight": given["in_proj_weight"] * x.sum()}
        (dx,) = torch.autograd.grad(block.call(dependent, backend=backend).sum(), x, create_graph=True)
        results.append((dx, *torch.autograd.grad(dx.square().sum(), x)))
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-11, atol=1e-11)


# Subsets of operands that require gradients ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("block", (BLOCKS["plain"], BLOCKS["three inputs"], BLOCKS["everything"]), ids=str)
def test_only_requested_gradients_are_computed(block, backend):
    given = block.operands()
    names = [name for name, value in given.items() if value.is_floating_point()]
    y = block.reference(given)
    dy = torch.randn_like(y)
    truth = cases.gradients(y, given, dy)
    subsets = list(product((False, True), repeat=len(names)))
    if len(subsets) > 130:  # each alone, all but each, and some others
        chosen = {n for n in range(len(subsets)) if n.bit_count() in (0, 1, len(names) - 1, len(names))}
        subsets = [subsets[n] for n in sorted(chosen | set(range(7, len(subsets), len(subsets) // 60)))]
    for subset in subsets:
        for name, wanted in zip(names, subset, strict=True):
            given[name].requires_grad_(wanted)
        y = block.call(given, backend=backend)
        assert y.requires_grad == any(subset)
        if any(subset):
            ours = cases.gradients(y, given, dy)
            cases.assert_same(ours, {name: truth[name] for name in ours}, 1e-10, subset)


def test_x_without_gradient_still_trains_the_weights():
    block = Block()
    given = block.operands()
    given["query"].requires_grad_(False)
    dy = torch.randn(2, 5, 6, dtype=torch.float64)
    ours, truth = (cases.gradients(y, given, dy) for y in (block.call(given), block.reference(given)))
    assert "query" not in ours and len(ours) == 4
    cases.assert_same(ours, truth, 1e-10)
