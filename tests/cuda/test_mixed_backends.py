"""Forward in CUDA C++ with backward elsewhere, and the reverse: one mask, one meaning of whatever is kept."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from mlp_cases import kernels_of, relative_error
from torch import Tensor

from fused_remat._triton import interpreter_wanted
from fused_remat.check.cases import CASES, LARGE, SMALL, TINY, Case, Sizes
from fused_remat.check.run import placed
from fused_remat.functional.operands import Prepared

pytestmark = pytest.mark.usefixtures("one_thread")
needs_interpreter = pytest.mark.skipif(
    find_spec("triton") is None or not interpreter_wanted(), reason="Triton's interpreter is not to be had"
)
# For what takes its time: the interpreter, odd sizes, a profiler.
_SOME = ("gated, dropout, a quarter kept", "gelu_tanh, LayerNorm", "causal, dropout", "rotary, q and k norms")
SOME = [case for case in CASES if case.name in _SOME]
WHOLE, ODD = (replace(sizes, workspace=LARGE.workspace) for sizes in (TINY, SMALL))
# y of an MLP; out and lse of an attention; y of a block and, where they are asked for, its weights.
OUTPUTS = {"mlp": 1, "attention": 2, "multi_head_attention": 2}
# Rounding of sums in another order.
CLOSE = {torch.float64: 1e-12, torch.bfloat16: 1e-2}


class _Stop(Exception):
    pass


@pytest.fixture
def prepare(monkeypatch):
    """(case, tensors, sizes) -> the call as the ops of level 2 take it, less the backend, and its compute dtype."""

    def prepare(case: Case, tensors: dict[str, Tensor], sizes: Sizes) -> tuple[tuple, torch.dtype]:
        seen: list[Prepared] = []

        def stop(self: Prepared):
            seen.append(self)
            raise _Stop

        monkeypatch.setattr(Prepared, "run", stop)
        with pytest.raises(_Stop):
            case.function(**case.arguments(tensors, sizes))
        return seen[0].arguments, seen[0].call.dtype

    return prepare


@torch.no_grad()
def both_passes(case: Case, call: tuple[tuple, torch.dtype], forward: str, backward: str) -> dict[str, Tensor]:
    """Outputs, and gradients of every operand that is there."""
    arguments, dtype = call
    fwd, bwd = (getattr(torch.ops.fused_remat, f"{case.op}_{which}") for which in ("fwd", "bwd"))
    seed = torch.tensor([5])
    results = fwd(*arguments, forward, dtype, seed)
    generator = torch.Generator().manual_seed(1)
    douts = [torch.randn(r.shape, generator=generator).to(r.dtype) for r in results[: OUTPUTS[case.op]]]
    douts = [d.masked_fill(r.isinf(), 0.0) for d, r in zip(douts, results, strict=False)]
    wanted = [isinstance(t, Tensor) and t.requires_grad for t in arguments[: len(bwd.default._schema.returns)]]
    masks = [wanted, []] if "wide_mask" in str(bwd.default._schema) else [wanted]
    gradients = bwd(*douts, *arguments, backward, dtype, seed, *results, *masks)
    found = {
        f"output {i}": r.masked_fill(r.isinf(), 0.0) for i, r in enumerate(results[: OUTPUTS[case.op]]) if r.numel() > 0
    }
    return found | {f"gradient {i}": g for i, g in enumerate(gradients) if wanted[i]}


def check(prepare, case: Case, other: str, dtype: torch.dtype, sizes: Sizes) -> None:
    call = prepare(case, placed(case.tensors(sizes), "cpu", dtype), sizes)
    alone = both_passes(case, call, other, other)
    for forward, backward in (("cuda", other), (other, "cuda"), ("cuda", "cuda")):
        mixed = both_passes(case, call, forward, backward)
        for name, expected in alone.items():
            error = relative_error(mixed[name], expected)
            assert error <= CLOSE[dtype], (forward, backward, name, error)


def case_id(case: Case) -> str:
    return f"{case.op}: {case.name}"


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_cuda_and_cpp(case, prepare):
    check(prepare, case, "cpp", torch.float64, WHOLE)


@pytest.mark.parametrize("case", SOME, ids=case_id)
def test_cuda_and_cpp_in_half_precision(case, prepare):
    check(prepare, case, "cpp", torch.bfloat16, ODD)


@needs_interpreter
@pytest.mark.parametrize("case", SOME, ids=case_id)
def test_cuda_and_triton(case, prepare):
    check(prepare, case, "triton", torch.float64, WHOLE)


@pytest.mark.parametrize("case", SOME, ids=case_id)
def test_each_pass_runs_where_it_was_told_to(case, prepare):
    call = prepare(case, placed(case.tensors(WHOLE), "cpu", torch.float64), WHOLE)
    kernels = {}
    for forward, backward in (("cuda", "cpp"), ("cpp", "cuda")):
        ran = kernels_of(lambda f=forward, b=backward: both_passes(case, call, f, b))
        kernels[forward] = {tuple(name.rpartition("_")[::2]) for name in ran}
    first = "mlp_fwd_chunk" if case.op == "mlp" else "attention_fwd"
    last = "mlp_bwd_chunk" if case.op == "mlp" else "attention_bwd"
    assert {(first, "cuda"), (last, "cpp")} <= kernels["cuda"] and (last, "cuda") not in kernels["cuda"]
    assert {(first, "cpp"), (last, "cuda")} <= kernels["cpp"] and (last, "cpp") not in kernels["cpp"]
