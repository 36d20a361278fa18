"""Which implementer runs a call, and why the others do not: one table.

A backend is a name. Named by the user (`with fused_remat.backend(name):`) it is honoured or refused with its reasons;
otherwise the first with nothing against it runs, in the order of `BACKENDS` but for the calls that `_prefers_cuda`
names. The name is chosen in forward and used again in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fused_remat import _cuda, _triton, mlp_routes, ops
from fused_remat._override import Override

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

in_context = Override()


@dataclass(frozen=True)
class Call:
    """What the choice depends on. `reference_only` is the reason why the reference path alone can run, if any."""

    op: str
    device: str  # type of the device: "cpu", "cuda", ...
    dtype: torch.dtype  # compute dtype: autocast's, else that of x
    activation: str | None = None  # None: the op has none
    arch: int | None = None  # of a CUDA device: `_triton.arch_of`
    width: int | None = None  # of the widest head, where there are heads
    features: tuple[int, int, int] | None = None  # of an MLP: D, D_out and F
    # Of an MLP on the backend "cuda", what else speaks against one kernel a pass and the two epilogues of stage 1.
    against_one_kernel: str | None = None
    against_library: str | None = None
    against_gemm: str | None = None
    reference_only: str | None = None


def _why_not_compiled(call: Call) -> list[str]:
    """What speaks against every backend but the reference."""
    reasons = [] if call.reference_only is None else [call.reference_only]
    unavailable = ops.ready()
    if unavailable is not None:
        return [*reasons, f"the compiled extension is not available: {unavailable}"]
    if call.dtype not in DTYPES:
        reasons.append(f"{call.dtype} is not one of {', '.join(map(str, DTYPES))}")
    if call.activation is not None and call.activation not in ops.compiled_activations():
        reasons.append(f"activation {call.activation!r} has no compiled twin")
    return reasons


def _why_not_triton(call: Call) -> list[str]:
    reasons = [*_triton.why_not(call.device, call.dtype, call.arch), *_why_not_compiled(call)]
    if call.width is not None and call.width > _triton.WIDEST_HEAD:
        reasons.append(f"heads are {call.width} wide, the Triton kernels take up to {_triton.WIDEST_HEAD}")
    if call.width is not None and call.dtype == torch.float64 and call.arch not in (None, *_triton.FP64_ARCHITECTURES):
        reasons.append("float64 attention is compiled well for compute capability 8.0 and 9.0 only")
    return reasons


def _why_not_cuda(call: Call) -> list[str]:
    return [*_cuda.why_not(call.op, call.device, call.arch), *_why_not_compiled(call)]


def _why_not_cpp(call: Call) -> list[str]:
    on_cpu = [] if call.device == "cpu" else [f"the tensors are on {call.device}, the C++ kernels run on cpu"]
    return on_cpu + _why_not_compiled(call)


# In order of preference. The last one is never refused.
BACKENDS: dict[str, Callable[[Call], list[str]]] = {
    "triton": _why_not_triton,
    "cuda": _why_not_cuda,
    "cpp": _why_not_cpp,
    "aten": _why_not_compiled,
    "reference": lambda call: [],
}


def _prefers_cuda(call: Call) -> bool:
    """Whether the CUDA C++ kernels can run a call and come before Triton's. From models and compiled code: no GPU has
    timed it yet.

    - Wide MLPs whose stage 1 is a product of a library with an epilogue: these lose 1 to 3% to their extra traffic and
      win more by larger tiles. Below D = 2048 the traffic is 5% and more, and one tile of Triton's does without.
      Without an epilogue (`mlp_routes` says where) the traffic is more again, and Triton's kernels win anywhere.
    - Narrow MLPs in half precision that one kernel makes a pass of, where Triton's streaming launches several per tile.
    - float64, and float32 without TF32: for these Triton multiplies without tensor cores, in small tiles.
    """
    if call.device != "cuda" or call.features is None:
        return False
    wide = max(call.features[:2]) >= _cuda.WIDE
    always = _is_one_kernel(call) or _cuda.library_products(call.dtype)
    # Only a library that is there can say which epilogues it has.
    return (wide or always) and not _why_not_cuda(call) and (always or mlp_routes.has_epilogue(call))


def _is_one_kernel(call: Call) -> bool:
    d_in, d_out, hidden = call.features
    narrow = max(d_in, d_out) <= _cuda.NARROW and hidden <= _cuda.FEW_FEATURES and call.dtype.itemsize == 2
    return narrow and call.against_one_kernel is None


def _check_name(name: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {name!r}")
    return name


def why_not(backend: str, call: Call) -> list[str]:
    """Every reason why `backend` cannot run `call`; empty if it can. Raises ValueError for an unknown name."""
    return BACKENDS[_check_name(backend)](call)


def _choose(call: Call) -> str:
    """The backend that runs a call for which none was named.

    The CUDA C++ kernels are compiled only for a GPU that Triton cannot use. Where they are merely preferred, that would
    take more minutes than they save: they run if they are there.
    """
    if _prefers_cuda(call):
        return "cuda"
    # On a CPU, GPU kernels run to be proved, not to do work.
    names = [name for name in BACKENDS if call.device != "cpu" or name not in ("triton", "cuda")]
    for name in names:
        if name == "cuda" and not _why_not_compiled(call):
            _cuda.load(call.device, call.arch)
        if not BACKENDS[name](call):
            break
    return name


def resolve(call: Call) -> str:
    """The backend that runs `call`. The first call may compile kernels.

    Raises:
        RuntimeError: a backend was named and cannot run this call; the message lists its reasons.
    """
    named = in_context.value
    if named is None:
        return _choose(call)
    if named == "cuda":
        _cuda.load(call.device, call.arch)
    reasons = BACKENDS[named](call)
    if reasons:
        raise RuntimeError(
            f"backend {named!r} was named but cannot run {call.op}: {'; '.join(reasons)}. "
            f"Name another of {', '.join(BACKENDS)}, or none to have one chosen"
        )
    return named


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Have every fused call inside the `with` block run on that backend, or raise RuntimeError with its reasons.

    `name`: "triton", "cuda", "cpp", "aten" (composed from ATen, any device) or "reference" (plain torch, saves no
    memory). Raises ValueError for another name.
    """
    with in_context.during(_check_name(name)):
        yield
