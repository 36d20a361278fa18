"""Batches for a model of the user's own: from a function, or random ones from shapes in JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fused_remat.compare.factory import BadOption, one_line

MakeBatch = Callable[[nn.Module, int], Any]  # (model, step) -> dict or tuple; torch's generator is seeded by the step

_KEYS = {"shape", "dtype", "below", "value"}
_EXAMPLE = '{"input_ids": {"shape": [2, 64], "dtype": "int64", "below": 256}}'


@dataclass(frozen=True)
class Spec:
    """One tensor: integers from 0 to `below` (exclusive), a constant `value`, or standard normal."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    below: int | None = None
    value: float | None = None

    def draw(self) -> Tensor:
        if self.value is not None:
            return torch.full(self.shape, self.value, dtype=self.dtype)
        if self.dtype.is_floating_point:
            return torch.randn(self.shape, dtype=torch.float32).to(self.dtype)
        return torch.randint(self.below, self.shape).to(self.dtype)


def from_shapes(described: dict[str, Any] | list[Any]) -> tuple[MakeBatch, str]:
    """Random batches and a line that describes them; an object gives keyword arguments, a list positional ones.

    Raises BadOption naming the tensor that is described wrongly.
    """
    names = list(described) if isinstance(described, dict) else [str(i) for i in range(len(described))]
    values = list(described.values()) if isinstance(described, dict) else described
    if not values:
        raise BadOption("--inputs", f"describes no tensor; for example {_EXAMPLE}")
    specs = {name: _spec(name, value) for name, value in zip(names, values, strict=True)}
    text = ", ".join(
        f"{name} {list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}" for name, spec in specs.items()
    )

    def make(model: nn.Module, step: int) -> dict[str, Tensor] | tuple[Tensor, ...]:
        drawn = {name: spec.draw() for name, spec in specs.items()}
        return drawn if isinstance(described, dict) else tuple(drawn.values())

    return make, f"random inputs {text}"


def draw(make: MakeBatch, model: nn.Module, step: int, seed: int, device: torch.device) -> Any:
    """The batch of `step`, on `device`: a function of `seed` and `step`, whatever was drawn before.

    Raises BadOption where `make` raises or returns something other than a dict, a tuple, a list or a tensor.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * 1_000_003 + step)
        try:
            batch = make(model, step)
        except Exception as error:  # the user's code may raise anything
            raise BadOption(
                "--batch", f"the function raised {one_line(error)}; it is called as f(model, step)"
            ) from error
    if not isinstance(batch, (dict, tuple, list, Tensor)) or not any(isinstance(t, Tensor) for t in tree_leaves(batch)):
        raise BadOption(
            "--batch", f"the function returned a {type(batch).__name__}, expected a dict or tuple of tensors"
        )
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a model: a dict goes in by keyword, a tuple or list by position."""
    if isinstance(batch, dict):
        return (), batch
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def _spec(name: str, described: Any) -> Spec:
    def refuse(why: str) -> BadOption:
        return BadOption("--inputs", f"{name}: {why}; for example {_EXAMPLE}")

    if not isinstance(described, dict) or "shape" not in described:
        raise refuse(f'expected an object with a "shape", got {described!r}')
    if unknown := described.keys() - _KEYS:
        raise refuse(f"unknown {', '.join(sorted(unknown))}, expected some of {', '.join(sorted(_KEYS))}")
    shape, below, value = described["shape"], described.get("below"), described.get("value")
    if not isinstance(shape, list) or not all(_is_int(size) and size > 0 for size in shape):
        raise refuse(f"shape must be a list of whole numbers of at least 1, got {shape!r}")
    dtype = getattr(torch, str(described.get("dtype", "float32")), None)
    if not isinstance(dtype, torch.dtype) or dtype.is_complex:
        raise refuse(f"dtype must name a real dtype of torch, got {described['dtype']!r}")
    if value is not None and not (_is_int(value) or isinstance(value, (float, bool))):
        raise refuse(f"value must be a number, got {value!r}")
    if below is not None and (dtype.is_floating_point or not _is_int(below) or below < 1):
        raise refuse(f"below must be a whole number of at least 1, for integers, got {below!r} for {dtype}")
    if value is None and below is None and not dtype.is_floating_point:
        if dtype != torch.bool:
            raise refuse(f'{dtype} needs "below" (random from 0 to below - 1) or "value" (the same everywhere)')
        below = 2
    return Spec(tuple(shape), dtype, below, value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
