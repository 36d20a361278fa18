"""The GPU check, tried on the CPU with tiny shapes: its parts, its JSON, and what it says of what is missing."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace

import pytest
import torch
from mlp_cases import needs_extension

from benchmarks import gpu_check, gpu_parts, gpu_timing, run
from benchmarks.cases import OURS
from benchmarks.gpu_cases import FULL, TINY
from benchmarks.gpu_parts import Settings
from benchmarks.operation import CHECKPOINT, EAGER, Bar, NotRun
from fused_remat import reference

DRY = Settings("cpu", None)
needs_library = pytest.mark.skipif(needs_extension is not None, reason=str(needs_extension))


@pytest.fixture
def check(tmp_path, capsys, monkeypatch):
    """Runs the command dry; returns status, JSON and what was printed."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def check(*arguments: str):
        out = tmp_path / "check.json"
        status = gpu_check.main(["--dry-run", "--out", str(out), *arguments])
        return status, json.loads(out.read_text()), capsys.readouterr().out

    return check


@pytest.fixture
def timing(tmp_path, one_thread):
    """Times the tiny cases of an operation in this process; returns a row per case."""

    def timing(operation: str, *arguments: str):
        file = tmp_path / "rows.jsonl"
        assert gpu_timing.main([operation, str(file), "--device", "cpu", *arguments]) == 0
        return [json.loads(line) for line in file.read_text().splitlines()]

    return timing


# Whole runs


@needs_library
@pytest.mark.slow
def test_dry_run(check, monkeypatch):
    status, result, printed = check("--tests", "tests/gpu/test_streams.py")
    assert {name: part["status"] for name, part in result["parts"].items()} == {
        "build": "done", "tests": "done", "mlp": "done", "attention": "done", "mha": "done", "sanitizer": "skipped"
    }, result  # fmt: skip
    assert status == 0
    assert result["environment"]["torch_version"] == torch.__version__
    for operation in gpu_parts.TIMED:
        cases = result["parts"][operation]["cases"]
        assert [case["case"] for case in cases] == [case.name for case in getattr(TINY, operation)]
        for case in cases:
            assert {EAGER, CHECKPOINT, OURS} <= set(case["providers"]), case
            assert case["floor_h200_ms_modelled"] > 0
    assert "sanitizer: skipped, needs a CUDA device" in printed
    assert "mha: forward + backward" in printed


def test_a_budget_skips_what_does_not_fit_and_says_so(check):
    status, result, printed = check("--seconds", "1", "--part", "sanitizer", "mlp")
    assert result["parts"]["mlp"] == {"status": "skipped", "reason": "out of time"}
    assert status == 0
    assert "mlp: skipped, out of time" in printed


def test_a_part_that_raises_is_a_failed_part(check, monkeypatch):
    def broken(settings, seconds):
        raise OSError("no space left")

    monkeypatch.setattr(gpu_parts, "sanitizer", broken)
    status, result, printed = check("--part", "sanitizer")
    assert status == 1
    assert result["parts"]["sanitizer"] == {"status": "failed", "reason": "OSError: no space left"}
    assert "sanitizer: failed, OSError: no space left" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_only_a_dry_run(capsys):
    with pytest.raises(SystemExit) as stopped:
        gpu_check.main([])
    assert stopped.value.code == 2
    assert "torch finds no usable CUDA device; --dry-run tries everything on the CPU" in capsys.readouterr().err


def test_the_default_time_is_under_eight_minutes():
    assert sum(gpu_check.PARTS.values()) <= gpu_check.DEFAULT_SECONDS < 480
    assert set(gpu_check.PARTS) == {"build", "tests", "sanitizer", *gpu_parts.TIMED}


# Parts


def test_a_command_is_stopped_with_its_children(tmp_path):
    mark = tmp_path / "mark"
    code = f"import subprocess, sys; subprocess.run(['sh', '-c', 'sleep 3; touch {mark}'])"
    done = gpu_parts.run([sys.executable, "-c", code], 1.0)
    assert done.status is None
    assert gpu_parts._unfinished(done)["status"] == "timed out"
    time.sleep(3)
    assert not mark.exists()


def test_failed_tests_are_named(tmp_path):
    file = tmp_path / "test_two.py"
    file.write_text(
        "import pytest\npytestmark = pytest.mark.gpu\n"
        "def test_right(): pass\ndef test_wrong(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='no device')\ndef test_skipped(): pass\n"
    )
    part = gpu_parts.tests(replace(DRY, tests=[str(file)]), 60)
    assert part["status"] == "failed"
    assert part["counts"] == {"failed": 1, "passed": 1, "skipped": 1}
    assert len(part["failures"]) == 1 and "test_two.py::test_wrong - assert 1 == 2" in part["failures"][0]


def test_a_sanitizer_that_is_not_there_is_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(gpu_parts.shutil, "which", lambda name: None)
    part = gpu_parts.sanitizer(Settings("cuda", None), 10)
    assert part["status"] == "skipped" and "compute-sanitizer is not on PATH" in part["reason"]


def test_a_sanitizer_that_finds_something_fails(monkeypatch):
    def run(command, seconds, environment=None):
        found = "racecheck" in command
        return gpu_parts.Finished(9 if found else 0, "========= Race reported" if found else "", 1.0)

    monkeypatch.setattr(gpu_parts.shutil, "which", lambda name: "/bin/compute-sanitizer")
    monkeypatch.setattr(gpu_parts, "run", run)
    part = gpu_parts.sanitizer(Settings("cuda", None), 10)
    assert part["status"] == "failed" and part["reason"] == "racecheck: see there"
    assert part["memcheck"]["status"] == "done"
    assert part["racecheck"]["output"] == "========= Race reported"


# Timing


def test_rows_hold_times_bytes_floor_and_reasons(timing):
    for row, case in zip(timing("mlp"), TINY.mlp, strict=True):
        assert row["case"] == case.name and row["gemm_flop"] == case.gemm_flop
        eager = row["providers"][EAGER]
        assert 0 < eager["ms"][1] <= eager["ms"][0] <= eager["ms"][2]
        assert eager["time_to_eager"] == 1.0
        assert eager["kept_mib"] == (4 if case.gated else 2) * case.hidden_bytes / 2**20
        assert eager["gemm_flop"] == (9 if case.gated else 6) * case.gemm_flop
        assert row["providers"][CHECKPOINT]["gemm_flop"] == (11 if case.gated else 7) * case.gemm_flop
        assert row["not_run"]["quack"] and row["not_run"]["liger"]
        assert "compile" not in row["providers"] and "compile" not in row["not_run"]


@needs_library
def test_each_backend_of_a_gpu_is_timed_or_says_why_not(timing, monkeypatch):
    monkeypatch.setattr(gpu_timing, "GPU_BACKENDS", ("cpp", "aten", "cuda"))
    for row in timing("mlp"):
        ours, named = row["providers"][OURS], [row["providers"][f"{OURS}-{name}"] for name in ("cpp", "aten")]
        assert all(own["gemm_flop"] == ours["gemm_flop"] and own["ms"][0] > 0 for own in named)
        assert "backend 'cuda' was named but cannot run mlp: the tensors are on cpu" in row["not_run"][f"{OURS}-cuda"]


@needs_library
def test_a_named_backend_is_timed_alone(timing):
    for row in timing("mlp", "--backend", "aten"):
        assert OURS in row["providers"]
        assert not any(name.startswith(f"{OURS}-") and name.endswith(("triton", "cuda")) for name in row["not_run"])


def test_the_table_has_a_column_for_each_backend_of_a_gpu():
    timed = {"ms": [2.0, 1.0, 3.0], "kept_mib": 1.0, "backward_peak_mib": 1.0, "time_to_eager": 1.5}
    providers = {EAGER: timed, OURS: timed, f"{OURS}-cuda": {**timed, "ms": [7.0, 1.0, 8.0]}}
    (line,) = gpu_check._lines([{"case": "one", "providers": providers, "floor_h200_ms_modelled": 0.5}])
    assert len(line) == len(gpu_check._HEADERS)
    shown = {" ".join(header): cell for header, cell in zip(gpu_check._HEADERS, line, strict=True)}
    assert (shown["ours ms"], shown["triton ms"], shown["cuda ms"]) == ("2.00", "", "7.00")


def test_a_build_without_cuda_kernels_says_why(check, monkeypatch):
    cuda = {"loaded": False, "why_not": "nvcc is missing"}
    monkeypatch.setattr(gpu_parts, "build", lambda settings, seconds: {"status": "done", "cuda": cuda})
    status, _, printed = check("--part", "build")
    assert status == 0 and "build: done\n  CUDA C++ kernels: nvcc is missing" in printed


def test_a_wrong_provider_has_a_reason_and_no_time(timing, monkeypatch):
    def wrong(case, leaves):
        return lambda: reference.mlp(**leaves, activation="relu")

    def missing(case, leaves):
        raise NotRun("not installed")

    def broken(case, leaves):
        raise RuntimeError("CUDA error:\n  an illegal memory access")

    providers = {EAGER: run.OPERATIONS["mlp"].providers[EAGER], "wrong": wrong, "missing": missing, "broken": broken}
    monkeypatch.setitem(run.OPERATIONS, "mlp", replace(run.OPERATIONS["mlp"], providers=providers))
    for row in timing("mlp"):
        assert set(row["providers"]) == {EAGER}
        assert row["not_run"]["wrong"].startswith("parity failed: wrong: the error of output is ")
        assert row["not_run"]["missing"] == "not installed"
        assert row["not_run"]["broken"] == "RuntimeError: CUDA error: an illegal memory access"


@needs_library
def test_goals_stand_beside_what_was_measured(timing, monkeypatch):
    case = replace(TINY.mlp[0], bars=(Bar(OURS, EAGER, 1.5), Bar(OURS, "quack", 1.0)))
    monkeypatch.setattr(gpu_timing, "TINY", replace(TINY, mlp=[case]))
    (row,) = timing("mlp")
    reached, not_run = row["goals"]
    assert reached["measured"] == row["providers"][OURS]["time_to_eager"]
    assert not_run["measured"] is None
    assert gpu_check._goal({**reached, "measured": 1.234}).endswith("at most 1.50 x the time of eager; measured 1.23")
    assert gpu_check._goal(not_run).endswith("at most 1.00 x the time of quack; not measured")


def test_no_case_is_begun_when_time_is_out(timing):
    assert [row.get("skipped") for row in timing("attention", "--seconds", "-1")] == ["out of time"] * 2


@needs_library
def test_a_named_backend_is_timed(timing):
    (row,) = timing("mha", "--backend", "aten")
    assert OURS in row["providers"]


def test_parity_is_judged_on_a_part_whose_truth_is_cheap():
    for case in FULL.attention:
        part = gpu_timing._part(case)
        assert part.batch * part.heads * part.length**2 * 8 <= 2**28
        assert (part.width, part.causal, part.dtype) == (case.width, case.causal, case.dtype)
    assert all(gpu_timing._part(case).rows == 2048 for case in FULL.mlp)


def test_the_shapes_are_those_of_the_plan():
    assert {(case.width, case.gated) for case in FULL.mlp} == {(w, g) for w in (768, 1024, 4096) for g in (False, True)}
    assert {(case.width, case.length, case.causal) for case in FULL.attention} == {
        (width, length, causal) for width in (64, 128) for length in (2048, 8192, 32768) for causal in (False, True)
    }
    goals = {case.gated: {(bar.baseline, bar.most) for bar in case.bars} for case in FULL.mlp if case.width == 4096}
    checkpoints = {(CHECKPOINT, 1.05), ("checkpoint-reentrant", 0.92)}
    assert goals == {False: {(EAGER, 1.20), *checkpoints}, True: {(EAGER, 1.25), *checkpoints}}
