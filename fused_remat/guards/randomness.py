"""Random number generators that torch's recomputation does not replay: their states, taken and put back."""

from __future__ import annotations

import ctypes
import importlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Source:
    """One generator."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None]
    identity: int


def source_of(value: Any, name: str) -> Source | None:
    """How to take and put back the state of `value`; None if it is no generator or has no state."""
    if isinstance(value, torch.Generator):
        return Source(name, value.get_state, value.set_state, id(value))
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return Source(name, value.getstate, value.setstate, id(value))
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    if isinstance(value, numpy.RandomState):
        return Source(name, lambda: value.get_state(legacy=False), value.set_state, id(value))
    bits = value.bit_generator if isinstance(value, numpy.Generator) else value
    if isinstance(bits, numpy.BitGenerator):
        return Source(name, lambda: bits.state, lambda state: setattr(bits, "state", state), id(bits))
    return None


def global_sources() -> Iterator[Source]:
    """The generators of Python and NumPy, and torch's of every device in use."""
    yield Source("Python's random", random.getstate, random.setstate, id(random))
    if "numpy" in sys.modules:  # which imports its generators when they are asked for
        numpy = importlib.import_module("numpy.random")
        yield Source("numpy.random", lambda: numpy.get_state(legacy=False), numpy.set_state, id(numpy))
    for generator in (torch.default_generator, *device_generators()):
        yield _of_device(generator)


def _of_device(generator: torch.Generator) -> Source:
    return Source(f"torch's of {generator.device}", generator.get_state, generator.set_state, id(generator))


def device_generators() -> Iterable[torch.Generator]:
    """torch's own, one for each device of the accelerator, if it is in use."""
    accelerator = torch.accelerator.current_accelerator()
    module = getattr(torch, accelerator.type, None) if accelerator is not None else None
    if module is None or not getattr(module, "is_initialized", bool)():
        return ()
    return getattr(module, "default_generators", ())


class Randomness:
    """The states of some sources as they are now, later those of the sources that were drawn from in between."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._before = {source.identity: (source, source.get()) for source in sources}

    def add(self, source: Source) -> None:
        """One more, unless it is there already."""
        if source.identity not in self._before:
            self._before[source.identity] = (source, source.get())

    def keep_drawn(self) -> None:
        """Forget the sources that stand where they stood."""
        self._before = {
            identity: (source, state)
            for identity, (source, state) in self._before.items()
            if not _same(state, source.get())
        }

    def appeared(self) -> list[str]:
        """Names of generators of devices that came into use in between, whose states were not taken."""
        return [_of_device(generator).name for generator in device_generators() if id(generator) not in self._before]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """The sources give once more what they gave after this object was made, and then continue where they were."""
        found = [(source, source.get()) for source, _ in self._before.values()]
        for source, state in self._before.values():
            source.set(state)
        try:
            yield
        finally:
            for source, state in found:
                source.set(state)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):  # in host memory; read without torch, which may be working on fake tensors
        return a.nbytes == b.nbytes and _octets(a) == _octets(b)
    if isinstance(a, dict):
        return all(_same(value, b[key]) for key, value in a.items())
    if hasattr(a, "tobytes"):
        return a.tobytes() == b.tobytes()
    return a == b


def _octets(x: torch.Tensor) -> bytes:
    return ctypes.string_at(x.data_ptr(), x.nbytes)
