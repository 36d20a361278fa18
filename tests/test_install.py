"""The real package as users get it: isolated install, first use, no compiler, and the instructions that it holds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import mlp_results
import pytest
import torch
from tiny_project import NO_COMPILER, REPOSITORY, build, clean_environment, copy_build_files, unzip

import fused_remat
from fused_remat import _extension

INSTALLED = Path(fused_remat.__file__).parent.parent


def run_results(site: Path, **environment: str) -> tuple[dict, list[str]]:
    """What `mlp_results.py` prints with the package in `site`, and its lines on stderr."""
    done = subprocess.run(
        [sys.executable, mlp_results.__file__], env=clean_environment() | {"PYTHONPATH": str(site)} | environment,
        capture_output=True, text=True, timeout=1140, check=False, cwd=site,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr.splitlines()


def assert_agree(got: dict[str, list], expected: dict[str, list]) -> None:
    assert got.keys() == expected.keys()
    for name, tensors in got.items():
        # Sums of at most 40 products of standard normal numbers, twice: a few hundred roundings.
        tolerance = 1e-12 if "float64" in name else 1e-4
        for ours, theirs in zip(tensors, expected[name], strict=True):
            difference = (torch.tensor(ours).double() - torch.tensor(theirs).double()).abs().max()
            assert difference <= tolerance * torch.tensor(theirs).double().abs().max(), name


@pytest.fixture(scope="module")
def reference_results() -> dict[str, list]:
    with fused_remat.backend("reference"):
        return mlp_results.compute()


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory) -> list[str]:
    """A Python that can import setuptools and the standard library, as an isolated build does."""
    modules = tmp_path_factory.mktemp("bare")
    site = Path(find_spec("setuptools").origin).parent.parent
    for path in (site / "setuptools", site / "_distutils_hack", *site.glob("setuptools-*.dist-info")):
        (modules / path.name).symlink_to(path)
    command = [sys.executable, "-S"]
    missing = subprocess.run([*command, "-c", "import torch"], cwd=modules, capture_output=True, text=True, check=False)
    assert "No module named 'torch'" in missing.stderr
    return ["env", f"PYTHONPATH={modules}", *command]


@pytest.fixture(scope="module")
def isolated(tmp_path_factory, bare_python) -> tuple[Path, Path]:
    """The wheel that an isolated install makes of the source distribution, and its site-packages."""
    folder = tmp_path_factory.mktemp("isolated")
    checkout = folder / "checkout"
    checkout.mkdir()
    copy_build_files(checkout)
    for name in ("fused_remat", "csrc"):
        shutil.copytree(REPOSITORY / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    archive, _ = build("build_sdist", checkout, clean_environment(), bare_python)
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "unpacked", filter="data")
    (sources,) = (folder / "unpacked").iterdir()
    wheel, _ = build("build_wheel", sources, clean_environment(), bare_python)
    return wheel, unzip(wheel, folder / "site")


def test_isolated_install_is_pure_python_with_every_source(isolated):
    wheel, site = isolated
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not list(site.rglob("*.so"))

    def files(folder: Path, *patterns: str) -> dict[str, bytes]:
        found = (path for pattern in patterns for path in folder.rglob(pattern))
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found if path.is_file()}

    package = site / "fused_remat"
    assert files(package / "csrc", "*") == files(REPOSITORY / "csrc", "*.cpp", "*.h", "*.cu", "*.cuh")
    beside_csrc = ("*.py", "*.json", "*.html")
    assert files(package, *beside_csrc) == files(REPOSITORY / "fused_remat", *beside_csrc)


def test_metadata(isolated):
    wheel, _ = isolated
    with zipfile.ZipFile(wheel) as archive:
        text = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert re.search(r"^License-Expression: Apache-2\.0$", text["METADATA"], re.MULTILINE)
    assert "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION" in text["LICENSE"]
    assert "fused-remat = fused_remat.cli:main" in text["entry_points.txt"]
    assert text["top_level.txt"].split() == ["fused_remat"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_isolated_install_compiles_at_first_use(isolated, reference_results, tmp_path):
    _, site = isolated
    found, lines = run_results(site, FUSED_REMAT_CACHE=str(tmp_path))
    assert found["origin"] == "first-use cache"
    assert len(lines) == 1 and "compiling the C++ extension" in lines[0]
    assert_agree(found["results"], reference_results)


def test_no_compiler_gives_one_warning_and_right_results(isolated, reference_results, tmp_path):
    _, site = isolated
    found, lines = run_results(site, FUSED_REMAT_CACHE=str(tmp_path), CXX=NO_COMPILER)
    assert found["origin"] is None
    (warned,) = (line for line in lines if "Warning" in line)
    assert "RuntimeWarning: fused_remat runs on its reference path" in warned and "no C++ compiler" in warned
    assert_agree(found["results"], reference_results)


# The compiled library


@pytest.fixture(scope="module")
def library() -> Path:
    reason = _extension.load()
    if reason is not None:
        pytest.skip(f"no compiled library: {reason}")
    return _extension.status().path


def test_results_without_vector_instructions(library, reference_results):
    found, _ = run_results(INSTALLED, ATEN_CPU_CAPABILITY="default")
    assert found["capability"] == "DEFAULT" and found["origin"] is not None
    assert_agree(found["results"], reference_results)


def test_results_with_the_instructions_of_this_machine(library, reference_results):
    assert_agree(mlp_results.compute(), reference_results)


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_vector_instructions_stand_only_in_functions_chosen_at_run_time(library):
    """No AVX (an instruction with a v, or a ymm or zmm register) outside the avx2 and avx512 namespaces."""
    command = ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "file format elf64-x86-64" not in text:
        pytest.skip("the rule is about x86-64")
    function, chosen_at_run_time, everywhere = "", set(), set()
    for line in text.splitlines():
        if header := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            function = header[1]
        elif re.match(r"\s+[0-9a-f]+:\s+v\w+ ", line) or "%ymm" in line or "%zmm" in line:
            named = re.search(r"avx2|avx512", function, re.IGNORECASE)
            (chosen_at_run_time if named else everywhere).add(function)
    assert everywhere == set()
    assert any("AVX512" in function for function in chosen_at_run_time)
    assert any("AVX2" in function for function in chosen_at_run_time)
