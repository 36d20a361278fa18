"""`fused-remat check`: it passes where everything is right, and says what is wrong where something is."""

from __future__ import annotations

import json
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import spy
import torch
from mlp_cases import needs_extension

from fused_remat import cli, dispatch, reference
from fused_remat.check import run as check
from fused_remat.check.cases import CASES, LARGE, SMALL
from fused_remat.check.rounded import rounded_delta

pytestmark = [pytest.mark.skipif(needs_extension is not None, reason=str(needs_extension))]
pytest.importorskip("typer")
pytest.importorskip("rich")


@pytest.fixture
def run_command(one_thread):
    from typer.testing import CliRunner

    app = cli.build_app()
    return lambda *arguments: CliRunner().invoke(app, ["check", *arguments], env={"COLUMNS": "200"})


def case_of(op: str, name: str):
    return next(case for case in CASES if (case.op, case.name) == (op, name))


@contextmanager
def broken(monkeypatch, name: str, breaks):
    """Backend "spy", which passes calls on to the C++ one, with the op `name` followed by `breaks(arguments)`."""
    with spy.spying(after={name: breaks}):
        monkeypatch.setitem(dispatch.BACKENDS, "spy", dispatch.BACKENDS["cpp"])
        yield


# Runs


@pytest.mark.slow
def test_everything_passes_here(run_command, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # an interpreter would take minutes
    result = run_command("--device", "cpu", "--json")
    printed = json.loads(result.stdout)
    wrong = [row for row in printed["rows"] if row["passed"] is False]
    assert (result.exit_code, printed["passed"], wrong) == (0, True, [])
    done = {(row["op"], row["case"], row["check"], row["backend"]) for row in printed["rows"] if row["passed"]}
    for case in CASES:
        for backend in ("cpp", "aten", "reference"):
            assert (case.op, case.name, "gradcheck", backend) in done
        for backend in ("cpp", "aten"):
            assert {(case.op, case.name, dtype, backend) for dtype in ("float32", "bfloat16")} <= done


def test_table_names_checks_backends_and_who_cannot_run(run_command, monkeypatch):
    few = [case_of("mlp", "gelu"), case_of("attention", "full")]
    monkeypatch.setattr("fused_remat.check.command.run", lambda where, backend: check.run(where, backend, few))
    result = run_command("--device", "cpu")
    assert result.exit_code == 0, result.output
    for text in ("gradcheck", "float32", "bfloat16", "cpp", "aten", "reference", "full", "not run on cuda: the"):
        assert text in result.stdout
    assert "FAIL" not in result.stdout
    assert "checks in" in result.stdout and ", 0 failed" in result.stdout


def test_a_named_backend_is_the_only_one(run_command, monkeypatch):
    few = [case_of("mlp", "gelu")]
    monkeypatch.setattr("fused_remat.check.command.run", lambda where, backend: check.run(where, backend, few))
    result = run_command("--device", "cpu", "--backend", "aten", "--json")
    rows = json.loads(result.stdout)["rows"]
    assert result.exit_code == 0
    assert {row["backend"] for row in rows} == {"aten"}
    assert [row["check"] for row in rows] == ["gradcheck", "float32", "bfloat16"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("op, name", [("mlp", "gated silu"), ("attention", "causal, grouped heads")])
def test_triton_kernels_pass_in_the_interpreter(op, name):
    rows = list(check.run("cpu", "triton", [case_of(op, name)]))
    assert [(row.check, row.passed) for row in rows if row.check != "bfloat16"] == [
        ("gradcheck", True), ("float32", True)
    ], rows  # fmt: skip


# What is wrong


@pytest.mark.parametrize(
    "op, name, kernel, breaks, tensor",
    [
        ("mlp", "gelu", "mlp_fwd_chunk", lambda a: a[13].mul_(1.001), "output 0"),
        ("mlp", "gated silu", "mlp_bwd_chunk", lambda a: a[17].mul_(1.001), "dw_gate"),
        ("attention", "full", "attention_fwd", lambda a: a[16].add_(1e-3), "output 1"),
        ("attention", "causal, dropout", "attention_bwd", lambda a: a[23].mul_(1.001), "dk"),
        ("multi_head_attention", "weights per head", "attention_weights", lambda a: a[-1].mul_(1.001), "output 1"),
    ],
)  # fmt: skip
def test_a_wrong_kernel_fails(monkeypatch, op, name, kernel, breaks, tensor):
    with broken(monkeypatch, kernel, breaks):
        rows = list(check.run("cpu", "spy", [case_of(op, name)]))
    found = {row.check: row for row in rows}
    assert found["float32"].passed is False
    assert f"the error of {tensor} is " in found["float32"].detail
    assert found["gradcheck"].passed is False


def test_a_wrong_kernel_is_named_and_sets_the_exit_code(run_command, monkeypatch):
    case = case_of("mlp", "gelu")
    with broken(monkeypatch, "mlp_fwd_chunk", lambda arguments: arguments[13].mul_(1.001)):
        monkeypatch.setattr("fused_remat.check.command.run", lambda where, backend: check.run(where, backend, [case]))
        result = run_command("--device", "cpu", "--backend", "spy")
    assert result.exit_code == 1
    assert "FAIL mlp (gelu), float32 on spy: the error of output 0 is 0.00068, allowed " in result.stdout


def test_a_kernel_that_raises_fails_with_its_words(monkeypatch):
    def breaks(arguments):
        raise RuntimeError("no such\n  instruction")

    with broken(monkeypatch, "mlp_fwd_chunk", breaks):
        rows = list(check.run("cpu", "spy", [case_of("mlp", "gelu")]))
    assert all(row.passed is False and "RuntimeError: no such instruction" in row.detail for row in rows)


def test_nan_in_one_place_fails(monkeypatch):
    with broken(monkeypatch, "mlp_fwd_chunk", lambda arguments: arguments[13][0, 0].fill_(float("nan"))):
        rows = list(check.run("cpu", "spy", [case_of("mlp", "gelu")]))
    assert [row.passed for row in rows] == [False] * 3


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}: {case.name}")
def test_every_case_has_gradients_well_above_what_is_allowed(case):
    judge = check.Judge(case, "cpu", torch.float32, SMALL)
    assert judge(case, "reference", "cpu") is None
    assert all(0 < allowed < 5e-6 for allowed in judge._allowed.values())
    assert all(truth.norm() > 1e-2 for truth in judge._truth.values())


# What attention in half precision is allowed


ROTARY = case_of("multi_head_attention", "rotary, q and k norms")


def test_rounded_delta_is_softmaxs_backward_with_the_rounded_out():
    random = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 9, 8, generator=random).bfloat16() for _ in range(4))
    q = 3 * q  # rows of P that are nearly one-hot

    def gradients():
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out, lse, _ = reference.attention(*leaves, causal="top_left")
        return out, lse, torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse)))

    *exact, right = gradients()
    with rounded_delta():
        *rounded, got = gradients()
    assert all(map(torch.equal, exact, rounded))
    wide_q, wide_k, wide_v, wide_dout = (t.float() for t in (q, k, v, dout))
    p = (wide_q @ wide_k.mT * 8**-0.5).masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    delta = (wide_dout * rounded[0].float()).sum(-1, keepdim=True)
    ds = p * (wide_dout @ wide_v.mT - delta + 1.0) * 8**-0.5
    for ours, known, plain in zip(got, (ds @ wide_k, ds.mT @ wide_q, p.mT @ wide_dout), right, strict=True):
        torch.testing.assert_close(ours, known.bfloat16(), rtol=2**-7, atol=1e-5)
        assert torch.equal(ours, plain) == (plain is right[2])  # dv knows no delta


def test_rounded_delta_ends_with_its_block():
    law = reference.attention
    with pytest.raises(KeyError), rounded_delta():
        assert reference.attention is not law
        raise KeyError
    assert reference.attention is law


def test_normalised_heads_pass_at_the_size_of_a_gpu():
    """Their gradients lose most by the rounding of out, which the reference does not round."""
    judge = check.Judge(ROTARY, "cpu", torch.bfloat16, LARGE)
    assert judge(ROTARY, "cpp", "cpu") is None
    law = judge._errors(judge._results(judge._tensors, "reference"))
    ours = judge._errors(judge._results(judge._tensors, "cpp"))
    assert ours["dk_norm"] > 3 * law["dk_norm"]


class Worse(check.Judge):
    """Backend "worse" has `factor` times the error that torch's fused attention has."""

    factor = 1.0

    def _results(self, tensors, backend):
        if backend != "worse":
            return super()._results(tensors, backend)
        with rounded_delta():
            plain = super()._results(tensors, "reference")
        return {name: true + self.factor * (plain[name] - true) for name, true in self._truth.items()}


def test_more_than_twice_the_error_of_torchs_fused_attention_fails():
    judge = Worse(ROTARY, "cpu", torch.bfloat16, LARGE)
    assert judge(ROTARY, "worse", "cpu") is None
    judge.factor = 2.5
    wrong = judge(ROTARY, "worse", "cpu")
    assert "the error of dk_norm is " in wrong and "the error of dq_norm is " in wrong


# Arguments


def test_a_named_backend_that_cannot_run_gives_its_reasons(run_command):
    result = run_command("--device", "cpu", "--backend", "cuda")
    assert result.exit_code == 1
    assert (
        "Error: backend 'cuda' cannot run on cpu: the tensors are on cpu, the CUDA C++ kernels run on cuda"
        in result.stderr
    )
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--backend", "fast"], "expected one of triton, cuda, cpp, aten, reference"),
        (["--device", "tpu"], "expected cpu or cuda"),
    ],
)
def test_bad_arguments(run_command, arguments, message):
    result = run_command(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("\u2502", " ").split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(run_command):
    result = run_command("--device", "cuda")
    assert result.exit_code == 2
    assert "use --device cpu" in " ".join(result.stderr.replace("\u2502", " ").split())
