"""What dominates the peak, whether recompute would help, and what is cheaper to try first, in plain sentences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from fused_remat.profile.kept import LOSS, KeptTensor
from fused_remat.profile.recompute import Recompute, alive_at_peak
from fused_remat.recording import Recording
from fused_remat.sizes import format_bytes
from fused_remat.training_step import TrainingStep

# What is said to matter: a share of the peak.
_MATTERS = 0.15
_NO_HELP, _LITTLE_HELP = 0.02, 0.10
_LOSS_OPS = ("LogSoftmaxBackward0", "SoftmaxBackward0", "NllLossBackward0", "NllLoss2DBackward0")
_SOFTMAX_OPS = ("SoftmaxBackward0", "SafeSoftmaxBackward0")
_GROUPS = {
    "activations": ("kept", "rebuilt"),
    "parameters": ("parameters", "buffers"),
    "gradients": ("gradients",),
    "optimizer state": ("optimizer",),
    "temporary buffers": ("temporary",),
    "inputs and outputs": ("inputs", "output"),
}
_PLURAL = ("activations", "parameters", "gradients", "temporary buffers", "inputs and outputs")


def shares_of_peak(recording: Recording) -> dict[str, float]:
    """The parts of the peak, which add up to 1: activations, parameters, gradients, optimizer state, temporary buffers,
    inputs and outputs."""
    alive, peak = alive_at_peak(recording), recording.peak_bytes or 1
    return {group: sum(alive.get(kind, 0) for kind in kinds) / peak for group, kinds in _GROUPS.items()}


def verdict_of(recording: Recording, kept: Iterable[KeptTensor], recompute: Recompute) -> str:
    """One sentence."""
    shares = shares_of_peak(recording)
    dominant = max(shares, key=shares.__getitem__)
    activations = shares["activations"]
    where = f"the peak of {format_bytes(recording.peak_bytes)} ({recording.source}, {moment_of_peak(recording)})"
    if dominant == "activations":
        first = f"Activations dominate: they are {_percent(activations)} of {where}"
    else:
        verb = "dominate" if dominant in _PLURAL else "dominates"
        first = (
            f"{dominant.capitalize()} {verb} with {_percent(shares[dominant])} of {where}, "
            f"activations are {_percent(activations)}"
        )
    loss = loss_bytes(kept)
    if loss >= _MATTERS * recording.peak_bytes and recompute.saving < _LITTLE_HELP:
        first += f", and {format_bytes(loss)} of what is kept belongs to the loss"
    return f"{first}; {_help(recompute)}."


def moment_of_peak(recording: Recording) -> str:
    """The phase and module of the peak, in words."""
    if recording.peak_phase == "optimizer":
        return "in the optimizer's step"
    module = f" of {recording.peak_module}" if recording.peak_module else ", outside of the model's layers"
    return f"in {recording.peak_phase}{module}"


def loss_bytes(kept: Iterable[KeptTensor]) -> int:
    """Kept bytes of the loss: saved outside of the model, or by its own loss (a softmax outside of all layers)."""
    return sum(t.nbytes for t in kept if t.module == LOSS or (t.module == "" and t.op in _LOSS_OPS))


def advice_for(
    step: TrainingStep, recording: Recording, kept: Iterable[KeptTensor], *, stale_gradients: int = 0
) -> list[str]:
    """What to try before recompute, the cheapest first. `stale_gradients`: bytes that `.grad` held before profiling."""
    kept = list(kept)
    shares = shares_of_peak(recording)
    advice: list[str] = []
    if recording.peak_phase == "optimizer" and step.optimizer is not None:
        advice += _about_optimizer_step(step.optimizer, torch.device(recording.device))
    if stale_gradients:
        advice.append(
            f"Gradients of {format_bytes(stale_gradients)} were there before the step: clear them by "
            "zero_grad(set_to_none=True), so that they are not alive during forward."
        )
    short_lived = 0.0 if recording.peak_phase == "optimizer" else shares["temporary buffers"]
    if shares["activations"] + short_lived >= _MATTERS:
        advice += _about_activations(step, recording, kept)
    if shares["gradients"] + shares["optimizer state"] >= max(shares["activations"], _MATTERS):
        advice.append(
            f"Gradients and optimizer state are {_percent(shares['gradients'] + shares['optimizer state'])} of the "
            "peak: freeze what need not train (requires_grad_(False)), train adapters (LoRA), use an optimizer with "
            "less state, or shard it over devices (FSDP)."
        )
    return advice


def _help(recompute: Recompute) -> str:
    now, best, saving = recompute.peak_bytes, recompute.bound_bytes, recompute.saving
    if saving < _NO_HELP:
        return "recompute cannot help: without a single kept activation the peak would be as high"
    converted = recompute.converted_peak_bytes
    alone = ""
    if converted is not None:
        alone = f"; fused_remat.convert(model) alone is predicted to reach {format_bytes(converted)}"
        if converted >= now:
            alone = f"; fused_remat.convert(model) alone is predicted not to lower it ({format_bytes(converted)})"
    if saving < _LITTLE_HELP:
        return f"recompute would hardly help, by {_percent(saving)} at most, to {format_bytes(best)} (bound){alone}"
    return f"recompute can help, by {_percent(saving)} at most, to {format_bytes(best)} (bound){alone}"


def _about_optimizer_step(optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[str]:
    group, name = optimizer.param_groups[0], type(optimizer).__name__
    if group.get("fused"):
        return
    # Left to itself, torch takes the foreach variant on a GPU alone.
    is_foreach = group.get("foreach") or ("foreach" in group and group["foreach"] is None and device.type == "cuda")
    ways = ["fused=True, which makes no temporary buffers"] if "fused" in group else []
    if is_foreach:
        ways.append("foreach=False, which makes them for one parameter at a time instead of for all")
    if ways:
        yield f"The peak is in the optimizer's step: pass {', or '.join(ways)}, to {name}."


def _about_activations(step: TrainingStep, recording: Recording, kept: list[KeptTensor]) -> Iterator[str]:
    total = sum(t.nbytes for t in kept) or 1
    single = sum(t.nbytes for t in kept if t.dtype == "float32")
    device = torch.device(recording.device).type
    if single > total / 2 and not torch.is_autocast_enabled(device):
        yield (
            f"{_percent(single / total)} of what is kept is float32: train under torch.autocast({device!r}, "
            "torch.bfloat16), which roughly halves it."
        )
    yield from _about_scores(kept, total)
    loss = loss_bytes(kept)
    if loss >= _MATTERS * recording.peak_bytes:
        yield (
            f"The loss keeps {format_bytes(loss)} (of the size of the logits, mostly): compute it in chunks of tokens, "
            "or only where there is a target."
        )
    yield from _about_inputs(step)


def _about_scores(kept: list[KeptTensor], total: int) -> Iterator[str]:
    """Attention probabilities that are kept as a whole."""
    scores = [t for t in kept if t.op in _SOFTMAX_OPS and len(t.shape) >= 3 and t.shape[-1] > 1]
    nbytes = sum(t.nbytes for t in scores)
    if nbytes >= _MATTERS * total:
        yield (
            f"Attention keeps its probabilities ({format_bytes(nbytes)}, which grow with the square of the length): "
            "let a fused kernel run, F.scaled_dot_product_attention without need_weights (in transformers: "
            'attn_implementation="sdpa"); with dropout on a CPU only fused_remat.attention is one.'
        )


def _about_inputs(step: TrainingStep) -> Iterator[str]:
    tensors = [t for t in step.inputs() if t.ndim]
    if not tensors:
        return
    first: Tensor = tensors[0]
    if first.ndim > 1 and first.shape[0] > 1:
        yield (
            f"A smaller batch (now {first.shape[0]}) keeps less in proportion; accumulate gradients over several to "
            "train as before."
        )
    if first.ndim == 4:
        height, width = first.shape[2:]
        yield f"A smaller image (now {height} x {width}) keeps less in proportion to its pixels, or faster."
    elif first.ndim in (2, 3) and first.shape[1] > 1 and not (first.ndim == 2 and first.is_floating_point()):
        yield f"A shorter sequence (now {first.shape[1]}) keeps less, at least in proportion."


def _percent(share: float) -> str:
    return "less than 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def rounded(shares: Mapping[str, float]) -> dict[str, float]:
    """For JSON: four decimals."""
    return {name: round(share, 4) for name, share in shares.items()}
