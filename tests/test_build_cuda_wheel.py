"""The CUDA library compiled ahead of time: wheels with and without it, and what is loaded of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tiny_cuda_project
from tiny_cuda_project import LOAD, TORCH_VERSION, CudaProject
from tiny_project import NO_COMPILER, build, finish

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the library is built on Linux only"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
SOURCES = {"kernel.cu", "host.cpp", "cutlass_sm80_gemm.cu", "cutlass_sm90a_gemm.cu"}


@pytest.fixture
def project(tmp_path: Path) -> CudaProject:
    return CudaProject(tmp_path)


def libraries(site: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in site.glob("fused_remat/*.so")}


def test_a_wheel_carries_both_and_loads_them_silently(project):
    site = project.install("site")
    names = sorted(libraries(site))
    assert len(names) == 2 and names[0].startswith("_C.torch2.14-")
    assert names[1].startswith("_C_cuda.torch2.14-cu13.0-80.90a.100a+ptx80-")
    code = LOAD.replace("_extension.load()", "_extension.load_installed()")
    for version in (TORCH_VERSION, "2.14.9+cu130"):
        outcome = finish(
            project.start(code, site, CXX=NO_COMPILER, CUDA_HOME="/nowhere", STAND_IN_TORCH_VERSION=version)
        )
        assert outcome.found == {
            "loaded_before": True, "reason": None, "origin": "ahead-of-time", "status_reason": None, "answer": 24,
            "torch": "2.14",
        }  # fmt: skip
        assert outcome.lines == []


@pytest.mark.parametrize(
    "changes",
    [{"FUSED_REMAT_SKIP_CUDA": "1"}, {"CUDA_HOME": "/nowhere"}, {"STAND_IN_TORCH_CUDA": ""}],
    ids=["skipped", "no nvcc", "no CUDA"],
)
def test_a_wheel_without_it_holds_the_same_as_ever(project, changes):
    changes = {name: value for name, value in changes.items() if value}
    environment = project.environment(**changes)
    if not changes:
        del environment["STAND_IN_TORCH_CUDA"]
    wheel, said = build("build_wheel", project.folder, environment)
    assert said.count("installing without the CUDA extension: ") == 1
    with zipfile.ZipFile(wheel) as archive:
        found = {name: archive.read(name) for name in archive.namelist() if name.endswith(".so")}
    ((name, content),) = found.items()
    shutil.rmtree(project.folder / "build")
    assert libraries(project.install("site"))[Path(name).name] == content


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"STAND_IN_TORCH_VERSION": "2.15.0+cu130"},
            "was built for torch 2.14 with CUDA 13.0, this is torch 2.15.0+cu130",
        ),
        (
            {"STAND_IN_TORCH_CUDA": "13.2"},
            "was built for torch 2.14 with CUDA 13.0, this is torch 2.14.1+cu130 with CUDA 13.2",
        ),
        ({}, "was built from other sources or flags"),
    ],
)
def test_a_library_that_does_not_fit_is_not_loaded(project, changes, said):
    site = project.install("site")
    if not changes:
        kernel = site / "fused_remat" / "csrc" / "cuda" / "kernel.cu"
        kernel.write_text(kernel.read_text() + "// changed\n")
    (library,) = site.glob("fused_remat/_C_cuda.*")
    library.write_bytes(b"loading this file would fail")
    outcome = finish(project.start(LOAD, site, **changes))
    assert (outcome.found["loaded_before"], outcome.found["origin"], outcome.found["answer"]) == (
        False, "first-use cache", 24
    )  # fmt: skip
    assert said in outcome.found["status_reason"]
    assert said in outcome.lines[-1] and "compiling the CUDA extension" in outcome.lines[-1]


def test_a_broken_library_leaves_the_other_one_alone(project):
    site = project.install("site")
    (library,) = site.glob("fused_remat/_C_cuda.*")
    library.write_bytes(b"not an ELF file")
    plain = project.load(site)
    assert (plain.found["origin"], plain.lines) == ("ahead-of-time", [])
    outcome = finish(project.start(LOAD, site))
    assert outcome.found["answer"] == 24 and "cannot be loaded" in outcome.found["status_reason"]


def test_a_skipped_library_is_not_loaded_either(project):
    outcome = finish(project.start(LOAD, project.install("site"), FUSED_REMAT_SKIP_CUDA="1"))
    assert "FUSED_REMAT_SKIP_CUDA" in outcome.found["reason"] and not outcome.found["loaded_before"]


def test_a_wrong_list_fails_the_installation(project):
    with pytest.raises(AssertionError, match="TORCH_CUDA_ARCH_LIST has 'all', expected entries"):
        project.install("site", TORCH_CUDA_ARCH_LIST="all")


def test_editable_build_recompiles_only_what_changed(project):
    def build_in_place() -> set[str]:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(command, cwd=project.folder, env=project.environment(), check=True, capture_output=True)
        return {path.name for path in project.folder.glob("fused_remat/_C*.so")}

    first = build_in_place()
    project.write({"cuda/kernel.cu": tiny_cuda_project.SOURCES["cuda/kernel.cu"] + "// changed\n"})
    count = len(project.calls())
    second = build_in_place()
    assert len(first) == len(second) == 2 and len(first & second) == 1
    assert len(project.calls()) == count + 1
