"""How kept bytes grow with a size of the inputs: on two logarithmic axes, beside slopes 1 and 2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fused_remat.show.labels import byte_unit, drawable
from fused_remat.show.render import check_path, finish
from fused_remat.show.theme import LIGHT, Theme, style, theme_named
from fused_remat.sizes import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
_COLOURS = ("fused", "checkpoint", "gradients", "output", "rebuilt", "stock", "parameters", "alarm")


@dataclass(frozen=True)
class Curve:
    """Bytes at ascending sizes along one axis of the inputs; `law` says in words how they grow, "" where unknown."""

    axis: str
    sizes: tuple[int, ...]
    nbytes: tuple[int, ...]
    label: str = "kept"
    source: str = "measured"
    law: str = ""


def growth(curves: Iterable[Curve], *, path: str | Path | None = None, theme: str = "light") -> Figure:
    """Bytes over the size of the inputs, one panel per axis (batch, sequence, resolution), log-log.

    Dotted guides of slope 1 (linear) and 2 (quadratic) go through the first point of a panel's largest curve.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
        TypeError, ValueError: an argument is wrong, there is no curve, or one has fewer than two sizes or no bytes.
    """
    path, colours, curves = check_path(path), theme_named(theme), list(curves)
    check_curves(curves)
    with style(colours, math=False):
        return finish(draw(curves, colours), path)


def check_curves(curves: Sequence[Curve]) -> None:
    """Raises TypeError or ValueError unless every curve can be drawn on logarithmic axes."""
    if not curves:
        raise ValueError("curves is empty, so there is no growth to draw; profile with sweep=")
    for curve in curves:
        if not isinstance(curve, Curve):
            raise TypeError(f"curves must be fused_remat.show.Curve, got {type(curve).__name__}")
        if len(curve.sizes) != len(curve.nbytes) or len(curve.sizes) < 2:
            raise ValueError(
                f"a curve needs at least two sizes and as many bytes, got {len(curve.sizes)} and {len(curve.nbytes)}"
            )
        if min(curve.sizes) < 1 or min(curve.nbytes) < 1:
            raise ValueError(f"sizes and bytes must be at least 1 (the axes are logarithmic), got {curve}")


def sentence(curves: Sequence[Curve]) -> str:
    """The curves in words."""
    parts = "; ".join(
        f"{c.label} over {c.axis} ({c.source}) {format_bytes(c.nbytes[0])} at {c.sizes[0]} to "
        f"{format_bytes(c.nbytes[-1])} at {c.sizes[-1]}{f', {c.law}' if c.law else ''}"
        for c in curves
    )
    return f"Growth of bytes with the size of the inputs: {parts}."


def draw(curves: Sequence[Curve], theme: Theme = LIGHT) -> Figure:
    """The figure, arguments checked and within `style`."""
    from matplotlib.figure import Figure

    axes_names = list(dict.fromkeys(curve.axis for curve in curves))
    columns = min(len(axes_names), 3)
    lines = -(-len(axes_names) // columns)
    figure = Figure(figsize=(11.0 if columns > 1 else 7.5, 4.6 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for panel, name in zip(panels, axes_names, strict=False):
        _draw_panel(panel, [curve for curve in curves if curve.axis == name], theme)
    for panel in panels[len(axes_names) :]:
        panel.remove()
    return figure


def _draw_panel(axes: Axes, curves: Sequence[Curve], theme: Theme) -> None:
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    sizes = sorted({size for curve in curves for size in curve.sizes})
    highest = max(max(curve.nbytes) for curve in curves)
    lowest = min(min(curve.nbytes) for curve in curves)
    axes.set_xscale("log")
    axes.set_yscale("log")
    base = max(curves, key=lambda curve: curve.nbytes[-1])
    first, last, start = base.sizes[0], base.sizes[-1], base.nbytes[0]
    top = max(highest, start * (last / first) ** 2)
    axes.set_ylim(lowest / 1.6, top * 2.2)
    axes.set_xlim(sizes[0] / 1.12, sizes[-1] * 1.12 * (sizes[-1] / sizes[0]) ** 0.12)
    for slope, dashes in ((1, (0, (1, 2))), (2, (0, (4, 3)))):
        end = start * (last / first) ** slope
        axes.plot(
            (first, last),
            (start, end),
            color=theme.ink,
            linewidth=0.9,
            linestyle=dashes,
            gid=f"slope-{slope}",
            zorder=1,
        )
        axes.annotate(
            f"slope {slope}",
            (last, end),
            xytext=(9, 0),
            textcoords="offset points",
            ha="left",
            va="center",
            fontsize=8.5,
        )
    for number, curve in enumerate(curves):
        colour = getattr(theme, _COLOURS[number % len(_COLOURS)])
        hollow = curve.source == "predicted"
        axes.plot(
            curve.sizes, curve.nbytes, marker=_MARKERS[number % len(_MARKERS)], color=colour, linewidth=1.8,
            markerfacecolor=theme.ground if hollow else colour, gid=f"curve-{curve.source}",
            label=f"{drawable(curve.label, 40)}, {curve.source}", zorder=3,
        )  # fmt: skip
    axes.xaxis.set_major_locator(FixedLocator(_spread(sizes)))
    axes.xaxis.set_major_formatter(lambda size, _: f"{size:g}")
    axes.yaxis.set_major_locator(FixedLocator(_powers(lowest / 1.6, top * 2.2)))
    axes.yaxis.set_major_formatter(lambda nbytes, _: _tick(nbytes))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(drawable(curves[0].axis))
    axes.set_title(f"Bytes over {drawable(curves[0].axis)}")
    axes.legend(loc="upper left")


def _powers(lowest: float, highest: float) -> list[float]:
    """Powers of two within the axis, at most about eight."""
    exponents = [e for e in range(80) if lowest <= 2**e <= highest]
    stride = max(1, -(-len(exponents) // 8))
    return [float(2**e) for e in exponents[::stride]]


def _spread(sizes: Sequence[int]) -> list[float]:
    """The sizes that are far enough from each other for their numbers to fit."""
    room = (sizes[-1] / sizes[0]) ** 0.1
    shown = [sizes[0]]
    for size in sizes[1:]:
        if size / shown[-1] >= room:
            shown.append(size)
    return list(map(float, shown))


def _tick(nbytes: float) -> str:
    name, size = byte_unit(nbytes)
    return f"{nbytes / size:g} {name}"


def curves_of(profile: Any) -> list[Curve]:
    """The curves of a `Profile` that was made with `sweep=`: kept bytes and the peak along each axis."""
    made = []
    for growth_along in profile.growth.values():
        sizes = tuple(point.size for point in growth_along.points)
        source = growth_along.points[0].source
        for label, name in (("kept", "kept_bytes"), ("peak", "peak_bytes")):
            law = growth_along.laws[label].in_words(growth_along.axis, growth_along.base)
            values = tuple(getattr(point, name) for point in growth_along.points)
            made.append(Curve(growth_along.axis, sizes, values, label, source, law))
    return made
