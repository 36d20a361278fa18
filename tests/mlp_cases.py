"""What the tests of the MLP op share: operands, forced tiles, references, and which kernels ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import profile

import fused_remat
from fused_remat import ops, reference
from fused_remat.recording import one_dnn

needs_extension = f"the compiled extension is not available: {ops.ready()}" if ops.ready() else None
BACKENDS = ("cpp", "aten")
# Backend -> its reason against a call on the CPU, a pattern for the op's name.
REFUSED_ON_A_CPU = {
    "triton": "the tensors are on cpu, where only Triton's interpreter runs its kernels",
    "cuda": "the tensors are on cpu, the CUDA C[+][+] kernels run on cuda",
}


def operands(
    rows: int | Sequence[int],
    width: int,
    hidden: int,
    out: int | None = None,
    *,
    gated: bool = False,
    bias: bool = True,
    dtype: torch.dtype = torch.float64,
    requires_grad: bool = True,
) -> dict[str, Tensor]:
    """x and parameters by the argument names of `fused_remat.mlp`, scaled so that values stay of order 1."""
    rows, out = (rows,) if isinstance(rows, int) else tuple(rows), width if out is None else out
    shapes = {"x": (*rows, width), "w_up": (hidden, width), "w_down": (out, hidden)}
    if bias:
        shapes |= {"b_up": (hidden,), "b_down": (out,)}
    if gated:
        shapes["w_gate"] = (hidden, width)
        if bias:
            shapes["b_gate"] = (hidden,)
    made = {}
    for name, shape in shapes.items():
        scale = max(shape[-1], 1) ** -0.5 if name.startswith("w_") else 1.0
        made[name] = (torch.randn(shape, dtype=torch.float64) * scale).to(dtype).requires_grad_(requires_grad)
    return made


ADAPTERS = ("up_adapter", "gate_adapter", "down_adapter")


def op_layer(given: dict, norm: fused_remat.Norm | None = None) -> list:
    """The arguments of `torch.ops.fused_remat.mlp*` between x and the activation."""
    layer = [given.get(name) for name in ("w_up", "w_down", "b_up", "b_down", "w_gate", "b_gate")]
    adapters = [given.get(name) for name in ADAPTERS]
    factors = [factor for adapter in adapters for factor in ((adapter.a, adapter.b) if adapter else (None, None))]
    scales = [adapter.scale if adapter else 1.0 for adapter in adapters]
    norms = [norm.kind, norm.eps] if norm else ["", 0.0]
    return [*layer, norm and norm.weight, norm and norm.bias, *factors, *scales, *norms]


def output_mask(*operands: bool) -> list[bool]:
    """The `output_mask` of `mlp_bwd` that begins with these; no gradient is asked for of the operands after them."""
    return [*operands, *[False] * (15 - len(operands))]


def packed_by_the_library(dtype: torch.dtype) -> int:
    """Most bytes beside the workspace that a product on the CPU takes: where the processor multiplies half precision,
    oneDNN packs operands in each thread, whatever the sizes are."""
    half = dtype.itemsize < 4 and one_dnn.computes(dtype)
    return 1_400_000 * torch.get_num_threads() if half else 0


def plan(
    given: dict, workspace: int, backend: str, *, backward: bool = True, dropout: bool = False, activation: str = "gelu"
):
    """(axis, rows, features, bytes) of the tiles; axis is "features" or "tokens"."""
    x, w_up, w_down = given["x"], given["w_up"], given["w_down"]
    axis, rows, features, nbytes = torch.ops.fused_remat.mlp_plan(
        x.numel() // x.shape[-1], w_up.shape[1], w_down.shape[0], w_up.shape[0], "w_gate" in given, backward, dropout,
        x.dtype, w_up.dtype, x.dtype, workspace, backend, x.device.type, False,
        [given[name].a.shape[0] if name in given else 0 for name in ADAPTERS],
        activation,
    )  # fmt: skip
    return ("features" if axis else "tokens"), rows, features, nbytes


def workspace_for(
    given: dict[str, Tensor], width: int, backend: str, *, dropout: bool = False, activation: str = "gelu"
) -> int:
    """The smallest budget whose backward chunks are `width` tokens or features wide, whichever axis is cut."""
    for budget in range(1024, 2**20, 8):
        axis, rows, features, nbytes = plan(given, budget, backend, dropout=dropout, activation=activation)
        if nbytes <= budget and (features if axis == "features" else rows) == width:
            return budget
    raise AssertionError(f"no budget gives chunks of {width}")


def run(given: dict[str, Tensor], *, backend: str | None = None, seed: int = 0, **settings) -> Tensor:
    """`fused_remat.mlp` on a named backend, with torch's generator at `seed`."""
    torch.manual_seed(seed)
    if backend is None:
        return fused_remat.mlp(**given, **settings)
    with fused_remat.backend(backend):
        return fused_remat.mlp(**given, **settings)


def run_reference(given: dict[str, Tensor], *, seed: int = 0, activation: str = "gelu", dropout_p: float = 0.0):
    torch.manual_seed(seed)
    return reference.mlp(**given, activation=activation, dropout_p=dropout_p)


def gradients(y: Tensor, given: dict[str, Tensor], dy: Tensor, **settings) -> dict[str, Tensor]:
    return dict(zip(given, torch.autograd.grad(y, list(given.values()), dy, **settings), strict=True))


def kernels_of(call) -> list[str]:
    """Names of the fused_remat ops that `call()` ran, in order, those inside other ops included."""
    with profile() as trace:
        call()
    return [
        event.name.removeprefix("fused_remat::") for event in trace.function_events if "fused_remat::" in event.name
    ]


@contextmanager
def refused_on_a_cpu(name: str, op: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What runs inside names that backend and must be refused with its reason."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    reason = REFUSED_ON_A_CPU[name].format(op=op)
    with fused_remat.backend(name), pytest.raises(RuntimeError, match=f"backend '{name}' was named.*{reason}"):
        yield


def relative_error(actual: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference over that of `truth`, both in float64."""
    assert torch.equal(actual.isnan(), truth.isnan())
    return ((actual.double() - truth.double()).norm() / truth.double().norm()).item()
