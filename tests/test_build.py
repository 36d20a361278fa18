"""Building the C++ library: at install time, at first use, and what happens where neither works."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_project import LOAD, NO_COMPILER, Project, build, finish

from fused_remat import _build

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the library is built on Linux only"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
SOURCE_COUNT = 2


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture
def in_process(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """`fused_remat._build` of this process builds the stand-in sources with its compiler into its cache."""
    monkeypatch.setattr(_build, "source_root", lambda: project.csrc)
    monkeypatch.setenv("CXX", str(project.compiler))
    monkeypatch.setenv("FUSED_REMAT_CACHE", str(project.cache))
    monkeypatch.delenv("MAX_JOBS", raising=False)
    return project


def wait_for(condition, what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


def group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


# First use


def test_first_use_compiles_once_and_says_so_in_one_line(tmp_path):
    project = Project(tmp_path, real_torch=True)
    first, second = project.load(), project.load()
    assert first.found == {
        "reason": None, "origin": "first-use cache", "status_reason": None, "answer": 42, "torch": torch.__version__
    }  # fmt: skip
    (line,) = first.lines
    assert line.startswith(f"fused_remat: compiling the C++ extension for torch {torch.__version__} with ")
    assert "about 1 min" in line and str(project.cache) in line
    assert second.found == first.found
    assert second.lines == []
    assert len(project.calls()) == SOURCE_COUNT


def test_compiler_command_is_portable(in_process):
    _build.first_use_library()
    assert len(in_process.calls()) == SOURCE_COUNT
    for call in in_process.calls():
        assert "-std=c++20" in call.split()
        assert "native" not in call and "-march" not in call and "-mtune" not in call and "cuda" not in call
    libraries = subprocess.run(["ldd", _build.first_use_library()], capture_output=True, text=True, check=True).stdout
    assert "cuda" not in libraries and "nvrtc" not in libraries


def test_two_processes_at_once_build_once(project):
    project.hold.touch()
    first = project.start()
    wait_for(project.calls, "the first process to compile")
    second = project.start()
    assert "waiting for another process" in second.stderr.readline()
    project.hold.unlink()
    outcomes = finish(first), finish(second)
    assert [outcome.found["answer"] for outcome in outcomes] == [42, 42]
    assert len(outcomes[0].lines) == 1 and outcomes[1].lines == []
    assert len(project.calls()) == SOURCE_COUNT


def test_a_waiting_process_shares_the_failure_instead_of_building_again(project):
    project.hold.touch()
    project.broken.touch()
    first = project.start(MAX_JOBS="1")
    wait_for(project.calls, "the first process to compile")
    second = project.start(MAX_JOBS="1")
    assert "waiting for another process" in second.stderr.readline()
    project.hold.unlink()
    reasons = finish(first).found["reason"], finish(second).found["reason"]
    assert "error: broken on purpose" in reasons[0] and "failed.log" in reasons[0]
    assert "failed in another process" in reasons[1] and "failed.log" in reasons[1]
    assert len(project.calls()) == 1
    project.broken.unlink()
    assert project.load().found["answer"] == 42  # whoever comes later tries anew


def test_a_killed_builder_leaves_nothing_that_blocks(project):
    project.hold.touch()
    killed = project.start()
    try:
        wait_for(project.calls, "the process to compile")
        os.kill(killed.pid, signal.SIGKILL)
        killed.communicate(timeout=60)
        (folder,) = project.cache.iterdir()
        assert (folder / "lock").exists() and list(folder.glob("build-*")) and not (folder / "_C.so").exists()
        project.hold.unlink()
        after = project.load()
        assert after.found["answer"] == 42
        assert len(after.lines) == 1 and "waiting" not in after.lines[0]
        assert not list(folder.glob("build-*"))
    finally:
        project.hold.unlink(missing_ok=True)
        wait_for(lambda: not group_is_alive(killed.pid), "ninja and the compiler, which outlived their parent")


def test_threads_of_one_process_load_once(project):
    code = (
        """
import threading
from fused_remat import _extension
reasons = []
threads = [threading.Thread(target=lambda: reasons.append(_extension.load())) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert reasons == [None] * 8, reasons
"""
        + LOAD
    )
    outcome = finish(project.start(code))
    assert outcome.found["answer"] == 42
    assert len(project.calls()) == SOURCE_COUNT and len(outcome.lines) == 1


def test_load_is_a_constant_to_the_compiler(tmp_path):
    project = Project(tmp_path, real_torch=True)
    code = (
        """
import torch
from fused_remat import _extension

@torch.compile(fullgraph=True, backend="eager")
def step(x):
    return x + 1 if _extension.load() is None else x - 1

assert step(torch.ones(2)).tolist() == [2.0, 2.0]
"""
        + LOAD
    )
    assert finish(project.start(code)).found["answer"] == 42


@pytest.mark.parametrize("what", ["torch", "cxx11_abi", "python", "flags", "source", "header", "compiler"])
def test_whatever_the_library_depends_on_names_its_build(what, in_process, monkeypatch):
    compiler = _build.find_compiler()
    before = _build.build_key(in_process.csrc, compiler)
    if what == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    elif what == "cxx11_abi":
        monkeypatch.setattr(torch, "compiled_with_cxx11_abi", lambda: False)
    elif what == "python":
        monkeypatch.setattr(_build.sysconfig, "get_config_var", lambda name: "cpython-399")
    elif what == "flags":
        monkeypatch.setattr(_build, "CXX_FLAGS", (*_build.CXX_FLAGS, "-DMORE"))
    elif what == "compiler":
        compiler = _build.Compiler(compiler.command, "g++ 99.1")
    else:
        path = in_process.csrc / {"source": "nested/answer.cpp", "header": "answer.h"}[what]
        path.write_text(path.read_text() + "// changed\n")
    assert _build.build_key(in_process.csrc, compiler) != before


def test_another_torch_version_compiles_anew(project):
    versions = ("2.14.1+cpu", "2.14.1+cu130", "2.15.0", "2.14.1+cpu")
    outcomes = [project.load(STAND_IN_TORCH_VERSION=version) for version in versions]
    assert [outcome.found["torch"] for outcome in outcomes] == list(versions)
    assert [len(outcome.lines) for outcome in outcomes] == [1, 1, 1, 0]
    assert len(project.calls()) == 3 * SOURCE_COUNT


def test_cuda_sources_are_not_for_the_cpp_compiler(in_process):
    before = _build.fingerprint(in_process.csrc)
    (in_process.csrc / "cuda").mkdir()
    (in_process.csrc / "cuda" / "kernel.cpp").write_text("not C++")
    assert [path.relative_to(in_process.csrc).as_posix() for path in _build.sources(in_process.csrc)] == [
        "answer.cpp",
        "nested/answer.cpp",
    ]
    assert _build.fingerprint(in_process.csrc) == before


def test_max_jobs(monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "3")
    assert (_build.job_count(8), _build.job_count(2)) == (3, 2)
    for bad in ("0", "many", "-1"):
        monkeypatch.setenv("MAX_JOBS", bad)
        with pytest.raises(_build.BuildUnavailable, match=f"MAX_JOBS is '{bad}', expected a positive whole number"):
            _build.job_count(8)


def test_cache_root(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSED_REMAT_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert _build.cache_root() == tmp_path / "a"
    monkeypatch.delenv("FUSED_REMAT_CACHE")
    assert _build.cache_root() == tmp_path / "b" / "fused_remat"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert _build.cache_root() == tmp_path / "c" / ".cache" / "fused_remat"


# No library


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"FUSED_REMAT_NO_BUILD": "1"}, "FUSED_REMAT_NO_BUILD forbids the first-use build"),
        ({"CXX": NO_COMPILER}, f"no C++ compiler found on PATH (looked for CXX='{NO_COMPILER}')"),
        ({"CXX": "", "PATH": "/nonexistent"}, "no C++ compiler found on PATH (looked for g++, c++ or clang++)"),
        ({"FUSED_REMAT_CACHE": "/proc/nowhere"}, "set FUSED_REMAT_CACHE to a writable folder"),
        ({"MAX_JOBS": "many"}, "MAX_JOBS is 'many'"),
    ],
)
def test_without_a_library_one_warning_gives_the_reason(project, changes, expected):
    code = "from fused_remat import _extension\n_extension.load()\n" + LOAD
    outcome = finish(project.start(code, **changes))
    assert expected in outcome.found["reason"] and outcome.found["origin"] is None
    warned = [line for line in outcome.lines if "RuntimeWarning" in line]
    assert len(warned) == 1 and expected in warned[0] and "reference path" in warned[0]
    assert project.calls() == []


# Ahead of time


@pytest.fixture
def site(project: Project) -> Path:
    """The stand-in package as a wheel with its library puts it into site-packages."""
    return project.install("site")


def test_ahead_of_time_library_loads_silently_and_needs_no_compiler(tmp_path):
    project = Project(tmp_path, real_torch=True)
    site = project.install("site")
    assert len(project.calls()) == SOURCE_COUNT and not any("native" in call for call in project.calls())
    (library,) = site.glob("fused_remat/_C.*")
    abi = _build.abi_version(torch.__version__)
    assert _build.library_record(library) == (abi, _build.fingerprint(site / "fused_remat" / "csrc"))
    outcome = project.load(site, CXX=NO_COMPILER, FUSED_REMAT_NO_BUILD="1")
    assert outcome.found == {
        "reason": None, "origin": "ahead-of-time", "status_reason": None, "answer": 42, "torch": abi
    }  # fmt: skip
    assert outcome.lines == []


def test_library_serves_every_torch_of_its_minor_version(project, site):
    for version in ("2.14.0", "2.14.9+cu130"):
        outcome = project.load(site, STAND_IN_TORCH_VERSION=version)
        assert outcome.found["origin"] == "ahead-of-time" and outcome.lines == []


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.15.0", "2.14.0.dev20260901+cpu"])
def test_library_for_another_torch_gives_one_message_and_the_first_use_build(project, site, version):
    (library,) = site.glob("fused_remat/_C.*")
    library.write_bytes(b"loading this file would fail")
    said = f"the installed library was built for torch 2.14, this is torch {version}"
    first, second = (project.load(site, STAND_IN_TORCH_VERSION=version) for _ in range(2))
    assert len(first.lines) == 1 and said in first.lines[0] and "compiling" in first.lines[0]
    assert len(second.lines) == 1 and said in second.lines[0] and "reinstall" in second.lines[0]
    for outcome in (first, second):
        assert (outcome.found["origin"], outcome.found["answer"]) == ("first-use cache", 42)
        assert said in outcome.found["status_reason"]


def test_library_for_another_torch_without_a_compiler_gives_one_warning(project, site):
    outcome = project.load(site, STAND_IN_TORCH_VERSION="2.15.0", CXX=NO_COMPILER)
    (warned,) = (line for line in outcome.lines if "RuntimeWarning" in line)
    assert "was built for torch 2.14, this is torch 2.15.0; no C++ compiler found" in warned
    assert outcome.found["origin"] is None


def test_library_of_other_sources_is_not_loaded(project, site):
    (site / "fused_remat" / "csrc" / "nested" / "answer.cpp").write_text("int half_of_the_answer() { return 5; }")
    outcome = project.load(site)
    assert outcome.found["answer"] == 10
    assert "was built from other C++ sources or flags" in outcome.lines[0]


def test_broken_library_falls_to_the_first_use_build_with_the_reason(project, site):
    (library,) = site.glob("fused_remat/_C.*")
    library.write_bytes(b"not an ELF file")
    outcome = project.load(site)
    assert outcome.found["answer"] == 42 and outcome.found["origin"] == "first-use cache"
    assert "cannot be loaded" in outcome.lines[0] and str(library) in outcome.lines[0]


def test_rebuilding_a_wheel_leaves_no_trace_of_removed_sources(project, site):
    (project.csrc / "nested" / "answer.cpp").rename(project.csrc / "other.cpp")
    again = project.install("site-again")
    assert len(list(again.glob("fused_remat/_C.*"))) == 1
    assert sorted(path.name for path in again.rglob("csrc/**/*.*")) == ["answer.cpp", "answer.h", "other.cpp"]
    assert project.load(again).found["origin"] == "ahead-of-time"


def test_installing_without_a_compiler_gives_pure_python_and_says_why(project):
    wheel, said = build("build_wheel", project.folder, project.environment(CXX=NO_COMPILER))
    assert wheel.name.endswith("py3-none-any.whl")
    assert f"installing without the C++ extension: no C++ compiler found on PATH (looked for CXX='{NO_COMPILER}" in said


def test_compile_error_fails_the_installation(project):
    project.broken.touch()
    with pytest.raises(AssertionError, match="error: broken on purpose"):
        project.install("site")


def test_editable_build_recompiles_only_what_changed(project):
    def build_in_place() -> Path:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(command, cwd=project.folder, env=project.environment(), check=True, capture_output=True)
        (library,) = project.folder.glob("fused_remat/_C.*")
        return library

    first = build_in_place()
    (project.csrc / "nested" / "answer.cpp").write_text("int half_of_the_answer() { return 4; }")
    second = build_in_place()
    assert first != second and not first.exists()
    assert len(project.calls()) == SOURCE_COUNT + 1
    outcome = project.load(FUSED_REMAT_NO_BUILD="1")
    assert (outcome.found["origin"], outcome.found["answer"]) == ("ahead-of-time", 8)


@pytest.mark.parametrize("version", ["2.11.0", "2.14.1+cu130", "2.15.0.dev20261101+cpu", "2.16.0a0+git1234567"])
def test_abi_version(version):
    expected = {"2.11.0": "2.11", "2.14.1+cu130": "2.14"}.get(version, version.split("+")[0])
    assert _build.abi_version(version) == expected
