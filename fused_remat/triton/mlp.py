"""Level 3 of the MLP on Triton: the host side. Schemas: csrc/library.cpp; meaning: csrc/mlp.h.

Weights may be dense in either dim, x and dy may have any strides; hidden, dup, dgate and residuals have dense rows.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from fused_remat.triton import launch, mlp_configs, mlp_plan
from fused_remat.triton.configs import Config
from fused_remat.triton.dropout import drop_threshold
from fused_remat.triton.mlp_bwd import mlp_dact_kernel, mlp_dhidden_kernel, mlp_fused_kernel
from fused_remat.triton.mlp_fwd import mlp_act_kernel, mlp_fwd_kernel
from fused_remat.triton.sums import column_sums
from fused_remat.triton.targets import arch_of

# Rows of one partial sum of the elementwise backward.
SUM_ROWS = 128


class Layer(NamedTuple):
    """x [rows, D] and the parameters of a tile's hidden features."""

    x: Tensor
    w_up: Tensor  # [features, D]
    b_up: Tensor | None
    w_gate: Tensor | None
    b_gate: Tensor | None

    def features(self, start: int, stop: int) -> Layer:
        rest = (t if t is None else t[start:stop] for t in self[1:])
        return Layer(self.x, *rest)


class Buffers(NamedTuple):
    """[rows, features]; None where absent. `db_up`, `db_gate` [features] are added to."""

    hidden: Tensor
    dup: Tensor | None
    dgate: Tensor | None
    db_up: Tensor | None
    db_gate: Tensor | None

    def features(self, start: int, stop: int) -> Buffers:
        return Buffers(*(t if t is None else t[..., start:stop] for t in self))


class Pre(NamedTuple):
    """A pre-activation in memory [rows, features], and the bias that is not in it yet."""

    values: Tensor
    bias: Tensor | None


class Dropping(NamedTuple):
    """A tile's place in the mask, as kernels take it; `seed` is None without dropout."""

    seed: Tensor | None = None
    row0: int = 0
    feature0: int = 0
    hidden_features: int = 0
    threshold: int = 0
    scale_bits: int = 0

    def features(self, start: int) -> Dropping:
        return self._replace(feature0=self.feature0 + start)


@lru_cache(maxsize=64)
def _drop_numbers(p: float) -> tuple[int, int]:
    """The threshold of the mask, and the bits of the fp64 that scales what is kept."""
    return drop_threshold(p), struct.unpack("<q", struct.pack("<d", 1.0 / (1.0 - p)))[0]


def _dropping(seed: Tensor, p: float, row0: int, feature0: int, hidden_features: int) -> Dropping:
    return Dropping(seed, row0, feature0, hidden_features, *_drop_numbers(p)) if p > 0.0 else Dropping()


def _forward_path(layer: Layer) -> str:
    x = layer.x
    return mlp_configs.forward_path(x.dtype, arch_of(x), mlp_plan.aligned(x, layer.w_up, layer.w_gate))


def _backward_path(layer: Layer, dy: Tensor, w_down: Tensor) -> str:
    x = layer.x
    aligned = mlp_plan.aligned(x, layer.w_up, layer.w_gate, dy, w_down)
    return mlp_configs.backward_path(x.shape[1], dy.shape[1], x.dtype, arch_of(x), aligned)


def _rows_of(*matrices: Tensor | None) -> list:
    """Each matrix and its row stride."""
    return [arg for matrix in matrices for arg in (matrix, 0 if matrix is None else matrix.stride(0))]


def _multiply(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> Pre:
    """out <- x w^T + bias by the library; a bias of another dtype is left to the kernel that reads `out`."""
    if bias is not None and bias.dtype == out.dtype:
        torch.addmm(bias, x, w.t(), out=out)
        return Pre(out, None)
    torch.mm(x, w.t(), out=out)
    return Pre(out, bias)


def mlp_fwd_chunk(
    x: Tensor,
    w_up: Tensor,
    b_up: Tensor | None,
    w_gate: Tensor | None,
    b_gate: Tensor | None,
    seed: Tensor,
    activation: str,
    dropout_p: float,
    row0: int,
    feature0: int,
    hidden_features: int,
    up: Tensor,
    gate: Tensor,
    hidden: Tensor,
    scratch: Tensor,
    *,
    path: str | None = None,
) -> None:
    """Writes `hidden` and the residuals `up` and `gate`. `scratch` is used by the elementwise path of a gated layer."""
    if hidden.numel() == 0:
        return
    layer = Layer(x, w_up, b_up, w_gate, b_gate)
    dropping = _dropping(seed, dropout_p, row0, feature0, hidden_features)
    residuals = tuple(kept if kept.shape[1] > 0 else None for kept in (up, gate))
    if (path or _forward_path(layer)) == "fused":
        _fused_forward(layer, dropping, residuals, hidden, activation)
    else:
        _elementwise_forward(layer, dropping, (None, None), residuals, hidden, scratch, activation)


def _fused_forward(
    layer: Layer, dropping: Dropping, residuals: tuple[Tensor | None, ...], hidden: Tensor, activation: str
) -> None:
    operands = (layer.x, layer.w_up, layer.w_gate)
    op = "mlp_fwd" if layer.w_gate is None else "mlp_fwd_gated"
    plan = mlp_plan.gemm_plan(op, operands, (hidden, *residuals), dropping.seed is not None)
    kept = [arg for t in residuals for arg in (*_rows_of(t), 0 if t is None else t.shape[1])]
    launch.launch(
        mlp_fwd_kernel, plan.grid, *mlp_plan.operand_args(operands, plan), layer.b_up, layer.b_gate, *dropping, *kept,
        *_rows_of(hidden), *hidden.shape, layer.x.shape[1], ACTIVATION=activation, **plan.meta,
    )  # fmt: skip


def _elementwise_forward(
    layer: Layer,
    dropping: Dropping,
    kept: tuple[Tensor | None, Tensor | None],  # pre-activations of all features that need not be made
    residuals: tuple[Tensor | None, ...],
    hidden: Tensor,
    scratch: Tensor | None,
    activation: str,
) -> None:
    up = Pre(kept[0], None) if kept[0] is not None else _multiply(layer.x, layer.w_up, layer.b_up, hidden)
    gate = Pre(kept[1], None)
    if layer.w_gate is not None and kept[1] is None:
        if scratch is None or scratch.numel() == 0:
            scratch = torch.empty_like(hidden)
        gate = _multiply(layer.x, layer.w_gate, layer.b_gate, scratch)
    config = mlp_configs.elementwise(arch_of(hidden))
    stored = [arg for t in residuals for arg in (*_rows_of(t), 0 if t is None else t.shape[1])]
    launch.launch(
        mlp_act_kernel, _elementwise_grid(hidden, config.block_m, config), *_rows_of(up.values, gate.values),
        up.bias, gate.bias, *dropping, *stored, *_rows_of(hidden), *hidden.shape,
        ACTIVATION=activation, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        WIDE=_wide_rows(config.block_m, hidden, up.values, gate.values, *residuals), num_warps=config.num_warps,
    )  # fmt: skip


def _elementwise_grid(hidden: Tensor, rows: int, config: Config) -> tuple[int]:
    return (triton.cdiv(hidden.shape[0], rows) * triton.cdiv(hidden.shape[1], config.block_n),)


def _wide_rows(block_rows: int, *matrices: Tensor | None) -> bool:
    return mlp_plan.overflows(max(m.stride(0) * block_rows for m in matrices if m is not None))


def mlp_bwd_chunk(
    x: Tensor,
    dy: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None,
    w_gate: Tensor | None,
    b_gate: Tensor | None,
    up: Tensor,
    gate: Tensor,
    seed: Tensor,
    activation: str,
    dropout_p: float,
    row0: int,
    feature0: int,
    hidden_features: int,
    hidden: Tensor,
    dup: Tensor,
    dgate: Tensor,
    scratch: Tensor,
    db_up: Tensor,
    db_gate: Tensor,
    *,
    path: str | None = None,
) -> None:
    """Writes `hidden` and, unless `dup` has no elements, `dup` and `dgate`; adds to `db_up` and `db_gate`.

    `path` names one of `mlp_configs.backward_path`; `scratch` is not used.
    """
    if hidden.numel() == 0:
        return
    layer = Layer(x, w_up, b_up, w_gate, b_gate)
    dropping = _dropping(seed, dropout_p, row0, feature0, hidden_features)
    buffers = Buffers(hidden, *(t if t.numel() > 0 else None for t in (dup, dgate, db_up, db_gate)))
    features, kept = hidden.shape[1], (up, gate)
    bounds = sorted({0, features, *(t.shape[1] for t in kept)})
    for start, stop in pairwise(bounds):
        parts, w_down_part, place = (layer, buffers), w_down, dropping
        if stop - start < features:
            parts = (layer.features(start, stop), buffers.features(start, stop))
            w_down_part, place = w_down[:, start:stop], dropping.features(start)
        sources = tuple(t[:, start:stop] if t.shape[1] >= stop else None for t in kept)
        _backward_span(*parts, dy, w_down_part, place, sources, activation, path)


def _backward_span(
    layer: Layer,
    buffers: Buffers,
    dy: Tensor,
    w_down: Tensor,
    dropping: Dropping,
    kept: tuple[Tensor | None, Tensor | None],
    activation: str,
    path: str | None,
) -> None:
    """Features whose pre-activations are all kept or all to be rebuilt, `up` and `gate` each for itself."""
    nothing_kept = kept[0] is None and kept[1] is None
    path = path or _backward_path(layer, dy, w_down)
    if buffers.dup is None:
        if nothing_kept and path != "elementwise":
            _fused_forward(layer, dropping, (None, None), buffers.hidden, activation)
        else:
            _elementwise_forward(layer, dropping, kept, (None, None), buffers.hidden, buffers.dgate, activation)
        return
    if nothing_kept and path == "fused":
        _fused_backward(layer, buffers, dy, w_down, dropping, activation)
        return
    up = Pre(kept[0], None) if kept[0] is not None else _multiply(layer.x, layer.w_up, layer.b_up, buffers.dup)
    gate = Pre(kept[1], None)
    if layer.w_gate is not None and kept[1] is None:
        gate = _multiply(layer.x, layer.w_gate, layer.b_gate, buffers.dgate)
    if path == "elementwise":
        torch.mm(dy, w_down, out=buffers.hidden)
        _elementwise_backward(up, gate, buffers, dropping, activation)
    else:
        _epilogue_backward(up, gate, buffers, dy, w_down, dropping, activation)


class Partials:
    """Sums of dup and dgate over row blocks, where wanted; `finish` adds them up and to the result."""

    def __init__(self, buffers: Buffers, blocks: int) -> None:
        self.targets = (buffers.db_up, buffers.db_gate)
        self.args = [None if t is None else t.new_empty((blocks, t.shape[0])) for t in self.targets]

    def finish(self) -> None:
        for partial, target in zip(self.args, self.targets, strict=True):
            if target is not None:
                column_sums(partial, target)


def _fused_backward(
    layer: Layer, buffers: Buffers, dy: Tensor, w_down: Tensor, dropping: Dropping, activation: str
) -> None:
    operands = (layer.x, layer.w_up, layer.w_gate, dy, w_down.t())
    outputs = (buffers.hidden, buffers.dup, buffers.dgate)
    op = "mlp_dual" if layer.w_gate is None else "mlp_triple"
    plan = mlp_plan.gemm_plan(op, operands, outputs, dropping.seed is not None)
    partials = Partials(buffers, plan.blocks_m)
    launch.launch(
        mlp_fused_kernel, plan.grid, *mlp_plan.operand_args(operands, plan), layer.b_up, layer.b_gate, *dropping,
        *_rows_of(*outputs), *partials.args, *buffers.hidden.shape, layer.x.shape[1], dy.shape[1],
        ACTIVATION=activation, **plan.meta,
    )  # fmt: skip
    partials.finish()


def _epilogue_backward(
    up: Pre, gate: Pre, buffers: Buffers, dy: Tensor, w_down: Tensor, dropping: Dropping, activation: str
) -> None:
    operands = (dy, w_down.t())
    outputs = (buffers.hidden, buffers.dup, buffers.dgate)
    op = "mlp_dhidden" if gate.values is None else "mlp_dhidden_gated"
    plan = mlp_plan.gemm_plan(op, operands, (*outputs, up.values, gate.values), dropping.seed is not None)
    partials = Partials(buffers, plan.blocks_m)
    launch.launch(
        mlp_dhidden_kernel, plan.grid, *mlp_plan.operand_args(operands, plan), *_rows_of(up.values, gate.values),
        up.bias, gate.bias, *dropping, *_rows_of(*outputs), *partials.args, *buffers.hidden.shape, dy.shape[1],
        ACTIVATION=activation, **plan.meta,
    )  # fmt: skip
    partials.finish()


def _elementwise_backward(up: Pre, gate: Pre, buffers: Buffers, dropping: Dropping, activation: str) -> None:
    config = mlp_configs.elementwise(arch_of(buffers.hidden))
    outputs = (buffers.hidden, buffers.dup, buffers.dgate)
    partials = Partials(buffers, triton.cdiv(buffers.hidden.shape[0], SUM_ROWS))
    launch.launch(
        mlp_dact_kernel, _elementwise_grid(buffers.hidden, SUM_ROWS, config), *_rows_of(up.values, gate.values),
        up.bias, gate.bias, *dropping, *_rows_of(*outputs), *partials.args, *buffers.hidden.shape,
        ACTIVATION=activation, SUM_ROWS=SUM_ROWS, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        WIDE=_wide_rows(config.block_m, *outputs, up.values, gate.values), num_warps=config.num_warps,
    )  # fmt: skip
    partials.finish()
