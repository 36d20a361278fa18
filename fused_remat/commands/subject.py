"""What a command is about: a model with inputs, its loss and its optimizer, from the command's options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import typer
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fused_remat.commands.options import bad_value, check_device, check_seed, refuse_for_built_in, require
from fused_remat.compare.command import MODELS, load_workload
from fused_remat.compare.custom import find_inputs, read_settings
from fused_remat.compare.factory import BadOption, build_model, find_callable, importable_from_here
from fused_remat.compare.inputs import arguments, draw

OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "none": None}


@dataclass(frozen=True)
class Subject:
    """`model(*args, **kwargs)` with `loss` of its output, trained by what `optimizer` makes of its parameters."""

    title: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    resized: Callable[[int], Any]  # of a batch size: inputs of that many rows
    loss: Callable[[Any], Tensor] | None
    optimizer: Callable[..., torch.optim.Optimizer] | None

    def named(self) -> dict[str, Any]:
        """The keyword arguments that `profile`, `plan` and their like take beside model and inputs."""
        return {"kwargs": self.kwargs, "loss": self.loss, "optimizer": self.optimizer}


@contextmanager
def subject(
    model: str,
    *,
    config: str | None,
    inputs: str | None,
    batch: str | None,
    loss: str | None = None,
    optimizer: str = "adamw",
    device: str = "cpu",
    seed: str = "0",
    fake: bool = False,
) -> Iterator[Subject]:
    """The subject that these options describe; modules of the current folder can be imported inside.

    With `fake`, a model of the user's own is built on the meta device, and nothing of it takes memory.

    Raises:
        typer.BadParameter: naming the option that is wrong.
        typer.Exit: 1, where an optional package of a built-in model is missing.
    """
    where, seed_number = check_device(device), check_seed(seed)
    with importable_from_here():
        try:
            found = _find_optimizer(optimizer)
            if ":" not in model:
                yield _built_in(model, {"config": config, "inputs": inputs, "batch": batch, "loss": loss}, where, found)
            else:
                make, _ = find_inputs(model, inputs, batch)
                where = torch.device("meta") if fake else where
                with torch.device(where):
                    made = _own_model(model, config, seed_number, where)
                    drawn = draw(make, made, 0, seed_number, where)
                loss_of = None if loss is None else find_callable("--loss", loss)
                yield Subject(model, made, *arguments(drawn), lambda size: with_rows(drawn, size), loss_of, found)
        except BadOption as error:
            raise typer.BadParameter(str(error), param_hint=error.option) from error


def _built_in(
    name: str, own: dict[str, str | None], device: torch.device, optimizer: Callable[..., Any] | None
) -> Subject:
    refuse_for_built_in(own)
    if name not in MODELS:
        raise bad_value("--model", name, f"{', '.join(MODELS)} or module:callable", "for example --model vit")
    require(MODELS[name].packages, f"--model {name}")
    workload = load_workload(name)(0, device)
    batch = workload.batch(0)
    inputs, targets = batch

    def resized(size: int) -> Any:
        args, kwargs = workload.inputs(with_rows(batch, size))
        return args or kwargs

    def cross_entropy(output: Any) -> Tensor:
        fitting = targets  # repeated or cut to the sizes of the output, whatever inputs it was made of
        shape = next(leaf.shape for leaf in tree_leaves(dict(output) if isinstance(output, Mapping) else output))
        for dim in range(targets.dim()):
            fitting = _with_size(fitting, dim, shape[dim])
        return workload.loss_of(output, (inputs, fitting))

    cross_entropy.__qualname__ = cross_entropy.__name__  # as reports name it
    return Subject(workload.title, workload.build(), *workload.inputs(batch), resized, cross_entropy, optimizer)


def with_rows(batch: Any, size: int) -> Any:
    """`batch` with `size` rows: every tensor with as many rows (dimension 0) as the first is repeated or cut."""
    rows = next(leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())

    def fit(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != rows:
            return leaf
        return _with_size(leaf, 0, size)

    return tree_map(fit, batch)


def _with_size(tensor: Tensor, dim: int, size: int) -> Tensor:
    return tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])


def _own_model(model: str, config: str | None, seed: int, device: torch.device) -> nn.Module:
    made, _ = build_model(find_callable("--model", model), read_settings(config), seed)
    return made.to(device).train()


def _find_optimizer(name: str) -> Callable[..., torch.optim.Optimizer] | None:
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    if ":" not in name:
        raise bad_value(
            "--optimizer", name, f"{', '.join(OPTIMIZERS)} or module:callable", "for example --optimizer adamw"
        )
    return find_callable("--optimizer", name)
