"""What the layers of a model promise to keep: every fused layer, norm and region in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fused_remat.convert.own import KINDS, OwnAttention
from fused_remat.convert.promises import InlineMLP
from fused_remat.convert.rebind import Record, records_of


@dataclass(frozen=True)
class Promise:
    """One method of a layer that runs fused or recomputed.

    Attributes:
        name, layer, method: where; of a layer with several paths the first.
        kind: "mlp", "gated mlp", "attention", "norm" or "region".
        keep: of an MLP or attention.
        record: of a converted layer; None for a module of `fused_remat.nn`.
        inside: path of the region around it, "" if there is none: it is made again there, and keeps nothing.
        beside: whether its method runs modules besides the fused call, which keep what they keep.
    """

    name: str
    layer: nn.Module
    method: str
    kind: str
    keep: Any = ()
    record: Record | None = None
    inside: str = ""
    beside: bool = False

    @property
    def text(self) -> str:
        """In a few words."""
        if self.inside:
            return f"nothing (inside region {self.inside or 'of the model'})"
        if self.kind == "region":
            return "its inputs"
        if self.kind == "norm":
            return "nothing"
        return f"its input{_also(self.keep)}"


def promises_of(model: nn.Module) -> list[Promise]:
    """In model order."""
    found: list[Promise] = []
    regions: list[str] = []
    for name, layer in model.named_modules():
        inside = next((path for path in regions if _is_below(name, path)), "")
        kind = KINDS.get(type(layer))
        if kind is not None:
            found.append(Promise(name, layer, "forward", kind, layer.keep, None, inside, _calls_out_proj(layer)))
        for method, record in records_of(layer).items():
            if record.kind == "part":  # of an MLP in a block, whose record promises for it
                continue
            found.append(_promised(name, layer, method, record, inside))
            if record.kind == "region":
                regions.append(name)
    return found


def _promised(name: str, layer: nn.Module, method: str, record: Record, inside: str) -> Promise:
    layout = getattr(record, "layout", None)
    own_code = [getattr(layout, part, ()) for part in ("before", "after", "norm")]
    beside = any(own_code) or isinstance(record, InlineMLP)  # an MLP in a block that does more
    beside = beside or (isinstance(record, OwnAttention) and _calls_out_proj(layer))
    return Promise(name, layer, method, record.kind, getattr(record, "keep", ()), record, inside, beside)


def _calls_out_proj(layer: nn.Module) -> bool:
    """Whether `layer` is an attention that calls its output projection, whatever that is."""
    return isinstance(layer, nn.MultiheadAttention) and type(layer.out_proj) not in _plain_out_projs()


def _plain_out_projs() -> tuple[type[nn.Module], ...]:
    from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

    return nn.Linear, NonDynamicallyQuantizableLinear


def _is_below(name: str, path: str) -> bool:
    return name != path and (not path or name.startswith(f"{path}."))


def _also(keep: Any) -> str:
    if isinstance(keep, float):
        return f" and {keep:.0%} of the hidden features" if keep else ""
    return f", {', '.join(keep)}" if keep else ""
