"""Which kernels run attention on the CUDA C++ backend, asked by facts of `csrc/cuda/attention_routes.cpp`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fused_remat import ops

# By which flash sizes its buffers; a device is not asked for it, which would create a context.
_MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Question:
    """A call, or the group of heads of one. `scratch` is what its kernels may allocate, in bytes."""

    dtype: torch.dtype
    sizes: tuple[int, ...]  # B, H, Hk, Lq, Lk, E, Ev
    backward: bool = False
    masks: bool = False
    causal: int = 0  # 1 top left, 2 bottom right
    window: tuple[int, int] = (-1, -1)
    extra_keys: int = 0
    dropout_p: float = 0.0
    softcap: float = 0.0
    aligned: bool = True
    knows_out: bool = True
    dweights: bool = False
    dmasks: bool = False
    scratch: int = 32 * 2**20


def why_unknown() -> str | None:
    """Why the table cannot be asked; None if it can."""
    unavailable = ops.ready()
    if unavailable is not None:
        return f"the compiled extension is not available: {unavailable}"
    if not hasattr(torch.ops.fused_remat, "attention_routes"):
        return "no library of CUDA C++ kernels is loaded"
    return None


def table(question: Question, arch: int) -> dict[str, list[str]]:
    """The kernels in order of preference, each with the reasons against it, on that compute capability (times ten).

    The first without a reason runs. Creates no CUDA context.
    """
    q = question
    cudnn = torch.backends.cudnn.version() or 0
    texts = torch.ops.fused_remat.attention_routes(
        q.backward, q.dtype, q.sizes, q.masks, q.causal, *q.window, q.extra_keys, q.dropout_p, q.softcap, q.aligned,
        q.knows_out, q.dweights, q.dmasks, q.scratch, arch, _MULTIPROCESSORS, cudnn,
    )  # fmt: skip
    split = (text.partition(": ") for text in texts)
    return {name: reasons.split("; ") if reasons else [] for name, _, reasons in split}


def chosen(rows: dict[str, list[str]]) -> str:
    """The kernels that run, by the rows of `table`."""
    return next(name for name, reasons in rows.items() if not reasons)


_PLAIN = Question(torch.bfloat16, (8, 16, 16, 2048, 2048, 64, 64))
# What the doctor asks about.
TYPICAL = {
    "bf16": {},
    "bf16, causal": {"causal": 1},
    "bf16, grouped heads of 128": {"sizes": (8, 32, 8, 2048, 2048, 128, 128), "causal": 1},
    "bf16, many short samples": {"sizes": (64, 12, 12, 197, 197, 64, 64)},
    "bf16, mask": {"masks": True},
    "bf16, dropout": {"dropout_p": 0.1},
    "fp32": {"dtype": torch.float32},
}


def typical(arch: int) -> dict[str, dict[str, list[str]]]:
    """The tables of some usual calls, forward and backward."""
    return {
        f"{name}, {pass_}": table(_asked(**changes, backward=pass_ == "backward"), arch)
        for name, changes in TYPICAL.items()
        for pass_ in ("forward", "backward")
    }


def _asked(**changes) -> Question:
    return Question(**{**vars(_PLAIN), **changes})
