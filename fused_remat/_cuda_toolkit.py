"""What `_C_cuda` needs to be compiled: a torch with CUDA, nvcc of its major version, an architecture list, CUTLASS.

Each of them is found, or BuildUnavailable says in one sentence why not.

Environment: `FUSED_REMAT_SKIP_CUDA=1` leaves the library out; `CUDA_HOME` or `CUDA_PATH` (toolkit, else nvcc on PATH,
else /usr/local/cuda); `TORCH_CUDA_ARCH_LIST` (such as "8.0+PTX;9.0a"); `CUTLASS_PATH` (else the headers of the
package nvidia-cutlass).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ._build import BuildUnavailable  # relative: an isolated build loads both files under another package's name

# The PTX for GPUs to come is that of 8.0: it costs no pass of its own, and most kernels use nothing newer.
DEFAULT_ARCHITECTURES = "8.0+PTX;9.0a;10.0a"
USUAL_FOLDER = "/usr/local/cuda"
OLDEST_ARCHITECTURE = 80  # the kernels use cp.async and the matrix instructions of that generation
# What torch's own builds read these names as.
_NAMED = {
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}


# Architectures


@dataclass(frozen=True)
class Architecture:
    """One entry of an architecture list: 8.0 is number 80; `suffix` "a" ties it to that very one, "f" to its family."""

    number: int
    suffix: str = ""
    ptx: bool = False

    def __str__(self) -> str:
        return f"{self.number // 10}.{self.number % 10}{self.suffix}{'+PTX' if self.ptx else ''}"

    def flags(self, *, ptx: bool = True) -> list[str]:
        """nvcc's. PTX is that of the plain architecture: with a suffix it would run nowhere else either."""
        named, plain = f"{self.number}{self.suffix}", f"compute_{self.number}"
        if not (self.ptx and ptx):
            return [f"-gencode=arch=compute_{named},code=sm_{named}"]
        if not self.suffix:
            return [f"-gencode=arch={plain},code=[sm_{named},{plain}]"]  # one pass for both
        return [f"-gencode=arch=compute_{named},code=sm_{named}", f"-gencode=arch={plain},code={plain}"]

    def runs_on(self, capability: int) -> bool:
        """Whether a GPU of that compute capability (86 for 8.6) can run what was compiled for this entry."""
        if self.ptx and self.number <= capability:
            return True
        if self.suffix == "a":
            return self.number == capability
        return self.number // 10 == capability // 10 and self.number <= capability


def parse_architectures(text: str) -> list[Architecture]:
    """The entries of a list as `TORCH_CUDA_ARCH_LIST` has it, in order, older ones than the kernels need left out.

    Raises BuildUnavailable for an entry that is none, and when nothing is left.
    """
    found: dict[tuple[int, str], Architecture] = {}
    spelled_out = text
    for name, entries in _NAMED.items():
        spelled_out = spelled_out.replace(name, entries)
    for entry in re.split(r"[;,\s]+", spelled_out.strip(";, \n")):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", entry)
        if match is None:
            raise BuildUnavailable(
                f"TORCH_CUDA_ARCH_LIST has {entry!r}, expected entries such as those of {DEFAULT_ARCHITECTURES!r}; "
                "correct or unset it"
            )
        key = (10 * int(match[1]) + int(match[2]), match[3])
        known = found.get(key, Architecture(*key))
        found[key] = replace(known, ptx=known.ptx or bool(match[4]))
    wanted = [found[key] for key in sorted(found) if key[0] >= OLDEST_ARCHITECTURE]
    if not wanted:
        raise BuildUnavailable(
            f"TORCH_CUDA_ARCH_LIST={text!r} names no architecture from 8.0 on, which the kernels need; add one"
        )
    return wanted


@dataclass(frozen=True)
class Toolkit:
    """The CUDA toolkit: its compiler, what that says it is, and the folder with `include`."""

    nvcc: str
    version: str
    folder: Path

    @property
    def major(self) -> str:
        return self.version.partition(".")[0]

    def architectures(self) -> list[Architecture]:
        """Those of TORCH_CUDA_ARCH_LIST, else of our own list what this nvcc knows. Raises BuildUnavailable."""
        named = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
        if named.strip(" ;,"):
            return parse_architectures(named)
        known = set(re.findall(r"compute_(\d+)", _output([self.nvcc, "--list-gpu-arch"])))
        ours = [arch for arch in parse_architectures(DEFAULT_ARCHITECTURES) if str(arch.number) in known]
        return ours or parse_architectures("8.0+PTX")


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def skipped_by_user() -> str | None:
    """The reason, where the environment asks for no CUDA library."""
    if os.environ.get("FUSED_REMAT_SKIP_CUDA", "") in ("", "0"):
        return None
    return "FUSED_REMAT_SKIP_CUDA leaves the CUDA extension out; unset it"


def torch_cuda() -> str:
    """The CUDA version that torch was built for. Raises BuildUnavailable when there is none, or none is wanted."""
    import torch

    if reason := skipped_by_user():
        raise BuildUnavailable(reason)
    if torch.version.cuda is None:
        raise BuildUnavailable("this torch is built without CUDA")
    return torch.version.cuda


def find_toolkit() -> Toolkit:
    """The toolkit whose compiler fits this torch. Raises BuildUnavailable."""
    wanted = torch_cuda()
    major = wanted.partition(".")[0]
    nvcc = _find_nvcc(major)
    version = re.search(r"release [\d.]+, V(\d+\.\d+(\.\d+)?)", _output([nvcc, "--version"]))
    if version is None:
        raise BuildUnavailable(f"`{nvcc} --version` failed; set CUDA_HOME to a working CUDA toolkit {major}")
    if version[1].partition(".")[0] != major:
        raise BuildUnavailable(
            f"{nvcc} is of CUDA {version[1]}, this torch is built for CUDA {wanted}; "
            f"set CUDA_HOME to a CUDA toolkit {major}"
        )
    # nvcc on PATH may be a script anywhere; the real one says where it lives.
    top = re.search(r"^#\$ TOP=(.+)$", _output([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull]), re.MULTILINE)
    folder = Path(top[1].strip()) if top else Path(nvcc).resolve().parent.parent
    return Toolkit(nvcc, version[1], folder.resolve())


def _find_nvcc(major: str) -> str:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if named := os.environ.get(variable):
            nvcc = Path(named) / "bin" / "nvcc"
            if shutil.which(nvcc) is None:
                raise BuildUnavailable(
                    f"{variable} is {named!r}, which has no bin/nvcc; correct it to a CUDA toolkit {major} or unset it"
                )
            return str(nvcc)
    nvcc = shutil.which("nvcc") or shutil.which(f"{USUAL_FOLDER}/bin/nvcc")
    if nvcc is None:
        raise BuildUnavailable(
            f"no nvcc found (looked in CUDA_HOME, CUDA_PATH, PATH and {USUAL_FOLDER}); "
            f"install a CUDA toolkit {major} or set CUDA_HOME"
        )
    return nvcc


# CUTLASS


@dataclass(frozen=True)
class Cutlass:
    """The headers of CUTLASS, or why there are none."""

    include: Path | None
    reason: str | None = None

    @property
    def version(self) -> str | None:
        if self.include is None:
            return None
        text = (self.include / "cutlass" / "version.h").read_text()
        numbers = dict(re.findall(r"#define CUTLASS_(MAJOR|MINOR|PATCH)\s+(\d+)", text))
        return ".".join(numbers.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH"))


def find_cutlass() -> Cutlass:
    """The headers where CUTLASS_PATH says, else in the package nvidia-cutlass. Imports nothing of it."""
    if named := os.environ.get("CUTLASS_PATH"):
        include = Path(named) / "include"
        remedy = f"CUTLASS_PATH is {named!r}, which has no include/cutlass/version.h; correct or unset it"
    else:
        spec = importlib.util.find_spec("cutlass_library")
        remedy = (
            "the headers of CUTLASS are not installed; run `pip install --no-deps nvidia-cutlass` or set CUTLASS_PATH"
        )
        if spec is None or not spec.submodule_search_locations:
            return Cutlass(None, remedy)
        include = Path(spec.submodule_search_locations[0]) / "source" / "include"
    return Cutlass(include) if (include / "cutlass" / "version.h").is_file() else Cutlass(None, remedy)
