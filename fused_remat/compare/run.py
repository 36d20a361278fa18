"""Compares one model: makes the variants, measures one step of each, trains them side by side, gathers the result."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor, nn

from fused_remat import budget
from fused_remat.compare.evidence import describe_path, operators_run
from fused_remat.compare.results import ModelResult, VariantResult
from fused_remat.compare.train import deterministic, train
from fused_remat.compare.variants import CHECKPOINT, FUSED, Variant, make_variants
from fused_remat.compare.workload import Batch, Workload
from fused_remat.measure import Measurement, Timeline, measure, memory_timeline

OnProgress = Callable[[str, int], None]  # (what is going on, units of work done since the last call)

# Units of work that measuring one variant counts as in the progress bar: about as long as that many steps.
MEASURING_UNITS = 8


def work_units(steps: int, variants: int = 3) -> int:
    """Units that one model reports in all."""
    return variants * (steps + MEASURING_UNITS)


def compare_model(workload: Workload, steps: int, on_progress: OnProgress) -> ModelResult:
    """Trains `workload` by every variant for `steps` optimizer steps each and measures one step of each beforehand.

    Measuring happens before the first optimizer step and changes neither weights nor random states.

    Raises:
        FloatingPointError: a loss is not finite.
    """
    start = time.perf_counter()
    with deterministic(workload.device):
        variants = make_variants(workload)
        if CHECKPOINT not in variants:
            on_progress(f"{workload.name}: no repeated blocks to checkpoint", work_units(steps, variants=1))
        memory, timelines, paths = {}, {}, {}
        for name, variant in variants.items():
            on_progress(f"{workload.name}: memory of one step, {name}", 0)
            step = _step_function(workload, variant.model, workload.batch(0))
            memory[name], timelines[name], paths[name] = _measure(variant, step)
            on_progress(f"{workload.name}: memory of one step, {name}", MEASURING_UNITS)

        def on_step(name: str, step: int, loss: float) -> None:
            on_progress(f"{workload.name}: step {step + 1} of {steps}, loss {loss:.3f}", 1)

        curves = train(workload, variants, steps, on_step)
    results = {
        name: VariantResult(
            name=name,
            explanation=v.explanation,
            curve=curves[name],
            memory=memory[name],
            timeline=timelines[name],
            mlps=v.mlps,
            attentions=v.attentions,
            blocks=v.blocks,
            converted=v.converted,
            skipped=v.skipped,
            path=paths[name],
        )
        for name, v in variants.items()
    }
    return ModelResult(
        name=workload.name,
        title=workload.title,
        description=workload.describe(),
        metric=workload.metric,
        unit=workload.unit,
        remarks=workload.remarks(),
        steps=steps,
        parameters=sum(p.numel() for p in variants[FUSED].model.parameters()),
        shape=workload.shape,
        workspace_bytes=budget.resolve(None, workload.device.type),
        seconds=time.perf_counter() - start,
        variants=results,
    )


def _step_function(workload: Workload, model: nn.Module, batch: Batch) -> Callable[[], Tensor]:
    return lambda: workload.loss(model, batch)


def _measure(variant: Variant, step: Callable[[], Tensor]) -> tuple[Measurement, Timeline, str]:
    """The memory and matrix products of one step, its timeline, and (fused only) which operators ran."""
    measured, timeline = measure(step, repeats=0), memory_timeline(step)
    if variant.name != FUSED:
        return measured, timeline, ""
    path = describe_path(operators_run(step))
    variant.model.zero_grad(set_to_none=True)
    return measured, timeline, path
