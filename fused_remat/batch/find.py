"""`find_batch_size`: checks, one search per policy, and what the results mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fused_remat._snapshot import RandomStates
from fused_remat._step import check_count, with_index
from fused_remat.batch.arrange import arranged, check_policy, labelled
from fused_remat.batch.inputs import MakeBatch
from fused_remat.batch.meters import Meter, meter_for
from fused_remat.batch.report import BatchReport, BatchResult, fragmentation
from fused_remat.batch.search import Accumulation, Found, Stage, Trial, search, split_target
from fused_remat.batch.trials import Trials, quick_collections
from fused_remat.settings import is_finite
from fused_remat.training_step import make_step

Progress = Callable[[str, Stage, int, Trial | None], None]


def find_batch_size(
    model: nn.Module,
    make_batch: MakeBatch,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Optimizer | type[Optimizer] | Callable[[list[nn.Parameter]], Optimizer] | None = None,
    limit: int | str | float | None = None,
    smallest: int = 1,
    largest: int | None = None,
    target: int | None = None,
    margin: float = 0.1,
    policies: Sequence[Any] | Mapping[str, Any] = ("everything", "full"),
    steps: int = 2,
    worst: bool = False,
    progress: Progress | None = None,
) -> BatchReport:
    """The largest batch sizes, by doubling and halving, whose whole optimizer steps fit: one per policy.

    Each trial runs `steps` optimizer steps (the optimizer's state appears in the first) and starts from clean: weights,
    buffers, gradients, optimizer and random states as they came, no tensor or error of an earlier trial alive, the
    device's cache empty. The winner is run again, and no size is ever returned that did not run. Afterwards the model
    is as it was found.

    Args:
        model: in the mode and on the device in which it is trained.
        make_batch: takes a size and returns that many rows as the model's inputs: a tensor, a tuple, or a dict by name.
            It should return the worst case of your data: the longest sequence, the largest image, the most objects.
        loss: takes the model's output and returns a scalar; None: the output's own `.loss`, its scalar, or the mean
            square of its first floating-point tensor.
        optimizer: an instance, or a class or function of the parameters. None: no step is made and no state counted.
        limit: how much memory the training may take, weights and optimizer included: bytes, "6GiB", or on a CUDA device
            a fraction. None: what is free on the CUDA device, or the address space of the process where it is limited.
        smallest, largest: sizes to look between; `largest` is at most what the data have.
        target: rows of a global batch to reach by gradient accumulation; no larger micro-batch is tried.
        margin: fraction of the limit to stay free.
        policies: names as `convert` takes them, mappings, plans, functions that convert a model, or None for the model
            as it is; a dict names them. "everything" is the model without any conversion, its modules of
            `fused_remat.nn` keeping all their residuals.
        steps: per trial, at least 2; the first is not timed.
        worst: True says that `make_batch` returns the worst case, so that the report need not ask.
        progress: called as `progress(policy, stage, size, trial)` before (`trial` None) and after each trial.

    Returns:
        A `BatchReport`; it prints as a table. `report["full"].batch` is None if not even `smallest` fits.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: one out of range; no limit on a device that has none; a policy that is none, or not for this model.
        TrialError: a step fails for another reason than memory, at once.
    """
    _check(make_batch, smallest, largest, target, margin, steps, worst, progress)
    named = labelled(policies)
    make_step(model, (), None, loss=loss, optimizer=optimizer)
    device = with_index(next(p.device for p in model.parameters() if p.requires_grad))
    meter = meter_for(device, limit, margin)
    most = min((n for n in (largest, target) if n is not None), default=None)
    random_states, results, varying, about = RandomStates(), [], False, None
    try:
        for policy in named.values():
            check_policy(model, policy)
        for label, policy in named.items():
            with arranged(model, policy), quick_collections():
                trials = Trials(model, make_batch, loss, optimizer, steps, meter, label, progress)
                found = search(trials, smallest, most)
                accumulation, micro = _accumulate(target, found, trials)
                results.append(_result(label, found, accumulation, micro, most, target, meter))
            varying, about = varying or trials.rows.varying, about or trials.about
    finally:
        random_states.restore()
    return BatchReport(
        model=type(model).__name__,
        device=str(device),
        about=about,
        limit_bytes=meter.limit,
        limit_source=meter.source,
        margin=margin,
        steps=steps,
        target=target,
        results=tuple(results),
        warnings=tuple(_warnings(model, optimizer, worst=worst, varying=varying)),
    )


def _check(
    make_batch: Any, smallest: Any, largest: Any, target: Any, margin: Any, steps: Any, worst: Any, progress: Any
) -> None:
    if not callable(make_batch):
        raise TypeError(
            f"make_batch must be a function of the batch size, got {type(make_batch).__name__}; "
            "e.g. lambda size: torch.randn(size, 128)"
        )
    check_count("smallest", smallest, least=1)
    for name, value in (("largest", largest), ("target", target)):
        if value is not None:
            check_count(name, value, least=1)
            if value < smallest:
                raise ValueError(f"{name} must be at least smallest ({smallest}), got {value}")
    if not is_finite(margin) or not 0 <= margin < 1:
        raise ValueError(f"margin must be a fraction of the limit in [0, 1), got {margin!r}")
    check_count("steps", steps, least=2)
    if not isinstance(worst, bool):
        raise TypeError(f"worst must be a bool (whether make_batch returns the worst case), got {worst!r}")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a function or None, got {type(progress).__name__}")


def _accumulate(target: int | None, found: Found, trials: Trials) -> tuple[Accumulation | None, Trial | None]:
    """`target` rows in micro-batches that ran (those that the search did not try are run now), and the run of one."""
    if target is None or found.winner is None:
        return None, None
    ran = {trial.size: trial for trial in found.trials if trial.fits}
    failed = {trial.size for trial in found.trials if trial.stage == "confirm" and not trial.fits}
    for most in sorted(ran.keys() - failed, reverse=True):
        if most > found.winner.size:
            continue
        split = split_target(target, most)
        for size in filter(None, (split.batch, split.remainder)):
            if size in failed:
                break
            if size not in ran or ran[size].seconds is None:
                trial = trials(size, "target")
                found.trials.append(trial)
                if not trial.fits:
                    failed.add(size)
                    break
                ran[size] = trial
        else:
            return split, ran[split.batch]
    return None, None


def _result(
    label: str, found: Found, accumulation: Accumulation | None, micro: Trial | None, most: int | None,
    target: int | None, meter: Meter,
) -> BatchResult:  # fmt: skip
    winner = found.winner
    warnings = [fragmentation(winner)]
    if winner is not None:
        unsteady = sorted({t.size for t in found.trials if not t.fits and t.size <= winner.size})
        if unsteady:
            warnings.append(
                f"memory did not grow steadily with the batch: {', '.join(map(str, unsteady))} failed once although "
                f"{winner.size} ran"
            )
        if target is not None and accumulation is None:
            warnings.append(f"no split of {target} rows into micro-batches ran")
        if accumulation is not None and accumulation.remainder:
            warnings.append(
                f"{target} has no near divisor up to {winner.size}: {accumulation.steps} micro-batches of "
                f"{accumulation.batch} leave a remainder of {accumulation.remainder} rows for a last one; weight its "
                "loss by its rows"
            )
    return BatchResult(
        policy=label,
        batch=None if winner is None else winner.size,
        stopped=_stopped(found, most, target),
        winner=winner,
        accumulation=accumulation,
        micro_batch=micro,
        trials=tuple(found.trials),
        warnings=tuple(filter(None, warnings)),
    )


def _stopped(found: Found, most: int | None, target: int | None) -> str:
    failed = found.smallest_failed
    if found.reason == "nothing fits":
        return f"nothing fits: not even {failed.size} ({failed.outcome}: {failed.detail})"
    if found.reason == "largest":
        asked = "target" if target == most else "largest"
        return f"{most} is the {asked}, and it fits: a larger batch was not asked for"
    if found.reason == "data":
        ended = next(trial for trial in found.trials if trial.outcome == "data ended")
        return f"the data end there: {ended.detail}"
    return f"{failed.size} is the smallest size that failed ({failed.outcome}: {failed.detail})"


def _warnings(model: nn.Module, optimizer: Any, *, worst: bool, varying: bool) -> list[str]:
    found = []
    if varying:
        found.append(
            "the batches differ in more than their size (sequence lengths, image sizes?): have make_batch return the "
            "longest and largest that training will meet, or a later batch may not fit"
        )
    elif not worst:
        found.append(
            "make_batch decides what is tried: see that it returns the worst case of the data (the longest sequence, "
            "the most objects), and say so by worst=True"
        )
    if optimizer is None:
        found.append("no optimizer was given, so its state is not in these numbers")
    if not model.training:
        found.append("the model is in evaluation mode; call model.train() to try what training does")
    return found
