"""Small copies of layers, on which their own code is run: what the trials of MLPs, attentions and norms share."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.convert.fused import Path
from fused_remat.plain import without_fake_mode

_SHARED = ("_parameters", "_modules")  # of a module and its copy
Tensors = dict[str, dict[str, Tensor | None]]  # "_parameters" and "_buffers" of a module


class Marker(nn.Dropout):
    """Stands for a dropout, norm or other module around the layer: scales by `factor`."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


def marker_factors(paths: Iterable[Path]) -> dict[Path, float]:
    """A factor of its own for the marker at each path, whatever their order."""
    return {path: 0.75 + 0.25 * i for i, path in enumerate(sorted(paths))}


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """On the CPU, with values, with gradients, without autocast, warnings or traces in torch's random state."""
    with (
        without_fake_mode(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def first_line(error: Exception) -> str:
    """What `error` says, in one line; its class if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@functools.cache
def _unhooked(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (cls,), {"__call__": cls.forward, "__module__": cls.__module__})


def copy_module(module: nn.Module, training: bool, **changes: Any) -> nn.Module:
    """A copy whose call is its class's forward, with some of its `__dict__` replaced.

    Its containers are its own, and so are buffers and tensors among the attributes (also in a list or dict), which its
    code may write into; parameters are those of `module`.
    """
    copy = object.__new__(_unhooked(type(module)))
    own = {name: _own(value) for name, value in vars(module).items() if name not in (*_SHARED, *changes)}
    shared = {name: vars(module)[name].copy() for name in _SHARED if name in vars(module)}
    copy.__dict__.update(own | shared | {"training": training} | changes)
    return copy


def own_tensor(tensor: Tensor) -> Tensor:
    """A leaf with the values and the flag of `tensor`, and memory of its own."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _own(value: Any) -> Any:
    if isinstance(value, Tensor):
        return own_tensor(value)
    if not isinstance(value, (dict, list, set)):
        return value
    copied = value.copy()
    if isinstance(copied, dict):
        copied.update({key: own_tensor(item) for key, item in copied.items() if isinstance(item, Tensor)})
    elif isinstance(copied, list):
        copied[:] = [own_tensor(item) if isinstance(item, Tensor) else item for item in copied]
    return copied


def random_linear(
    shape: tuple[int, int], biased: bool, random: torch.Generator, scale: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Weight [out, in] and bias [out] (None unless `biased`) in float64 that require gradients."""
    weight, bias = (torch.randn(s, generator=random, dtype=torch.float64) * scale for s in (shape, shape[:1]))
    return weight.requires_grad_(), bias.requires_grad_() if biased else None


def small_linear(cls: type[nn.Module], weight: Tensor, bias: Tensor | None, training: bool) -> nn.Module:
    """A linear of class `cls` (nn.Linear, or transformers' Conv1D, which stores its weight transposed)."""
    fan_out, fan_in = weight.shape
    transposed = cls is not nn.Linear
    linear = cls(fan_out, fan_in) if transposed else cls(fan_in, fan_out, bias is not None)
    return copy_module(linear, training, _parameters={"weight": weight.t() if transposed else weight, "bias": bias})


def _no_tensors(module: nn.Module) -> Tensors:
    return {"_parameters": {}, "_buffers": {}}


def twin(
    module: nn.Module,
    parts: Mapping[Path, Any],
    training: bool,
    *,
    tensors: Callable[[nn.Module], Tensors] = _no_tensors,
    brings: Callable[[nn.Module], bool] = lambda child: False,
    path: Path = (),
) -> nn.Module:
    """A copy of `module`, which is at `path`, with `parts` in their places.

    `tensors`: what it has of its own. Other children stay out, but those that it `brings` along.
    """
    children = {}
    for name, child in module._modules.items():
        below = (*path, name)
        if child is None or below in parts:
            children[name] = parts.get(below)
        elif any(part[: len(below)] == below for part in parts):
            children[name] = twin(child, parts, training, tensors=tensors, brings=brings, path=below)
        elif brings(child):
            children[name] = copy_module(child, training, **tensors(child))
    return copy_module(module, training, _modules=children, **tensors(module))
