"""One picture per model: the loss curves, how far they lie apart, and the memory of one step."""

from __future__ import annotations

import io

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from fused_remat.budget import MIB
from fused_remat.compare.results import ModelResult
from fused_remat.compare.variants import CHECKPOINT, FUSED, STOCK
from fused_remat.measure import BACKWARD, FORWARD, Timeline
from fused_remat.show.theme import LIGHT, Theme, style

_INCHES = (11.0, 5.4)
_DPI = 150
# The difference axis is linear below this, so that equal losses have a place on it.
_SMALLEST_DIFFERENCE = 1e-8


def draw(result: ModelResult, theme: Theme = LIGHT, *, heading: bool = True) -> bytes:
    """The picture as PNG, 1650 x 810 pixels; `heading` puts the model's title on top."""
    with style(theme):
        figure = Figure(figsize=_INCHES, layout="constrained")
        if heading:
            figure.suptitle(result.title, x=0.01, ha="left", fontsize=12.5, fontweight="bold")
        left, right = figure.subfigures(1, 2, width_ratios=(1, 1.15))
        losses, apart = left.subplots(2, 1, sharex=True, height_ratios=(3, 1.2))
        _draw_losses(losses, result, theme)
        _draw_differences(apart, result, theme)
        _draw_memory(right.subplots(), result, theme)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()


def _look(theme: Theme) -> dict[str, dict]:
    """Line style per variant: told apart by width and dashes as well as by colour."""
    return {
        STOCK: dict(color=theme.stock, linewidth=4.0, alpha=0.65, solid_capstyle="butt"),
        CHECKPOINT: dict(color=theme.checkpoint, linewidth=1.8, linestyle=(0, (4, 2))),
        FUSED: dict(color=theme.fused, linewidth=1.8),
    }


def _draw_losses(axes: Axes, result: ModelResult, theme: Theme) -> None:
    for name, variant in result.variants.items():
        losses = variant.curve.losses
        marker = "o" if len(losses) < 3 else None
        axes.plot(range(1, len(losses) + 1), losses, label=name, marker=marker, **_look(theme)[name])
    largest = result.largest_loss_difference(FUSED)
    difference = f"differs from {STOCK} by at most {largest:.1g}" if largest else f"equals {STOCK}"
    axes.set_title(f"Training loss ({FUSED} {difference})")
    axes.set_ylabel("cross entropy (nats)" if result.unit else "loss")
    axes.legend(loc="upper right")


def _draw_differences(axes: Axes, result: ModelResult, theme: Theme) -> None:
    stock = result.variants[STOCK].curve.losses
    for name in (name for name in (CHECKPOINT, FUSED) if name in result.variants):
        own = result.variants[name].curve.losses
        apart = [abs(a - b) for a, b in zip(own, stock, strict=True)]
        axes.plot(range(1, len(apart) + 1), apart, marker=".", label=name, **_look(theme)[name])
    axes.set_yscale("symlog", linthresh=_SMALLEST_DIFFERENCE)
    largest = max(map(result.largest_loss_difference, result.variants))
    axes.set_ylim(-_SMALLEST_DIFFERENCE / 2, max(10 * largest, 1e-6))
    axes.yaxis.set_major_locator(FixedLocator([0.0, *(10.0**power for power in range(-8, 2, 2))]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("|loss - stock|")
    axes.set_xlabel("optimizer step")


def _draw_memory(axes: Axes, result: ModelResult, theme: Theme) -> None:
    highest = 0.0
    for name, variant in result.variants.items():
        shares, mib = passes(variant.timeline)
        label = f"{name}: kept {variant.kept_mib:.0f}, backward peak {variant.backward_peak_mib:.0f} MiB"
        axes.step(shares, mib, where="post", label=label, **_look(theme)[name])
        top = max(range(len(mib)), key=mib.__getitem__)
        axes.plot(shares[top], mib[top], "o", color=_look(theme)[name]["color"], markersize=6, zorder=5)
        highest = max(highest, mib[top])
    axes.axvline(1.0, color=theme.ink, linewidth=0.8, linestyle=":")
    axes.set_xlim(0.0, 2.0)
    axes.set_ylim(0.0, 1.32 * highest)
    axes.set_xticks([0.0, 0.5, 1.0, 1.5, 2.0], ["start", "forward", "loss", "backward", "end"])
    axes.set_title("Memory over one training step")
    axes.set_ylabel("MiB above parameters, optimizer state and batch")
    axes.set_xlabel("progress of each pass, in allocator events (dot: highest point)")
    axes.legend(loc="upper left")


def passes(timeline: Timeline) -> tuple[list[float], list[float]]:
    """The timeline as (position, MiB): forward from 0 to 1, backward from 1 to 2.

    A position is the share of the pass's allocator events that came before: unlike seconds under a profiler it is the
    same in every run.
    """
    positions, mib = [], []
    for offset, phase in enumerate((FORWARD, BACKWARD)):
        first, last = timeline.phases[phase]
        moments = zip(timeline.seconds, timeline.nbytes, strict=True)
        inside = [nbytes for seconds, nbytes in moments if first <= seconds <= last]
        positions += [offset + event / len(inside) for event in range(len(inside))]
        mib += [nbytes / MIB for nbytes in inside]
    return [*positions, 2.0], [*mib, mib[-1]]
