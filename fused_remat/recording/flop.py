"""FLOP of a step by phase and module, and which of them backward spends on what forward had made before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fused_remat import ops
from fused_remat.recording import _torch
from fused_remat.recording.places import Places, watched
from fused_remat.training_step import BACKWARD, FORWARD, TrainingStep


def counted_step(step: TrainingStep) -> tuple[dict[tuple[str, str], int], dict[str, int]]:
    """Runs the step and returns its FLOP by (phase, module) and, of those, the redone ones by module."""
    with watched(step.model) as places, Counter(places) as counter:
        step.run(counter.phase)
    return counter.flop, counter.redone


class Place:
    """The phase and the module that run now, and whether backward replays a forward."""

    def __init__(self, places: Places):
        self.places = places
        self.name = FORWARD
        self.outer_sequence = -1
        self._module = ""  # of the last node evaluated
        self._backward = -1  # the first of the backwards that run inside of each other

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.name, self._module, self._backward, self.outer_sequence = name, "", -1, -1
        yield

    def now(self) -> tuple[str, str, bool]:
        """(phase, path of the module, whether a forward is replayed)."""
        replaying = self.name == BACKWARD and torch.is_grad_enabled() and _torch.running_backward() != -1
        if self.name != BACKWARD:
            return self.name, self.places.module, replaying
        task, sequence = _torch.running_backward(), _torch.running_sequence()
        if self._backward == -1:
            self._backward = task
        if task == self._backward:
            self.outer_sequence = sequence
        if self.places.stack:
            return self.name, self.places.module, replaying
        if sequence >= 0:  # a leaf's gradient is accumulated right after the node that made it
            self._module = self.places.owner(sequence, nested=task != self._backward)
        return self.name, self._module, replaying


class Counter(TorchDispatchMode):
    """Adds up FLOP by the formulas of torch's registry, of fused operators and of attention on the CPU."""

    def __init__(self, places: Places):
        super().__init__()
        self.flop: dict[tuple[str, str], int] = {}
        self.redone: dict[str, int] = {}
        self._place = Place(places)
        self._formulas = formulas()

    @property
    def phase(self) -> Callable[[str], Any]:
        return self._place.phase

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.add(func, args, kwargs or {}, out)
        return out

    @property
    def outer_sequence(self) -> int:
        """Number of the autograd node that backward evaluates, not of one in a backward inside of it; -1 for none."""
        return self._place.outer_sequence

    def where(self) -> tuple[str, str, bool]:
        """Phase, module, and whether a forward is replayed."""
        return self._place.now()

    def add(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> tuple[str, str, bool]:
        """Counts one call that has been made. Returns where: phase, module, and whether a forward is replayed."""
        place = phase, module, replaying = self._place.now()
        formula = self._formulas.get(func._overloadpacket)
        if formula is None:
            return place
        flop = formula(*args, **kwargs, out_val=out)
        self.flop[phase, module] = self.flop.get((phase, module), 0) + flop
        redone = flop if replaying else redone_inside(func, args, flop)
        if redone:
            self.redone[module] = self.redone.get(module, 0) + redone
        return place


def formulas() -> dict[Any, Callable[..., int]]:
    """By operator packet: FLOP of a call, as torch's registry takes them.

    Attention on the CPU counts nothing in torch; here as much as torch counts for the same on a GPU.
    """
    from torch.utils import flop_counter

    ops.ready()  # registers the formulas of fused operators, if they are there
    scores, backward = flop_counter.sdpa_flop_count, flop_counter.sdpa_backward_flop_count

    def cpu_forward(q: Tensor, k: Tensor, v: Tensor, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return scores(q.shape, k.shape, v.shape)

    def cpu_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, out_val: Any = None, **kw: Any) -> int:
        return backward(dout.shape, q.shape, k.shape, v.shape)

    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: cpu_forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: cpu_backward,
        **flop_counter.flop_registry,
    }


def redone_inside(func: Any, args: tuple[Any, ...], flop: int) -> int:
    """Of the `flop` of one call of a fused backward, those that rebuild residuals which forward did not keep."""
    name = func._schema.name.removeprefix("fused_remat::")
    if name not in ("mlp_bwd", "multi_head_attention_bwd"):
        return 0
    shapes = tree_map(lambda leaf: leaf.shape if isinstance(leaf, Tensor) else leaf, args)
    masks = 2 if isinstance(shapes[-2], list) else 1
    head, tail = shapes[:-masks], shapes[-masks:]
    if name == "mlp_bwd":
        x, w_up, w_gate = shapes[1], shapes[2], shapes[6]
        rows = x[:-1].numel()
        kept = ((rows, w_up[0]), None if w_gate is None else (rows, w_up[0]))
        full = (*head[:-2], *kept, *tail)
    else:
        full = (*head[:-5], *((0,) if shape is None else shape for shape in head[-5:]), *tail)
    return flop - _fused_formula(name)(*full)


def _fused_formula(name: str) -> Callable[..., int]:
    module = {"mlp_bwd": ops.mlp, "multi_head_attention_bwd": ops.multi_head_attention}[name]
    return module.flop_formulas()[getattr(torch.ops.fused_remat, name)]
