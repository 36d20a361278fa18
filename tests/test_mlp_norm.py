"""A pre-norm folded into the MLP op: values, gradients on both axes and in forced tiles, and what is kept."""

from __future__ import annotations

from itertools import product

import mlp_cases as cases
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import fused_remat
from fused_remat import Norm, reference
from fused_remat.measure import measure

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
]
BACKEND = pytest.mark.parametrize("backend", cases.BACKENDS)
KIND = pytest.mark.parametrize("kind", ("layer_norm", "rms_norm"))
# rows, hidden width: feature chunks iff M < 2 F
AXES = {"features": (3, 5), "tokens": (11, 2)}


def _norm(kind: str, width: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    weight, bias = (torch.randn(width, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(2))
    return {"weight": weight, "bias": bias} if kind == "layer_norm" else {"weight": weight}


def _run(given, norm, kind, *, backend, **settings):
    return cases.run(given, backend=backend, norm=Norm(kind, **norm, eps=1e-3), **settings)


@BACKEND
@KIND
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
def test_second_order_gradients_in_forced_tiles(gated, axis, kind, backend):
    rows, hidden = AXES[axis]
    given, norm = cases.operands(rows, 3, hidden, 2, gated=gated), _norm(kind, 3)
    names = [*given, *norm]

    def call(workspace):
        def run(*values):
            passed = dict(zip(names, values, strict=True))
            return _run({n: passed[n] for n in given}, {n: passed[n] for n in norm}, kind, backend=backend,
                        workspace=workspace)  # fmt: skip

        return run

    inputs = (*given.values(), *norm.values())
    for workspace in (1, 2**20):
        assert gradcheck(call(workspace), inputs)
    ran = cases.kernels_of(lambda: call(1)(*inputs).sum().backward())
    assert ran.count(f"mlp_bwd_chunk_{backend}") == rows * hidden
    assert gradgradcheck(call(1), inputs, fast_mode=True)


@BACKEND
@KIND
@pytest.mark.parametrize(("dtype", "floor"), ((torch.float32, 1e-6), (torch.bfloat16, 1e-3)), ids=("fp32", "bf16"))
def test_as_precise_as_separate_modules(dtype, floor, kind, backend):
    for (rows, hidden), workspace in product(((40, 96), (300, 24)), (20_000, 2**20)):
        given, norm = cases.operands(rows, 16, hidden, dtype=dtype), _norm(kind, 16, dtype)
        dy = torch.randn(rows, 16).to(dtype)
        exact = {name: value.detach().double().requires_grad_() for name, value in (given | norm).items()}
        everything = given | norm

        def truth(values, norm=norm, given=given):
            return reference.mlp(
                **{name: values[name] for name in given},
                norm=Norm(kind, **{name: values[name] for name in norm}, eps=1e-3),
            )

        right = cases.gradients(truth(exact), exact, dy.double())
        stock = cases.gradients(truth(everything), everything, dy)
        ours = cases.gradients(_run(given, norm, kind, backend=backend, workspace=workspace), everything, dy)
        for name in everything:
            allowed = 2 * cases.relative_error(stock[name], right[name]) + floor
            assert cases.relative_error(ours[name], right[name]) <= allowed, (name, rows, workspace)


@KIND
def test_frozen_subsets(kind):
    given, norm = cases.operands(7, 4, 9), _norm(kind, 4)
    dy, full = torch.randn(7, 4, dtype=torch.float64), {}
    for wanted in ([*given, *norm], ["x"], ["weight"], ["w_up"], ["w_down"], [name for name in norm]):
        for name, value in (given | norm).items():
            value.requires_grad_(name in wanted)
        y = _run(given, norm, kind, backend="cpp", workspace=500)
        got = cases.gradients(y, {name: (given | norm)[name] for name in wanted}, dy)
        full = full or got
        for name, value in got.items():
            torch.testing.assert_close(value, full[name], rtol=1e-12, atol=1e-12)


@KIND
def test_only_x_is_kept_and_the_peak_is_bounded(kind):
    rows, width, hidden, workspace = 4096, 64, 256, 2**18
    given, norm = cases.operands(rows, width, hidden, dtype=torch.float32), _norm(kind, width, torch.float32)
    seen = measure(lambda: _run(given, norm, kind, backend="cpp", workspace=workspace), repeats=0)
    assert seen.kept_bytes == 0
    vectors = 64 * 1024  # sums of vectors and of the norm's slabs
    assert seen.backward_peak_above_gradients_bytes <= workspace * 1.01 + vectors


def test_a_norm_that_is_none_of_the_two_is_refused():
    given = cases.operands(3, 4, 5)
    for bad, error in (
        (Norm("batch_norm"), ValueError),
        ("layer_norm", TypeError),
        (Norm("layer_norm", torch.ones(3)), TypeError),
    ):
        with pytest.raises((error, ValueError), match="norm"):
            fused_remat.mlp(**given, norm=bad)
