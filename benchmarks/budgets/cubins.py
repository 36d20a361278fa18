"""What nvcc made of the CUDA C++ kernels: read out of the built library, compiling nothing and without a GPU.

cuobjdump (of Triton's wheel) tells registers, stack and static shared memory of every kernel and architecture; its
machine code, which instructions it has; the library itself, what launches ask for beside that.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.budgets.table import Budget
from fused_remat import _cuda_toolkit, _extension

# The low 12 bits of an instruction of 128, by the name that the table uses. A test has the disassembler, which takes
# minutes, count the same: HMMA and HGMMA are the instructions that it names so.
OPCODES = {0x23C: "mma", 0x9F0: "wgmma"}
DISASSEMBLED = {"mma": r"[HID]MMA", "wgmma": r"[HIQ]GMMA", "tcgen05": r"UTC\w*MMA"}
# Kernels that multiply matrices; with 16-bit operands on tensor cores, or it is a mistake.
PRODUCTS = (
    "attention_delta", "attention_dkdv", "attention_dmask", "attention_dq", "attention_fwd", "attention_weights",
    "cutlass_stage1_sm80", "cutlass_stage1_sm90a", "mlp_small_bwd", "mlp_small_fwd",
)  # fmt: skip
_NO_BITS = 8  # of ELF: a section without content in the file
_SIZED, _MAX_THREADS = 4, 5  # of attributes in a cubin: the form with a size, and EIATTR_MAX_THREADS
_RESERVED_SHARED = 1024  # of a block from sm_90 on, by the system; counted by the compiler, beyond the limit of a block


def nvcc_version() -> str | None:
    """Of the library that is there; None without one. Loads it, compiles nothing."""
    return torch.ops.fused_remat.nvcc_version() if _extension.load_cuda(build=False) is None else None


def why_not() -> str | None:
    """Why the kernels cannot be judged here, in one sentence, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # its text would only repeat the reason
        reason = _extension.load_cuda(build=False)
    if reason is not None:
        return f"no library of CUDA C++ kernels: {reason}"
    made = torch.ops.fused_remat
    if made.cuda_targets() != _cuda_toolkit.DEFAULT_ARCHITECTURES:
        return (
            f"the CUDA C++ kernels were compiled for {made.cuda_targets()}, not {_cuda_toolkit.DEFAULT_ARCHITECTURES}"
        )
    if made.cutlass_kinds() != ["sm80", "sm90a"]:
        return "the CUDA C++ kernels were compiled without CUTLASS"
    missing = [tool for tool in ("cuobjdump", "nvdisasm") if not _tool(tool).is_file()]
    if missing:
        return f"{' and '.join(missing)} of Triton's wheel are missing"
    return None if shutil.which("c++filt") else "c++filt (of binutils) is not installed"


def measure() -> list[Budget]:
    """The budgets of all kernels in the library, by name and architecture. Only where `why_not()` is None."""
    library = _extension.status().cuda.path
    found = usage(dump("-res-usage", library))
    with tempfile.TemporaryDirectory() as folder:
        _run("cuobjdump", "-xelf", "all", str(library), folder=folder)
        for cubin in Path(folder).glob("*.cubin"):
            arch = int(re.search(r"\.sm_(\d+)\w*\.cubin$", cubin.name)[1])
            for name, kernel in read_cubin(cubin.read_bytes()).items():
                found[name, arch].threads, found[name, arch].instructions = kernel.threads, kernel.instructions
    dynamic = dict(torch.ops.fused_remat.dynamic_shared_bytes())
    mangled = sorted({name for name, _ in found})
    names = dict(zip(mangled, _demangled(mangled), strict=True))
    rows = [_budget(readable(names[name]), arch, kernel, dynamic) for (name, arch), kernel in found.items()]
    return sorted(rows, key=lambda row: (row.kernel, row.arch))


@dataclass
class Kernel:
    """Of one kernel in one cubin."""

    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    threads: int = 0
    instructions: Counter = field(default_factory=Counter)


def usage(report: str) -> dict[tuple[str, int], Kernel]:
    """What `cuobjdump -res-usage` tells, by mangled name and architecture."""
    found: dict[tuple[str, int], Kernel] = {}
    for arch, line in _by_architecture(report):
        if match := re.match(r" Function (\S+):$", line):
            kernel = found[match[1], arch] = Kernel()
        elif match := re.match(r"  REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line):
            registers, stack, shared, local = map(int, match.groups())
            kernel.registers, kernel.stack_bytes, kernel.shared_bytes = registers, max(stack, local), shared
    return found


def disassembled(report: str) -> dict[tuple[str, int], Counter]:
    """The tensor-core instructions that `cuobjdump -sass` shows, by mangled name and architecture."""
    found: dict[tuple[str, int], Counter] = {}
    for arch, line in _by_architecture(report):
        if match := re.match(r"\s+Function : (\S+)$", line):
            counts = found[match[1], arch] = Counter()
        elif match := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+ )?(\w+)", line):
            counts.update(kind for kind, pattern in DISASSEMBLED.items() if re.fullmatch(pattern, match[1]))
    return found


def _by_architecture(report: str) -> Iterator[tuple[int, str]]:
    """Each line with the architecture of the cubin that it is about."""
    arch = 0
    for line in report.splitlines():
        if match := re.match(r"arch = sm_(\d+)", line):
            arch = int(match[1])
        yield arch, line


def read_cubin(cubin: bytes) -> dict[str, Kernel]:
    """Threads and tensor-core instructions of the kernels in a cubin, by mangled name."""
    sections = dict(_sections(cubin))
    found = {}
    for name, content in sections.items():
        if name.startswith(".text."):
            mangled = name.removeprefix(".text.")
            counts = Counter(low & 0xFFF for low, _ in struct.iter_unpack("<QQ", content))
            kinds = Counter({kind: counts[opcode] for opcode, kind in OPCODES.items() if counts[opcode]})
            found[mangled] = Kernel(threads=_threads(sections.get(f".nv.info.{mangled}", b"")), instructions=kinds)
    return found


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """The sections of a 64-bit ELF file by name."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    # Of each header: name, type, flags, address, offset, size.
    headers = [struct.unpack_from("<IIQQQQ", elf, table + size * i) for i in range(count)]
    strings = headers[names][4]
    for name, kind, _, _, offset, length in headers:
        content = b"" if kind == _NO_BITS else elf[offset : offset + length]
        yield elf[strings + name : elf.index(b"\0", strings + name)].decode(), content


def _threads(info: bytes) -> int:
    """The largest block that a kernel is compiled for, out of its attributes; 0 where none is named."""
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:
            if attribute == _MAX_THREADS:
                x, y, z = struct.unpack_from("<III", info, at)
                return x * y * z
            at += size
    return 0


def readable(demangled: str) -> str:
    """A kernel's name as the table has it: "mlp_dact<BFloat16>"."""
    # CUTLASS names a kernel after everything that it is composed of; ours in it is the epilogue.
    if match := re.search(r"Sm(80Visitor|90Epilogue)<c10::(\w+), (true|false)", demangled):
        kernel = {"80Visitor": "sm80", "90Epilogue": "sm90a"}[match[1]]
        return f"cutlass_stage1_{kernel}<{match[2]}, {'gated' if match[3] == 'true' else 'plain'}>"
    text = re.sub(r"\(anonymous namespace\)::|\bfused_remat::|\bcuda::|\bc10::|^void ", "", demangled)
    text = re.sub(r"AttentionShape<\w+, (\d+), (\d+)>", r"E=\1 N<=\2", text)
    name = text[: text.index(">(") + 1] if ">(" in text else text.partition("(")[0]
    return re.sub(r"^(\w+::)*(\w+?)_kernel\b", r"\2", name).replace(" >", ">")


def _budget(name: str, arch: int, kernel: Kernel, dynamic: Mapping[str, int]) -> Budget:
    base = name.partition("<")[0]
    reserved = _RESERVED_SHARED if arch >= 90 else 0
    return Budget(
        kernel=f"CUDA C++ {name}",
        arch=arch,
        variant="plain",
        tiles="",
        warps=kernel.threads // 32,
        stages=0,
        registers=kernel.registers,
        stack_bytes=kernel.stack_bytes,
        shared_bytes=max(kernel.shared_bytes - reserved, 0) + dynamic.get(base, 0),
        tensor_memory=0,
        dots=base in PRODUCTS and re.search(r"Half|BFloat16", name) is not None,
        tensor_core=dict(sorted(kernel.instructions.items())),
        warnings=[],
        source="cuda",
    )


def _tool(name: str) -> Path:
    spec = find_spec("triton")
    folder = Path(spec.origin).parent if spec and spec.origin else Path()
    return folder / "backends" / "nvidia" / "bin" / name


def dump(what: str, library: Path) -> str:
    """A report of cuobjdump about that library, such as "-res-usage"."""
    return _run("cuobjdump", what, str(library))


def _run(tool: str, *arguments: str, folder: str | None = None) -> str:
    path = f"{_tool(tool).parent}:/usr/bin:/bin"  # cuobjdump has nvdisasm disassemble
    command = [str(_tool(tool)), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env={"PATH": path}).stdout


def _demangled(names: list[str]) -> list[str]:
    command = ["c++filt", "--no-recurse-limit"]  # CUTLASS nests deeper than its limit
    done = subprocess.run(command, input="\n".join(names), capture_output=True, text=True, check=True)
    return done.stdout.splitlines()
