"""A converted layer at run time: where its parts are, whether they are still what they were, and the fused call.

Nothing here holds a module: a `Fused` record sits on the converted layer as an ordinary attribute and names parts by
path, so that copies, pickles and layers whose children are swapped later see their own parts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat import functional, last_calls, tensor_parallel
from fused_remat.convert.adapters import adapted
from fused_remat.convert.keep import of_workspace
from fused_remat.convert.norms import source_of
from fused_remat.plain import is_plain_input, why_not_plain, why_watched, why_weights_unfit
from fused_remat.settings import Keep, LowRank, Norm

Path = tuple[str, ...]
_logger = logging.getLogger("fused_remat")

# How one linear of 2F rows can hold gate and up: in halves, or in even and odd rows.
HALVES = ("gate_first", "up_first")
INTERLEAVED = ("gate_even", "up_even")


@dataclass(frozen=True)
class Layout:
    """Which child of a layer plays which part: paths of child names below the layer, () where there is none.

    The layer's `method` computes `hidden = act(up(x))` or `act(gate(x)) * up(x)`, then `down(dropout(hidden))`;
    `before` runs on x, `after` on the result, and `norm`, if any, on the sum of that result and x. Where `packed` says
    how, `up` and `gate` are one path: a linear that computes both.
    """

    up: Path
    down: Path
    gate: Path = ()
    packed: str = ""  # one of HALVES or INTERLEAVED; "" = gate and up are linears of their own, or there is no gate
    activation: str = ""  # a name in ACTIVATIONS
    act: Path = ()  # the module or function attribute that is the activation; () = written out in the method
    dropout: Path = ()
    before: tuple[Path, ...] = ()
    after: tuple[Path, ...] = ()
    norm: Path = ()
    through: tuple[Path, ...] = ()  # other modules whose own forward the fused call replaces
    method: str = "forward"

    @property
    def linears(self) -> tuple[Path, ...]:
        return (self.up, self.gate, self.down) if self.gate and not self.packed else (self.up, self.down)

    def gate_and_up(self, both: Tensor) -> tuple[Tensor, Tensor]:
        """What `both`, a packed weight [2F, D] or bias [2F], holds of gate and of up: views whose gradients are put
        together at once."""
        first, second = both.unflatten(0, (-1, 2)).unbind(1) if self.packed in INTERLEAVED else both.chunk(2)
        return (first, second) if self.packed in ("gate_first", "gate_even") else (second, first)


@dataclass(frozen=True)
class Fused:
    """What conversion found and the fused call relies on; compared with the layer at every call."""

    layout: Layout
    keep: Keep
    linear: type[nn.Module]  # nn.Linear, or transformers' Conv1D, which stores its weight transposed
    parts: tuple[tuple[Path, type[nn.Module]], ...]  # the replaced modules that are not linears, with their classes
    settings: tuple[tuple[Path, str, Any], ...]  # (part, attribute, value) that the replaced code reads
    children: tuple[tuple[Path, tuple[str, ...]], ...]  # (part, names) where the code runs every child (nn.Sequential)
    workspace: int | None = None  # bytes; None: whatever is in force when it is called

    @property
    def method(self) -> str:
        return self.layout.method

    @property
    def takes_norm(self) -> bool:
        """Whether a norm outside that made its input can be folded into the fused call: nothing else runs on x, or adds
        it."""
        return not self.layout.before and not self.layout.norm

    @property
    def kind(self) -> str:
        return "gated mlp" if self.layout.gate else "mlp"

    def describe(self) -> str:
        return f"{self.kind}, {self.layout.activation}, keep={self.keep}{of_workspace(self.workspace)}"

    def why_not_split(self, linears: list[nn.Module]) -> str | None:
        """Why the fused call cannot run on shards of `linears`; None if it can."""
        if self.layout.packed:
            return "gate and up share a linear, of which a shard is neither"
        return tensor_parallel.why_not_split(linears[:-1], linears[-1])

    def run(self, layer: nn.Module, stock: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Any:
        if len(args) + len(kwargs) != 1:
            note_own_code(layer, "it was called with more than its input", self.method)
            return stock()
        (x,) = args or kwargs.values()
        reason = why_stock(layer, self, x)
        if reason is not None:
            note_own_code(layer, reason, self.method)
            return stock()
        # A rank with a shard of the weights would have its part of the gradient of the norm's weight only.
        source = source_of(x) if self.takes_norm and not is_split(layer, self) else None
        return run(layer, self, *(source or (x,)))


def note_own_code(layer: nn.Module, reason: str, method: str = "forward") -> None:
    """Tells `fused_remat.audit`, and the logger "fused_remat" at level DEBUG, why a converted layer runs its own code
    in this call."""
    if not torch.compiler.is_compiling():
        last_calls.note_own(layer, reason, method)
        _logger.debug("%s runs its own code: %s", type(layer).__name__, reason)


def find(layer: nn.Module, path: Path) -> nn.Module | None:
    """The module at `path` below `layer`; None if there is none."""
    for name in path:
        if layer is None:
            return None
        layer = layer._modules.get(name)
    return layer


def child_names(module: nn.Module) -> tuple[str, ...]:
    """Of the modules directly below."""
    return tuple([name for name, child in module._modules.items() if child is not None])


def why_changed(layer: nn.Module, fused: Fused) -> str | None:
    """Why `layer` must run its own code: what is not plain, or no longer what conversion saw; None if nothing."""
    for path, names in fused.children:
        if child_names(find(layer, path)) != names:
            return f"the children of {'.'.join(path) or 'the layer'} are no longer {', '.join(names)}"
    linears = [find(layer, path) for path in fused.layout.linears]
    if tensor_parallel.is_split(linears):
        reason = fused.why_not_split(linears)
        if reason is not None:
            return reason
        weights = [linear.weight for linear in linears]
    else:
        weights = []
        for path, linear in zip(fused.layout.linears, linears, strict=True):
            part = adapted(linear, fused.linear)
            if isinstance(part, str):
                return f"{'.'.join(path)} {part}"
            weights.append(part.linear.weight)
    for path, cls in fused.parts:
        reason = why_not_plain(find(layer, path), cls)
        if reason is not None:
            return f"{'.'.join(path)} {reason}"
    for path, name, value in fused.settings:
        current = getattr(find(layer, path), name, None)
        if current is not value and current != value:
            return f"{'.'.join((*path, name))} is no longer {value!r}"
    return why_weights_unfit(*weights)


def why_stock(layer: nn.Module, fused: Fused, x: Tensor) -> str | None:
    """Why this call must run the layer's own code; None if the fused one computes the same."""
    split = is_split(layer, fused)
    if not split and not is_plain_input(x):
        return f"the input is a {type(x).__name__}"
    reason = why_changed(layer, fused) or why_watched()
    if reason is None and split:
        reason = tensor_parallel.why_not_entered([find(layer, path) for path in fused.layout.linears], x)
    if reason is None and fused.layout.dropout:
        dropout = find(layer, fused.layout.dropout)
        if dropout.p >= 1.0:
            return "everything is dropped"
        if split and dropout.training and dropout.p > 0.0:
            return "it drops hidden features of which this rank has a shard"
    return reason


def is_split(layer: nn.Module, fused: Any) -> bool:
    """Whether linears of `layer`, as its record names them, hold DTensors."""
    return tensor_parallel.is_split([find(layer, path) for path in fused.layout.linears])


def run(layer: nn.Module, fused: Fused, x: Tensor, norm: Norm | None = None) -> Tensor:
    """The fused result for the one input `x` of `layer`, or for `norm` of it where the record takes one."""
    layout = fused.layout
    for path in layout.before:
        x = find(layer, path)(x)
    # As for a norm outside: a rank with a shard would have its part of the gradient of the norm's weight only.
    source = source_of(x) if layout.before and not is_split(layer, fused) else None
    y = _mlp(layer, fused, *(source or (x, norm)))
    for path in layout.after:
        y = find(layer, path)(y)
    return find(layer, layout.norm)(y + x) if layout.norm else y


def _mlp(layer: nn.Module, fused: Fused, x: Tensor, norm: Norm | None) -> Tensor:
    layout = fused.layout
    dropout = find(layer, layout.dropout) if layout.dropout else None
    split = None
    w_gate, b_gate, gate_adapter = None, None, None
    if is_split(layer, fused):
        *ins, down = [find(layer, path) for path in layout.linears]
        split = tensor_parallel.split(ins, down)
        x, up_adapter, down_adapter = split.enter(x), None, None
        (w_up, *gate, w_down), (b_up, *b_gates, b_down) = split.weights, split.biases
        if layout.gate:
            w_gate, b_gate = gate[0], b_gates[0]
    else:
        w_up, b_up, up_adapter = _parameters(layer, fused, layout.up)
        w_down, b_down, down_adapter = _parameters(layer, fused, layout.down)
        if layout.gate and not layout.packed:
            w_gate, b_gate, gate_adapter = _parameters(layer, fused, layout.gate)
    if layout.packed:
        w_gate, w_up = layout.gate_and_up(w_up)
        b_gate, b_up = (None, None) if b_up is None else layout.gate_and_up(b_up)
        if up_adapter is not None:
            gate_adapter, up_adapter = (
                LowRank(up_adapter.a, half, up_adapter.scale) for half in layout.gate_and_up(up_adapter.b)
            )
    last_calls.note_fused(layer, x, method=fused.method)
    y = functional.mlp(
        x,
        w_up,
        w_down,
        b_up,
        b_down,
        w_gate=w_gate,
        b_gate=b_gate,
        up_adapter=up_adapter,
        gate_adapter=gate_adapter,
        down_adapter=down_adapter,
        activation=layout.activation,
        dropout_p=0.0 if dropout is None else dropout.p,
        training=dropout is not None and dropout.training,
        norm=norm,
        keep=fused.keep,
        workspace=fused.workspace,
    )
    return y if split is None else split.leave(y)


def _parameters(layer: nn.Module, fused: Fused, path: Path) -> tuple[Tensor, Tensor | None, LowRank | None]:
    """Weight [out, in], bias [out] and adapter of the linear at `path`, once it is known to fit."""
    part = adapted(find(layer, path), fused.linear)
    weight = part.linear.weight
    return (weight if fused.linear is nn.Linear else weight.t()), part.linear.bias, part.adapter
