"""The values of a few fake tensors: numbers, indices and masks that do not depend on what a model computes.

Models ask them things ("is this mask all ones?", "how many steps were taken?") and go different ways by the answer.
They are computed for real, on the CPU, as long as nothing unknown flows into them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

_MOST_ELEMENTS = 2**20
_aten = torch.ops.aten
_FACTORIES = {
    _aten.arange.default, _aten.arange.start, _aten.arange.start_step, _aten.zeros.default, _aten.ones.default,
    _aten.full.default, _aten.scalar_tensor.default,
}  # fmt: skip


class Values:
    """Known values by fake tensor. Views of one tensor share the memory of their values."""

    def __init__(self) -> None:
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def learn(self, fake: Tensor, real: Tensor) -> None:
        """Notes the value of a tensor that `fake` stands for, if it is such a number, index or mask on the CPU."""
        if real.device.type == "cpu" and real.layout == torch.strided and not real.requires_grad and _is_plain(real):
            with _disable_current_modes():
                self._known[fake] = real.detach().clone()

    def knows(self, fake: Tensor) -> bool:
        """Whether the value of this tensor is known."""
        return fake in self._known

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
        """The results of a call for real; None where a value is unknown, random, or too large."""
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = all(leaf in self._known for leaf in leaves)
        if known and (leaves or func in _FACTORIES) and torch.Tag.nondeterministic_seeded not in func.tags:
            with _disable_current_modes(), torch.no_grad():
                real = tree_map(self._real, (args, {k: v for k, v in kwargs.items() if k != "pin_memory"}))
                return func(*real[0], **real[1])
        if func._schema.is_mutable:
            for leaf in leaves:
                self._forget(leaf)
        return None

    def note(self, fakes: Any, reals: Any) -> None:
        """Notes the results of a call."""
        for fake, real in zip(tree_leaves(fakes), tree_leaves(reals), strict=True):
            if isinstance(fake, Tensor) and fake not in self._known and _is_plain(real):
                self._known[fake] = real
            elif isinstance(fake, Tensor) and fake in self._known and not _is_plain(real):
                del self._known[fake]  # it grew

    def _real(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._known[leaf]
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    def _forget(self, fake: Tensor) -> None:
        """What is written to, by a call with an unknown value among its arguments, is unknown from there on."""
        real = self._known.get(fake)
        if real is None:
            return
        memory = real.untyped_storage().data_ptr()
        for other in [f for f, r in self._known.items() if r.untyped_storage().data_ptr() == memory]:
            del self._known[other]


def _is_plain(real: Tensor) -> bool:
    if real.numel() == 1:
        return True
    return real.numel() <= _MOST_ELEMENTS and not real.is_floating_point() and not real.is_complex()
