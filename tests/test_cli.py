"""The command line and the doctor."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mlp_cases as cases
import pytest
import torch

import fused_remat
from fused_remat import _build, _build_cuda, _cuda, _cuda_toolkit, _extension, _triton, budget, cli, doctor, ops

ROOT = Path(__file__).parent.parent


def line(facts: dict, label: str) -> str:
    return dict(doctor.describe(facts))[label]


@pytest.fixture
def facts() -> dict:
    return doctor.examine()


def run_without(packages: tuple[str, ...], code: str) -> subprocess.CompletedProcess:
    """Runs `code` in a new process in which these packages cannot be imported."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({packages!r}))\n"
    return subprocess.run([sys.executable, "-c", hide + code], cwd=ROOT, capture_output=True, text=True, check=False)


# Doctor


def test_doctor_tells_the_versions_and_takes_no_gpu_context(facts):
    assert facts["fused_remat"] == fused_remat.__version__
    assert line(facts, "torch").startswith(f"{torch.__version__}, built ")
    assert line(facts, "CPU").startswith(torch.backends.cpu.get_cpu_capability())
    assert not torch.cuda.is_initialized()
    assert all("\n" not in text and text for _, text in doctor.describe(facts))


def test_doctor_names_the_backend_of_an_mlp_call_and_why_not_the_others(facts):
    loaded = facts["extension"]["loaded"]
    for call in ("fp32 on cpu", "bf16 on cpu"):
        choice = facts["mlp"][call]
        assert choice["backend"] == ("cpp" if loaded else "reference")
        assert "aten" in choice["why_not"] or loaded
        assert "the tensors are on cpu, the CUDA C++ kernels run on cuda" in choice["why_not"]["cuda"]
        assert line(facts, f"mlp {call}").startswith(f"{choice['backend']} (not ")


@pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension))
def test_doctor_names_the_backend_of_an_mlp_by_its_width(monkeypatch):
    """On a GPU whose Triton works and whose CUDA library has every GEMM."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(doctor, "_gpus", lambda: (["NVIDIA H200 (compute capability 9.0, 143771 MiB, driver 1)"], None))
    monkeypatch.setattr(doctor, "_loaded_cuda_extension", lambda build: {"loaded": False, "reason": "not asked"})
    monkeypatch.setattr(_extension, "load_cuda", lambda *, build=True: None)
    monkeypatch.setattr(_triton, "why_not", lambda device, dtype, arch: () if device == "cuda" else ("no",))
    for name, told in {"_targets": "9.0a", "_missing": [], "_gemm_kinds": ("sm90a",)}.items():
        monkeypatch.setattr(_cuda, name, lambda *arguments, told=told: told)
    facts = doctor.examine()
    chosen = {call: choice["backend"] for call, choice in facts["mlp"].items() if call.startswith("bf16 on cuda")}
    assert chosen == {
        "bf16 on cuda, D = 64": "cuda", "bf16 on cuda, D = 64 behind a norm": "triton",
        "bf16 on cuda, D = 768": "triton", "bf16 on cuda, D = 4096": "cuda",
        "bf16 on cuda, D = 4096, gelu_tanh": "cuda", "bf16 on cuda, D = 4096, gated": "cuda",
    }  # fmt: skip
    assert line(facts, "mlp bf16 on cuda, D = 768").startswith("triton (not cpp: the tensors are on cuda")
    assert facts["attention"]["bf16 on cuda"]["backend"] == "triton"
    monkeypatch.setattr(_cuda, "_gemm_kinds", lambda: ())
    assert doctor.examine()["mlp"]["bf16 on cuda, D = 4096"]["backend"] == "triton"


def test_doctor_as_json_needs_no_optional_package(facts):
    code = "import runpy; sys.argv[1:] = ['--json']; runpy.run_module('fused_remat.doctor', run_name='__main__')"
    done = run_without(("typer", "rich"), code)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert list(printed) == list(facts)
    assert {name: printed[name] for name in ("torch", "mlp")} == {name: facts[name] for name in ("torch", "mlp")}


def test_doctor_prints_one_line_per_fact(facts, capsys):
    doctor.report(as_json=False)
    printed = capsys.readouterr().out.splitlines()
    assert [text.split("  ")[0] for text in printed] == [label for label, _ in doctor.describe(facts)]


def test_doctor_says_in_words_what_is_wrong(monkeypatch, tmp_path):
    def broken(name):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    monkeypatch.setattr(budget, "_from_environment", "lots")
    monkeypatch.setattr(ops, "ready", lambda: "no compiler")
    monkeypatch.setattr(_extension, "status", lambda: _extension.Status(reason="no compiler"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    facts = doctor.examine()
    assert line(facts, "triton") == ("none: importing it fails (OSError: libcuda.so.1: cannot open shared object file)")
    assert line(facts, "GPU") == "none: no NVIDIA driver (nvidia-smi is not on PATH)"
    assert line(facts, "compiler").startswith("none: no C++ compiler found on PATH (looked for CXX='no-such-compiler')")
    assert line(facts, "extension") == "not available: no compiler"
    assert line(facts, "workspace") == "none: FUSED_REMAT_WORKSPACE must be a number of bytes, got 'lots'"
    assert "not cpp, aten: the compiled extension is not available: no compiler" in line(facts, "mlp fp32 on cpu")


def test_doctor_tells_what_the_cuda_extension_lacks(monkeypatch):
    def no_toolkit():
        raise _build.BuildUnavailable("no nvcc found")

    monkeypatch.setattr(_cuda_toolkit, "find_toolkit", no_toolkit)
    monkeypatch.setattr(_cuda_toolkit, "find_cutlass", lambda: _cuda_toolkit.Cutlass(None, "no headers"))
    monkeypatch.setattr(_extension, "load_cuda", lambda *, build: f"no nvcc found, build={build}")
    monkeypatch.setattr(_extension, "status", lambda: _extension.Status(cuda=_extension.Status()))
    monkeypatch.setattr(doctor, "_gpus", lambda: ([], "none"))
    for build in (False, True):
        facts = doctor.examine(build=build)
        assert line(facts, "nvcc") == "none: no nvcc found"
        assert line(facts, "CUTLASS") == "none: no headers"
        assert line(facts, "CUDA extension") == f"not available: no nvcc found, build={build}"


def test_doctor_tells_what_cuda_kernels_were_compiled_for(monkeypatch, tmp_path):
    monkeypatch.setattr(_cuda_toolkit, "find_cutlass", lambda: _cuda_toolkit.Cutlass(tmp_path))
    monkeypatch.setattr(_build_cuda, "cutlass_kinds", lambda *arguments: {"sm80": None, "sm90a": "no 9.0a"})
    monkeypatch.setattr(
        _cuda_toolkit, "find_toolkit", lambda: SimpleNamespace(nvcc="nvcc", version="13.0", architectures=lambda: [8.0])
    )
    (tmp_path / "cutlass").mkdir()
    (tmp_path / "cutlass" / "version.h").write_text("#define CUTLASS_MAJOR 4\n")
    facts = doctor._cuda_compiler()
    assert (facts["nvcc"], facts["nvcc_error"]) == ("nvcc: CUDA 13.0, for 8.0", None)
    assert (facts["cutlass"], facts["cutlass_error"]) == (f"4.?.?: {tmp_path}; no 9.0a", None)
    loaded = {"loaded": True, "origin": "ahead-of-time", "path": "/a.so", "built_for_torch": "2.14", "reason": None}
    assert doctor._describe_cuda_extension(
        {**loaded, "nvcc": "13.0", "architectures": "8.0;9.0a", "cutlass": ["sm80"]}
    ) == (
        "loaded, ahead-of-time, built for torch 2.14: /a.so; made with nvcc 13.0 for 8.0;9.0a, "
        "with GEMMs of CUTLASS for sm80"
    )


def test_doctor_reads_the_gpus_from_the_driver(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 9.0, 143771 MiB, 580.65.06'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert doctor._gpus() == (["NVIDIA H200 (compute capability 9.0, 143771 MiB, driver 580.65.06)"], None)
    program.write_text("#!/bin/sh\nexit 9\n")
    gpus, error = doctor._gpus()
    assert not gpus
    assert error.startswith("nvidia-smi failed (") and "exit status 9" in error


def test_doctor_refuses_other_arguments():
    with pytest.raises(SystemExit, match=r"usage: python -m fused_remat\.doctor \[--json\] \[--build\]"):
        doctor._main(["--yaml"])


# Command line


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_an_optional_package_one_line_names_the_extra(missing):
    done = run_without((missing,), "from fused_remat.cli import main; main()")
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert missing in done.stderr and "pip install 'fused_remat[cli]'" in done.stderr


@pytest.fixture
def run_command():
    testing = pytest.importorskip("typer.testing")
    app = cli.build_app()
    return lambda *arguments: testing.CliRunner().invoke(app, list(arguments))


def test_help_lists_the_commands(run_command):
    result = run_command("--help")
    assert result.exit_code == 0
    assert "doctor" in result.output and "compare" in result.output


def test_version(run_command):
    result = run_command("--version")
    assert (result.exit_code, result.output) == (0, f"{fused_remat.__version__}\n")


def test_doctor_command(run_command, facts):
    result = run_command("doctor")
    assert result.exit_code == 0
    assert len(result.output.splitlines()) == len(doctor.describe(facts))
    result = run_command("doctor", "--json")
    assert result.exit_code == 0
    assert json.loads(result.output) == facts


def test_unknown_option(run_command):
    result = run_command("doctor", "--yaml")
    assert result.exit_code == 2
    assert "--yaml" in result.output
