"""The calls whose kernels are compiled: the implementers' own host code on tensors without storage.

A case is one call at a shape of the benchmarks. What its host code hands to `launch` is recorded, so that the tiles,
flags and specialisations compiled are those of a real run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_remat.triton import attention, heads, launch, mlp, norm, targets

ARCHITECTURES = (80, 90, 100)
BATCH, HEADS, LENGTH = 2, 16, 4096
ROWS, MODEL_WIDTHS = 8192, (768, 4096)


@dataclass(frozen=True)
class Case:
    """`variant` decides what the law allows; `call` runs the host code."""

    name: str
    variant: str
    call: Callable[[], None]


@dataclass(frozen=True)
class Launch:
    """One kernel as it would be started. `number` tells launches of the same kernel by one case apart."""

    case: Case
    kernel: Any
    number: int
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: dict[str, Any]

    @property
    def name(self) -> str:
        kernel = self.kernel.__name__.strip("_").removesuffix("_kernel")
        return f"{kernel} {self.case.name}" + (f" #{self.number}" if self.number > 1 else "")


def record(case: Case, arch: int) -> list[Launch]:
    """What the case launches on that architecture. Nothing is started."""
    launches: list[Launch] = []

    def keep(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        number = 1 + sum(known.kernel is kernel for known in launches)
        launches.append(Launch(case, kernel, number, grid, args, meta))

    with targets.pretending(arch), launch.replaced(keep):
        case.call()
    return launches


def cases() -> Iterator[Case]:
    """Every case, the widest used first."""
    for width in (64, 128, 256):
        for variant in ("plain", "causal", "bool mask", "float mask", "dropout", "softcap", "everything"):
            yield from _attention(variant, width)
    for width in (64, 128):
        yield from _attention("plain", width, torch.float32)  # products rounded to TF32
        yield from _attention("unaligned", width)
    for width in MODEL_WIDTHS:
        yield from _mlp(width)
    yield from _rows()


# Attention


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _mask(dtype: torch.dtype, heads: int, length: int) -> Tensor:
    return _empty(BATCH, heads, length, length, dtype=dtype)


@dataclass(frozen=True)
class _Attending:
    """What a variant adds to a plain call."""

    mask: Callable[[int], Tensor | None] = lambda length: None
    causal: bool = False
    dropout_p: float = 0.0
    padding: bool = False
    softcap: float = 0.0
    kv_heads: int = HEADS
    length: int = LENGTH
    gap: int = 0  # elements between the rows of operands

    def arguments(self) -> tuple[Any, ...]:
        """From attn_mask to scratch, in the order of the level-3 ops."""
        unlimited = 2**61
        key_mask = _empty(BATCH, 1, 1, self.length, dtype=torch.bool) if self.padding else None
        seed = _empty(1 if self.dropout_p else 0, dtype=torch.int64)
        high = 0 if self.causal else unlimited
        numbers = self.dropout_p, 0.125, self.softcap
        return self.mask(self.length), key_mask, seed, -unlimited, high, 0, *numbers, 0, HEADS, 0


_MASKS = {
    "plain": _Attending(),
    "causal": _Attending(causal=True),
    "bool mask": _Attending(mask=lambda n: _mask(torch.bool, 1, n)),
    "float mask": _Attending(mask=lambda n: _mask(torch.bfloat16, 1, n)),
    "dropout": _Attending(dropout_p=0.1),
    "softcap": _Attending(causal=True, softcap=50.0),
    # Rows that no tensor descriptor can describe.
    "unaligned": _Attending(gap=1),
    # Sizes that no tile divides, and no address that is known to be aligned.
    "everything": _Attending(
        mask=lambda n: _mask(torch.float32, HEADS, n), causal=True, dropout_p=0.1, padding=True, kv_heads=4, length=4091
    ),
}


def _attention(variant: str, width: int, dtype: torch.dtype = torch.bfloat16) -> Iterator[Case]:
    attending, half = _MASKS[variant], dtype.itemsize == 2
    length, given = attending.length, attending.arguments()

    def operand(heads: int) -> Tensor:
        """As a projection leaves it: [B, L, heads, E], seen as [B, heads, L, E]."""
        rows = _empty(BATCH, length, heads * width + attending.gap, dtype=dtype)[..., : heads * width]
        return rows.unflatten(-1, (heads, width)).transpose(1, 2)

    q, dout, out = (operand(HEADS) for _ in range(3))
    k, v = (operand(attending.kv_heads) for _ in range(2))
    lse, delta, correction = (_empty(BATCH, HEADS, length, dtype=torch.float32) for _ in range(3))
    dq, dk, dv = (_empty(*t.shape, dtype=torch.float32) for t in (q, k, v))
    everything = variant == "everything"
    dmask = _empty(*given[0].shape, dtype=torch.float32) if everything else None
    weights = _empty(BATCH, 1, length, length, dtype=torch.float32)

    def backward() -> None:
        known = (lse, correction, delta, dout, None, None, 1.0, dq, dk, dv, dmask, None)
        attention.attention_bwd(q, k, v, *given, *known)

    def delta_of(rebuild: bool) -> None:
        attention.attention_delta(q, k, v, *given, lse, dout, None, 1.0, rebuild, out, delta, correction)

    name = f"E={width} {variant}" if half else f"E={width} float32 {variant}"
    calls = [
        (name, lambda: attention.attention_fwd(q, k, v, *given, out, lse)),
        (f"{name}, out rebuilt", lambda: delta_of(rebuild=True)),
        (name, backward),
    ]
    if half:
        calls.append((f"{name}, out kept", lambda: delta_of(rebuild=False)))
    if half and variant in ("plain", "everything"):
        calls.append((name, lambda: attention.attention_weights(q, k, *given, lse, 1 / HEADS, weights)))
    yield from (Case(name, variant, call) for name, call in calls)


# The MLP


def _mlp(width: int) -> Iterator[Case]:
    hidden = 4 * width
    features = min(hidden, 2048)
    x, dy = _empty(ROWS, width), _empty(ROWS, width)
    w_up, w_gate, w_down = _empty(features, width), _empty(features, width), _empty(width, hidden)[:, :features]
    b_up, nothing = _empty(features), _empty(ROWS, 0)
    no_sums, sums = _empty(0, dtype=torch.float32), _empty(features, dtype=torch.float32)
    buffers = [_empty(ROWS, features) for _ in range(4)]

    def forward(activation: str, *, gated: bool, p: float, path: str | None = None) -> None:
        seed = _empty(1 if p else 0, dtype=torch.int64)
        given = (x, w_up, None, w_gate, None) if gated else (x, w_up, b_up, None, None)
        to = (nothing, nothing, buffers[0], buffers[1] if gated else nothing)
        mlp.mlp_fwd_chunk(*given, seed, activation, p, 0, 0, hidden, *to, path=path)

    def backward(activation: str, *, gated: bool, p: float, path: str | None = None) -> None:
        seed = _empty(1 if p else 0, dtype=torch.int64)
        given = (x, dy, w_up, w_down, None, w_gate, None) if gated else (x, dy, w_up, w_down, b_up, None, None)
        to = (*buffers, no_sums) if gated else (*buffers[:2], nothing, nothing, sums)
        mlp.mlp_bwd_chunk(*given, nothing, nothing, seed, activation, p, 0, 0, hidden, *to, no_sums, path=path)

    for variant, p in (("plain", 0.0), ("dropout", 0.1)):
        for name, activation, gated in (("gelu", "gelu", False), ("gated silu", "silu", True)):
            for call in (forward, backward):
                run = functools.partial(call, activation, gated=gated, p=p)
                yield Case(f"D={width} {name} {variant}", variant, run)
                if width == MODEL_WIDTHS[0]:  # one pass over what library products made: of any width
                    run = functools.partial(run, path="elementwise")
                    yield Case(f"D={width} {name} {variant}, products apart", variant, run)


def _rows() -> Iterator[Case]:
    """What works on rows: bias sums, norms, and norm and rotation of heads."""
    width, head = 4096, 128
    rows, out, weight, bias = _empty(ROWS, width), _empty(ROWS, width), _empty(width), _empty(width)
    wide, dweight, dbias = (_empty(*shape, dtype=torch.float32) for shape in ((ROWS, width), (width,), (width,)))
    yield Case(f"D={width}", "plain", lambda: mlp.column_sums(rows, dweight))
    for kind, shift in (("rms_norm", None), ("layer_norm", bias)):
        dshift = None if shift is None else dbias
        yield Case(
            f"D={width} {kind}",
            "plain",
            functools.partial(norm.normalize_rows, rows, kind, weight, shift, 1e-5, torch.bfloat16, out),
        )
        yield Case(
            f"D={width} {kind}",
            "plain",
            functools.partial(norm.normalize_rows_bwd, wide, rows, kind, weight, shift, 1e-5, wide, dweight, dshift),
        )
    q, dq = (_empty(BATCH, LENGTH, HEADS, head, dtype=t).transpose(1, 2) for t in (torch.bfloat16, torch.float32))
    cos, sin = _empty(1, LENGTH, head), _empty(1, LENGTH, head)
    q_norm, dq_norm = _empty(head), _empty(head, dtype=torch.float32)
    yield Case(f"E={head}", "plain", lambda: heads.transform_heads(q, q_norm, 1e-6, cos, sin, False, 0))
    yield Case(
        f"E={head}", "plain", lambda: heads.transform_heads_bwd(dq, q, q_norm, 1e-6, cos, sin, False, 0, dq_norm)
    )
