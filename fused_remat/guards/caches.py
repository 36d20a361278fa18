"""Key-value caches: they grow in the forward, and would grow again in the replay."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fused_remat.guards.errors import RematCache, RematWarning

_NAMES = ("past_key_values", "past_key_value", "layer_past", "past_kv", "past", "kv_cache", "cache", "cache_params")
_WITHOUT = "pass use_cache=False (or set model.config.use_cache = False) in training, or run under torch.no_grad()"


def refuse_caches(region: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises RematCache for a cache object. Warns of keys and values that come as plain tensors: they do not grow."""
    for name, value in _arguments(args, kwargs):
        if is_cache(value):
            raise RematCache(
                f"{region} gets the key-value cache {name} ({type(value).__name__}) while gradients are on: its replay "
                f"would add the same keys and values once more; {_WITHOUT}"
            )
    for name in _NAMES:
        value = kwargs.get(name)
        held = _inside(name, value) if isinstance(value, (tuple, list, Mapping)) and not is_cache(value) else ()
        if any(isinstance(item, Tensor) for _, item in held):
            warnings.warn(
                f"{region} gets past keys and values in {name} while gradients are on and keeps them for backward; "
                f"if they are no trained prefix, {_WITHOUT}",
                RematWarning,
                stacklevel=4,
            )


def is_cache(value: Any) -> bool:
    """Whether an object is of a class called a cache: DynamicCache, StaticCache, KVCache, ..."""
    if isinstance(value, (Tensor, nn.Module, type)):
        return False
    return any(cls.__name__.endswith("Cache") for cls in type(value).__mro__)


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each argument, and what containers among them hold, however deep."""
    for number, value in enumerate(args):
        yield from _inside(f"args[{number}]", value)
    for name, value in kwargs.items():
        yield from _inside(name, value)


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The value, and what it holds if it is a container: those that `arguments` takes apart. None holds itself."""
    yield name, value
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _inside(f"{name}[{key!r}]", item)
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from _inside(f"{name}[{number}]", item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type) and not is_cache(value):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                yield from _inside(f"{name}.{field.name}", getattr(value, field.name))
