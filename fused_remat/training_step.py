"""One optimizer step of a model as a thing that can be run, recorded and taken back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fused_remat._snapshot import RandomStates, Snapshot
from fused_remat.plain import has_values

FORWARD, BACKWARD, OPTIMIZER = PHASES = ("forward", "backward", "optimizer")

Phase = Callable[[str], AbstractContextManager[Any]]


@dataclass
class TrainingStep:
    """One optimizer step: zero_grad, forward, loss, backward, optimizer.step. Made by `make_step`, which checks it.

    Attributes:
        model: what is trained.
        args, kwargs: its inputs.
        loss: of the model's output; None: see `find_loss`.
        optimizer: None: the step ends with backward.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor] | None = None
    optimizer: Optimizer | None = None

    def forward(self) -> Tensor:
        """The scalar loss, with its graph. Of the model's output only what the graph needs stays alive.

        Raises:
            TypeError: the loss is no tensor.
            ValueError: it is not a scalar, has no graph, or the output offers nothing to train on.
        """
        output = self.model(*self.args, **self.kwargs)
        if self.loss is None:
            loss, _ = find_loss(output)
            if loss is None:
                raise ValueError(
                    f"the model's output ({type(output).__name__}) has no .loss, no scalar and no floating-point "
                    "tensor to make a loss of; pass loss=, a function of the output that returns a scalar"
                )
        else:
            loss = self.loss(output)
        _check_loss(loss)
        return loss

    def run(self, phase: Phase = lambda name: nullcontext()) -> Tensor:
        """The whole step; returns the loss. Gradients are None before and left in place after.

        `phase(name)` is entered around "forward", "backward" and (with an optimizer) "optimizer".
        Raises: as `forward`, and whatever the model, the loss and the optimizer raise.
        """
        self.zero_grad()
        with phase(FORWARD):
            loss = self.forward()
            torch.clear_autocast_cache()  # a training loop leaves autocast after each forward
        with phase(BACKWARD):
            loss.backward()
        if self.optimizer is not None:
            with phase(OPTIMIZER):
                self.optimizer.step()
        return loss

    def zero_grad(self) -> None:
        """Sets the gradient of every parameter and input to None."""
        for leaf in self.leaves():
            leaf.grad = None

    def leaves(self) -> list[Tensor]:
        """Parameters of the model and the optimizer, and input tensors that are leaves; each once."""
        grouped = () if self.optimizer is None else (p for g in self.optimizer.param_groups for p in g["params"])
        found = [*self.model.parameters(), *grouped, *(t for t in self.inputs() if t.is_leaf)]
        return list({id(tensor): tensor for tensor in found}.values())

    def inputs(self) -> list[Tensor]:
        """The tensors among `args` and `kwargs`, in containers too; each once."""
        return list({id(t): t for t in tensors_in([self.args, self.kwargs])}.values())


def make_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Optimizer | type[Optimizer] | Callable[[list[nn.Parameter]], Optimizer] | None = None,
) -> TrainingStep:
    """A checked `TrainingStep`. Runs nothing of the model.

    Args:
        model: at least one of its parameters requires a gradient.
        args, kwargs: inputs of `model`.
        loss: takes the model's output and returns a scalar tensor; None: see `find_loss`.
        optimizer: an instance over the model's parameters, or a class or function that is called with the list of
            those that require a gradient and returns one.

    Raises:
        TypeError: an argument of the wrong type; the optimizer cannot be built, or its step needs a closure.
        ValueError: nothing to train, lazy parameters, an optimizer of other parameters, or an input with a graph.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {_kind(model)}; wrap a function in a module")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple of the model's inputs, got {_kind(args)}; pass (x,) for a single one")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        raise TypeError(f"kwargs must map names to inputs of the model, got {_kind(kwargs)}")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of the model's output, got {_kind(loss)}")
    lazy = next((name for name, p in [*model.named_parameters(), *model.named_buffers()] if is_lazy(p)), None)
    if lazy is not None:
        raise ValueError(f"parameter {lazy} of the model has no shape yet (a lazy module); run one forward first")
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("model has no parameter that requires a gradient, so there is nothing to train")
    for path, tensor in _inputs_of(args, kwargs or {}):
        if tensor.grad_fn is not None:
            raise ValueError(
                f"{path} was computed with gradients ({tensor.grad_fn.name()}), and the backward of every step would "
                "go on through that graph, which the first one frees; detach() it (and requires_grad_() it, if the "
                "step is to compute its gradient)"
            )
    return TrainingStep(model, tuple(args), dict(kwargs or {}), loss, _optimizer(optimizer, trainable))


def check_has_memory(step: TrainingStep) -> None:
    """Raises ValueError if a tensor of the model or of its inputs is on the device "meta" or fake: real steps need
    all."""
    named = {
        "the model's parameters have": step.model.parameters(),
        "the model's buffers have": step.model.buffers(),
    }
    lacking = [what for what, tensors in named.items() if not all(map(has_values, tensors))]
    lacking += [f"{path} has" for path, tensor in _inputs_of(step.args, step.kwargs) if not has_values(tensor)]
    if lacking:
        raise ValueError(f"{lacking[0]} no memory (meta or fake tensors), so no step can be run; pass fake=True")


@contextmanager
def left_untouched(step: TrainingStep) -> Iterator[None]:
    """Takes back what runs of `step` inside do, also when one raises.

    Afterwards parameters, buffers, other attributes of the modules, input tensors, every `.grad`, the optimizer with
    its state, training flags and the random generators (torch's, Python's, NumPy's if imported) have the values, and
    are the objects, that they were. Inside, every `.grad` is None at first. Not covered: what objects other than
    dicts, lists and tuples on the modules hold, and what the model changes outside of itself.

    Copies every tensor once (those on a GPU into the host's memory).
    """
    roots = [vars(module) for module in step.model.modules()]
    if step.optimizer is not None:
        roots.append(vars(step.optimizer))
    snapshot = Snapshot([*roots, list(step.args), dict(step.kwargs)])
    random_states = RandomStates()
    snapshot.take_gradients()
    try:
        yield
    finally:
        snapshot.restore()
        random_states.restore()


def find_loss(output: Any) -> tuple[Tensor | None, str]:
    """The scalar to train on where none was named, and in words what it is; None if there is none.

    It is the output's own `.loss` (or entry "loss"), else the first floating-point tensor in the output: itself if it
    has one element, else its mean square.
    """
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own.mean(), "the output's own .loss"
    tensor = _first_floating(output)
    if tensor is None:
        return None, ""
    if tensor.numel() == 1:
        return tensor.reshape(()), "the model's scalar output"
    return tensor.float().square().mean(), f"the mean square of the model's first output {list(tensor.shape)}"


def _first_floating(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    members = list(output.values()) if isinstance(output, Mapping) else output
    if not isinstance(members, (tuple, list)):
        members = list(vars(output).values()) if hasattr(output, "__dict__") else []
    return next((found for member in members if (found := _first_floating(member)) is not None), None)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss must return a tensor, got {_kind(loss)}; return the scalar to train on")
    if loss.numel() != 1:
        raise ValueError(f"loss must be a scalar, got shape {list(loss.shape)}; reduce it, e.g. by .mean()")
    if not loss.requires_grad:
        raise ValueError(
            "the loss has no graph (requires_grad=False), so there is no backward; it must depend on parameters that "
            "require a gradient, outside of torch.no_grad()"
        )


def _optimizer(given: Any, trainable: list[nn.Parameter]) -> Optimizer | None:
    if given is None:
        return None
    built = given
    if not isinstance(given, Optimizer):
        if not callable(given):
            raise TypeError(
                f"optimizer must be an Optimizer, a class or a function of the parameters, got {_kind(given)}"
            )
        name = getattr(given, "__name__", repr(given))
        try:
            built = given(trainable)
        except Exception as error:  # the caller's code may raise anything
            raise TypeError(
                f"optimizer {name} cannot be built from the list of parameters alone: {type(error).__name__}: {error}; "
                f"pass an instance, or lambda parameters: {name}(parameters, ...)"
            ) from error
        if not isinstance(built, Optimizer):
            raise TypeError(f"optimizer {name} must return a torch.optim.Optimizer, got {_kind(built)}")
    closure = inspect.signature(type(built).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(f"optimizer {type(built).__name__} needs a closure for its step; use one that does not")
    own = set(map(id, trainable))
    if not any(id(p) in own for group in built.param_groups for p in group["params"]):
        raise ValueError("optimizer holds none of the model's trainable parameters; build it from model.parameters()")
    return built


def tensors_in(root: Any) -> Iterator[Tensor]:
    """The tensors in nested mappings, tuples and lists, as often as they occur; keys of mappings are not looked at."""
    return (tensor for _, tensor in _located(root, ""))


def _inputs_of(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among a model's inputs, and where they are, in words."""
    for index, member in enumerate(args):
        yield from _located(member, f"input {index}")
    for name, member in kwargs.items():
        yield from _located(member, f"input {name!r}")


def _located(root: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(root, Tensor):
        yield path, root
    elif isinstance(root, (Mapping, tuple, list)):
        for key, member in root.items() if isinstance(root, Mapping) else enumerate(root):
            yield from _located(member, f"{path}[{key!r}]")


def _kind(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else f"a {type(value).__name__}"
