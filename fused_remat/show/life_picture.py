"""Life-bars: one line per activation (equal layers folded), a gap where it is dropped, a second bar where rebuilt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fused_remat.recording import Recording
from fused_remat.show.labels import drawable
from fused_remat.show.lives import DROPPED, KEPT, REBUILT, Life, Row, lives, rows
from fused_remat.show.memory_picture import mark_phases
from fused_remat.show.render import check_path, finish
from fused_remat.show.sketch import Sketch
from fused_remat.show.stack import Stack, check_recording, layout, positions, stack
from fused_remat.show.theme import HATCHES, LIGHT, Theme, style, theme_named
from fused_remat.sizes import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LARGEST = 24
_BETWEEN = 0.25  # of a row of one life: the room between rows
_TALLEST = 4.0  # rows of one life: what a row of many takes at most
MOST_LANES = 48  # lives that a row shows of its own; more could not be told apart
_THINNEST = 0.004  # of the width: what a bar takes at least, to be seen


def life_bars(
    recording: Recording | Sketch,
    *,
    regions: Iterable[Sequence[str]] = (),
    largest: int = LARGEST,
    path: str | Path | None = None,
    theme: str = "light",
) -> Figure:
    """One bar per activation from birth to last use; what is dropped and rebuilt has a gap and a second bar.

    Equal layers share a row: its lives lie in it one above the other, the first layer on top.

    Args:
        recording: of `fused_remat.recording.record_step`, or the sketch of a plan, which has its largest rows.
        regions: module paths recomputed together (`Assignment.regions`), for the arrows to what is rebuilt.
        largest: rows that are drawn, those with the most bytes; the title says how many are left out.
        path, theme: as in `memory`.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
        TypeError, ValueError: an argument is wrong, the recording is empty, or it has no kept and no rebuilt value.
    """
    path, colours = check_path(path), theme_named(theme)
    check_recording(recording)
    if isinstance(largest, bool) or not isinstance(largest, int) or largest < 1:
        raise ValueError(f"largest must be an int of at least 1 (rows), got {largest!r}")
    shown, left_out, _ = rows_of(recording, [tuple(region) for region in regions], largest)
    if not shown:
        raise ValueError("recording has no kept and no rebuilt activation, so there is no life to draw")
    with style(colours, math=False):
        return finish(draw(recording, shown, left_out, colours), path)


def rows_of(
    recording: Recording | Sketch, regions: Iterable[Sequence[str]] = (), largest: int = LARGEST
) -> tuple[Sequence[Row], int, int]:
    """(the rows to draw, how many are left out, bytes of those); a sketch has its own, whatever the regions."""
    if isinstance(recording, Sketch):
        ranked = sorted(recording.rows, key=lambda row: -row.nbytes)
        rest = ranked[largest:]
        shown = [row for row in recording.rows if row not in rest]
        return shown, recording.left_out + len(rest), recording.left_out_bytes + sum(row.nbytes for row in rest)
    shown, rest = rows(lives(recording, regions), largest, MOST_LANES)
    return shown, len(rest), sum(row.nbytes for row in rest)


def draw(recording: Recording | Sketch, shown: Sequence[Row], hidden: int, theme: Theme = LIGHT) -> Figure:
    """The figure of those rows, within `style`; `hidden`: how many are left out."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    labels = [_label(row) for row in shown]
    made = stack(recording)
    counts, widths = layout([made], ("forward", "backward"))  # no activation lives on in the optimizer
    axis = _Axis(made, positions(made, counts, widths))
    middles, height = _places(shown)
    figure = Figure(figsize=(11.0, 1.4 + 0.3 * height), layout="constrained")
    axes = figure.subplots()
    lanes = _lanes(shown, middles)
    values = [life for row in shown for life in row.lives]
    for life in values:
        _draw_life(axes, life, axis, *lanes[life.name], theme)
    _draw_arrows(axes, values, axis, lanes, theme)
    mark_phases(axes, widths, theme)
    axes.set_ylim(height + 0.1, -0.1)
    axes.set_yticks(middles, labels)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    left_out = f"; {hidden} smaller rows left out" if hidden else ""
    axes.set_title(f"Lives of activations over one step, {recording.source} on {recording.device}{left_out}")
    states = {segment.state for life in values for segment in life.segments}
    handles = [Patch(label=word, **_look(state, theme)) for state, word in _WORDS.items() if state in states]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), handlelength=2.2)
    return figure


_WORDS = {KEPT: "kept until its last use", DROPPED: "made and dropped", REBUILT: "rebuilt"}


class _Axis:
    """From a moment to a place on the axis, on which the events of a phase lie equally far apart."""

    def __init__(self, made: Stack, where: np.ndarray):
        self._made, self._where = made, where

    def __call__(self, moment: float) -> float:
        made, event = self._made, moment
        if made.times is not made.events:  # else moments are numbers of events
            event = 1 + int(np.searchsorted(made.times[1:], moment))
        return float(np.interp(event, made.events, self._where, right=1.0))


def _look(state: str, theme: Theme) -> dict[str, Any]:
    if state == DROPPED:
        return dict(facecolor=theme.ground, edgecolor=theme.kept, linewidth=0.9)
    return dict(facecolor=getattr(theme, state), edgecolor=theme.ground, hatch=HATCHES[state], linewidth=0.3)


def _height(row: Row) -> float:
    return min(1.0 + 0.15 * (len(row.lives) - 1), _TALLEST)


def _places(shown: Sequence[Row]) -> tuple[list[float], float]:
    """(the middle of each row from the top, height of all)."""
    ends = np.cumsum([_height(row) for row in shown])
    return [float(end - _height(row) / 2) for end, row in zip(ends, shown, strict=True)], float(ends[-1])


def _lanes(shown: Sequence[Row], middles: Sequence[float]) -> dict[str, tuple[float, float]]:
    """(top, height) of every life by its name."""
    lanes = {}
    for row, middle in zip(shown, middles, strict=True):
        whole = _height(row) - _BETWEEN
        for lane, life in enumerate(row.lives):
            lanes[life.name] = (middle - whole / 2 + lane * whole / len(row.lives), whole / len(row.lives))
    return lanes


def _draw_life(axes: Axes, life: Life, axis: _Axis, top: float, height: float, theme: Theme) -> None:
    for segment in life.segments:
        first, last = axis(segment.first), axis(segment.last)
        axes.broken_barh(
            [(first, max(last - first, _THINNEST))], (top, height), gid=f"life-{segment.state}",
            **_look(segment.state, theme),
        )  # fmt: skip
    for before, after in zip(life.segments[:-1], life.segments[1:], strict=True):
        ends = axis(before.last), axis(after.first)
        axes.plot(ends, [top + height / 2] * 2, color=theme.ink, linewidth=0.6, linestyle=":", gid="life-gap")


def _draw_arrows(
    axes: Axes, shown: Sequence[Life], axis: _Axis, lanes: dict[str, tuple[float, float]], theme: Theme
) -> None:
    # One arrow for what is rebuilt together: the others are made from the first.
    first = {life.rebuilt_from: life for life in reversed(shown) if life.rebuilt_from in lanes}
    for life in first.values():
        moment = axis(next(segment.first for segment in life.segments if segment.state == REBUILT))
        (from_top, from_height), (to_top, to_height) = lanes[life.rebuilt_from], lanes[life.name]
        arrow = axes.annotate(
            "", (moment, to_top + to_height / 2), xytext=(moment, from_top + from_height / 2),
            arrowprops=dict(arrowstyle="->", color=theme.ink, linewidth=0.9, shrinkA=0, shrinkB=0),
        )  # fmt: skip
        arrow.set_gid("life-source")


def _label(row: Row) -> str:
    several = f" x {row.values}" if row.values > 1 else ""
    return f"{drawable(row.name, 36)}{several}, {format_bytes(row.nbytes)}"
