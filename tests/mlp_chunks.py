"""One tile of an MLP at level 3: operands, the two ops on any implementer, and the same by plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlp_cases as cases
import torch
from torch import Tensor

from fused_remat import reference
from fused_remat.activations import ACTIVATIONS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Named = dict[str, Tensor]
Ops = tuple[Callable[..., None], Callable[..., None]]  # forward and backward
GRADIENTS = ("hidden", "dup", "dgate", "db_up", "db_gate")
FLOORS = {torch.float64: 1e-14, torch.float32: 3e-7, torch.float16: 1e-4, torch.bfloat16: 1e-3}


@dataclass(frozen=True)
class Chunk:
    """A tile [rows, features] at (row0, feature0) of a layer with `hidden_features`."""

    rows: int = 129
    width: int = 17
    features: int = 63
    out: int = 17
    gated: bool = False
    bias: bool = True
    activation: str = "gelu"
    dropout_p: float = 0.0
    kept: tuple[int, int] = (0, 0)  # leading columns of up and of gate
    dtype: torch.dtype = torch.float32
    row0: int = 5
    feature0: int = 3
    hidden_features: int = 400
    seed: int = -7

    def but(self, **changes) -> Chunk:
        return replace(self, **changes)


def operands(chunk: Chunk) -> Named:
    made = cases.operands(
        chunk.rows, chunk.width, chunk.features, chunk.out, gated=chunk.gated, bias=chunk.bias, dtype=chunk.dtype,
        requires_grad=False,
    )  # fmt: skip
    made["dy"] = torch.randn(chunk.rows, chunk.out, dtype=torch.float64).to(chunk.dtype)
    return {name: value.to(DEVICE) for name, value in made.items()}


def _place(chunk: Chunk) -> tuple:
    seed = torch.tensor([chunk.seed] if chunk.dropout_p else [], dtype=torch.int64, device=DEVICE)
    return seed, chunk.activation, chunk.dropout_p, chunk.row0, chunk.feature0, chunk.hidden_features


def _unwritten(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def forward(op: Callable[..., None], chunk: Chunk, given: Named, **settings) -> Named:
    """hidden and the residuals up and gate."""
    rows, features, dtype = chunk.rows, chunk.features, chunk.dtype
    made = {
        "up": _unwritten(rows, chunk.kept[0], dtype=dtype),
        "gate": _unwritten(rows, chunk.kept[1], dtype=dtype),
        "hidden": _unwritten(rows, features, dtype=dtype),
    }
    weights = [given.get(name) for name in ("w_up", "b_up", "w_gate", "b_gate")]
    scratch = _unwritten(rows if chunk.gated else 0, features, dtype=dtype)
    op(given["x"], *weights, *_place(chunk), *made.values(), scratch, **settings)
    return made


def backward(
    op: Callable[..., None], chunk: Chunk, given: Named, residuals: Named, *, gradient: bool = True, sums: bool = True,
    **settings,
) -> Named:  # fmt: skip
    """hidden, dup, dgate, and the bias gradients, which are added to ones; without `gradient` hidden alone."""
    rows, features = chunk.rows, chunk.features
    has = {"hidden": True, "dup": gradient, "dgate": chunk.gated}
    made = {name: _unwritten(rows if there else 0, features, dtype=chunk.dtype) for name, there in has.items()}
    scratch = _unwritten(rows, features, dtype=chunk.dtype)
    wide = torch.promote_types(chunk.dtype, torch.float32)
    there = gradient and sums
    made |= {"db_up": torch.ones(features * there, dtype=wide, device=DEVICE)}
    made |= {"db_gate": torch.ones(features * (there and chunk.gated), dtype=wide, device=DEVICE)}
    weights = [given.get(name) for name in ("w_up", "w_down", "b_up", "w_gate", "b_gate")]
    buffers = [made[name] for name in ("hidden", "dup", "dgate")]
    op(
        given["x"], given["dy"], *weights, residuals["up"], residuals["gate"], *_place(chunk), *buffers, scratch,
        made["db_up"], made["db_gate"], **settings,
    )  # fmt: skip
    return {name: made[name] for name in GRADIENTS if made[name].numel() and (gradient or name == "hidden")}


def plain(chunk: Chunk, given: Named, dtype: torch.dtype) -> tuple[Named, Named]:
    """What forward and backward return, by autograd in `dtype`."""
    given = {name: value.detach().to(dtype) for name, value in given.items()}
    up = torch.nn.functional.linear(given["x"], given["w_up"], given.get("b_up")).requires_grad_()
    gate, act = None, ACTIVATIONS[chunk.activation]
    if chunk.gated:
        gate = torch.nn.functional.linear(given["x"], given["w_gate"], given.get("b_gate")).requires_grad_()
    hidden = act(up) if gate is None else act(gate) * up
    if chunk.dropout_p:
        scale = 1 / (1 - chunk.dropout_p)
        hidden = torch.where(mask(chunk), hidden * scale, 0.0)
    pre = [t for t in (up, gate) if t is not None]
    dup, *rest = torch.autograd.grad(hidden, pre, given["dy"] @ given["w_down"])
    made = {"hidden": hidden.detach(), "up": up.detach()[:, : chunk.kept[0]]}
    gradients = {"hidden": hidden.detach(), "dup": dup, "db_up": 1 + _sum(dup)}
    if chunk.gated:
        made["gate"] = gate.detach()[:, : chunk.kept[1]]
        gradients |= {"dgate": rest[0], "db_gate": 1 + _sum(rest[0])}
    return made, gradients


def mask(chunk: Chunk) -> Tensor:
    """Bool [rows, features], True = kept."""
    shape = (chunk.row0 + chunk.rows, chunk.hidden_features)
    whole = reference.dropout_mask(torch.tensor([chunk.seed], device=DEVICE), chunk.dropout_p, shape)
    return whole[chunk.row0 :, chunk.feature0 : chunk.feature0 + chunk.features]


def _sum(gradient: Tensor) -> Tensor:
    return gradient.sum(0, dtype=torch.promote_types(gradient.dtype, torch.float32))


def assert_as_exact_as_torch(actual: Named, stock: Named, truth: Named) -> None:
    """At most twice the error of the same dtype in torch, plus what a few operations round."""
    assert set(actual) <= set(truth)
    for name, made in actual.items():
        if made.numel() == 0:
            continue
        # A sum that cancels in one column is exact in torch by luck alone. It adds up numbers of the tile's dtype.
        floor = FLOORS[actual["hidden"].dtype] * (4 if name.startswith("db") else 1)
        allowed = 2 * cases.relative_error(stock[name], truth[name]) + floor
        assert cases.relative_error(made, truth[name]) <= allowed, name


def _triton() -> Ops:
    from fused_remat.triton import mlp

    return mlp.mlp_fwd_chunk, mlp.mlp_bwd_chunk


def check(chunk: Chunk, given: Named | None = None, *, ops: Ops | None = None, **settings) -> Named:
    """Forward and backward, on Triton unless said otherwise, against plain torch; returns the gradients."""
    forward_op, backward_op = ops or _triton()
    given = operands(chunk) if given is None else given
    (stock_made, stock), (true_made, truth) = plain(chunk, given, chunk.dtype), plain(chunk, given, torch.float64)
    made = forward(forward_op, chunk, given)
    assert_as_exact_as_torch({k: v for k, v in made.items() if v.numel()}, stock_made, true_made)
    gradients = backward(backward_op, chunk, given, made, **settings)
    assert_as_exact_as_torch(gradients, stock, truth)
    return gradients


def assert_same(first: Named, second: Named) -> None:
    """Bit for bit."""
    assert set(first) == set(second)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
