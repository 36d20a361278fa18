"""A look at each torch call of a region's forward, for what shows nowhere else: the first, and each with `verify`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from fused_remat.guards.randomness import Source, source_of
from fused_remat.guards.saved import Saved, source_line

# Their kernels save bytes of their own besides values (oneDNN's and cuDNN's workspaces), parts of which nobody writes.
_WITH_WORKSPACE = re.compile("lstm|gru|rnn|batch_norm")
_FRESH = ("_like", "new_")  # they make a tensor like their argument: nothing moves


class Watch(TorchFunctionMode):
    """Sees generators that are passed to torch, tensors that change devices, and noise that is saved before it is made.

    Attributes:
        generators: explicit generators that were used, by id.
        moves: sentences such as "Tensor.to moves a tensor from cpu to cuda:0 at net.py:12".
        saves_noise: whether `rrelu` ran in training. It saves its noise before drawing it, so a replay must not stop
            at what it saves last.
    """

    def __init__(self, found: Callable[[Source], None], saved: Saved) -> None:
        super().__init__()
        self.found = found
        self.saved = saved
        self.generators: dict[int, torch.Generator] = {}
        self.moves: list[str] = []
        self.saves_noise = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is not None and id(generator) not in self.generators:
            self.generators[id(generator)] = generator
            self.found(source_of(generator, "a torch.Generator"))
        name = getattr(func, "__name__", "")
        with self.saved.inside(_writes_late(name), _unread(name, args, kwargs)):
            result = func(*args, **kwargs)
        if name.startswith("rrelu"):
            self.saves_noise = True
        if isinstance(result, Tensor):
            devices = {value.device for value in args if isinstance(value, Tensor)}
            if devices and result.device not in devices and not any(part in name for part in _FRESH):
                self._moved(func, min(map(str, devices)), result.device)
        return result

    def _moved(self, func: Any, origin: str, target: torch.device) -> None:
        line = source_line()
        what = (resolve_name(func) or func.__name__).removeprefix("torch.")
        self.moves.append(f"{what} moves a tensor from {origin} to {target}{f' at {line}' if line else ''}")


def _writes_late(name: str) -> bool:
    """Whether the torch function of that name saves running statistics and then moves them."""
    return name.endswith(("batch_norm", "instance_norm"))


def _unread(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[Tensor], bool] | None:
    """Which of the tensors that a torch function saves are its kernel's, with parts that nobody writes or reads."""
    if _WITH_WORKSPACE.search(name):
        return lambda x: x.dtype is torch.uint8
    in_evaluation = name.startswith("rrelu") and not kwargs.get("training", args[3] if len(args) > 3 else False)
    if in_evaluation or name.endswith("ctc_loss"):  # noise that is not drawn; the table beyond the shorter targets
        return lambda x: x.is_floating_point() and not x.requires_grad
    return None
