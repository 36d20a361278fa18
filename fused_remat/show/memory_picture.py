"""The memory of one step, stacked by kind, with the budget and the named peak."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fused_remat.recording import Recording
from fused_remat.show.labels import byte_unit, drawable
from fused_remat.show.render import check_path, finish
from fused_remat.show.sketch import Sketch
from fused_remat.show.stack import (
    Stack,
    check_recording,
    decimate,
    layout,
    numbers,
    place,
    positions,
    stack,
)
from fused_remat.show.theme import HATCHES, LIGHT, Theme, style, theme_named
from fused_remat.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HEADROOM = 1.3  # of the axis above the highest thing on it, for the words at the peak
_WORDS = 0.18  # of the axis: the height of those words


def memory(
    *recordings: Recording | Sketch,
    names: tuple[str, ...] = (),
    budget: int | str | None = None,
    path: str | Path | None = None,
    theme: str = "light",
) -> Figure:
    """Memory over one step, stacked by kind; several recordings (before, after) one above the other to one scale.

    Args:
        recordings: of `fused_remat.recording.record_step`, or sketches of plans; each panel says whether its own was
            measured or predicted.
        names: one per recording, such as ("before", "after").
        budget: bytes, or a size such as "6GiB"; drawn as a line.
        path: file to write, ending in .png or .svg.
        theme: "light" or "dark".

    Returns:
        A matplotlib Figure that no pyplot state knows of.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
        TypeError, ValueError: an argument is wrong, or a recording is empty.
    """
    path, colours, limit = check_path(path), theme_named(theme), None
    if not recordings:
        raise ValueError("memory needs at least one recording")
    for index, recording in enumerate(recordings):
        check_recording(recording, f"recordings[{index}]")
    if names and len(names) != len(recordings):
        raise ValueError(f"names must be one per recording ({len(recordings)}), got {len(names)}")
    if budget is not None:
        limit = parse_bytes("budget", budget)
    with style(colours, math=False):
        return finish(draw(recordings, names or ("",) * len(recordings), limit, colours), path)


def draw(
    recordings: tuple[Recording | Sketch, ...], names: tuple[str, ...], budget: int | None, theme: Theme = LIGHT
) -> Figure:
    """The figure, arguments checked and within `style`."""
    from matplotlib.figure import Figure

    stacks = [stack(recording) for recording in recordings]
    counts, widths = layout(stacks)
    highest = max([*(int(made.totals.max()) for made in stacks), budget or 0])
    unit, size = byte_unit(highest)
    figure = Figure(figsize=(11.0, 1.0 + 3.9 * len(stacks)), layout="constrained")
    panels = figure.subplots(len(stacks), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, recording, made, name in zip(panels, recordings, stacks, names, strict=True):
        where = positions(made, counts, widths)
        axes.set_ylim(0.0, _HEADROOM * highest / size)
        axes.set_ylabel(unit)
        _draw_stack(axes, made, where, size, theme)
        _draw_peak(axes, numbers(recording, made, budget), made, where, size, theme)
        mark_phases(axes, widths, theme)
        heading = f"{drawable(name)}: " if name else ""
        title = f"{heading}memory over one step, {recording.source} on {recording.device}"
        axes.set_title(title[0].upper() + title[1:] if not name else title)
        if budget is not None:
            _draw_budget(axes, budget, size, left=_is_right(made, where), theme=theme)
    panels[-1].set_xlabel("the step's phases, each by its allocations and releases in order")
    _draw_legend(figure, stacks, theme)
    return figure


def outline(where: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Corners `[K, 2]` of the area between two staircases: each level holds until the next event."""
    ends = np.append(where[1:], max(1.0, where[-1]))

    def stairs(level: np.ndarray) -> np.ndarray:
        corners = np.empty((2 * len(level), 2))
        corners[0::2, 0], corners[1::2, 0] = where, ends
        corners[0::2, 1] = corners[1::2, 1] = level
        same = corners[:, 1]
        # A corner between two others of its own height says nothing.
        needed = np.ones(len(corners), dtype=bool)
        needed[1:-1] = (same[1:-1] != same[:-2]) | (same[1:-1] != same[2:])
        return corners[needed]

    return np.concatenate([stairs(upper), stairs(lower)[::-1]])


def _draw_stack(axes: Axes, made: Stack, where: np.ndarray, size: int, theme: Theme) -> None:
    from matplotlib.patches import Polygon

    drawn = decimate(made)
    edges = np.concatenate([np.zeros((len(drawn), 1)), np.cumsum(made.levels[drawn], axis=1)], axis=1) / size
    for column, kind in enumerate(made.kinds):
        area = Polygon(
            outline(where[drawn], edges[:, column], edges[:, column + 1]),
            facecolor=getattr(theme, kind), edgecolor=theme.ground, hatch=HATCHES[kind], linewidth=0.4,
            gid=f"kind-{kind}",
        )  # fmt: skip
        axes.add_patch(area)
    total = outline(where[drawn], edges[:, -1], edges[:, -1])
    axes.plot(*total[: len(total) // 2].T, color=theme.ink, linewidth=0.9, gid="total")


def _draw_peak(axes: Axes, values: Mapping[str, Any], made: Stack, where: np.ndarray, size: int, theme: Theme) -> None:
    from matplotlib.transforms import ScaledTranslation

    at = where[made.top], values["peak_bytes"] / size
    right = _is_right(made, where)
    # Words that would lie on the budget line go above it.
    budget = (values["budget_bytes"] or 0) / size
    height = budget if at[1] <= budget < at[1] + _WORDS * axes.get_ylim()[1] else at[1]
    words = f"peak {format_bytes(values['peak_bytes'])}\n{place(values['peak_phase'], drawable(values['peak_module']))}"
    axes.plot(*at, "v", color=theme.ink, markersize=7, gid="peak", zorder=6, clip_on=False)
    beside = ScaledTranslation((-10 if right else 10) / 72, 8 / 72, axes.figure.dpi_scale_trans)
    axes.annotate(
        words, at, xytext=(at[0], height), textcoords=axes.transData + beside,
        ha="right" if right else "left", va="bottom", zorder=7,
        bbox=dict(facecolor=theme.ground, edgecolor=theme.grid, pad=2.5),
        arrowprops=None if height == at[1] else dict(arrowstyle="-", color=theme.ink, linewidth=0.8),
    )  # fmt: skip


def _is_right(made: Stack, where: np.ndarray) -> bool:
    return bool(where[made.top] > 0.5)


def mark_phases(axes: Axes, widths: Mapping[str, float], theme: Theme) -> None:
    """Name the phases below the axis and draw the borders between them."""
    borders = np.concatenate([[0.0], np.cumsum(list(widths.values()))])
    for border in borders[1:-1]:
        axes.axvline(border, color=theme.ink, linewidth=0.8, linestyle=":")
    axes.set_xlim(0.0, 1.0)
    axes.set_xticks((borders[1:] + borders[:-1]) / 2, list(widths))
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")


def _draw_budget(axes: Axes, budget: int, size: int, *, left: bool, theme: Theme) -> None:
    height = budget / size
    axes.axhline(height, color=theme.alarm, linewidth=1.6, linestyle=(0, (6, 3)), gid="budget", zorder=5)
    axes.annotate(
        f"budget {format_bytes(budget)}", (0.0 if left else 1.0, height), xytext=(5 if left else -5, 3),
        textcoords="offset points", ha="left" if left else "right", va="bottom", color=theme.alarm, zorder=7,
        bbox=dict(facecolor=theme.ground, edgecolor="none", pad=1.0),
    )  # fmt: skip


def _draw_legend(figure: Figure, stacks: list[Stack], theme: Theme) -> None:
    from matplotlib.patches import Patch

    used = {kind for made in stacks for kind in made.kinds}
    handles = [
        Patch(facecolor=getattr(theme, kind), edgecolor=theme.ground, hatch=HATCHES[kind], label=kind)
        for kind in reversed(HATCHES)
        if kind in used
    ]
    figure.legend(handles=handles, loc="outside right upper", handlelength=2.2, handleheight=1.6)
