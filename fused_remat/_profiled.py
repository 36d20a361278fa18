"""Which models of this process somebody profiled or planned: what `convert` gives a hint about where nobody did."""

from __future__ import annotations

from weakref import WeakSet

from torch import nn

_seen: WeakSet[nn.Module] = WeakSet()

HINT = (
    "hint: nobody profiled this model here; fused_remat.profile(model, ...) says whether activations dominate, and "
    "what is cheaper"
)


def note_profiled(model: nn.Module) -> None:
    """`profile` or `plan` ran a step of `model`."""
    _seen.add(model)


def was_profiled(model: nn.Module) -> bool:
    """Whether one of them did, of this very module, not a copy."""
    return model in _seen
