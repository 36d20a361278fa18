"""A model of the user's own as a workload: any factory, any inputs, its own loss or one that stands in for it."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.compare.factory import BadOption, build_model, find_callable, one_line, read_json
from fused_remat.compare.inputs import MakeBatch, arguments, draw, from_shapes
from fused_remat.compare.workload import Workload
from fused_remat.training_step import find_loss

_RATE = 1e-4  # low: nothing is known of the model


class CustomModel(Workload):
    """`factory(**config)` on the batches of `make_batch`; `describe_inputs` is a line about them."""

    metric = "evaluation loss, first batch"
    unit = ""
    learning_rate = _RATE
    mlp_class = None
    shape = None

    def __init__(
        self,
        title: str,
        factory: Callable[..., Any],
        config: dict[str, Any],
        make_batch: MakeBatch,
        describe_inputs: str,
        seed: int,
        device: torch.device,
    ) -> None:
        """Builds the model and takes a first step of it. Raises BadOption where that cannot be trained."""
        super().__init__(seed, device)
        self.title = title
        self.name = re.sub(r"\W+", "-", title.rpartition(":")[2])
        model, self._remarks = build_model(factory, config, seed)
        self._model = model.to(device).train()
        self._make_batch, self._describe_inputs = make_batch, describe_inputs
        self._loss_source, is_random = self._try()
        self._remarks += (_RANDOM if is_random else _NOT_RANDOM,)

    def describe(self) -> str:
        parameters = sum(p.numel() for p in self._model.parameters())
        return f"{parameters} parameters; {self._describe_inputs}; the loss is {self._loss_source}"

    def remarks(self) -> tuple[str, ...]:
        return self._remarks

    def build(self) -> nn.Module:
        return copy.deepcopy(self._model)

    def batch(self, step: int) -> Any:
        return draw(self._make_batch, self._model, step, self.seed, self.device)

    def inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments(batch)

    def loss_of(self, output: Any, batch: Any) -> Tensor:
        return find_loss(output)[0]

    def validate(self, model: nn.Module) -> float:
        """The loss in evaluation mode on the batch of step 0: these data are not known to have a held-out part."""
        return self.loss(model, self.batch(0)).item()

    def _try(self) -> tuple[str, bool]:
        """What the loss is, and whether two passes over one batch give two losses (dropout, mostly)."""
        batch, losses = self.batch(0), []
        with torch.random.fork_rng(devices=[]):
            for trial in range(2):
                torch.manual_seed(trial)
                loss, source = self._first_loss(batch)
                losses.append(loss.item())
        if not math.isfinite(losses[0]):
            raise BadOption("--model", f"the first loss is {losses[0]}, expected a finite number; check the inputs")
        return source, losses[0] != losses[1]

    def _first_loss(self, batch: Any) -> tuple[Tensor, str]:
        try:
            model = copy.deepcopy(self._model)
        except Exception as error:  # the user's code may raise anything
            raise BadOption(
                "--model", f"the model cannot be copied (copy.deepcopy raised {one_line(error)})"
            ) from error
        try:
            args, kwargs = arguments(batch)
            output = model(*args, **kwargs)
        except Exception as error:
            raise BadOption(
                "--model", f"its forward raised {one_line(error)}; check --config and the inputs"
            ) from error
        loss, source = find_loss(output)
        if loss is None or not loss.requires_grad:
            raise BadOption(
                "--model",
                f"its output ({type(output).__name__}) has no differentiable loss: expected a .loss, a scalar, or a "
                "floating-point tensor that depends on the parameters",
            )
        return loss, source


_NOT_RANDOM = "The model draws no random numbers, so that losses differ by rounding alone."
_RANDOM = (
    "The model draws random numbers in training (dropout?), others in each variant, so that losses differ by more than "
    "rounding; turn that off in --config to compare losses."
)


def custom_workload(
    model: str, config: str | None, inputs: str | None, batch: str | None, seed: int, device: torch.device
) -> CustomModel:
    """The workload that these options of the command describe. Raises BadOption naming the one that is wrong."""
    make, described = find_inputs(model, inputs, batch)
    factory = find_callable("--model", model)
    settings = read_settings(config)
    return CustomModel(model, factory, settings, make, described, seed, device)


def read_settings(config: str | None) -> dict[str, Any]:
    """The factory's keyword arguments, from the option --config. Raises BadOption."""
    return {} if config is None else read_json("--config", config, (dict,), "an object of keyword arguments")


def find_inputs(model: str, inputs: str | None, batch: str | None) -> tuple[MakeBatch, str]:
    """What makes the batches of `model`, from the options --inputs and --batch, and a line about it.

    Raises BadOption naming the option that is wrong or missing.
    """
    if (inputs is None) == (batch is None):
        raise BadOption("--inputs" if inputs else "--batch", _which_inputs(model, both=inputs is not None))
    if batch is not None:
        return find_callable("--batch", batch), f"batches from {batch}"
    return from_shapes(read_json("--inputs", inputs, (dict, list), "an object or a list that describes tensors"))


def _which_inputs(model: str, *, both: bool) -> str:
    if both:
        return "--inputs and --batch both say what goes into the model; give one of them"
    forward = getattr(find_callable("--model", model), "forward", None)
    takes = ""
    if inspect.isfunction(forward):
        names = list(inspect.signature(forward).parameters)[1:]
        takes = f" (its forward takes {', '.join(names[:6])}{', ...' if len(names) > 6 else ''})"
    return (
        f"{model} needs inputs{takes}: describe them with --inputs, for example "
        '\'{"input_ids": {"shape": [2, 64], "dtype": "int64", "below": 256}}\', or name a function of the model and '
        "the step that makes them, --batch module:callable"
    )
