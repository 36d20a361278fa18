"""Building the CUDA library beside the C++ one: what it needs, what it is named after, and what happens without."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import tiny_cuda_project
import torch
from test_build import group_is_alive, wait_for
from tiny_cuda_project import LOAD, TORCH_VERSION, CudaProject
from tiny_project import finish

from fused_remat import _build, _build_cuda, _cuda_toolkit, _extension
from fused_remat._build import BuildUnavailable
from fused_remat._cuda_toolkit import parse_architectures

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the library is built on Linux only"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
SOURCES = {"kernel.cu", "host.cpp", "cutlass_sm80_gemm.cu", "cutlass_sm90a_gemm.cu"}


@pytest.fixture
def project(tmp_path: Path) -> CudaProject:
    return CudaProject(tmp_path)


@pytest.fixture
def in_process(project: CudaProject, monkeypatch: pytest.MonkeyPatch) -> CudaProject:
    tiny_cuda_project.show_to_this_process(project, monkeypatch)
    return project


# The recipe


def made(project: CudaProject) -> _build.Recipe:
    return _build_cuda.recipe(project.csrc, _build.find_compiler(), _cuda_toolkit.find_toolkit())


def test_each_source_is_compiled_as_its_kind_asks(project):
    project.install("site")
    assert {call.split("/csrc/cuda/")[1].split()[0] for call in project.cuda_calls()} == SOURCES
    every = [
        "-gencode=arch=compute_80,code=[sm_80,compute_80]", "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_100a,code=sm_100a",
    ]  # fmt: skip
    for source, generated in (
        ("kernel.cu", every),
        ("cutlass_sm80_gemm.cu", ["-gencode=arch=compute_80,code=sm_80"]),
        ("cutlass_sm90a_gemm.cu", every[1:2]),
    ):
        words = project.call_of(source)
        assert words[0] == "nvcc"
        assert [word for word in words if word.startswith("-gencode")] == generated
        assert {"-std=c++20", "-O3", "--expt-relaxed-constexpr", "-fPIC,-fvisibility=hidden"} <= set(words)
        assert "--compress-mode=size" in words
        assert words[words.index("-ccbin") + 1] == str(project.compiler)
        assert (str(project.cutlass / "include") in words) == ("cutlass" in source)
    host = project.call_of("host.cpp")
    assert {
        "-fvisibility=hidden", "-DFUSED_REMAT_CUDA_ARCHITECTURES=80,90,100", '-DFUSED_REMAT_NVCC_VERSION="13.0.88"',
        '-DFUSED_REMAT_CUDA_TARGETS="8.0+PTX;9.0a;10.0a"', "-DFUSED_REMAT_WITH_CUTLASS_SM80",
        "-DFUSED_REMAT_WITH_CUTLASS_SM90A", str(project.toolkit / "include"),
    } <= set(host)  # fmt: skip
    assert "-fopenmp" not in host
    for call in project.calls():
        assert "native" not in call and "-march" not in call and "http" not in call


def test_sources_for_cutlass_fit_their_generation(in_process, monkeypatch):
    def flags(listed: str) -> dict[str, list[str]]:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
        steps = {step.source.name: step for step in made(in_process).steps}
        return {name: [flag for flag in step.flags if "gencode" in flag] for name, step in steps.items()}

    ada = flags("8.0;8.9;9.0+PTX")
    assert ada["cutlass_sm80_gemm.cu"] == ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_89,code=sm_89"]
    assert ada["cutlass_sm90a_gemm.cu"] == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert ada["kernel.cu"][-1] == "-gencode=arch=compute_90,code=[sm_90,compute_90]"
    assert "-DFUSED_REMAT_WITH_CUTLASS_SM90A" in made(in_process).rules["compile"]
    assert flags("9.0;9.0a")["cutlass_sm90a_gemm.cu"] == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert "cutlass_sm90a_gemm.cu" not in flags("8.0;10.0a")
    hopper = flags("9.0a+PTX")
    assert hopper["cutlass_sm90a_gemm.cu"] == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert "cutlass_sm80_gemm.cu" not in hopper
    kinds = _build_cuda.cutlass_kinds(in_process.csrc, parse_architectures("9.0a"), _cuda_toolkit.find_cutlass())
    assert kinds == {"sm80": "none of the architectures 9.0a is for sm80 kernels", "sm90a": None}
    assert "-DFUSED_REMAT_WITH_CUTLASS_SM80" not in made(in_process).rules["compile"]


def test_without_cutlass_its_kernels_are_left_out_with_a_reason(in_process, monkeypatch):
    monkeypatch.setenv("CUTLASS_PATH", "/nowhere")
    reason = "CUTLASS_PATH is '/nowhere', which has no include/cutlass/version.h; correct or unset it"
    assert _cuda_toolkit.find_cutlass() == _cuda_toolkit.Cutlass(None, reason)
    recipe = made(in_process)
    assert {step.source.name for step in recipe.steps} == {"kernel.cu", "host.cpp"}
    assert not any("CUTLASS" in word for rule in recipe.rules.values() for word in rule)
    kinds = _build_cuda.cutlass_kinds(in_process.csrc, parse_architectures("8.0;9.0a"), _cuda_toolkit.find_cutlass())
    assert kinds == {"sm80": reason, "sm90a": reason}


@pytest.mark.parametrize("installed", [True, False])
def test_cutlass_is_found_in_its_package_without_importing_it(installed, monkeypatch, tmp_path):
    package = tmp_path / "cutlass_library"
    headers = package / "source" / "include" / "cutlass"
    headers.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (headers / "version.h").write_text("#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 0\n")
    monkeypatch.delenv("CUTLASS_PATH", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)] if installed else [])
    sys.path_importer_cache.clear()
    found = _cuda_toolkit.find_cutlass()
    if installed:
        assert (found.include, found.version, found.reason) == (headers.parent, "4.2.0", None)
    else:
        assert found.include is None and found.version is None
        assert "run `pip install --no-deps nvidia-cutlass` or set CUTLASS_PATH" in found.reason


def test_older_toolkits_are_not_asked_to_compress_code(in_process, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    in_process.make_nvcc(version="12.8")
    for path in (in_process.toolkit / "lib64").iterdir():
        path.rename(path.with_suffix(".12"))
    assert not any("compress" in word for word in made(in_process).rules["nvcc"])


def test_a_launcher_serves_nvcc_too_and_is_no_host_compiler(in_process, monkeypatch):
    monkeypatch.setattr(_build, "find_compiler", lambda: _build.Compiler(("ccache", "g++-13", "-m64"), "g++ 13"))
    rules = made(in_process).rules
    assert rules["nvcc"][:2] == ["ccache", str(in_process.nvcc)]
    assert rules["nvcc"][rules["nvcc"].index("-ccbin") + 1] == "g++-13"
    assert rules["compile"][:3] == ["ccache", "g++-13", "-m64"]


def test_libraries_of_cuda_are_those_of_torch_then_those_of_the_toolkit(in_process, monkeypatch, tmp_path):
    site = tmp_path / "site"
    beside_torch = site / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    for path in (beside_torch, site / "nvidia" / "cu12" / "lib" / "libcublas.so.13"):
        path.parent.mkdir(parents=True)
        path.touch()
    (site / "torch").mkdir()
    monkeypatch.setattr(_build, "torch_folder", lambda: site / "torch")
    lib = in_process.toolkit / "lib64"
    assert [word for word in made(in_process).libraries if "/lib" in word and not word.startswith("-")] == [
        str(beside_torch), str(lib / "libcublas.so.13"), str(lib / "libcublasLt.so.13")
    ]  # fmt: skip
    (lib / "libcublas.so.13").unlink()
    with pytest.raises(BuildUnavailable, match=r"libcublas\.so\.13 is neither beside torch nor in "):
        made(in_process)


# Names


def test_names_carry_what_must_be_known_before_loading(in_process):
    name = _build_cuda.library_name(TORCH_VERSION, "13.0", parse_architectures("8.0;9.0a+PTX"), in_process.csrc)
    assert (
        name == f"_C_cuda.torch2.14-cu13.0-80.90a+ptx90-{_build_cuda.fingerprint(in_process.csrc)}{_build.EXT_SUFFIX}"
    )
    assert _build_cuda.library_record(Path(name)) == ("2.14", "13.0", _build_cuda.fingerprint(in_process.csrc))
    assert _build_cuda.library_record(Path("_C_cuda.so")) == ("unknown", "unknown", "")


@pytest.mark.parametrize(
    ("changed", "ours", "theirs"),
    [
        ("cuda/kernel.cu", True, False),
        ("cuda/kernel.h", True, False),
        ("cuda/host.cpp", True, False),
        ("shared.h", True, True),
        ("deeper.h", True, True),
        ("library.cpp", True, True),
        ("unrelated.h", False, True),
        ("answer.cpp", False, True),
    ],
)
def test_each_library_is_named_after_its_own_sources(changed, ours, theirs, in_process):
    before = _build_cuda.fingerprint(in_process.csrc), _build.fingerprint(in_process.csrc)
    path = in_process.csrc / changed
    path.write_text(path.read_text() + "// changed\n")
    after = _build_cuda.fingerprint(in_process.csrc), _build.fingerprint(in_process.csrc)
    assert (before[0] != after[0], before[1] != after[1]) == (ours, theirs)


@pytest.mark.parametrize("what", ["nvcc", "architectures", "cutlass", "torch", "flags"])
def test_whatever_the_library_depends_on_names_its_build(what, in_process, monkeypatch):
    def key() -> str:
        return _build_cuda.build_key(in_process.csrc, _build.find_compiler(), _cuda_toolkit.find_toolkit())

    before = key()
    if what == "nvcc":
        in_process.make_nvcc(version="13.1")
    elif what == "architectures":
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    elif what == "cutlass":
        monkeypatch.setenv("CUTLASS_PATH", "/nowhere")
    elif what == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    else:
        monkeypatch.setattr(_build_cuda, "NVCC_FLAGS", (*_build_cuda.NVCC_FLAGS, "-DMORE"))
    assert key() != before


# First use


def test_only_who_asks_for_cuda_waits_for_nvcc(project):
    plain = project.load()
    assert plain.found["answer"] == 42 and project.cuda_calls() == []
    first, second = (finish(project.start(LOAD)) for _ in range(2))
    assert first.found == {
        "loaded_before": False, "reason": None, "origin": "first-use cache", "status_reason": None, "answer": 24,
        "torch": TORCH_VERSION,
    }  # fmt: skip
    (line,) = first.lines
    assert (
        f"compiling the CUDA extension for torch {TORCH_VERSION} with nvcc 13.0.88 for 8.0+PTX;9.0a;10.0a, once" in line
    )
    assert "about 1 min" in line or "about 2 min" in line
    assert second.found == first.found and second.lines == []
    assert len(project.cuda_calls()) == len(SOURCES)


def test_what_is_not_to_be_compiled_yet_says_so(project):
    code = LOAD.replace("load_cuda()", "load_cuda(build=False)")
    assert "it is not compiled yet" in finish(project.start(code)).found["reason"]
    assert project.cuda_calls() == []
    finish(project.start(LOAD))
    assert finish(project.start(code)).found["answer"] == 24
    later = "from fused_remat import _extension\n_extension.load_cuda(build=False)\n" + LOAD  # that was no final word
    shutil.rmtree(project.cache)
    assert finish(project.start(later)).found["answer"] == 24


def test_asking_again_looks_for_no_toolkit(monkeypatch):
    """Who merely asks may ask at every call; who wants it compiled is tried once, whatever was said before."""
    looked: list[bool] = []

    def find(build: bool) -> _extension.Status:
        looked.append(build)
        return _extension.Status(reason="there is none")

    monkeypatch.setattr(_extension, "load", lambda: None)
    monkeypatch.setattr(_extension, "_cuda_status", None)
    monkeypatch.setattr(_extension, "_cuda_reason", None)
    monkeypatch.setattr(_extension, "_find_and_load_cuda", find)
    for wanted in (False, False, True, True, False):
        assert _extension.load_cuda(build=wanted) == "there is none"
    assert looked == [False, True]


def test_threads_load_it_once(project):
    code = (
        """
import threading
from fused_remat import _extension
reasons = []
threads = [threading.Thread(target=lambda: reasons.append(_extension.load_cuda())) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert reasons == [None] * 8, reasons
"""
        + LOAD
    )
    assert finish(project.start(code)).found["answer"] == 24
    assert len(project.cuda_calls()) == len(SOURCES)


def test_a_killed_builder_leaves_nothing_that_blocks(project):
    project.load()
    project.hold.touch()
    killed = project.start(LOAD)
    try:
        wait_for(project.cuda_calls, "the process to compile")
        os.kill(killed.pid, signal.SIGKILL)
        killed.communicate(timeout=60)
        project.hold.unlink()
        after = finish(project.start(LOAD))
        assert after.found["answer"] == 24
        assert len(after.lines) == 1 and "waiting" not in after.lines[0]
    finally:
        project.hold.unlink(missing_ok=True)
        wait_for(lambda: not group_is_alive(killed.pid), "ninja and nvcc, which outlived their parent")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"FUSED_REMAT_NO_BUILD": "1"}, "the C++ extension that they need is not available: FUSED_REMAT_NO_BUILD"),
        ({"FUSED_REMAT_SKIP_CUDA": "1"}, "FUSED_REMAT_SKIP_CUDA leaves the CUDA extension out"),
        ({"CUDA_HOME": "/nowhere"}, "CUDA_HOME is '/nowhere'"),
        ({"TORCH_CUDA_ARCH_LIST": "all"}, "TORCH_CUDA_ARCH_LIST has 'all'"),
    ],
)
def test_without_it_there_is_a_reason_and_no_warning_of_its_own(project, changes, expected):
    outcome = finish(project.start(LOAD, **changes))
    assert expected in outcome.found["reason"] and outcome.found["origin"] is None
    assert not any("Warning" in line and "CUDA" in line for line in outcome.lines)
    assert project.cuda_calls() == []


def test_a_failed_build_keeps_its_log_and_is_tried_once(project):
    (project.folder / "broken-cuda").touch()
    code = LOAD.replace("status =", "assert _extension.load_cuda() == reason\nstatus =")
    outcome = finish(project.start(code, MAX_JOBS="1"))
    assert "compiling the CUDA extension failed: kernel.cu(1): error: broken on purpose" in outcome.found["reason"]
    assert "failed.log" in outcome.found["reason"]
    assert len(project.cuda_calls()) == 1


def test_a_function_that_nobody_defines_fails_the_build(project):
    # Such as one of the C++ library, which hides its own.
    project.write({"cuda/host.cpp": "int half_of_the_answer();\nint use() { return half_of_the_answer(); }\n"})
    assert "undefined reference to `half_of_the_answer()'" in finish(project.start(LOAD)).found["reason"]
