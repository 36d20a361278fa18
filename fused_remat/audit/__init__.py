"""`audit` and `auditing`: did the last step keep what the layers promised?

In reading order: `promises` lists what the layers of a model promise, `expected` says by formula what that is in bytes,
`watching` sees what a step saves, `judge` compares, `report` is the result. `fused_remat.last_calls` holds the notes
that fused layers make at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fused_remat._about import about_model, about_step
from fused_remat.audit.judge import by_note, by_watching, name_of
from fused_remat.audit.promises import promises_of
from fused_remat.audit.report import Audit, Row
from fused_remat.audit.watching import Watching
from fused_remat.policy.arrangement import is_arranged
from fused_remat.training_step import TrainingStep

__all__ = ["Audit", "Row", "audit", "auditing"]


def audit(model: nn.Module, *, step: Callable[[], Any] | TrainingStep | None = None) -> Audit:
    """Whether the fused layers and regions of `model` kept in a step what they promised.

    Args:
        model: converted by `fused_remat.convert`, or with modules of `fused_remat.nn`.
        step: runs a forward and backward of `model`, which is then measured, as by `auditing`: a function, or a
            `fused_remat.training_step.TrainingStep` of this model, whose inputs the report then names. None: nothing
            runs; the rows tell of each layer's last call with gradients, whenever that was, whether it ran fused and,
            if not, why, and what such a call keeps by formula.

    Returns:
        An `Audit`: prints as a table; `ok` is False where a layer kept more than promised (its own code ran, the
        reference path, ...) or less (something around it recomputes it too), or where no promise could be checked.
        Where a policy or plan lets the model keep everything, there is none, and that is ok.

    Raises:
        TypeError: `model` is no module, or `step` no function. ValueError: a `TrainingStep` of another model.
        RuntimeError: an audit is running already. And whatever `step` raises.
    """
    _check(model)
    if step is None:
        rows = [by_note(promise) for promise in promises_of(model)]
        return Audit(name_of(model), rows=rows, arranged=is_arranged(model), about=about_model(model))
    own = step if isinstance(step, TrainingStep) else None
    if own is not None and own.model is not model:
        raise ValueError(f"step is a TrainingStep of another {name_of(own.model)} than model; make one of model")
    if own is None and not callable(step):
        raise TypeError(f"step must be a function without arguments that runs a step, got {type(step).__name__}")
    with auditing(model) as found:
        step() if own is None else own.run()
    if own is not None:
        found.about = about_step(own)
    return found


@contextmanager
def auditing(model: nn.Module) -> Iterator[Audit]:
    """Measures, per layer, what a forward and backward inside keep; the `Audit` is filled at the end.

    Of several passes (gradient accumulation) the last is told. Hooks on saved tensors see every tensor in the meantime,
    so the step is slower; what it computes stays the same. Calls inside torch.compile are not seen.

    Raises:
        TypeError: `model` is no module.
        RuntimeError: an audit is running already.
    """
    _check(model)
    found, promises = Audit(name_of(model), about=about_model(model)), promises_of(model)
    watching = Watching(model, promises)
    with watching.watching():
        yield found
    found.measured, found.arranged = True, is_arranged(model)
    found.rows = [by_watching(promise, watching) for promise in promises]
    found.outside_bytes = 0 if watching.kept is None else watching.kept.outside


def _check(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
