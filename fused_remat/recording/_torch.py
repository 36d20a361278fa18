"""The parts of torch that it does not promise to keep, as this package uses them. Nothing else here imports them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.optim import optimizer

# What FakeTensorMode raises for an operator whose result, or its shape, depends on values.
DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


def processor_knows(instructions: Literal["avx2", "avx512"]) -> bool:
    """Whatever ATEN_CPU_CAPABILITY says, which other libraries do not heed."""
    return bool(getattr(torch.cpu, f"_is_{instructions}_supported")())


def next_sequence() -> int:
    """The number that autograd gives to the next node made on this thread."""
    return torch._C._autograd._get_sequence_nr()


def running_sequence() -> int:
    """The number of the autograd node that the engine evaluates on this thread; -1 for none, and for those of leaves"""
    node = torch._C._current_autograd_node()
    sequence = -1 if node is None else node._sequence_nr()
    return sequence if sequence < 2**63 else -1


def running_node() -> tuple[int, str] | None:
    """(number, name) of the autograd node of torch's own that the engine evaluates on this thread; None for none, and
    for those of an autograd.Function."""
    node = torch._C._current_autograd_node()
    if node is None or isinstance(node, torch.autograd.function.BackwardCFunction):
        return None
    return node._sequence_nr(), node.name()


def running_backward() -> int:
    """A number for the innermost backward that the engine runs on this thread; -1 for none."""
    return torch._C._current_graph_task_id()


@contextmanager
def optimizers_take_fake_tensors() -> Iterator[None]:
    """Optimizers choose their foreach variants (the default on a GPU) for fake parameters as for real ones."""
    known = optimizer._foreach_supported_types
    known.append(FakeTensor)
    try:
        yield
    finally:
        known.remove(FakeTensor)


@contextmanager
def rng_states_seen(see: Callable[[Tensor], None]) -> Iterator[None]:
    """Calls `see` with every state of the CPU's generator that is taken: checkpointing keeps one for each region."""
    original = torch.get_rng_state

    def get_rng_state() -> Tensor:
        state = original()
        see(state)
        return state

    torch.get_rng_state = get_rng_state
    try:
        yield
    finally:
        torch.get_rng_state = original


def compiled_modules(model: nn.Module) -> list[str]:
    """Paths of the modules that torch.compile wraps, or compiles in place."""
    return [
        path
        for path, module in model.named_modules()
        if getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
    ]
