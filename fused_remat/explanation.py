"""`explain`: what a call would do here, before it is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fused_remat import dispatch, functional
from fused_remat.functional.attention import prepare_attention
from fused_remat.functional.mlp import prepare_mlp
from fused_remat.functional.multi_head_attention import prepare_multi_head_attention
from fused_remat.functional.operands import Prepared

_MIB = 2**20


@dataclass(frozen=True)
class Tiles:
    """How a pass cuts [M, F]: `axis` ("tokens" or "features") is the outer loop; a tile is [rows, features]."""

    axis: str
    rows: int
    features: int
    nbytes: int  # of the workspace that a tile needs
    excess: int  # bytes by which even the smallest tile exceeds the budget; 0 where it fits

    def __str__(self) -> str:
        return f"{self.axis} chunks, tiles of {self.rows} rows x {self.features} features, {_bytes(self)}"


@dataclass(frozen=True)
class Groups:
    """How a pass cuts the heads: `kv_heads` key-value heads (with their query heads) at a time, `rows` token rows."""

    kv_heads: int
    rows: int
    nbytes: int  # of the workspace that a group needs
    excess: int  # bytes by which even the smallest group exceeds the budget; 0 where it fits

    def __str__(self) -> str:
        return f"groups of {self.kv_heads} key-value heads, {self.rows} token rows at a time, {_bytes(self)}"


@dataclass(frozen=True)
class Scores:
    """The attention core holds scores in tiles; nothing of size [Lq, Lk] exists."""

    def __str__(self) -> str:
        return "scores in tiles"


Plan = Tiles | Groups | Scores


@dataclass(frozen=True)
class Explanation:
    """The backend that runs a call, every other backend's reasons, and the plan (None on the reference path)."""

    op: str
    backend: str
    reasons: dict[str, list[str]]
    workspace: int
    forward: Plan | None
    backward: Plan | None

    def __str__(self) -> str:
        lines = [f"{self.op} runs on {self.backend!r} with a workspace of {self.workspace / _MIB:.2f} MiB"]
        for name, plan in (("forward", self.forward), ("backward", self.backward)):
            lines.append(f"  {name}: {plan or 'not streamed, every activation is materialised'}")
        lines += [f"  not {name!r}: {'; '.join(reasons)}" for name, reasons in self.reasons.items() if reasons]
        return "\n".join(lines)


def explain(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Which backend `call(*args, **kwargs)` would run on, why not the others, and how it would be cut.

    `call` is `fused_remat.mlp`, `fused_remat.attention` or `fused_remat.multi_head_attention`. Computes nothing.

    Raises:
        TypeError: `call` is none of these.
        Whatever the call itself would raise.
    """
    if call not in _PREPARE:
        raise TypeError(f"call must be one of fused_remat.{', '.join(f.__name__ for f in _PREPARE)}, got {call!r}")
    bound = inspect.signature(call).bind(*args, **kwargs)
    bound.apply_defaults()
    prepare, plan = _PREPARE[call]
    accepted = inspect.signature(prepare).parameters
    prepared = prepare(**{name: value for name, value in bound.arguments.items() if name in accepted})
    backend = dispatch.resolve(prepared.call)
    reasons = {name: dispatch.why_not(name, prepared.call) for name in dispatch.BACKENDS}
    workspace = prepared.arguments[-1]
    plans = (None, None) if backend == "reference" else plan(prepared, backend, workspace)
    return Explanation(prepared.call.op, backend, reasons, workspace, *plans)


def _bytes(plan: Tiles | Groups) -> str:
    over = f", {plan.excess} bytes over the budget" if plan.excess else ""
    return f"{plan.nbytes / _MIB:.2f} MiB{over}"


# Positions among the arguments of `mlp`: the factors a and b of three adapters, their scales, then the norm's name.
_MLP_FACTORS, _MLP_SETTINGS = 9, 18


def _mlp_plans(prepared: Prepared, backend: str, workspace: int) -> tuple[Tiles, Tiles]:
    x, w_up, w_down, _, _, w_gate, *_ = prepared.arguments
    norm, _eps, _activation, p, *_ = prepared.arguments[_MLP_SETTINGS:]
    factors_a = prepared.arguments[_MLP_FACTORS : _MLP_FACTORS + 6 : 2]
    ranks = [0 if a is None else a.shape[0] for a in factors_a]

    def tiles(backward: bool) -> Tiles:
        by_features, rows, features, nbytes = torch.ops.fused_remat.mlp_plan(
            x.shape[:-1].numel(), w_up.shape[1], w_down.shape[0], w_up.shape[0], w_gate is not None, backward, p > 0,
            x.dtype, w_up.dtype, prepared.call.dtype, workspace, backend, prepared.call.device, bool(norm),
            ranks,
        )  # fmt: skip
        return Tiles("features" if by_features else "tokens", rows, features, nbytes, max(0, nbytes - workspace))

    return tiles(backward=False), tiles(backward=True)


def _head_plans(prepared: Prepared, backend: str, workspace: int) -> tuple[Groups, Groups]:
    kv_heads, rows, nbytes = torch.ops.fused_remat.multi_head_attention_plan(
        *prepared.arguments, backend, prepared.call.dtype
    )
    groups = Groups(kv_heads, rows, nbytes, max(0, nbytes - workspace))
    return groups, groups  # one plan: both passes make the same products


def _score_plans(prepared: Prepared, backend: str, workspace: int) -> tuple[Scores, Scores]:
    return Scores(), Scores()


_PREPARE = {
    functional.mlp: (prepare_mlp, _mlp_plans),
    functional.attention: (prepare_attention, _score_plans),
    functional.multi_head_attention: (prepare_multi_head_attention, _head_plans),
}
