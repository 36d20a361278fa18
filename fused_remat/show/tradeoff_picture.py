"""Cost against peak memory: every way that was considered, the baselines, the budget and the way chosen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fused_remat.show.labels import byte_unit, cost_unit, drawable, format_cost, thinned
from fused_remat.show.render import check_path, finish
from fused_remat.show.theme import LIGHT, Theme, style, theme_named
from fused_remat.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COSTS = {"flop": "redone in backward", "seconds": "time of one step", "added seconds": "time added to a step"}
SOURCES = ("measured", "predicted")

_MOST = 400  # dots of points that are neither labelled nor chosen
# Where a label may lie, in points from its dot, tried in this order: (right, up, horizontal, vertical alignment).
_PLACES = (
    (8, 6, "left", "bottom"), (8, -6, "left", "top"), (-8, 6, "right", "bottom"), (-8, -6, "right", "top"),
    (8, 22, "left", "bottom"), (8, -22, "left", "top"), (-8, 22, "right", "bottom"), (-8, -22, "right", "top"),
    (8, 38, "left", "bottom"), (-8, 38, "right", "bottom"), (8, 54, "left", "bottom"), (-8, 54, "right", "bottom"),
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One way to run a step.

    Attributes:
        peak_bytes: highest bytes of the step.
        cost: FLOP redone in backward, or seconds; the same for every point of a picture.
        source: "measured" or "predicted".
        label: of a baseline ("everything", "sqrt", ...); "" for others.
        chosen: whether this is what the plan does.
    """

    peak_bytes: int
    cost: float
    source: str
    label: str = ""
    chosen: bool = False


def tradeoff(
    points: Iterable[Point],
    *,
    cost: str = "flop",
    budget: int | str | None = None,
    path: str | Path | None = None,
    theme: str = "light",
) -> Figure:
    """Cost (up) against peak memory (to the right): measured dots are filled, predicted ones hollow, the chosen ringed.

    Args:
        points: `Point`s; `points_of(plan)` makes those of a plan.
        cost: what their cost is: "flop" (redone), "seconds" (of a step) or "added seconds" (to the step as it was).
        budget, path, theme: as in `memory`.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
        TypeError, ValueError: an argument is wrong, or there is no point.
    """
    path, colours, points = check_path(path), theme_named(theme), list(points)
    check_points(points, cost)
    limit = None if budget is None else parse_bytes("budget", budget)
    with style(colours, math=False):
        return finish(draw(points, cost, limit, colours), path)


def check_points(points: Sequence[Point], cost: str) -> None:
    """Raises TypeError or ValueError unless there are points, each of a known source and with finite numbers."""
    if cost not in COSTS:
        raise ValueError(f"cost must be one of {', '.join(map(repr, COSTS))}, got {cost!r}")
    if not points:
        raise ValueError("points is empty, so there is nothing to draw")
    for point in points:
        if not isinstance(point, Point):
            raise TypeError(f"points must be fused_remat.show.Point, got {type(point).__name__}")
        if point.source not in SOURCES:
            raise ValueError(f"source of a point must be one of {', '.join(map(repr, SOURCES))}, got {point.source!r}")
        if not (math.isfinite(point.cost) and point.cost >= 0 and point.peak_bytes >= 0):
            raise ValueError(f"a point must have a finite cost and peak of at least 0, got {point}")


def sentence(points: Sequence[Point], cost: str, budget: int | None) -> str:
    """The points in words."""
    counts = " and ".join(f"{sum(p.source == source for p in points)} {source}" for source in SOURCES)
    named = "".join(f" {_in_words(p, cost)}." for p in points if p.chosen or p.label)
    limit = f" The budget is {format_bytes(budget)}." if budget is not None else ""
    return f"Cost ({COSTS[cost]}) against peak memory of one step, {counts} points.{named}{limit}"


def table_rows(points: Sequence[Point], cost: str, largest: int) -> tuple[list[dict[str, Any]], int]:
    """(the rows to show, how many points are left out): all that are named or chosen, of others at most `largest`."""
    ordered = sorted(points, key=lambda p: (-p.peak_bytes, p.cost))
    plain = [p for p in ordered if not (p.label or p.chosen)]
    shown = set(map(id, thinned(plain, largest)))
    kept = [p for p in ordered if p.label or p.chosen or id(p) in shown]
    return [asdict(p) | {"cost_text": format_cost(cost, p.cost)} for p in kept], len(ordered) - len(kept)


def draw(points: Sequence[Point], cost: str, budget: int | None, theme: Theme = LIGHT) -> Figure:
    """The figure, arguments checked and within `style`."""
    from matplotlib.figure import Figure

    unit, size = byte_unit(max([*(p.peak_bytes for p in points), budget or 0]))
    cost_name, cost_size = cost_unit(cost, max(p.cost for p in points))
    figure = Figure(figsize=(11.0, 5.4), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(f"peak of one step ({unit})")
    axes.set_ylabel(f"{COSTS[cost]} ({cost_name})")
    axes.set_title(f"{'Redone FLOP' if cost == 'flop' else 'Time'} against peak memory")
    at = {id(p): (p.peak_bytes / size, p.cost / cost_size) for p in points}
    limit = None if budget is None else budget / size
    _scale(axes, list(at.values()), limit)
    if budget is not None:
        axes.axvline(limit, color=theme.alarm, linewidth=1.6, linestyle=(0, (6, 3)), gid="budget")
        axes.annotate(
            f"budget {format_bytes(budget)}", (limit, 1.0), xycoords=("data", "axes fraction"), xytext=(-4, -4),
            textcoords="offset points", ha="right", va="top", rotation=90, color=theme.alarm,
        )  # fmt: skip
    _draw_dots(axes, points, at, theme)
    _draw_labels(figure, axes, [p for p in points if p.label or p.chosen], at, limit)
    _draw_legend(axes, points, theme)
    return figure


def _look(source: str, label: str, theme: Theme) -> dict[str, Any]:
    """Filled where measured, hollow where predicted; a baseline is a square."""
    colour = theme.checkpoint if label else theme.fused
    return dict(
        marker="s" if label else "o", markersize=7.5 if label else 6, linestyle="", color=colour, markeredgewidth=1.4,
        markerfacecolor=colour if source == "measured" else theme.ground, gid=f"point-{source}",
        zorder=5 if source == "measured" else 4,  # where the two coincide, what was measured shows
    )  # fmt: skip


def _draw_dots(axes: Axes, points: Sequence[Point], at: dict[int, tuple[float, float]], theme: Theme) -> None:
    for source in SOURCES:
        for label in (False, True):
            some = [p for p in points if p.source == source and bool(p.label) == label]
            plain = thinned([p for p in some if not (label or p.chosen)], _MOST)
            some = [*plain, *(p for p in some if label or p.chosen)]
            if some:
                axes.plot(*zip(*(at[id(p)] for p in some), strict=True), **_look(source, "x" if label else "", theme))
    for point in (p for p in points if p.chosen):
        axes.plot(*at[id(point)], marker="o", markersize=17, markerfacecolor="none", markeredgewidth=2.0,
                  color=theme.ink, gid="chosen", zorder=6)  # fmt: skip


def _draw_labels(
    figure: Figure, axes: Axes, named: Sequence[Point], at: dict[int, tuple[float, float]], budget: float | None
) -> None:
    """A label beside each named dot, where it lies on no other label, on the fewest dots and inside of the axes."""
    figure.draw_without_rendering()  # fixes the layout that the places are judged by
    frame = axes.get_window_extent()
    dots = axes.transData.transform(list(at.values()))
    line = None if budget is None else axes.transData.transform((budget, 0.0))[0]
    taken = []
    for point in named:
        words = drawable(point.label or "chosen", 40) + (f" ({point.source})" if point.chosen else "")
        tried = []
        for right, up, horizontal, vertical in _PLACES:
            distance = (right + math.copysign(6 * point.chosen, right), up)
            made = axes.annotate(
                words, at[id(point)], xytext=distance, textcoords="offset points", ha=horizontal, va=vertical,
                fontweight="bold" if point.chosen else "normal", zorder=6,
            )  # fmt: skip
            box = made.get_window_extent().padded(4)
            made.remove()
            outside = not (frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1)
            hidden = int(((dots >= (box.x0, box.y0)) & (dots <= (box.x1, box.y1))).all(axis=1).sum())
            crossed = line is not None and box.x0 <= line <= box.x1
            clashes = 9 * outside + 9 * sum(box.overlaps(other) for other in taken) + 2 * min(hidden, 4) + crossed
            tried.append((clashes, len(tried), made, box))
        _, _, made, box = min(tried, key=lambda entry: entry[:2])
        axes.add_artist(made)
        taken.append(box)


def _draw_legend(axes: Axes, points: Sequence[Point], theme: Theme) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for source in SOURCES:
        if any(p.source == source and not p.label for p in points):
            handles.append(Line2D([], [], label=source, **_look(source, "", theme)))
        if any(p.source == source and p.label for p in points):
            handles.append(Line2D([], [], label=f"baseline, {source}", **_look(source, "x", theme)))
    if any(p.chosen for p in points):
        ring = dict(marker="o", markersize=13, markerfacecolor="none", markeredgewidth=2.0, linestyle="")
        handles.append(Line2D([], [], label="chosen", color=theme.ink, **ring))
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def _scale(axes: Axes, places: Sequence[tuple[float, float]], budget: float | None) -> None:
    across = [x for x, _ in places] + ([] if budget is None else [budget])
    highest = max(y for _, y in places)
    margin = 0.12 * (max(across) - min(across)) or 0.1 * max(across) or 1.0
    axes.set_xlim(min(across) - margin, max(across) + margin)
    axes.set_ylim(-0.06 * highest or -0.1, 1.15 * highest or 1.0)


def _in_words(point: Point, cost: str) -> str:
    what = "Chosen" + (f" ({point.label})" if point.label else "") if point.chosen else point.label
    return f"{what}, {point.source}: {format_bytes(point.peak_bytes)} at {format_cost(cost, point.cost)}"


def points_of_profile(profile: Any) -> list[Point]:
    """The step as a `Profile` found it and as `fused_remat.convert` would make it, by redone FLOP; [] if it cannot."""
    recording, recompute = profile.recording, profile.recompute
    if recompute.converted_peak_bytes is None:
        return []
    return [
        Point(recording.peak_bytes, recording.redone_flop, recording.source, "as it is"),
        Point(recompute.converted_peak_bytes, recompute.converted_redone_flop, "predicted", "converted"),
    ]


def points_of(plan: Any) -> tuple[list[Point], str]:
    """(the points of a `Plan`, what their cost is): everything kept, its front, and what of it was run.

    A point that was run is there twice, predicted and measured; the chosen one is marked where it was measured, else
    where it was predicted. The cost of a measured point is that of its prediction: the plan measures peaks.
    """
    cost, unit = ("added seconds", 1e9) if plan.minimise == "time" else ("flop", 1)
    points = [Point(plan.everything_kept, 0.0, "predicted", "everything")]
    for index, found in enumerate(plan.front):
        chosen = index == plan.chosen
        points.append(Point(found.peak, found.cost / unit, "predicted", chosen=chosen and found.measured is None))
        if found.measured is not None:
            points.append(Point(found.measured, found.cost / unit, "measured", chosen=chosen))
    return points, cost
