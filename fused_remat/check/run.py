"""Run the checks: which backends can, and what they got against what is allowed."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck

import fused_remat
from fused_remat import dispatch
from fused_remat.check.cases import ALIGNED, CASES, CONSTANT, LARGE, NARROW, SMALL, TINY, Case, Sizes, Tensors
from fused_remat.check.rounded import rounded_delta

DTYPES = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}
HALVES = (torch.bfloat16, torch.float16)
LAW = "reference"  # what the other backends are compared with; its own gradients are checked all the same
ERROR_FACTOR = 2.0
_MOST_JOBS = 8
_GPU_BACKENDS = ("triton", "cuda")
# Units in the last place that are always allowed. fp32 results may add up in another order than torch's, and where they
# cancel (the bias of keys) little but the rounding of the terms is left; half-precision sums are fp32 and rounded once.
FLOOR_ULPS = {torch.float32: 4.0, torch.bfloat16: 0.25, torch.float16: 0.25}


@dataclass(frozen=True)
class Row:
    """One check of one backend. `passed` None: it cannot run this, `detail` says why."""

    op: str
    case: str
    check: str  # "gradcheck", or the dtype of a comparison
    backend: str
    passed: bool | None
    detail: str
    seconds: float


def run(device: str, backend: str | None = None, cases: Sequence[Case] = CASES) -> Iterator[Row]:
    """The rows as they come: every backend, or the one named, on every case.

    On a GPU the cases are shared among processes, since a first run spends its time compiling kernels, one by one.
    """
    jobs = max(1, min(_MOST_JOBS, (os.cpu_count() or 1) // 2)) if device == "cuda" else 1
    if jobs == 1:
        for case in cases:
            yield from _rows(case, device, backend)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        shares = [pool.submit(_rows_of, CASES.index(case), device, backend) for case in cases]
        for share in shares:
            yield from share.result()


def _rows_of(index: int, device: str, backend: str | None) -> list[Row]:
    return list(_rows(CASES[index], device, backend))


def _rows(case: Case, device: str, backend: str | None) -> Iterator[Row]:
    names = [backend] if backend else [name for name in dispatch.BACKENDS if name != LAW]
    for name in names if backend else (*names, LAW):
        yield judged_row(case, "gradcheck", name, device, torch.float64, _tiny(name, device), gradients_differ)
    for sizes, dtype in comparisons(case, device, backend):
        label = str(dtype).removeprefix("torch.")
        judge = Judge(case, device, dtype, sizes)
        for name in (name for name in names if name != LAW):
            yield judged_row(case, label, name, device, dtype, sizes, judge)


def comparisons(case: Case, device: str, backend: str | None = None) -> Iterator[tuple[Sizes, torch.dtype]]:
    """What is compared with float64 on that device, by every backend or the one named."""
    for dtype in DTYPES[device]:
        yield LARGE if device == "cuda" else _small(backend), dtype
    if device == "cuda":
        for sizes in (ALIGNED, NARROW) if case.op == "mlp" else (ALIGNED,):
            for dtype in HALVES:
                yield sizes, dtype


def _small(backend: str | None) -> Sizes:
    """On a CPU, where those who are slow piece by piece are GPU kernels that something imitates."""
    return replace(SMALL, workspace=LARGE.workspace) if backend in _GPU_BACKENDS else SMALL


def _tiny(backend: str, device: str) -> Sizes:
    """For finite differences. An interpreter takes a second per piece, so that it gets all in one."""
    imitated = backend in _GPU_BACKENDS and device == "cpu"
    return replace(TINY, workspace=LARGE.workspace) if imitated else TINY


def unavailable(device: str, backend: str) -> list[str]:
    """The reasons why `backend` can run no case at all; empty if it can run one."""
    found: dict[str, None] = {}
    for case in CASES:
        for dtype in (*DTYPES[device], torch.float64):
            against = reasons(case, backend, device, dtype, TINY)
            if not against:
                return []
            found |= dict.fromkeys(against)
    return list(found)


def judged_row(
    case: Case, check: str, backend: str, device: str, dtype: torch.dtype, sizes: Sizes,
    judged: Callable[[Case, str, str], str | None],
) -> Row:  # fmt: skip
    name = f"{case.name}, {sizes.name}" if sizes.name else case.name
    against = reasons(case, backend, device, dtype, sizes)
    if against:
        return Row(case.op, name, check, backend, None, "; ".join(against), 0.0)
    start = time.perf_counter()
    try:
        wrong = judged(case, backend, device)
    except Exception as error:  # whatever a broken kernel raises is what the check is there to find
        wrong = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return Row(case.op, name, check, backend, wrong is None, wrong or "", time.perf_counter() - start)


def reasons(case: Case, backend: str, device: str, dtype: torch.dtype, sizes: Sizes) -> list[str]:
    """Why `backend` cannot run that case there; empty if it can. Compiles no kernels."""
    arguments = case.arguments(placed(case.tensors(sizes), device, dtype), sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that there is no compiled library is among the reasons
        return fused_remat.explain(case.function, **arguments).reasons[backend]


def placed(tensors: Tensors, device: str, dtype: torch.dtype) -> Tensors:
    """Floating tensors in that dtype, requiring gradients; masks as they are."""
    return {
        name: t.to(device, dtype).requires_grad_(name not in CONSTANT) if t.is_floating_point() else t.to(device)
        for name, t in tensors.items()
    }


def _outputs(case: Case, tensors: Tensors, sizes: Sizes, backend: str) -> tuple[Tensor, ...]:
    torch.manual_seed(0)  # of the dropout mask
    with fused_remat.backend(backend):
        outputs = case.function(**case.arguments(tensors, sizes))
    return outputs if isinstance(outputs, tuple) else (outputs,)


def gradients_differ(case: Case, backend: str, device: str) -> str | None:
    """What torch.autograd.gradcheck says in float64, reruns of the same bits included; None if nothing."""
    sizes = _tiny(backend, device)
    tensors = placed(case.tensors(sizes), device, torch.float64)
    wanted = [name for name, t in tensors.items() if t.requires_grad]

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        given = tensors | dict(zip(wanted, values, strict=True))
        # A row with nothing to attend to has lse -inf, which has no finite differences.
        return tuple(o.masked_fill(o.isinf(), 0.0) for o in _outputs(case, given, sizes, backend))

    try:
        gradcheck(function, [tensors[name] for name in wanted], fast_mode=True, rtol=1e-6, atol=1e-7)
    except GradcheckError as error:
        return " ".join(str(error).split())
    return None


class Judge:
    """Compares results with float64, allowing twice the error of plain torch in the same dtype: of the reference, or of
    attention as torch's fused kernels compute it, whichever is larger."""

    def __init__(self, case: Case, device: str, dtype: torch.dtype, sizes: Sizes):
        self._case, self._sizes, self._dtype = case, sizes, dtype
        self._tensors = placed(case.tensors(sizes), device, dtype)
        self._floor = FLOOR_ULPS[dtype] * torch.finfo(dtype).eps
        self._allowed: dict[str, float] | None = None
        self._truth: dict[str, Tensor] = {}

    def __call__(self, case: Case, backend: str, device: str) -> str | None:
        if self._allowed is None:
            wide = {name: t.detach().double() if t.is_floating_point() else t for name, t in self._tensors.items()}
            self._truth = self._results(
                {name: t.requires_grad_(self._tensors[name].requires_grad) for name, t in wide.items()}, LAW
            )
            self._allowed = {name: ERROR_FACTOR * error + self._floor for name, error in self._plain_errors().items()}
        wrong = [
            f"the error of {name} is {error:.2g}, allowed {self._allowed[name]:.2g}"
            for name, error in self._errors(self._results(self._tensors, backend)).items()
            if not error <= self._allowed[name]
        ]
        return "; ".join(wrong) or None

    def _plain_errors(self) -> dict[str, float]:
        errors = self._errors(self._results(self._tensors, LAW))
        if self._case.op == "mlp" or self._dtype not in HALVES:
            return errors
        with rounded_delta():
            fused = self._errors(self._results(self._tensors, LAW))
        return {name: max(error, fused[name]) for name, error in errors.items()}

    def _results(self, tensors: Tensors, backend: str) -> dict[str, Tensor]:
        """Outputs, and gradients for random incoming ones."""
        outputs = _outputs(self._case, tensors, self._sizes, backend)
        wanted = {name: t for name, t in tensors.items() if t.requires_grad}
        generator = torch.Generator().manual_seed(1)
        douts = [torch.randn(o.shape, generator=generator).to(self._dtype).to(o.device, o.dtype) for o in outputs]
        douts = [d.masked_fill(o.detach().isinf(), 0.0) for d, o in zip(douts, outputs, strict=True)]
        gradients = torch.autograd.grad(outputs, list(wanted.values()), douts)
        named = {f"output {index}": o.detach() for index, o in enumerate(outputs)}
        return named | {f"d{name}": g for name, g in zip(wanted, gradients, strict=True)}

    def _errors(self, results: dict[str, Tensor]) -> dict[str, float]:
        return {name: _relative_error(results[name], true) for name, true in self._truth.items()}


def _relative_error(actual: Tensor, truth: Tensor) -> float:
    """Norm of the difference over that of the truth; NaN where infinities or NaN are not in the same places."""
    actual, finite = actual.double(), truth.isfinite()
    if not torch.equal(actual[~finite], truth[~finite]):
        return float("nan")
    difference = (actual - truth)[finite].norm()
    return (difference / truth[finite].norm().clamp_min(torch.finfo(torch.float64).tiny)).item()


def as_json(device: str, rows: Sequence[Row]) -> dict[str, Any]:
    """What `fused-remat check --json` prints."""
    return {
        "fused_remat": fused_remat.__version__,
        "torch": torch.__version__,
        "device": device,
        "passed": all(row.passed is not False for row in rows),
        "rows": [vars(row) for row in rows],
    }
