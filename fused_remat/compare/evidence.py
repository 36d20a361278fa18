"""Which operators really ran in the fused variant: observed in one step, not inferred from settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import Tensor
from torch.autograd.profiler import profile

from fused_remat import _extension
from fused_remat.dispatch import BACKENDS

_NAMESPACE = "fused_remat::"
_ENDINGS = tuple(f"_{backend}" for backend in BACKENDS)  # of tile operators: mlp_fwd_chunk_cpp


def operators_run(fn: Callable[[], Tensor]) -> Counter[str]:
    """Names (without namespace) of our operators that one forward and backward of `fn` calls, with counts."""
    with profile(use_kineto=True) as profiler:
        fn().backward()
    names = (event.name for event in profiler.function_events)
    return Counter(name.removeprefix(_NAMESPACE) for name in names if name.startswith(_NAMESPACE))


def describe_path(operators: Counter[str]) -> str:
    """One sentence for a person: the tile operators with their calls per step, or that it was the reference path."""
    tiles = sorted((name, calls) for name, calls in operators.items() if name.endswith(_ENDINGS))
    if tiles:
        return "compiled operators, per step " + ", ".join(f"{name} x {calls}" for name, calls in tiles) + "."
    reason = _extension.status().reason
    return f"the reference path, which saves no memory{f' ({reason})' if reason else ''}."


def ran_compiled(operators: Counter[str]) -> bool:
    """Whether a compiled tile operator was called at all."""
    return any(name.endswith(_ENDINGS) for name in operators)
