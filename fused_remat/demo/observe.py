"""The same example run by torch: what autograd really keeps, and which operations it really redoes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fused_remat.demo.run import Run

# Dispatched inside the example without computing anything.
_NO_OPERATION = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


@dataclass(frozen=True)
class Observation:
    """One forward and backward in float64 on the CPU.

    `kept`: values that autograd saved in forward, as `saved_tensors_hooks` see them, in that order, each storage once.
    `redone`: operations of the example that ran again in backward, as a dispatch mode sees them.
    """

    z: float
    gradient: float
    kept: tuple[float, ...]
    redone: tuple[str, ...]


def observe(x: float, keep_b: bool) -> Observation:
    """Runs z = (x^2 + 1)^2; to drop b it runs as a region that torch recomputes and leaves once b is there again."""
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    example = _Example()
    watch = _Watch(example)
    saved: dict[int, float] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel():  # torch saves an empty tensor to mark its region
            saved.setdefault(tensor.data_ptr(), tensor.item())
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if keep_b:
            z = example(leaf)
        else:
            with set_checkpoint_early_stop(True):
                z = checkpoint(example, leaf, use_reentrant=False)
    with watch:
        z.backward()
    return Observation(z.item(), leaf.grad.item(), tuple(saved.values()), tuple(watch.operations))


def disagreements(run: Run, observation: Observation) -> list[str]:
    """Where torch and `run` differ, a sentence each; empty when they agree to the last bit."""
    pairs = {
        "z": (run.values["z"], observation.z),
        "dz/dx": (run.values["dx"], observation.gradient),
        "kept values": (tuple(run.kept.values()), observation.kept),
        "redone operations": (len(run.redone), len(observation.redone)),
    }
    return [f"{name}: the demo says {ours}, torch {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]


class _Example:
    """a = x^2, b = a + 1, z = b^2. `running` while it is being called."""

    running = False

    def __call__(self, x: Tensor) -> Tensor:
        self.running = True
        try:
            a = x.square()
            b = a + 1
            return b.square()
        finally:
            self.running = False  # torch leaves by an exception once it has what it needs


class _Watch(TorchDispatchMode):
    """Notes the operations that run inside the example, not those of backward itself."""

    def __init__(self, example: _Example) -> None:
        super().__init__()
        self.example = example
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.example.running and func not in _NO_OPERATION:
            self.operations.append(str(func.overloadpacket).removeprefix("aten."))
        return func(*args, **(kwargs or {}))
