"""`MLP` and `GatedMLP`: children are nn.Linear, results those of calling them one after the other.

Dims: `D` in_features, `F` hidden_features, `D_out` out_features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat import functional, last_calls, tensor_parallel
from fused_remat.activations import ACTIVATIONS
from fused_remat.plain import is_plain_input, why_not_plain_linear, why_watched, why_weights_unfit
from fused_remat.settings import Keep, Norm, check_activation, check_dropout, check_keep, check_size

Source = Callable[[Tensor], tuple[Tensor, Norm] | None]


def _why_unfused(x: Tensor, dropout_p: float, *linears: nn.Module) -> str | None:
    if tensor_parallel.is_split(linears):
        if dropout_p > 0.0:
            return "it drops hidden features of which this rank has a shard"
        reason = tensor_parallel.why_not_split(linears[:-1], linears[-1])
        reason = reason or tensor_parallel.why_not_entered(linears, x)
        return reason or why_weights_unfit(*[linear.weight for linear in linears]) or why_watched()
    for linear in linears:
        reason = why_not_plain_linear(linear)
        if reason is not None:
            return reason
    if not is_plain_input(x):
        return f"the input is a {type(x).__name__}"
    return why_weights_unfit(*[linear.weight for linear in linears]) or why_watched()


def _fused(
    x: Tensor, source: Source | None, up: nn.Linear, gate: nn.Linear | None, down: nn.Linear, **settings: Any
) -> Tensor:
    """`source`: says what a norm made `x` from, and that norm, which the fused call then applies."""
    linears = [up, down] if gate is None else [up, gate, down]
    split = tensor_parallel.split(linears[:-1], down) if tensor_parallel.is_split(linears) else None
    norm = None
    if split is None:
        x, norm = (source and source(x)) or (x, None)
        weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
    else:
        x, weights, biases = split.enter(x), split.weights, split.biases
    y = functional.mlp(
        x,
        weights[0],
        weights[-1],
        biases[0],
        biases[-1],
        w_gate=None if gate is None else weights[1],
        b_gate=None if gate is None else biases[1],
        norm=norm,
        **settings,
    )
    return y if split is None else split.leave(y)


class MLP(nn.Module):
    """`fc2(dropout(act(fc1(x))))` that keeps only `x` for the backward pass.

    Args:
        in_features: width D of the input.
        hidden_features: width F between the two linears; `in_features` if None.
        out_features: width D_out of the output; `in_features` if None.
        activation: a name from `fused_remat.activations.ACTIVATIONS`.
        bias: whether both linears have a bias.
        dropout: probability in [0, 1) of zeroing an element after the activation, in training mode only.
        keep: what backward does not have to rebuild: `()` nothing, `("up",)` the pre-activation, or a float in
            [0, 1], the fraction of hidden features whose pre-activation is kept.
        device, dtype: of the parameters.

    Shapes: x [..., D] -> [..., D_out], in the dtype of the weights (or autocast's).

    Raises:
        ValueError: a size below 1, an unknown activation or name in `keep`, `dropout` or a fraction out of range.
        TypeError: `keep` is neither a tuple of names nor a float.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        *,
        activation: str = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        keep: Keep = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        hidden_features = in_features if hidden_features is None else hidden_features
        out_features = in_features if out_features is None else out_features
        check_size("in_features", in_features)
        check_size("hidden_features", hidden_features)
        check_size("out_features", out_features)
        super().__init__()
        self.activation = check_activation(activation)
        self.dropout = check_dropout(dropout)
        self.keep = check_keep(keep, gated=False)
        self.fc1 = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.fc2 = nn.Linear(hidden_features, out_features, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or last_calls.watcher is None:
            return self._run(x, self.keep)
        with last_calls.watched(self, "forward"):
            return self._run(x, self.keep)

    def _run(self, x: Tensor, keep: Keep, source: Source | None = None, workspace: int | None = None) -> Tensor:
        fc1, fc2 = self.fc1, self.fc2
        reason = _why_unfused(x, self.dropout * self.training, fc1, fc2)
        if reason is not None:
            last_calls.note_own(self, reason)
            hidden = ACTIVATIONS[self.activation](fc1(x))
            return fc2(F.dropout(hidden, self.dropout, self.training))
        last_calls.note_fused(self, x)
        return _fused(
            x,
            source,
            fc1,
            None,
            fc2,
            activation=self.activation,
            dropout_p=self.dropout,
            training=self.training,
            keep=keep,
            workspace=workspace,
        )

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, dropout={self.dropout}, keep={self.keep}"


class GatedMLP(nn.Module):
    """`down_proj(dropout(act(gate_proj(x)) * up_proj(x)))` that keeps only `x` (Shazeer, "GLU Variants", 2020).

    Args:
        in_features: width D of the input.
        hidden_features: width F of gate and up.
        out_features: width D_out of the output; `in_features` if None.
        activation: of the gate, a name from `fused_remat.activations.ACTIVATIONS`.
        bias: whether the three linears have a bias.
        dropout: probability in [0, 1) of zeroing an element of the hidden product, in training mode only.
        keep: what backward does not have to rebuild: any of "up" and "gate" in a tuple, or a float in [0, 1], the
            fraction of hidden features whose up and gate are kept.
        device, dtype: of the parameters.

    Shapes: x [..., D] -> [..., D_out], in the dtype of the weights (or autocast's).

    Raises:
        ValueError: a size below 1, an unknown activation or name in `keep`, `dropout` or a fraction out of range.
        TypeError: `keep` is neither a tuple of names nor a float.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: str = "silu",
        bias: bool = False,
        dropout: float = 0.0,
        keep: Keep = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        out_features = in_features if out_features is None else out_features
        check_size("in_features", in_features)
        check_size("hidden_features", hidden_features)
        check_size("out_features", out_features)
        super().__init__()
        self.activation = check_activation(activation)
        self.dropout = check_dropout(dropout)
        self.keep = check_keep(keep, gated=True)
        self.gate_proj = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.up_proj = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.down_proj = nn.Linear(hidden_features, out_features, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or last_calls.watcher is None:
            return self._run(x, self.keep)
        with last_calls.watched(self, "forward"):
            return self._run(x, self.keep)

    def _run(self, x: Tensor, keep: Keep, source: Source | None = None, workspace: int | None = None) -> Tensor:
        gate_proj, up_proj, down_proj = self.gate_proj, self.up_proj, self.down_proj
        reason = _why_unfused(x, self.dropout * self.training, up_proj, gate_proj, down_proj)
        if reason is not None:
            last_calls.note_own(self, reason)
            hidden = ACTIVATIONS[self.activation](gate_proj(x)) * up_proj(x)
            return down_proj(F.dropout(hidden, self.dropout, self.training))
        last_calls.note_fused(self, x)
        return _fused(
            x,
            source,
            up_proj,
            gate_proj,
            down_proj,
            activation=self.activation,
            dropout_p=self.dropout,
            training=self.training,
            keep=keep,
            workspace=workspace,
        )

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, dropout={self.dropout}, keep={self.keep}"
