"""`mlp`: argument checks, then one op call (or the reference path where no compiled op can be right)."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_remat import budget, dispatch, reference
from fused_remat._triton import arch_of
from fused_remat.functional.operands import (
    Operands,
    Prepared,
    check_dtypes,
    check_seed_is_drawn_once,
    check_tensors,
    why_reference_only,
)
from fused_remat.settings import (
    Keep,
    LowRank,
    Norm,
    check_activation,
    check_dropout,
    check_keep,
    check_low_rank,
    check_norm,
)

ADAPTERS = ("up_adapter", "gate_adapter", "down_adapter")


def mlp(
    x: Tensor,  # [..., D]
    w_up: Tensor,  # [F, D]
    w_down: Tensor,  # [D_out, F]
    b_up: Tensor | None = None,  # [F]
    b_down: Tensor | None = None,  # [D_out]
    *,
    w_gate: Tensor | None = None,  # [F, D]
    b_gate: Tensor | None = None,  # [F]
    up_adapter: LowRank | None = None,
    gate_adapter: LowRank | None = None,
    down_adapter: LowRank | None = None,
    norm: Norm | None = None,
    activation: str = "gelu",
    dropout_p: float = 0.0,
    training: bool = True,
    keep: Keep = (),
    workspace: int | None = None,
) -> Tensor:
    """Two-layer or gated MLP whose hidden activations are rebuilt inside backward, chunk by chunk.

    `n = norm(x)`; `up = n w_up^T + b_up`; plain `hidden = act(up)`, gated (`w_gate`) `hidden = act(gate) * up`;
    dropout on `hidden`; `y = hidden w_down^T + b_down`. Backward needs x and the weights, plus what `keep` names;
    neither pass ever holds a whole [M, F] tensor that was not kept (`M` = token rows).

    Args:
        x, w_up, w_down, b_up, b_down, w_gate, b_gate: shapes above, weights as `nn.Linear` stores them. One device and
            one dtype (float64, float32, bfloat16, float16; others run on the reference path); under autocast the
            dtypes may differ.
        up_adapter, gate_adapter, down_adapter: a `fused_remat.LowRank` that its weight carries. Of a frozen weight
            backward makes the narrow products of its adapter alone; what adapters take in is rebuilt, not kept.
        norm: a `fused_remat.Norm` applied to x first; its result is not kept.
        activation: a name of `fused_remat.activations.ACTIVATIONS`.
        dropout_p: probability in [0, 1) of zeroing a hidden element, only if `training`. The mask is Philox4x32-10 of
            one seed drawn from torch's generator (Salmon et al., SC 2011).
        keep: residuals that backward need not rebuild: `()`, `("up",)`, `("up", "gate")` (gated), or a float in [0, 1]:
            that fraction of the hidden features.
        workspace: bytes of scratch, see `fused_remat.workspace`.

    Returns:
        y [..., D_out] in x's dtype, or autocast's.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong rank, shape, device, name, probability or budget.
        RuntimeError: a named backend (`fused_remat.backend`) cannot run this call.
    """
    return prepare_mlp(
        x, w_up, w_down, b_up, b_down, w_gate=w_gate, b_gate=b_gate, up_adapter=up_adapter, gate_adapter=gate_adapter,
        down_adapter=down_adapter, norm=norm, activation=activation, dropout_p=dropout_p, training=training, keep=keep,
        workspace=workspace,
    ).run()  # fmt: skip


def prepare_mlp(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    *,
    w_gate: Tensor | None,
    b_gate: Tensor | None,
    up_adapter: LowRank | None,
    gate_adapter: LowRank | None,
    down_adapter: LowRank | None,
    norm: Norm | None,
    activation: str,
    dropout_p: float,
    training: bool,
    keep: Keep,
    workspace: int | None,
) -> Prepared:
    """Refuse what cannot be meant, before anything is computed; arguments as `mlp`."""
    check_norm(norm)
    adapters = dict(zip(ADAPTERS, (up_adapter, gate_adapter, down_adapter), strict=True))
    factors = _factors(adapters)
    operands = {
        "x": x, "w_up": w_up, "w_down": w_down, "b_up": b_up, "b_down": b_down, "w_gate": w_gate, "b_gate": b_gate,
        "norm.weight": norm.weight if norm else None, "norm.bias": norm.bias if norm else None, **factors,
    }  # fmt: skip
    check_tensors(operands, required=("x", "w_up", "w_down"))
    if b_gate is not None and w_gate is None:
        raise ValueError("b_gate was given without w_gate; pass both for a gated MLP, neither for a plain one")
    if gate_adapter is not None and w_gate is None:
        raise ValueError("gate_adapter was given without w_gate; pass w_gate for a gated MLP, or up_adapter")
    check_activation(activation)
    p = check_dropout(dropout_p, name="dropout_p") * bool(training)
    check_seed_is_drawn_once(p)
    check_keep(keep, gated=w_gate is not None)
    _check_shapes(operands)
    kept = kept_features(keep, w_up.shape[0], gated=w_gate is not None)
    call = _call(operands, factors, activation=activation, norm=norm, p=p, keeps=any(kept))

    def on_reference() -> Tensor:
        return reference.mlp(
            x, w_up, w_down, b_up, b_down, w_gate=w_gate, b_gate=b_gate, **adapters, norm=norm, activation=activation,
            dropout_p=p,
        )  # fmt: skip

    arguments = (
        *operands.values(), *(float(adapter.scale) if adapter else 1.0 for adapter in adapters.values()),
        norm.kind if norm else "", norm.eps if norm else 0.0, activation, p,
        *kept, budget.resolve(workspace, x.device.type),
    )  # fmt: skip
    return Prepared(call, arguments, on_reference)


def _call(
    operands: Operands, factors: Operands, *, activation: str, norm: Norm | None, p: float, keeps: bool
) -> dispatch.Call:
    x, w_up, w_down = operands["x"], operands["w_up"], operands["w_down"]
    dtype = check_dtypes(operands, factors=factors)
    reference_only = why_reference_only(operands, dropout_p=p, keeps_features=keeps)
    against = {} if reference_only else _against_cuda_kernels(operands, dtype, norm=norm, keeps=keeps, p=p)
    return dispatch.Call(
        op="mlp",
        device=x.device.type,
        arch=arch_of(x.device),
        dtype=dtype,
        activation=activation,
        features=(w_up.shape[1], w_down.shape[0], w_up.shape[0]),
        reference_only=reference_only,
        **against,
    )


def _against_cuda_kernels(
    operands: Operands, dtype: torch.dtype, *, norm: Norm | None, keeps: bool, p: float
) -> dict[str, str | None]:
    """What speaks against kernels of the backend "cuda" beside widths, dtype and activation: fields of a Call."""
    w_down, rank = operands["w_down"], _rank(operands, "down_adapter")
    # Copied into the workspace, w_down has rows as a GEMM wants them.
    in_place = rank is None and w_down.dtype == dtype
    kept = (keeps, "pre-activations are kept")
    return {
        "against_one_kernel": _first(
            kept,
            (norm is not None, "a norm is folded in"),
            (any(_rank(operands, name) is not None for name in ADAPTERS), "a weight has an adapter"),
        ),
        "against_library": _first(
            (operands["w_gate"] is not None, "the layer is gated"),
            (p > 0, "hidden values are dropped"),
            kept,
            (operands["b_up"] is not None and operands["b_up"].dtype != dtype, "the operands have different dtypes"),
        ),
        "against_gemm": _first(
            (in_place and w_down.stride(1) != 1, "rows of dy or w_down are not dense"),
            (in_place and w_down.stride(0) % 8 != 0, "rows of an input do not start at 16 bytes"),
            (rank is not None and rank % 8 != 0, "the output width is no multiple of 8"),
        ),
    }


def _first(*facts: tuple[bool, str]) -> str | None:
    for holds, reason in facts:
        if holds:
            return reason
    return None


def _rank(operands: Operands, adapter: str) -> int | None:
    a = operands[f"{adapter}.a"]
    return None if a is None else a.shape[0]


def _factors(adapters: dict[str, LowRank | None]) -> Operands:
    """The factors by the names that messages use, None where there is no adapter."""
    factors: Operands = {}
    for name, adapter in adapters.items():
        check_low_rank(name, adapter)
        factors[f"{name}.a"] = adapter.a if adapter else None
        factors[f"{name}.b"] = adapter.b if adapter else None
    return factors


def kept_features(keep: Keep, hidden_features: int, *, gated: bool) -> tuple[int, int]:
    """Leading hidden features whose up and gate are kept."""
    if isinstance(keep, (int, float)):
        kept = round(keep * hidden_features)
        return kept, kept if gated else 0
    return (hidden_features if "up" in keep else 0), (hidden_features if "gate" in keep else 0)


def _check_shapes(operands: Operands) -> None:
    x, w_up, w_down = operands["x"], operands["w_up"], operands["w_down"]
    if x.dim() < 1:
        raise ValueError("x must be [..., D] with at least 1 dim, got a 0-dim tensor; add the feature dim")
    for name, weight in (("w_up", w_up), ("w_down", w_down)):
        if weight.dim() != 2:
            raise ValueError(f"{name} must be [out, in] with 2 dims as nn.Linear stores it, got {weight.dim()} dims")
    features, d_in = w_up.shape
    d_out = w_down.shape[0]
    if x.shape[-1] != d_in:
        raise ValueError(
            f"x has {x.shape[-1]} features in its last dim, but w_up is [F={features}, D={d_in}] and takes {d_in}"
        )
    expected = {
        "w_down": (d_out, features), "w_gate": (features, d_in), "b_up": (features,), "b_gate": (features,),
        "b_down": (d_out,), "norm.weight": (d_in,), "norm.bias": (d_in,),
    }  # fmt: skip
    for name, shape in expected.items():
        operand = operands[name]
        if operand is not None and tuple(operand.shape) != shape:
            raise ValueError(
                f"{name} must have shape {list(shape)} to fit w_up [F={features}, D={d_in}] and w_down "
                f"[D_out={d_out}, F], got {list(operand.shape)}"
            )
    for name, out, width in zip(ADAPTERS, (features, features, d_out), (d_in, d_in, features), strict=True):
        a, b = operands[f"{name}.a"], operands[f"{name}.b"]
        if a is not None and (a.dim() != 2 or a.shape[1] != width or tuple(b.shape) != (out, a.shape[0])):
            raise ValueError(
                f"{name}.a and {name}.b must be [r, {width}] and [{out}, r] to fit their weight [{out}, {width}], got "
                f"{list(a.shape)} and {list(b.shape)}"
            )
