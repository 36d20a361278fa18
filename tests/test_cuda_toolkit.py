"""What the CUDA library needs to be compiled: which architectures are asked for, and what may be missing."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import tiny_cuda_project
import torch
from tiny_cuda_project import CudaProject
from tiny_project import NO_COMPILER

from fused_remat import _build_cuda, _cuda_toolkit
from fused_remat._build import BuildUnavailable
from fused_remat._cuda_toolkit import Architecture, Toolkit, parse_architectures

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the library is built on Linux only"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


@pytest.fixture
def project(tmp_path: Path) -> CudaProject:
    return CudaProject(tmp_path)


@pytest.fixture
def in_process(project: CudaProject, monkeypatch: pytest.MonkeyPatch) -> CudaProject:
    tiny_cuda_project.show_to_this_process(project, monkeypatch)
    return project


# Architectures


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8.0;9.0a;10.0a+PTX", "8.0;9.0a;10.0a+PTX"),
        ("9.0a 8.0, 8.6", "8.0;8.6;9.0a"),
        (" 8.0+PTX;8.0; ", "8.0+PTX"),
        ("7.5;8.0;9.0;9.0a", "8.0;9.0;9.0a"),
        ("Ampere", "8.0;8.6+PTX"),
        ("Hopper;Ada", "8.9+PTX;9.0+PTX"),
        ("12.0f", "12.0f"),
    ],
)
def test_architecture_lists_are_read_as_torch_reads_them(text, expected):
    assert ";".join(map(str, parse_architectures(text))) == expected


@pytest.mark.parametrize("text", ["8", "sm_80", "8.0;volta", "8.0+ptx", "8.0b"])
def test_an_entry_that_is_no_architecture_is_named(text):
    with pytest.raises(
        BuildUnavailable, match=r"^TORCH_CUDA_ARCH_LIST has '[^;]+', expected entries .* correct or unset"
    ):
        parse_architectures(text)


def test_a_list_of_older_architectures_only():
    with pytest.raises(BuildUnavailable, match=r"TORCH_CUDA_ARCH_LIST='7\.0;7\.5' names no architecture from 8\.0 on"):
        parse_architectures("7.0;7.5")


def test_flags_of_an_architecture():
    assert Architecture(80).flags() == ["-gencode=arch=compute_80,code=sm_80"]
    assert Architecture(100, "a", ptx=True).flags() == [
        "-gencode=arch=compute_100a,code=sm_100a",
        "-gencode=arch=compute_100,code=compute_100",
    ]
    assert Architecture(80, ptx=True).flags() == ["-gencode=arch=compute_80,code=[sm_80,compute_80]"]
    assert Architecture(80, ptx=True).flags(ptx=False) == ["-gencode=arch=compute_80,code=sm_80"]


@pytest.mark.parametrize(
    ("targets", "runs", "does_not"),
    [
        ("8.0+PTX;9.0a;10.0a", (80, 86, 89, 90, 100, 103, 120), (75,)),
        ("8.6", (86, 89), (80, 90)),
        ("9.0a", (90,), (80, 100)),
        ("10.0f", (100, 103), (90, 110, 120)),
        ("8.0+PTX", (80, 90, 120), (75,)),
    ],
)
def test_where_compiled_code_runs(targets, runs, does_not):
    architectures = parse_architectures(targets)
    for capability in (*runs, *does_not):
        assert any(arch.runs_on(capability) for arch in architectures) == (capability in runs), capability


@pytest.mark.parametrize(
    ("known", "expected"),
    [("75 80 90 100 120", "8.0+PTX;9.0a;10.0a"), ("75 80 86 89 90", "8.0+PTX;9.0a"), ("80", "8.0+PTX")],
)
def test_without_a_list_the_default_is_what_nvcc_knows_of_ours(in_process, known, expected):
    in_process.make_nvcc(known=known)
    assert ";".join(map(str, _cuda_toolkit.find_toolkit().architectures())) == expected


def test_the_list_of_the_environment_is_honoured(in_process, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6;9.0a")
    assert list(map(str, _cuda_toolkit.find_toolkit().architectures())) == ["8.6", "9.0a"]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", " ")
    assert ";".join(map(str, _cuda_toolkit.find_toolkit().architectures())) == _cuda_toolkit.DEFAULT_ARCHITECTURES


# What is missing


def test_nothing_is_missing(in_process):
    assert _build_cuda.why_not() is None
    assert _cuda_toolkit.find_toolkit() == Toolkit(str(in_process.nvcc), "13.0.88", in_process.toolkit)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("torch", "this torch is built without CUDA"),
        ("asked", "FUSED_REMAT_SKIP_CUDA leaves the CUDA extension out; unset it"),
        ("home", "CUDA_HOME is '/nowhere', which has no bin/nvcc; correct it to a CUDA toolkit 13 or unset it"),
        ("path", "CUDA_PATH is '/nowhere', which has no bin/nvcc; correct it to a CUDA toolkit 13 or unset it"),
        ("nvcc", "no nvcc found (looked in CUDA_HOME, CUDA_PATH, PATH and /nowhere); install a CUDA toolkit 13 or set"),
        ("broken", "nvcc --version` failed; set CUDA_HOME to a working CUDA toolkit 13"),
        ("major", "is of CUDA 12.8.88, this torch is built for CUDA 13.0; set CUDA_HOME to a CUDA toolkit 13"),
        ("compiler", f"no C++ compiler found on PATH (looked for CXX='{NO_COMPILER}')"),
        ("sources", "this version has no CUDA sources"),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(what, reason, in_process, monkeypatch):
    if what == "torch":
        monkeypatch.setattr(torch.version, "cuda", None)
    elif what == "asked":
        monkeypatch.setenv("FUSED_REMAT_SKIP_CUDA", "1")
    elif what in ("home", "path"):
        monkeypatch.delenv("CUDA_HOME")
        monkeypatch.setenv(f"CUDA_{what.upper()}", "/nowhere")
    elif what == "nvcc":
        monkeypatch.delenv("CUDA_HOME")
        monkeypatch.setattr(_cuda_toolkit, "USUAL_FOLDER", "/nowhere")
        monkeypatch.setenv("PATH", "/nowhere")
    elif what == "broken":
        in_process.nvcc.write_text("#!/bin/sh\nexit 1\n")
    elif what == "major":
        in_process.make_nvcc(version="12.8")
    elif what == "compiler":
        monkeypatch.setenv("CXX", NO_COMPILER)
    else:
        shutil.rmtree(in_process.csrc / "cuda")
    found = _build_cuda.why_not()
    assert reason in found and "\n" not in found


def test_nvcc_on_path_may_be_a_script_elsewhere(in_process, monkeypatch, tmp_path):
    script = tmp_path / "bin" / "nvcc"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {in_process.nvcc} "$@"\n')
    script.chmod(0o755)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    assert _cuda_toolkit.find_toolkit() == Toolkit(str(script), "13.0.88", in_process.toolkit)


def test_the_usual_folder_is_the_last_to_be_looked_in(in_process, monkeypatch):
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(_cuda_toolkit, "USUAL_FOLDER", str(in_process.toolkit))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert _cuda_toolkit.find_toolkit().nvcc == str(in_process.nvcc)
