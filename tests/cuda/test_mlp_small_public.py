"""Narrow MLPs through `fused_remat.mlp` on the CUDA C++ backend: which path runs, what it keeps and what it takes."""

from __future__ import annotations

import adapter_cases
import mlp_cases as cases
import pytest
import torch
from torch import Tensor

import fused_remat
from fused_remat import Norm
from fused_remat.measure import measure

pytestmark = [
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
]
GATED = pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
ONE_KERNEL = ["mlp_small_fwd_cuda", "mlp_small_bwd_cuda"]
BF16 = torch.bfloat16


def _level3(call) -> list[str]:
    return [name for name in cases.kernels_of(call) if name.endswith(("_cuda", "_aten", "_cpp", "_triton"))]


def _results(given: dict[str, Tensor], dy: Tensor, run) -> dict[str, Tensor]:
    y = run(given)
    wanted = [name for name, value in given.items() if value.requires_grad]
    return {"y": y.detach()} | dict(zip(wanted, torch.autograd.grad(y, [given[n] for n in wanted], dy), strict=True))


def _in(given: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: value.detach().to(dtype).requires_grad_(value.requires_grad) for name, value in given.items()}


def _check(given: dict[str, Tensor], dy: Tensor, **settings) -> dict[str, Tensor]:
    reference = lambda values: cases.run_reference(values, **settings)
    ours = _results(given, dy, lambda values: cases.run(values, backend="cuda", **settings))
    truth, stock = (_results(_in(given, t), dy.to(t), reference) for t in (torch.float64, dy.dtype))
    for name, right in truth.items():
        assert ours[name].dtype == (given[name].dtype if name != "y" else dy.dtype)
        assert cases.relative_error(ours[name], right) <= 2 * cases.relative_error(stock[name], right) + 1e-4, name
    return ours


@GATED
@pytest.mark.parametrize("dtype", (BF16, torch.float16), ids=str)
def test_one_kernel_each_way(dtype, gated):
    given = cases.operands((3, 21), 34, 50, 20, gated=gated, dtype=dtype)
    _check(given, torch.randn(3, 21, 20).to(dtype), activation="silu", dropout_p=0.2)
    dy = torch.randn(3, 21, 20).to(dtype)
    assert _level3(lambda: cases.run(given, backend="cuda").backward(dy)) == ONE_KERNEL


@GATED
def test_strides_and_frozen_operands(gated):
    """Transposed weights, x whose dims do not collapse, dy of stride 0; gradients of some operands."""
    made = cases.operands((3, 21), 34, 50, 20, gated=gated, dtype=BF16, requires_grad=False)
    given = {name: value.t().contiguous().t() if value.dim() == 2 else value for name, value in made.items()}
    given["x"] = torch.cat((made["x"], made["x"]), -1)[..., :34].transpose(0, 1)
    for wanted in (tuple(given), ("x",), ("w_down", "b_down"), ("w_up",), ("b_gate",) if gated else ("b_up",)):
        chosen = {name: value.detach().requires_grad_(name in wanted) for name, value in given.items()}
        ours = _check(chosen, torch.ones(1, 1, 1, dtype=BF16).expand(21, 3, 20))
        assert set(ours) == {"y", *wanted}
        for name in {"w_up", "w_down"} & set(wanted):
            assert ours[name].stride() == given[name].stride()


@GATED
def test_backward_twice_and_again_gives_the_same_bits(gated):
    given = cases.operands(70, 17, 63, gated=gated, dtype=BF16)
    before = {name: value.detach().clone() for name, value in given.items()}
    dy = torch.randn(70, 17).to(BF16)
    runs = []
    for _ in range(2):
        y = cases.run(given, backend="cuda", dropout_p=0.3)
        for retain_graph in (True, False):
            runs.append([y.detach(), *cases.gradients(y, given, dy, retain_graph=retain_graph).values()])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
    assert all(torch.equal(value.detach(), before[name]) for name, value in given.items())


@GATED
@pytest.mark.parametrize("x_dtype", (torch.float32, BF16), ids=str)
def test_fp32_parameters_under_autocast(x_dtype, gated):
    """Read as they are and rounded on the way in: no copies, and gradients are the sums, unrounded."""
    given = cases.operands(40, 16, 72, gated=gated, dtype=torch.float32)
    given["x"] = given["x"].detach().to(x_dtype).requires_grad_()
    dy = torch.randn(40, 16).to(BF16)
    with torch.autocast("cpu", dtype=BF16):
        assert _level3(lambda: cases.run(given, backend="cuda").backward(dy)) == ONE_KERNEL
        ours = _results(given, dy, lambda values: cases.run(values, backend="cuda"))
        measured = measure(lambda: cases.run(given, backend="cuda"), repeats=1)
    assert measured.kept_bytes == 0
    stock = _results(_in(given, BF16), dy, cases.run_reference)
    truth = _results(_in(given, torch.float64), dy.double(), cases.run_reference)
    for name, right in truth.items():
        assert ours[name].dtype == (given[name].dtype if name != "y" else BF16)
        assert cases.relative_error(ours[name], right) <= 2 * cases.relative_error(stock[name], right) + 1e-4, name


def test_wide_gradients():
    """Where the sums themselves are asked for."""
    given = cases.operands(40, 16, 72, gated=True, dtype=BF16, requires_grad=False)
    dy, seed = torch.randn(40, 16).to(BF16), torch.empty(0, dtype=torch.int64)
    settings = (*cases.op_layer(given), "silu", 0.0, 0, 0, 2**20, "cuda", BF16, seed, None, None, None)
    mask = cases.output_mask(*[True] * 7)
    narrow, wide = (
        torch.ops.fused_remat.mlp_bwd(dy, given["x"], *settings, mask, wide) for wide in ([], [False, *mask[1:]])
    )
    assert torch.equal(narrow[0], wide[0]) and wide[0].dtype == BF16
    for rounded, exact in zip(narrow[1:7], wide[1:7], strict=True):
        assert exact.dtype == torch.float32 and torch.equal(exact.bfloat16(), rounded)
        assert not torch.equal(exact, rounded.float())


@GATED
def test_forward_and_backward_on_different_backends(gated):
    """One mask, and the same residuals: none."""
    given = cases.operands(65, 17, 63, 33, gated=gated, dtype=BF16, requires_grad=False)
    layer, seed, dy = cases.op_layer(given), torch.tensor([5]), torch.randn(65, 33).to(BF16)
    mask, results = cases.output_mask(*[True] * 5, gated, gated), []
    backends = ("cuda", "cpp", "aten")
    for forward in backends:
        settings = ("silu", 0.2, 0, 0, 2**16)
        y, up, gate = torch.ops.fused_remat.mlp_fwd(given["x"], *layer, *settings, forward, BF16, seed)
        assert up.shape == gate.shape == (65, 0)
        for backward in backends:
            grads = torch.ops.fused_remat.mlp_bwd(
                dy, given["x"], *layer, *settings, backward, BF16, seed, None, up, gate, mask
            )
            results.append([y, *grads])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            if a.numel():
                assert cases.relative_error(b, a) < 1.5e-2


@GATED
@pytest.mark.parametrize("workspace", (1, 2**16, 2**22), ids=str)
def test_bytes(workspace, gated):
    """Nothing is kept but the seed, forward takes no scratch at all, backward the partial sums that explain tells."""
    given = cases.operands(1100, 32, 100, gated=gated, dtype=BF16)
    with fused_remat.backend("cuda"):
        told = fused_remat.explain(fused_remat.mlp, **given, workspace=workspace, dropout_p=0.1)
    measured = measure(lambda: cases.run(given, backend="cuda", workspace=workspace, dropout_p=0.1), repeats=1)
    assert measured.kept_bytes == 8
    assert measured.forward_peak_above_output_bytes - 8 <= 64
    taken = measured.backward_peak_above_gradients_bytes - 8
    assert told.backward.nbytes <= workspace and (told.backward.nbytes > 0) == (workspace > 2**16)
    assert told.backward.nbytes - 64 <= taken <= told.backward.nbytes + 64


# What takes the ordinary path, and the reason that the predicate gives.
STREAMED = {
    "wide input": ({"width": 129}, {}, "D and D_out are up to 128, got 129 and 129"),
    "wide output": ({"out": 136}, {}, "D and D_out are up to 128, got 16 and 136"),
    "many features": ({"hidden": 513}, {}, "F is up to 512, got 513"),
    "fp32": ({"dtype": torch.float32}, {}, "the compute dtype is Half or BFloat16, got Float"),
    "kept": ({}, {"keep": ("up",)}, "pre-activations are kept"),
    "norm": ({}, {"norm": Norm("rms_norm")}, "a norm is folded in"),
    "nothing": ({"rows": 0}, {}, "a dimension is 0"),
}


def _reasons(given: dict[str, Tensor], **changes) -> list[str]:
    x, w_up, w_down = given["x"], given["w_up"], given["w_down"]
    call = {
        "rows": x.shape[:-1].numel(), "d_in": w_up.shape[1], "d_out": w_down.shape[0],
        "hidden_features": w_up.shape[0], "compute": x.dtype, "operands": [value.dtype for value in given.values()],
        "keeps": False, "norm": False, "adapted": False,
    }  # fmt: skip
    return torch.ops.fused_remat.mlp_small_why_not(**call | changes)


@pytest.mark.parametrize("case", STREAMED)
def test_what_is_streamed(case):
    sizes, settings, reason = STREAMED[case]
    sizes = {"rows": 8, "width": 16, "hidden": 24, "dtype": BF16} | sizes
    given = cases.operands(**sizes, requires_grad=False)
    flags = {"keeps": "keep" in settings, "norm": "norm" in settings}
    assert _reasons(given, **flags) == [reason]
    with fused_remat.backend("cuda"):
        told = fused_remat.explain(fused_remat.mlp, **given, **settings)
    assert "one kernel" not in str(told)
    x = given["x"].requires_grad_()
    ran = cases.kernels_of(lambda: cases.run(given, backend="cuda", **settings).sum().backward())
    assert x.grad is not None and not set(ran) & set(ONE_KERNEL)


def test_adapters_are_streamed():
    given = adapter_cases.operands(8, 16, 24, 16, adapted=("up",), gated=False, frozen=True, dtype=BF16)
    ran = cases.kernels_of(lambda: adapter_cases.run(given, backend="cuda").sum().backward())
    assert not set(ran) & set(ONE_KERNEL)
    plain = cases.operands(8, 16, 24, dtype=BF16, requires_grad=False)
    assert _reasons(plain, adapted=True) == ["a weight has an adapter"]


def test_every_reason_is_told():
    given = cases.operands(8, 16, 24, dtype=BF16, requires_grad=False)
    assert _reasons(given) == []
    assert _reasons(given, operands=[BF16, torch.float32, torch.float16]) == []
    assert _reasons(given, operands=[torch.float64]) == ["operands are Half, BFloat16 or Float, got Double"]
    assert len(_reasons(given, d_in=200, hidden_features=2000, compute=torch.float64, keeps=True, norm=True)) == 5


def test_explain_tells_the_kernel():
    given = cases.operands(3000, 16, 24, dtype=BF16, requires_grad=False)
    with fused_remat.backend("cuda"):
        told = fused_remat.explain(fused_remat.mlp, **given)
    assert "forward: one kernel, hidden values stay on the chip, 0.00 MiB" in str(told)
    assert told.backward.rows % 32 == 0 and told.backward.rows < 3000 and told.backward.nbytes > 0
    # Other backends stream the same call.
    with fused_remat.backend("cpp"):
        assert "one kernel" not in str(fused_remat.explain(fused_remat.mlp, **given))
