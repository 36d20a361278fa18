"""Layers that a user wrote as modules of `fused_remat.nn`: what a policy or plan has them keep, in place of their own
`keep`, for as long as it is in force. Nothing of the module changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from fused_remat.convert.attention import before_norm, why_changed
from fused_remat.convert.keep import of_workspace
from fused_remat.convert.norms import source_of
from fused_remat.convert.rebind import original_class, why_no_subclass
from fused_remat.nn import MLP, GatedMLP, MultiheadAttention
from fused_remat.nn.attend import Result
from fused_remat.plain import class_name
from fused_remat.settings import Keep

KINDS: dict[type[nn.Module], str] = {MLP: "mlp", GatedMLP: "gated mlp", MultiheadAttention: "attention"}


@dataclass(frozen=True)
class OwnMLP:
    """What an `MLP` or `GatedMLP` keeps."""

    keep: Keep
    kind: str
    activation: str
    workspace: int | None = None  # bytes; None: whatever is in force when it is called
    method: ClassVar[str] = "forward"
    takes_norm: ClassVar[bool] = True

    def describe(self) -> str:
        return f"{self.kind}, {self.activation}, keep={self.keep}{of_workspace(self.workspace)}"

    def run(self, layer: MLP | GatedMLP, stock: Callable[[], Tensor], /, x: Tensor) -> Tensor:
        return layer._run(x, self.keep, source_of, self.workspace)


@dataclass(frozen=True)
class OwnAttention:
    """What a `MultiheadAttention` keeps."""

    keep: tuple[str, ...]
    workspace: int | None = None  # bytes; None: whatever is in force when it is called
    method: ClassVar[str] = "forward"
    kind: ClassVar[str] = "attention"
    takes_norm: ClassVar[bool] = True

    def describe(self) -> str:
        return f"attention, keep={self.keep}{of_workspace(self.workspace)}"

    def run(
        self,
        layer: MultiheadAttention,
        stock: Callable[[], Result],
        /,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Result:
        return layer._run(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal,
            keep=self.keep, source=before_norm if why_changed(layer) is None else None,
            workspace=self.workspace,
        )  # fmt: skip


Own = OwnMLP | OwnAttention


def own_kind(layer: nn.Module) -> str | None:
    """The kind of a module of `fused_remat.nn`, subclasses included; None for any other."""
    return next((kind for cls, kind in KINDS.items() if isinstance(layer, cls)), None)


def examine_own(layer: nn.Module) -> Own | str | None:
    """The record that has `layer` keep what it was made with, why it can have none, or None if it is not of ours."""
    kind = own_kind(layer)
    if kind is None:
        return None
    cls = original_class(layer)
    base = next(ours for ours in KINDS if isinstance(layer, ours))
    if cls.forward is not base.forward or cls._run is not base._run:
        return f"is a {class_name(cls)}, a subclass of fused_remat.{base.__name__} with a forward of its own"
    if "forward" in vars(layer):
        return "has a forward of its own on the instance"
    reason = why_no_subclass(cls, "forward")
    if reason is not None:
        return reason
    return OwnAttention(layer.keep) if kind == "attention" else OwnMLP(layer.keep, kind, layer.activation)


def note_on_own(layer: nn.Module, record: Any) -> str:
    """What the module was made with, where a record has it keep something else."""
    return f"made with keep={layer.keep}" if isinstance(record, Own) and record.keep != layer.keep else ""
