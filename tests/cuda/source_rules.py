"""What no source of `csrc/cuda` may say: what waits for the device, allocates behind ATen's back or leaves its stream.

A call on CUDA tensors may run while a graph is captured, on any stream and on any of several devices: it must not wait
for the device, must take memory from ATen alone, and must launch on the stream that `OnDevice` (device.h) gives.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc" / "cuda"
KERNELS = (".cu", ".cuh")
HOST = (".cpp", ".h")


@dataclass(frozen=True)
class Rule:
    """Code of files with these endings must not contain the pattern, but in files of the names in `but_in`."""

    pattern: str
    why: str
    example: str
    endings: tuple[str, ...] = KERNELS + HOST
    but_in: tuple[str, ...] = ()


RULES = (
    Rule(r"\bcuda\w*Synchronize\b|\bcudaEventQuery\b|\bsynchronize\(", "waits for the device",
         "cudaStreamSynchronize(s);"),
    Rule(r"\.item\s*(<|\()|\.cpu\(\)|_local_scalar_dense|\bis_nonzero\(|\.nonzero\(|at::equal\(|\.equal\(",
         "reads device memory from the host", "const double p = t.item<double>();"),
    Rule(r"\bkCPU\b|\bDeviceType::CPU\b", "copies to the host", "const Tensor h = t.to(at::kCPU);"),
    Rule(r"\bcudaMemcpy\w*|\bcudaMemset\w*", "copies outside ATen", "cudaMemcpyAsync(a, b, n, kind, stream);"),
    Rule(r"\bcuda(Malloc|Free|HostAlloc|HostRegister)\w*|\bcudaMemPool\w*|CUDACachingAllocator|\braw_alloc",
         "allocates outside ATen", "cudaMallocAsync(&p, n, stream);"),
    Rule(r"\bcuda(Stream|Event)(Create|Destroy|WaitEvent|Record)\w*", "has a stream or events of its own",
         "cudaStreamCreate(&s);"),
    Rule(r"\bget(Current|Default)CUDAStream\b|\bgetStreamFromPool\b|\bCUDA\w*Guard\b|\bcudaSetDevice\b",
         "takes a stream or sets a device: OnDevice does", "const auto s = at::cuda::getCurrentCUDAStream();",
         but_in=("device.h",)),
    Rule(r"\bOnDevice\s*[({][^;]*\bstream\s*\(", "sets a device that is left before the launch: give it a name",
         "launch_it(args, OnDevice(x).stream());", but_in=("device.h",)),
    Rule(r"\bcudaStream(Legacy|PerThread|Default)\b|\bStream\s*(\{\s*\}|\(\s*\))|\bcudaStream_t\s*[({]",
         "launches on no stream of the caller's", "transform(args, Stream{});"),
    Rule(r"<<<|\bcudaLaunch\w*|\bcudaFuncSetAttribute\b", "launches without checking: launch() of platform.h does",
         "kernel<<<1, 1>>>(p);", but_in=("platform.h", "cutlass_launch.cuh")),
    Rule(r"\basm\b", "has PTX outside warp.h, which gives every instruction its host twin",
         'asm volatile("bar.sync 0;");', but_in=("warp.h",)),
    Rule(r"\batomic(?!Add\s*\(|_)\w+\s*\(|\bstd::atomic\b|\bcooperative_groups\b",
         "orders threads in ways the runner lacks", "atomicCAS(p, 0u, 1u);"),
    Rule(r"\bprintf\(|\bassert\(|\b__trap\(|\bmalloc\(|\bnew\s", "prints, allocates or stops in a kernel",
         "int* p = new int[4];", endings=KERNELS),
    Rule(r'#\s*include\s*[<"](?!c10/util/(Half|BFloat16)\.h)(ATen|c10|torch)/', "includes headers of torch in a kernel",
         "#include <ATen/core/Tensor.h>", endings=KERNELS),
    Rule(r"#\s*include\s*<(ATen/ATen|ATen/Functions|torch/(all|extension|torch))\.h>", "includes all of torch",
         "#include <torch/extension.h>", endings=HOST),
)  # fmt: skip


def without_comments(text: str) -> str:
    """The code: comments and the insides of strings are blanked, lines stay where they are."""
    token = re.compile(r'//[^\n]*|/\*.*?\*/|#\s*include[^\n]*|"(?:\\.|[^"\\\n])*"', re.DOTALL)

    def blank(match: re.Match) -> str:
        found = match.group()
        if found.startswith("#"):
            return found
        if found.startswith('"'):
            return '""'
        return "\n" * found.count("\n")

    return token.sub(blank, text)


def complaints(name: str, text: str) -> list[str]:
    """`file:line: what is wrong` for each break of a rule."""
    code, found = without_comments(text), []
    for rule in RULES:
        if name in rule.but_in or not name.endswith(rule.endings):
            continue
        for match in re.finditer(rule.pattern, code):
            line = code.count("\n", 0, match.start()) + 1
            found.append(f"{name}:{line}: {match.group().strip()} {rule.why}")
    return found


def sources() -> list[Path]:
    return sorted(path for path in CSRC.rglob("*") if path.suffix in KERNELS + HOST)
