"""`explain`: what a call would do here, before it is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fused_remat import attention_routes, dispatch, functional, mlp_routes
from fused_remat.functional.attention import prepare_attention
from fused_remat.functional.mlp import prepare_mlp
from fused_remat.functional.multi_head_attention import prepare_multi_head_attention
from fused_remat.functional.operands import Prepared

_MIB = 2**20
_SCRATCH_SHARE = 8  # of the workspace what attention kernels may allocate (csrc/stream/heads.cpp)


@dataclass(frozen=True)
class Tiles:
    """How a pass cuts [M, F]: `axis` ("tokens" or "features") is the outer loop; a tile is [rows, features].

    `kernels` names the way that a backward on "cuda" makes a tile's gradients (stage 1), `why_not` the reasons against
    those that it prefers.
    """

    axis: str
    rows: int
    features: int
    nbytes: int  # of the workspace that a tile needs
    excess: int  # bytes by which even the smallest tile exceeds the budget; 0 where it fits
    kernels: str | None = None
    why_not: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        cut = f"{self.axis} chunks, tiles of {self.rows} rows x {self.features} features, {_bytes(self)}"
        return cut if self.kernels is None else f"{cut}; stage 1 by {_kernels(self)}"


@dataclass(frozen=True)
class OneKernel:
    """A narrow MLP whose pass is one kernel. Backward sums gradients of parameters over `rows` token rows at a time."""

    rows: int
    nbytes: int  # of the workspace that the partial sums need

    def __str__(self) -> str:
        return f"one kernel, hidden values stay on the chip, {self.nbytes / _MIB:.2f} MiB"


@dataclass(frozen=True)
class Groups:
    """How a pass cuts the heads: `kv_heads` key-value heads (with their query heads) at a time, `rows` token rows.

    `kernels` and `why_not` are those of its attention, as `Scores` has them.
    """

    kv_heads: int
    rows: int
    nbytes: int  # of the workspace that a group needs
    excess: int  # bytes by which even the smallest group exceeds the budget; 0 where it fits
    kernels: str | None = None
    why_not: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        cut = f"groups of {self.kv_heads} key-value heads, {self.rows} token rows at a time, {_bytes(self)}"
        return cut if self.kernels is None else f"{cut}; scores by {_kernels(self)}"


@dataclass(frozen=True)
class Scores:
    """The attention core holds scores in tiles; nothing of size [Lq, Lk] exists.

    `kernels` names those that the backend "cuda" chooses, and `why_not` the reasons against the ones that it prefers.
    """

    kernels: str | None = None
    why_not: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        return "scores in tiles" if self.kernels is None else f"scores in tiles by {_kernels(self)}"


Plan = Tiles | OneKernel | Groups | Scores


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


def _kernels(plan: Tiles | Groups | Scores) -> str:
    others = "".join(f"; not {name}: {' and '.join(why)}" for name, why in plan.why_not.items())
    return f"{plan.kernels!r} kernels{others}"


def _chosen(rows: dict[str, list[str]]) -> tuple[str, dict[str, list[str]]]:
    """`kernels` and `why_not` of a plan, by rows in order of preference with the reasons against each."""
    kernels = attention_routes.chosen(rows)
    return kernels, {name: rows[name] for name in list(rows)[: list(rows).index(kernels)]}


def _bytes(plan: Tiles | Groups) -> str:
    over = f", {plan.excess} bytes over the budget" if plan.excess else ""
    return f"{plan.nbytes / _MIB:.2f} MiB{over}"


# Positions among the arguments of `mlp`: the factors a and b of three adapters, their scales, then the norm's name.
_MLP_FACTORS, _MLP_SETTINGS = 9, 18


# What `mlp_plan` calls the axis of its tiles where there are none.
_ONE_KERNEL = 2


def _mlp_plans(prepared: Prepared, backend: str, workspace: int) -> tuple[Tiles | OneKernel, Tiles | OneKernel]:
    x, w_up, w_down, _, _, w_gate, *_ = prepared.arguments
    norm, _eps, activation, p, keep_up, keep_gate, *_ = prepared.arguments[_MLP_SETTINGS:]
    factors_a = prepared.arguments[_MLP_FACTORS : _MLP_FACTORS + 6 : 2]
    ranks = [0 if a is None else a.shape[0] for a in factors_a]

    def tiles(backward: bool) -> Tiles | OneKernel:
        axis, rows, features, nbytes = torch.ops.fused_remat.mlp_plan(
            x.shape[:-1].numel(), w_up.shape[1], w_down.shape[0], w_up.shape[0], w_gate is not None, backward, p > 0,
            x.dtype, w_up.dtype, prepared.call.dtype, workspace, backend, prepared.call.device, bool(norm),
            ranks, activation, keep_up + keep_gate,
        )  # fmt: skip
        if axis == _ONE_KERNEL:
            return OneKernel(rows, nbytes)
        stage1 = _chosen(mlp_routes.stage1(prepared.call, features)) if backward and backend == "cuda" else ()
        return Tiles(
            "features" if axis else "tokens", rows, features, nbytes, max(0, nbytes - workspace), *stage1
        )  # fmt: skip

    return tiles(backward=False), tiles(backward=True)


def _head_plans(prepared: Prepared, backend: str, workspace: int) -> tuple[Groups, Groups]:
    kv_heads, rows, nbytes = torch.ops.fused_remat.multi_head_attention_plan(
        *prepared.arguments, backend, prepared.call.dtype
    )
    excess = max(0, nbytes - workspace)
    if not _tells_kernels(prepared, backend):
        groups = Groups(kv_heads, rows, nbytes, excess)
        return groups, groups  # one plan: both passes make the same products
    question = _group_question(prepared, kv_heads, workspace)
    forward, backward = (
        Groups(kv_heads, rows, nbytes, excess, *_chosen(attention_routes.table(asked, prepared.call.arch)))
        for asked in (replace(question, dweights=False, dmasks=False), replace(question, backward=True))
    )
    return forward, backward


# Positions among the arguments of `multi_head_attention`.
_MHA_OUT, _MHA_BIAS_K, _MHA_MASK, _MHA_SETTINGS = 9, 11, 19, 29


def _group_question(prepared: Prepared, kv_heads: int, workspace: int) -> attention_routes.Question:
    """What attention of a group of heads is asked, in a backward that every operand's gradient is wanted of."""
    arguments = prepared.arguments
    query, key, _, w_q, w_k, *_ = arguments
    w_out, _, bias_k = arguments[_MHA_OUT : _MHA_BIAS_K + 1]
    masks = [t for t in arguments[_MHA_MASK : _MHA_MASK + 2] if t is not None]
    heads, all_kv_heads, zero_attn, *_, causal, left, right, p, _scale, softcap, weights = arguments[
        _MHA_SETTINGS : _MHA_SETTINGS + 14
    ]
    value_width = w_out.shape[1] // heads
    if w_q.dim() == 3:  # [H, E, D]
        width = w_q.shape[1]
    elif w_k is not None:
        width = w_q.shape[0] // heads
    else:  # rows of q, k and v
        width = (w_q.shape[0] - all_kv_heads * value_width) // (heads + all_kv_heads)
    extra = (bias_k is not None) + zero_attn
    length_k = (query if key is None else key).shape[1] + extra
    dtype = prepared.call.dtype
    return attention_routes.Question(
        dtype,
        (query.shape[0], kv_heads * (heads // all_kv_heads), kv_heads, query.shape[1], length_k, width, value_width),
        masks=bool(masks), causal=causal, window=(left, right), extra_keys=extra, dropout_p=p, softcap=softcap,
        # A group's heads lie side by side in rows of the workspace.
        aligned=all(size * dtype.itemsize % 16 == 0 for size in (width, value_width)),
        knows_out=not weights, dweights=bool(weights), dmasks=any(t.requires_grad for t in masks),
        scratch=workspace // _SCRATCH_SHARE,
    )  # fmt: skip


def _score_plans(prepared: Prepared, backend: str, workspace: int) -> tuple[Scores, Scores]:
    if not _tells_kernels(prepared, backend):
        return Scores(), Scores()
    return _scores_by(prepared, workspace, backward=False), _scores_by(prepared, workspace, backward=True)


def _tells_kernels(prepared: Prepared, backend: str) -> bool:
    return backend == "cuda" and attention_routes.why_unknown() is None and prepared.call.arch is not None


def _scores_by(prepared: Prepared, workspace: int, *, backward: bool) -> Scores:
    q, k, v, mask, key_mask, causal, left, right, p, _scale, softcap, _workspace = prepared.arguments
    rows = attention_routes.table(
        attention_routes.Question(
            prepared.call.dtype, (*q.shape[:2], k.shape[1], q.shape[2], *k.shape[2:], v.shape[3]), backward=backward,
            masks=mask is not None or key_mask is not None, causal=causal, window=(left, right), dropout_p=p,
            softcap=softcap, aligned=all(map(_is_aligned, (q, k, v))),
            dmasks=backward and any(t is not None and t.requires_grad for t in (mask, key_mask)),
            scratch=workspace // _SCRATCH_SHARE,
        ),
        prepared.call.arch,
    )  # fmt: skip
    return Scores(*_chosen(rows))


def _is_aligned(heads: torch.Tensor) -> bool:
    """Whether rows and heads begin on 16 bytes, where the allocator aligns what it hands out."""
    if heads.stride(3) != 1 and heads.shape[3] > 1:
        return True  # it will be copied
    steps = [heads.stride(dim) for dim in range(3) if heads.shape[dim] > 1]
    return all(step * heads.element_size() % 16 == 0 for step in (*steps, heads.storage_offset()))


_PREPARE = {
    functional.mlp: (prepare_mlp, _mlp_plans),
    functional.attention: (prepare_attention, _score_plans),
    functional.multi_head_attention: (prepare_multi_head_attention, _head_plans),
}
