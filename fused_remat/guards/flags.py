"""Settings that decide which bits an operation gives, beside autocast, which torch's checkpoint replays itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fused_remat import budget, dispatch
from fused_remat.guards import _torch

# In this order: what is set for all of torch first, then what differs from it.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    *_torch.settings(),
)


class Flags:
    """The settings as they are now: default dtype and device, precision of float32 and of reductions, kernels that
    may be chosen, determinism; and `fused_remat.workspace` and `fused_remat.backend`.
    """

    def __init__(self) -> None:
        self._values = [get() for get, _ in _SETTINGS]
        self._device = torch.get_default_device()
        self._workspace, self._backend = budget.in_context.value, dispatch.in_context.value

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """They are once more what they were when this object was made, and in the end what they are now."""
        found = [get() for get, _ in _SETTINGS]
        with ExitStack() as stack:
            if found != self._values:
                stack.callback(_put, found)
                _put(self._values)
            if torch.get_default_device() != self._device:
                stack.enter_context(self._device)
            stack.enter_context(budget.in_context.during(self._workspace))
            stack.enter_context(dispatch.in_context.during(self._backend))
            yield


def _put(values: list[Any]) -> None:
    """Sets those that differ only: what follows a general setting goes on following it."""
    for (get, put), value in zip(_SETTINGS, values, strict=True):
        if get() != value:
            put(value)
