"""Whether the CUDA C++ kernels can run a call, and where they are preferred to Triton's."""

from __future__ import annotations

from functools import cache

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fused_remat import _cuda_toolkit, _extension, _triton

# What a call of each op may run. Every one of them is in a whole library; a partial one is refused by name.
_ROWS = ("normalize_rows", "normalize_rows_bwd", "column_sums")
_ATTENTION = ("attention_fwd", "attention_delta", "attention_bwd")
KERNELS = {
    "mlp": ("mlp_fwd_chunk", "mlp_bwd_chunk", *_ROWS),
    "attention": _ATTENTION,
    "multi_head_attention": (*_ATTENTION, "attention_weights", "transform_heads", "transform_heads_bwd", *_ROWS),
}

# The narrowest weights at which a product with an epilogue that reads the pre-activation back (from memory, 1 to 3% of
# the time) beats one that rebuilds it in a tile of its own, for a tile of two or three accumulators is a smaller one.
WIDE = 2048
# Up to here one kernel makes a pass, and hidden values never leave the chip: of D and D_out, and of F.
NARROW, FEW_FEATURES = 128, 512

# Tests set it where they have loaded a build of the kernels that runs on CPU tensors.
on_cpu = False

KEYS = {"cuda": "CUDA", "cpu": "CPU"}  # of the dispatcher, by type of the device
_whole: set[tuple[str, str]] = set()  # (op, key) of which no kernel is missing


@_extension.constant_when_traced
def load(device: str, arch: int | None) -> None:
    """Load the kernels, compiled now where they are not there yet, if there is a GPU that the tensors are on."""
    if device == "cuda" and arch is not None:
        _extension.load_cuda()


@_extension.constant_when_traced
def why_not(op: str, device: str, arch: int | None) -> tuple[str, ...]:
    """The reasons against it, as far as they depend on these. Compiles nothing."""
    if device != "cuda" and not (device == "cpu" and on_cpu):
        return (f"the tensors are on {device}, the CUDA C++ kernels run on cuda",)
    if device == "cuda":
        if (unavailable := _extension.load_cuda(build=False)) is not None:
            return (f"the CUDA C++ kernels are not available: {unavailable}",)
        if (unfit := _why_not_on(arch, _targets())) is not None:
            return (unfit,)
    missing = _missing(op, KEYS[device])
    return (f"the loaded CUDA C++ kernels lack {', '.join(missing)}",) if missing else ()


def _missing(op: str, key: str) -> list[str]:
    """The kernels of `op` that no loaded library implements for that dispatch key."""
    if (op, key) in _whole or _extension.load() is not None:  # an op without schema may not be asked for
        return []
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    missing = [name for name in KERNELS[op] if not has_kernel(f"fused_remat::{name}_cuda", key)]
    if not missing:
        _whole.add((op, key))
    return missing


@_extension.constant_when_traced
def has_gemm(arch: int | None) -> bool:
    """Whether the library that is there holds a GEMM made with CUTLASS for a GPU. Compiles nothing."""
    kind = "sm90a" if arch == 90 else "sm80" if arch is not None and 80 <= arch < 90 else None
    return kind is not None and _extension.load_cuda(build=False) is None and kind in _gemm_kinds()


@cache
def _gemm_kinds() -> tuple[str, ...]:
    with _disable_current_modes():
        return tuple(torch.ops.fused_remat.cutlass_kinds())


@cache
def _targets() -> str:
    # Outside of every mode: a tracer would record the question.
    with _disable_current_modes():
        return torch.ops.fused_remat.cuda_targets()


def _why_not_on(arch: int | None, targets: str) -> str | None:
    """Why no machine code or PTX for `targets` ("8.0;9.0a+PTX") runs on a GPU; `arch` None is a stand-in for any."""
    made = _cuda_toolkit.parse_architectures(targets)
    if arch is None or any(target.runs_on(arch) for target in made):
        return None
    return (
        f"the CUDA C++ kernels were compiled for {targets}, the GPU has compute capability {arch / 10}; "
        "compile them again with TORCH_CUDA_ARCH_LIST unset or naming it"
    )


@_extension.constant_when_traced
def library_products(dtype: torch.dtype) -> bool:
    """Whether products of that dtype should be those of a library: Triton's use no tensor cores for it."""
    return dtype == torch.float64 or (dtype == torch.float32 and not _triton.allows_tf32())


@_extension.constant_when_traced
def sums_in_half() -> bool:
    """Whether the user lets products of float16 be summed in float16."""
    return torch.backends.cuda.matmul.allow_fp16_accumulation
