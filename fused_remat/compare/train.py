"""Trains the variants side by side: each step is taken by every variant before the next one begins.

So a busy machine slows all of them alike, and the ratio of two step times is taken within one step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from fused_remat.compare.variants import Variant
from fused_remat.compare.workload import Batch, Workload

_WEIGHT_DECAY = 0.05
_BETAS = (0.9, 0.95)
_CLIP_NORM = 1.0
_WARMUP_SHARE = 0.15
_LAST_RATE_SHARE = 0.1


@dataclass
class Curve:
    """`losses[i]` (nats) and `seconds[i]` (forward, backward and optimizer) of step i; `validation` after the last."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation: float = float("nan")


def train(
    workload: Workload, variants: Mapping[str, Variant], steps: int, on_step: Callable[[str, int, float], None]
) -> dict[str, Curve]:
    """Takes `steps` optimizer steps with every variant on the same batches, then validates each.

    Args:
        workload: gives the batches, the loss and the validation.
        variants: name to variant; their models are trained in place.
        steps: at least 1.
        on_step: called after each step of each variant with its name, the step (from 0) and the loss.

    Returns:
        Name to curve.

    Raises:
        FloatingPointError: a loss or the result of the validation is not finite.
    """
    curves = {name: Curve() for name in variants}
    optimizers = {name: _optimizer(variant.model, workload.learning_rate) for name, variant in variants.items()}
    names = list(variants)
    for step in range(steps):
        batch = workload.batch(step)
        first = step % len(names)  # the order rotates: nobody always runs on the caches that another one leaves
        for name in names[first:] + names[:first]:
            rate = workload.learning_rate * rate_share(step, steps)
            loss, seconds = _step(workload, variants[name].model, optimizers[name], batch, rate)
            _check_finite(loss, f"{workload.name}: the loss of {name} in step {step + 1}")
            curves[name].losses.append(loss)
            curves[name].seconds.append(seconds)
            on_step(name, step, loss)
    for name, variant in variants.items():
        curves[name].validation = _validate(workload, variant.model)
        _check_finite(curves[name].validation, f"{workload.name}: the {workload.metric} of {name}")
    return curves


def rate_share(step: int, steps: int) -> float:
    """The learning rate of `step` as a share of the highest: linear warm-up, then linear decay to a tenth."""
    warmup = max(1, round(_WARMUP_SHARE * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 1.0 - (1.0 - _LAST_RATE_SHARE) * (step - warmup + 1) / (steps - warmup)


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Asks torch for repeatable kernels on CUDA (a warning names an operator that has none); the CPU's already are."""
    if device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=_BETAS, weight_decay=_WEIGHT_DECAY)


def _step(
    workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, rate: float
) -> tuple[float, float]:
    """One optimizer step: its loss (before the step) and its seconds."""
    _synchronize(workload.device)
    start = time.perf_counter()
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = workload.loss(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), _CLIP_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    _synchronize(workload.device)
    return loss.item(), time.perf_counter() - start


def _check_finite(value: float, what: str) -> None:
    if not math.isfinite(value):
        raise FloatingPointError(f"{what} is {value}, so there is nothing to compare")


def _validate(workload: Workload, model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        value = workload.validate(model)
    model.train()
    return value


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
