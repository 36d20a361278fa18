"""A model of the user's own, from `module:callable` and a JSON object of settings: found, called and looked over."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn


class BadOption(ValueError):
    """An option of the command that cannot be used: `option` is its name, the message one line."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


@contextmanager
def importable_from_here() -> Iterator[None]:
    """Modules of the current folder can be imported, as they can under `python -m`."""
    here = os.getcwd()
    if here in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def find_callable(option: str, path: str) -> Callable[..., Any]:
    """What `path`, "module:callable" with dots inside either part, names.

    Raises BadOption for another form, a module that cannot be imported, and a name that is not there or no callable.
    """
    module_name, colon, attribute = path.partition(":")
    parts = attribute.split(".")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), *parts)):
        raise BadOption(option, f"got {path!r}, expected module:callable, for example mypackage.models:make_model")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # a module of the user's may raise anything
        raise BadOption(option, f"module {module_name} cannot be imported: {one_line(error)}") from error
    reached = module_name
    for part in parts:
        if not hasattr(found, part):
            raise BadOption(option, f"{reached} has no {part!r}; check the part of {path!r} after the colon")
        found, reached = getattr(found, part), f"{reached}.{part}"
    if not callable(found):
        raise BadOption(option, f"{path} is of type {type(found).__name__}, expected something to call")
    return found


def read_json(option: str, text: str, kinds: tuple[type, ...], what: str) -> Any:
    """The JSON in `text`, or in the file that it names.

    Raises BadOption for what cannot be read, and unless it is of one of `kinds`, in words `what`.
    """
    source = text
    if not text.lstrip().startswith(("{", "[")):
        try:
            source = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadOption(
                option, f"{text!r} is neither JSON (an opening brace first) nor a file that can be read: {error}"
            ) from error
    try:
        value = json.loads(source)
    except json.JSONDecodeError as error:
        raise BadOption(option, f"not valid JSON: {error}") from error
    if not isinstance(value, kinds):
        raise BadOption(option, f"got a JSON {type(value).__name__}, expected {what}")
    return value


def build_model(factory: Callable[..., Any], config: dict[str, Any], seed: int) -> tuple[nn.Module, tuple[str, ...]]:
    """The model that `factory` makes of `config`, weights drawn from `seed`, and remarks on how it was made.

    `factory` is called with the settings as keyword arguments. A class with a `config_class` (transformers' models)
    is called with `config_class(**config)`. Key-value caches are turned off: training has no use for them.

    Raises BadOption where the factory raises, or makes something other than an nn.Module with parameters.
    """
    config_class = getattr(factory, "config_class", None) if inspect.isclass(factory) else None
    name, remarks = getattr(factory, "__name__", str(factory)), []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            if config_class is None:
                model = factory(**config)
            else:
                settings = config_class(**config)
                remarks += _unknown(config, config_class)
                model = factory(settings)
        except Exception as error:  # the user's code may raise anything
            made_of = f"{name}({', '.join(f'{key}=...' for key in config)})"
            raise BadOption(
                "--model", f"{made_of} raised {one_line(error)}; its settings come from --config"
            ) from error
    if not isinstance(model, nn.Module):
        raise BadOption("--model", f"{name} returned a {type(model).__name__}, expected a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BadOption("--model", f"{name} returned a module without trainable parameters, so nothing can be trained")
    return model, (*remarks, *_without_caches(model))


def one_line(error: BaseException) -> str:
    """Type and first line of the message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _unknown(config: dict[str, Any], config_class: type) -> list[str]:
    """Settings that a default configuration has not: transformers takes any name, misspelt ones too."""
    try:
        default = config_class()
    except Exception:  # this one has no defaults, and nothing can be said
        return []
    unknown = [key for key in config if not hasattr(default, key) and not hasattr(default, f"_{key}")]
    return [f"{config_class.__name__} has no setting {', '.join(unknown)}, and may ignore it."] if unknown else []


def _without_caches(model: nn.Module) -> list[str]:
    """Sets `use_cache` to False in every configuration of the model's; a remark if it was on in one."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    on = [config for config in configs if getattr(config, "use_cache", False)]
    for config in on:
        config.use_cache = False
    return ["use_cache was turned off: a key-value cache is of no use in training."] if on else []
