"""`profile`: one optimizer step, looked at from every side, and taken back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fused_remat._about import about_step
from fused_remat._machine import machine_bytes_free
from fused_remat._profiled import note_profiled
from fused_remat._progress import OnProgress, Progress, check_progress
from fused_remat._step import python_tensors
from fused_remat.profile.axes import Sweep, resolve_sweeps
from fused_remat.profile.growth import Growth, Observed, growth_along
from fused_remat.profile.guard import compiled_modules, refuse_to_lie
from fused_remat.profile.kept import KeptTensor, kept_tensors, storages
from fused_remat.profile.modules import bytes_by_module
from fused_remat.profile.profile import Profile
from fused_remat.profile.recompute import recompute_of
from fused_remat.profile.verdict import advice_for, verdict_of
from fused_remat.recording import Recording, record_step
from fused_remat.recording.exchange import exchanged
from fused_remat.recording.places import watched
from fused_remat.sizes import format_bytes
from fused_remat.training_step import TrainingStep, left_untouched, make_step

_CUDA_BLOCK = 512


def profile(
    model: nn.Module,
    *inputs: Any,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Optimizer | type[Optimizer] | Callable[[list[nn.Parameter]], Optimizer] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    fake: bool = False,
    sweep: Any = None,
    progress: OnProgress | None = None,
) -> Profile:
    """Where the memory of one optimizer step of `model` goes, and whether recompute would help.

    Runs a few steps, zero_grad(set_to_none=True), forward, loss, backward and the optimizer's step, in the autocast
    context that is active, and takes them back: weights, buffers, gradients, optimizer, flags and random generators are
    as they were afterwards, also when something raises.

    Args:
        model: any module with a trainable parameter; converted models and models with checkpointing too.
        inputs, kwargs: what it is called with.
        loss: takes the model's output and returns a scalar. None: the output's own `.loss`, else its first
            floating-point tensor, itself if it has one element, else its mean square.
        optimizer: an instance, or a class or function of the parameters (`torch.optim.AdamW`). None: the step ends with
            backward, and no optimizer state is counted.
        fake: run on fake tensors, which have shapes and no memory: every number is then a prediction, and the model may
            be larger than the machine or on the meta device.
        sweep: which sizes of the inputs to change, to see how bytes grow: "batch" (dimension 0 of the inputs),
            "sequence" (1), "resolution" (2 and 3), a list of these, or a mapping from a name to a dimension, a tuple of
            dimensions that grow together, a list of sizes, a mapping {input: dimensions}, or a
            `fused_remat.Axis`. A size for which there may not be enough memory is run on fake tensors.
        progress: called as `progress(text, done, total)` before each piece of work, counted in steps recorded and
            looked at, and at the end with done equal to total.

    Returns:
        A `Profile`; it prints as a table, and `to_dict()` is JSON.

    Raises:
        TypeError, ValueError: an argument of another kind, or one that does not fit the model.
        RuntimeError: the numbers would be wrong here: a dispatch mode, saved-tensor hooks or a profiler is active, code
            is being compiled, or gradients are off.
        Whatever the model, the loss and the optimizer raise; ValueError from it at another size of a sweep.
    """
    if not isinstance(fake, bool):
        raise TypeError(f"fake must be a bool, got {fake!r}")
    check_progress(progress)
    refuse_to_lie(model, fake)
    step = make_step(model, inputs, kwargs, loss=loss, optimizer=optimizer)
    sweeps = resolve_sweeps(sweep, model, step.args, step.kwargs)
    stale = sum(dict(pair for p in step.leaves() if p.grad is not None for pair in storages(p.grad)).values())
    existing = python_tensors()
    work = Progress(progress, 3 + sum(size != one.base for one in sweeps for size in one.sizes))
    observed = _observe(step, fake, existing, work)
    note_profiled(model)
    recording, kept = observed.recording, observed.kept
    with work.piece("how far recompute could lower the peak"):
        recompute = recompute_of(step, recording)
    unseen, makers = _unseen(recording, kept)
    blind = [recording.blind_note, recompute.blind_note]
    growth = {one.name: _growth(one, step, observed, fake, existing, blind, work) for one in sweeps}
    work.finish()
    return Profile(
        recording=recording,
        kept=kept,
        unseen_bytes=unseen,
        unseen_modules=makers,
        modules=observed.modules,
        recompute=recompute,
        verdict=verdict_of(recording, kept, recompute),
        advice=advice_for(step, recording, kept, stale_gradients=stale),
        notes=_notes(model, recording, unseen, makers, recompute.note, growth, blind),
        about=about_step(step, recording.device),
        growth=growth,
    )


def _observe(step: TrainingStep, fake: bool, existing: list[Tensor], work: Progress) -> Observed:
    with work.piece("predicting a step" if fake else "measuring steps"):
        recording = record_step(step, fake=fake)
    with work.piece("looking at what forward keeps"):
        kept = _kept_on_fakes(step) if fake else _kept(step, existing)
    return Observed(recording, tuple(kept), bytes_by_module(step.model, kept, recording))


def _kept(step: TrainingStep, existing: list[Tensor]) -> list[KeptTensor]:
    with left_untouched(step), watched(step.model) as places:
        known = [*existing, *step.model.parameters(), *step.model.buffers(), *step.inputs()]
        return kept_tensors(step.forward, lambda: places.stack[-1] if places.stack else None, known)


def _kept_on_fakes(step: TrainingStep) -> list[KeptTensor]:
    with exchanged(step, None) as (fake, fakes), fakes.mode, watched(fake.model) as places:
        known = [*fake.leaves(), *fake.model.buffers(), *fake.inputs()]
        return kept_tensors(fake.forward, lambda: places.stack[-1] if places.stack else None, known)


def _growth(
    sweep: Sweep,
    step: TrainingStep,
    own: Observed,
    fake: bool,
    existing: list[Tensor],
    blind: list[str],
    work: Progress,
) -> Growth:
    """`blind` grows by the notes of what predicted runs leave out."""

    def observe(size: int) -> Observed:
        if size == sweep.base:
            return own
        args, kwargs = sweep.make(size)
        resized = TrainingStep(step.model, args, kwargs, step.loss, step.optimizer)
        factor = (size / (sweep.base or sweep.sizes[0])) ** (2 * sweep.power)
        try:
            with work.piece(f"{sweep.name} {size}"):
                observed = _observe(resized, fake or not _would_fit(own.recording, factor), existing, Progress(None))
        except Exception as error:
            shapes = [list(t.shape) for t in resized.inputs()]
            raise ValueError(
                f"sweep[{sweep.name!r}] at {size}, with inputs of the shapes {shapes}: the step raised "
                f"{type(error).__name__}: {error}. A loss has to fit every size (make its targets from the output); "
                "sizes and inputs can be given by a fused_remat.Axis"
            ) from error
        blind.append(observed.recording.blind_note)
        return observed

    return growth_along(sweep, observe)


def _would_fit(recording: Recording, factor: float) -> bool:
    """Whether the free memory holds the step with everything that is not static made `factor` times as large."""
    device = torch.device(recording.device)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        free -= torch.cuda.memory_allocated(device)
    else:
        free = machine_bytes_free()
    return free is None or (recording.peak_bytes - recording.static_bytes) * max(factor, 1) <= free


def _unseen(recording: Recording, kept: tuple[KeptTensor, ...]) -> tuple[int, tuple[str, ...]]:
    """Kept bytes that are in no entry of `kept`, and the modules that made them: those whose blocks match no entry."""
    block = _CUDA_BLOCK if torch.device(recording.device).type == "cuda" and recording.source == "measured" else 1
    sizes = Counter(-(-tensor.nbytes // block) * block for tensor in kept)
    nbytes, makers = 0, {}
    for a in recording.allocations:
        if a.kind != "kept":
            continue
        if sizes[a.nbytes]:
            sizes[a.nbytes] -= 1
        else:
            nbytes += a.nbytes
            makers[a.module] = None
    return nbytes, tuple(makers)


def _notes(
    model: nn.Module, recording: Recording, unseen: int, makers: tuple[str, ...], why_not_converted: str,
    growth: Mapping[str, Growth], blind: list[str],
) -> list[str]:  # fmt: skip
    notes = []
    if unseen:
        places = ", ".join(path or "the model itself" for path in makers[:3]) + (", ..." if len(makers) > 3 else "")
        notes.append(
            f"{format_bytes(unseen)} of what is kept is out of sight of autograd's saved-tensor hooks, so that no "
            f"operation and line can be named: checkpointing, or tensors held on a ctx. Made in: {places}."
        )
    compiled = compiled_modules(model)
    if compiled:
        notes.append(
            f"Compiled: {', '.join(path or 'the model' for path in compiled[:3])}. Inside compiled code no module and "
            "no line of the model can be told; what it keeps is counted in the module around it."
        )
    if why_not_converted:
        notes.append(f"Not predicted: {why_not_converted}.")
    mixed = [axis for axis, found in growth.items() if len({point.source for point in found.points}) > 1]
    if mixed:
        notes.append(f"The sweep over {', '.join(mixed)} predicted the sizes that might not fit, on fake tensors.")
    return notes + [f"{note[0].upper()}{note[1:]}." for note in dict.fromkeys(blind) if note]
