"""Narrow MLPs at level 3: the two ops of one kernel each, and the same by plain torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlp_cases as cases
import torch
from torch import Tensor

from fused_remat import reference

Named = dict[str, Tensor]
LAYER = ("w_up", "w_down", "b_up", "b_down", "w_gate", "b_gate")
GRADIENTS = ("x", *LAYER)
_GUARD = 64  # elements before and after a result that must not change


@dataclass(frozen=True)
class Narrow:
    rows: int = 17
    width: int = 16
    hidden: int = 16
    out: int = 16
    gated: bool = False
    bias: bool = True
    activation: str = "gelu"
    dropout_p: float = 0.0
    dtype: torch.dtype = torch.bfloat16
    workspace: int = 2**25
    seed: int = -7

    def but(self, **changes) -> Narrow:
        return replace(self, **changes)


def operands(case: Narrow) -> Named:
    made = cases.operands(
        case.rows, case.width, case.hidden, case.out, gated=case.gated, bias=case.bias, dtype=case.dtype,
        requires_grad=False,
    )  # fmt: skip
    return made | {"dy": torch.randn(case.rows, case.out, dtype=torch.float64).to(case.dtype)}


def guarded(like: Tensor, offset: int = 0) -> tuple[Tensor, Tensor]:
    """A result of that shape, dtype and order of strides full of NaN, and the storage around it, full of 7."""
    storage = torch.full((like.numel() + 2 * _GUARD + offset,), 7.0, dtype=like.dtype)
    inner = storage[_GUARD + offset : _GUARD + offset + like.numel()]
    strides = torch.empty_like(like).stride()
    result = inner.as_strided(like.shape, strides, inner.storage_offset()).fill_(float("nan"))
    return result, storage


def untouched(storage: Tensor, offset: int = 0) -> bool:
    return bool((storage[: _GUARD + offset] == 7).all() and (storage[-_GUARD:] == 7).all())


def _dropout(case: Narrow) -> tuple:
    seed = torch.tensor([case.seed] if case.dropout_p else [], dtype=torch.int64)
    return seed, case.activation, case.dropout_p


def run(case: Narrow, given: Named, *, wanted: tuple[str, ...] = GRADIENTS, offset: int = 0) -> Named:
    """y and the gradients that are wanted, by the names of their operands; nothing around them is written."""
    y, around_y = guarded(torch.empty(case.rows, case.out, dtype=case.dtype), offset)
    torch.ops.fused_remat.mlp_small_fwd_cuda(given["x"], *(given.get(n) for n in LAYER), *_dropout(case), y)
    results = {n: guarded(given[n], offset) for n in GRADIENTS if n in given and n in wanted}
    layer = (given.get(n) for n in LAYER if n != "b_down")
    torch.ops.fused_remat.mlp_small_bwd_cuda(
        given["dy"], given["x"], *layer, *_dropout(case), case.dtype, case.workspace,
        *(results[n][0] if n in results else None for n in GRADIENTS),
    )  # fmt: skip
    assert untouched(around_y, offset)
    for name, (_, storage) in results.items():
        assert untouched(storage, offset), name
    return {"y": y} | {name: result for name, (result, _) in results.items()}


def plain(case: Narrow, given: Named, dtype: torch.dtype) -> Named:
    """The same by autograd in `dtype`."""
    layer = {n: value.detach().to(dtype).requires_grad_() for n, value in given.items() if n != "dy"}
    seed, activation, p = _dropout(case)
    y = reference.mlp(**layer, activation=activation, dropout_p=p, seed=seed if p else None)
    gradients = torch.autograd.grad(y, list(layer.values()), given["dy"].to(dtype))
    return {"y": y.detach()} | dict(zip(layer, gradients, strict=True))


def assert_exact(actual: Named, stock: Named, truth: Named) -> None:
    """At most twice the error of the same dtype in torch, plus what a few operations round."""
    for name, made in actual.items():
        if made.numel():
            allowed = 2 * cases.relative_error(stock[name], truth[name]) + 1e-4
            assert cases.relative_error(made, truth[name]) <= allowed, name


def check(case: Narrow, given: Named | None = None, **settings) -> Named:
    given = operands(case) if given is None else given
    made = run(case, given, **settings)
    assert_exact(made, plain(case, given, case.dtype), plain(case, given, torch.float64))
    return made


def assert_same(first: Named, second: Named) -> None:
    """Bit for bit."""
    assert set(first) == set(second)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
