"""Options that commands share, and how a wrong value of one is refused."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated

import torch
import typer

Model = Annotated[
    str,
    typer.Option(
        help="vit or llama (the models of `fused-remat compare`), or a factory of your own as module:callable.",
        metavar="MODEL",
    ),
]
Config = Annotated[
    str | None,
    typer.Option(help="Keyword arguments of that factory: a JSON object, or a file with one.", metavar="JSON"),
]
Inputs = Annotated[
    str | None,
    typer.Option(
        help="Random inputs of that model, as JSON or a file with it: an object (keyword arguments) or a list of "
        '{"shape": [...], "dtype": "float32", "below": N, "value": V}; integers need below or value.',
        metavar="JSON",
    ),
]
Batch = Annotated[
    str | None,
    typer.Option(
        help="Instead of --inputs: module:callable, called with the model and the step, that returns a dict or "
        "tuple of tensors.",
        metavar="CALLABLE",
    ),
]
Loss = Annotated[
    str | None,
    typer.Option(
        help="module:callable, called with the model's output, that returns the scalar loss. Without it: the output's "
        ".loss or the output if it is a scalar, else the mean square of its first floating-point tensor.",
        metavar="CALLABLE",
    ),
]
Optimizer = Annotated[
    str,
    typer.Option(help="adamw, sgd or none, or module:callable, called with the parameters.", metavar="OPTIMIZER"),
]
Device = Annotated[str, typer.Option(help="Where to run: cpu or cuda.")]
Seed = Annotated[str, typer.Option(help="Seed of weights and inputs.", metavar="N")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]
Fake = Annotated[
    bool,
    typer.Option(
        "--fake",
        help="Predict on tensors without memory instead of measuring: for models larger than this machine, which the "
        "factory then builds on torch's meta device.",
    ),
]

_LARGEST_SEED = 2**31 - 1


def bad_value(option: str, got: object, expected: str, remedy: str) -> typer.BadParameter:
    """The error for a value that an option cannot have."""
    return typer.BadParameter(f"got {got!r}, expected {expected}; {remedy}", param_hint=option)


def check_whole_number(option: str, text: str, least: int, most: int) -> int:
    """The number that `text` is. Raises typer.BadParameter unless it is a whole one from `least` to `most`."""
    if not re.fullmatch(r"[0-9]+", text) or not least <= int(text) <= most:
        expected = f"a whole number from {least} to {most}"
        raise bad_value(option, text, expected, f"for example {option} {max(least, 7)}")
    return int(text)


def as_number(text: str | None) -> int | float | str | None:
    """Bytes and fractions as numbers, as functions take them; anything else, such as "6GiB", as it is."""
    for kind in (int, float):
        try:
            return None if text is None else kind(text)
        except ValueError:
            continue
    return text


def check_seed(text: str) -> int:
    """The seed that `text` is. Raises typer.BadParameter."""
    return check_whole_number("--seed", text, 0, _LARGEST_SEED)


def check_device(device: str) -> torch.device:
    """The device of that name. Raises typer.BadParameter unless it is there."""
    if device not in ("cpu", "cuda"):
        raise bad_value("--device", device, "cpu or cuda", "leave it out for the default")
    if device == "cuda" and not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no usable GPU"
        raise bad_value("--device", device, f"a device that is there, but {why}", "use --device cpu")
    return torch.device(device)


def refuse_for_built_in(values: Mapping[str, str | None]) -> None:
    """Raises typer.BadParameter for the first of these options (name to value) that is given."""
    for option, value in values.items():
        if value is not None:
            expected = "a model of your own, as --model module:callable"
            raise bad_value(f"--{option}", value, expected, f"leave --{option} out for the built-in models")


def require(packages: Iterable[str], command: str) -> None:
    """Raises typer.Exit(1) after one line if an optional package that the command needs cannot be imported."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            message = (
                f"Error: {command} needs {package}, which cannot be imported ({error}); "
                "install what it needs with: pip install 'fused_remat[demo]'"
            )
            typer.echo(message, err=True)
            raise typer.Exit(1) from error
