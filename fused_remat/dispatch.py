"""Which implementer runs a call, and why the others do not: one table.

A backend is a name. Named by the user (`with fused_remat.backend(name):`) it is honoured or refused with its reasons;
otherwise the first in `BACKENDS` with nothing against it runs. The name is chosen in forward and used again in
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fused_remat import _triton, ops
from fused_remat._override import Override

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_named = Override()


@dataclass(frozen=True)
class Call:
    """What the choice depends on. `reference_only` is the reason why the reference path alone can run, if any."""

    op: str
    device: str  # type of the device: "cpu", "cuda", ...
    dtype: torch.dtype  # compute dtype: autocast's, else that of x
    activation: str | None = None  # None: the op has none
    arch: int | None = None  # of a CUDA device: `_triton.arch_of`
    width: int | None = None  # of the widest head, where there are heads
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
    return [f"{call.op} has no CUDA C++ kernels in this version"]


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


def _check_name(name: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {name!r}")
    return name


def why_not(backend: str, call: Call) -> list[str]:
    """Every reason why `backend` cannot run `call`; empty if it can. Raises ValueError for an unknown name."""
    return BACKENDS[_check_name(backend)](call)


def _by_themselves(call: Call) -> Iterator[str]:
    """The backends that may be chosen without being named: an interpreter is for proving kernels, not for work."""
    return (name for name in BACKENDS if not (name == "triton" and call.device == "cpu"))


def resolve(call: Call) -> str:
    """The backend that runs `call`.

    Raises:
        RuntimeError: a backend was named and cannot run this call; the message lists its reasons.
    """
    named = _named.value
    if named is None:
        return next(name for name in _by_themselves(call) if not BACKENDS[name](call))
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
    with _named.during(_check_name(name)):
        yield
