"""`explain`: what a call would do here, before it is made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_remat import budget, dispatch
from fused_remat.functional import describe_mlp
from fused_remat.settings import Keep

_MIB = 2**20


@dataclass(frozen=True)
class Tiles:
    """How a pass cuts [M, F]: `axis` ("tokens" or "features") is the outer loop; a tile is [rows, features]."""

    axis: str
    rows: int
    features: int
    nbytes: int  # of the workspace that a tile needs
    excess: int  # bytes by which even the smallest tile exceeds the budget; 0 where it fits


@dataclass(frozen=True)
class Explanation:
    """The backend that runs a call, every other backend's reasons, and the tiles (None on the reference path)."""

    op: str
    backend: str
    reasons: dict[str, list[str]]
    workspace: int
    forward: Tiles | None
    backward: Tiles | None

    def __str__(self) -> str:
        lines = [f"{self.op} runs on {self.backend!r} with a workspace of {self.workspace / _MIB:.2f} MiB"]
        for name, tiles in (("forward", self.forward), ("backward", self.backward)):
            if tiles is None:
                lines.append(f"  {name}: not streamed, every activation is materialised")
                continue
            over = f", {tiles.excess} bytes over the budget" if tiles.excess else ""
            lines.append(
                f"  {name}: {tiles.axis} chunks, tiles of {tiles.rows} rows x {tiles.features} features, "
                f"{tiles.nbytes / _MIB:.2f} MiB{over}"
            )
        lines += [f"  not {name!r}: {'; '.join(reasons)}" for name, reasons in self.reasons.items() if reasons]
        return "\n".join(lines)


def explain(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    w_gate: Tensor | None = None,
    b_gate: Tensor | None = None,
    activation: str = "gelu",
    dropout_p: float = 0.0,
    training: bool = True,
    keep: Keep = (),
    workspace: int | None = None,
) -> Explanation:
    """Which backend `fused_remat.mlp` would run with these arguments, why not the others, and its tiles.

    Computes nothing. Raises what `fused_remat.mlp` would raise.
    """
    operands = {
        "x": x, "w_up": w_up, "w_down": w_down, "b_up": b_up, "b_down": b_down, "w_gate": w_gate, "b_gate": b_gate
    }  # fmt: skip
    call = describe_mlp(operands, activation, dropout_p, keep, workspace)
    backend = dispatch.resolve(call)
    reasons = {name: dispatch.why_not(name, call) for name in dispatch.BACKENDS}
    nbytes = budget.resolve(workspace, x.device.type)
    if backend == "reference":
        return Explanation(call.op, backend, reasons, nbytes, None, None)

    def tiles(backward: bool) -> Tiles:
        rows = x.shape[:-1].numel()
        by_features, tile_rows, tile_features, tile_bytes = torch.ops.fused_remat.mlp_plan(
            rows, w_up.shape[1], w_down.shape[0], w_up.shape[0], w_gate is not None, backward,
            training and dropout_p > 0, x.dtype, w_up.dtype, call.dtype, nbytes, backend, call.device,
        )  # fmt: skip
        axis = "features" if by_features else "tokens"
        return Tiles(axis, tile_rows, tile_features, tile_bytes, max(0, tile_bytes - nbytes))

    return Explanation(call.op, backend, reasons, nbytes, tiles(backward=False), tiles(backward=True))
