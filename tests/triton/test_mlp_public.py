"""`fused_remat.mlp` on the Triton backend, from the arguments that a caller gives."""

from __future__ import annotations

from functools import partial

import adapter_cases
import mlp_cases as cases
import pytest
import torch
from mlp_chunks import DEVICE
from torch import Tensor

import fused_remat
from fused_remat import Norm
from fused_remat.activations import ACTIVATIONS

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
]
GATED = pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
# What an error may be where torch happens to make none, relative to the norm of the result.
FLOORS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-4}
# rows, hidden width: feature chunks iff M < 2 F (plain) or 3 F (gated)
AXES = {"features": (33, 65), "tokens": (129, 17)}


def _operands(rows, width, hidden, out=None, *, requires_grad=True, **settings) -> dict[str, Tensor]:
    made = cases.operands(rows, width, hidden, out, requires_grad=False, **settings)
    return {name: value.to(DEVICE).requires_grad_(requires_grad) for name, value in made.items()}


def _results(call, given: dict[str, Tensor], dy: Tensor) -> dict[str, Tensor]:
    y = call(given)
    wanted = {name: value for name, value in given.items() if value.requires_grad}
    return {"y": y.detach()} | cases.gradients(y, wanted, dy)


def _triton(**settings):
    return lambda given: cases.run(given, backend="triton", **settings)


def _reference(norm: str | None = None, **settings):
    def call(given):
        norms = {"weight": given.get("norm_weight"), "bias": given.get("norm_bias")}
        layer = {name: value for name, value in given.items() if not name.startswith("norm_")}
        torch.manual_seed(0)
        return fused_remat.reference.mlp(**layer, norm=norm and Norm(norm, **norms), **settings)

    return call


def _check(given, dy, reference, **settings) -> dict[str, Tensor]:
    """Beside torch in the same dtype, both against float64."""
    exact = {name: value.detach().double().requires_grad_(value.requires_grad) for name, value in given.items()}
    truth, stock = _results(reference, exact, dy.double()), _results(reference, given, dy)
    ours = _results(_triton(**settings), given, dy)
    for name, right in truth.items():
        assert ours[name].dtype == stock[name].dtype
        allowed = 2 * cases.relative_error(stock[name], right) + FLOORS[dy.dtype]
        assert cases.relative_error(ours[name], right) <= allowed, name
    return ours


@GATED
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.float64), ids=("fp32", "fp16", "fp64"))
def test_chunks_of_several_sizes(dtype, axis, gated):
    """One tile, and tiles at row0 and feature0 > 0; both backward kernels, by the mean of D and D_out."""
    rows, hidden = AXES[axis]
    for (width, out), workspace, keep in (((17, 33), 2**22, ()), ((40, 63), 30_000, 0.4), ((24, 24), 9_000, ())):
        given = _operands(rows, width, hidden, out, gated=gated, dtype=dtype)
        dy = torch.randn(rows, out, device=DEVICE).to(dtype)
        settings = {"activation": "silu" if gated else "gelu", "dropout_p": 0.2 if keep == () else 0.0}
        _check(given, dy, _reference(**settings), keep=keep, workspace=workspace, **settings)


@GATED
@pytest.mark.parametrize("keep", ((), ("up",), 0.5, 1.0), ids=str)
def test_whatever_is_kept(keep, gated):
    given = _operands(70, 24, 90, gated=gated, dtype=torch.float32)
    dy = torch.randn(70, 24, device=DEVICE)
    _check(given, dy, _reference(dropout_p=0.1), keep=keep, workspace=30_000, dropout_p=0.1)


def _plainly_or_not(given: dict[str, Tensor], wanted: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: value.detach().requires_grad_(name in wanted) for name, value in given.items()}


@GATED
@pytest.mark.parametrize("wanted", (("x",), ("w_down",), ("b_up",), ("w_up", "b_down"), ("w_gate", "b_gate")), ids=str)
def test_frozen_operands(wanted, gated):
    if not gated and "w_gate" in wanted:
        wanted = ("w_up",)
    given = _plainly_or_not(_operands(40, 17, 63, gated=gated, dtype=torch.float32), wanted)
    ours = _check(given, torch.randn(40, 17, device=DEVICE), _reference(), workspace=20_000)
    assert set(ours) == {"y", *wanted}


@GATED
def test_strides(gated):
    """Transposed weights, x in three dims with gaps, dy of stride 0 as `sum` makes it."""
    made = _operands((3, 21), 34, 50, 20, gated=gated, dtype=torch.float32, requires_grad=False)
    given = {name: value.t().contiguous().t() if value.dim() == 2 else value for name, value in made.items()}
    given["x"] = torch.cat((made["x"], made["x"]), dim=-1)[..., :34]
    given = {name: value.requires_grad_() for name, value in given.items()}
    for dy in (torch.ones(1, 1, 1, device=DEVICE).expand(3, 21, 20), torch.randn(21, 3, 20, device=DEVICE).mT.mT):
        dy = dy if dy.shape[0] == 3 else dy.transpose(0, 1)
        _check(given, dy, _reference(), workspace=30_000)


@GATED
@pytest.mark.parametrize("kind", ("layer_norm", "rms_norm"))
@pytest.mark.parametrize("axis", AXES)
def test_folded_norms(axis, kind, gated):
    rows, hidden = AXES[axis]
    given = _operands(rows, 17, hidden, gated=gated, dtype=torch.float32)
    weight, bias = (torch.randn(17, device=DEVICE).requires_grad_() for _ in range(2))
    given |= {"norm_weight": weight} | ({"norm_bias": bias} if kind == "layer_norm" else {})

    def ours(given):
        layer = {name: value for name, value in given.items() if not name.startswith("norm_")}
        norm = Norm(kind, weight=given["norm_weight"], bias=given.get("norm_bias"))
        return cases.run(layer, backend="triton", norm=norm, workspace=60_000)

    dy = torch.randn(rows, 17, device=DEVICE)
    exact = {name: value.detach().double().requires_grad_() for name, value in given.items()}
    reference = _reference(kind)
    truth, stock = _results(reference, exact, dy.double()), _results(reference, given, dy)
    for name, value in _results(ours, given, dy).items():
        allowed = 2 * cases.relative_error(stock[name], truth[name]) + FLOORS[torch.float32]
        assert cases.relative_error(value, truth[name]) <= allowed, name


@GATED
@pytest.mark.parametrize("axis", AXES)
def test_adapters(axis, gated):
    """The kernels know nothing of adapters; what they are handed lies as their loads want it, or does not."""
    rows, hidden = AXES[axis]
    adapted = ("up", "gate", "down") if gated else ("up", "down")
    made = adapter_cases.operands(rows, 17, hidden, 21, adapted=adapted, gated=gated, frozen=True, dtype=torch.float32)
    given = {name: value.detach().to(DEVICE).requires_grad_(value.requires_grad) for name, value in made.items()}
    dy = torch.randn(rows, 21, device=DEVICE)
    exact = {name: value.detach().double().requires_grad_(value.requires_grad) for name, value in given.items()}
    settings = {"activation": "silu", "dropout_p": 0.2}
    truth, stock = (
        _results(lambda values: adapter_cases.run_reference(values, **settings), values, dy.to(values["x"].dtype))
        for values in (exact, given)
    )
    for workspace in (30_000, 2**22):
        ours = _results(partial(adapter_cases.run, backend="triton", workspace=workspace, **settings), given, dy)
        for name, right in truth.items():
            allowed = 2 * cases.relative_error(stock[name], right) + FLOORS[torch.float32]
            assert cases.relative_error(ours[name], right) <= allowed, name


@GATED
def test_forward_and_backward_on_different_backends(gated):
    """One mask, one meaning of what is kept."""
    given = _operands(65, 17, 63, 33, gated=gated, dtype=torch.float32, requires_grad=False)
    layer = cases.op_layer(given)
    seed, dy = torch.tensor([5], device=DEVICE), torch.randn(65, 33, device=DEVICE)
    mask, keep = cases.output_mask(*[True] * 5, gated, gated), (40, 20 if gated else 0)
    others = ("cpp", "triton") if DEVICE == "cpu" else ("aten", "triton")
    results = []
    for forward in others:
        settings = ("silu", 0.2, *keep, 30_000)
        y, up, gate = torch.ops.fused_remat.mlp_fwd(given["x"], *layer, *settings, forward, torch.float32, seed)
        for backward in others:
            grads = torch.ops.fused_remat.mlp_bwd(
                dy, given["x"], *layer, *settings, backward, torch.float32, seed, None, up, gate, mask
            )
            results.append([y, *grads])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


@GATED
def test_backward_twice_and_again_gives_the_same_bits(gated):
    given = _operands(65, 17, 63, gated=gated, dtype=torch.float32)
    dy = torch.randn(65, 17, device=DEVICE)
    before = {name: value.detach().clone() for name, value in given.items()}
    runs = []
    for _ in range(2):
        y = _triton(dropout_p=0.3, workspace=20_000)(given)
        for retain_graph in (True, False):
            runs.append([y.detach(), *cases.gradients(y, given, dy, retain_graph=retain_graph).values()])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
    assert all(torch.equal(value.detach(), before[name]) for name, value in given.items())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_that_are_not_finite_or_very_large(activation):
    """NaN where the formula has it, finite values and slopes where it does."""
    points = [float("nan"), float("inf"), -float("inf"), -1e4, -100.0, -13.3, 0.0, 13.3, 90.0, 1e4]
    x = torch.tensor(points, device=DEVICE).view(-1, 1)
    given = {"x": x, "w_up": torch.ones(9, 1, device=DEVICE), "w_down": torch.eye(9, device=DEVICE)[:4]}
    torch.testing.assert_close(
        _triton(activation=activation)(given), _reference(activation=activation)(given), equal_nan=True
    )
    stock = x[3:].double().requires_grad_()
    (slope,) = torch.autograd.grad(ACTIVATIONS[activation](stock).sum(), stock)
    finite = {name: value[3:] if name == "x" else value for name, value in given.items()}
    finite = {name: value.clone().requires_grad_() for name, value in finite.items()}
    y = _triton(activation=activation)(finite)
    (dx,) = torch.autograd.grad(y[:, :1].sum(), finite["x"])
    torch.testing.assert_close(dx.double(), slope, rtol=2e-6, atol=1e-6)


def test_which_kernels_run():
    given = _operands(40, 17, 63, gated=True, dtype=torch.float32)
    norm = Norm("rms_norm", weight=torch.ones(17, device=DEVICE))
    ran = cases.kernels_of(lambda: _triton(norm=norm)(given).sum().backward())
    level3 = {name for name in ran if name.rpartition("_")[2] in ("cpp", "aten", "triton", "cuda")}
    expected = ("mlp_fwd_chunk", "mlp_bwd_chunk", "column_sums", "normalize_rows", "normalize_rows_bwd")
    assert level3 == {f"{name}_triton" for name in expected}
