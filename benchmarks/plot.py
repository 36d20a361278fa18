"""One picture: time against memory, one panel per case, one point per provider. Everything in it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from benchmarks.operation import EAGER
from benchmarks.results import CaseResult, mib

# Okabe and Ito's palette, told apart without colour by the markers.
_COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#999999")
_MARKERS = "osD^v<>PX*h"
_PANEL_INCHES = 4.4
_LEGEND_COLUMNS_PER_PANEL = 2


def save_picture(results: Sequence[CaseResult], path: Path) -> None:
    """Writes the picture of at least one case as PNG. A provider has the same mark in all panels."""
    names = list(dict.fromkeys(name for result in results for name in result.times))
    columns = min(len(names), _LEGEND_COLUMNS_PER_PANEL * len(results))
    legend_inches = 0.25 * -(-len(names) // columns)
    height = _PANEL_INCHES + legend_inches
    figure, axes = plt.subplots(1, len(results), figsize=(_PANEL_INCHES * len(results), height), squeeze=False)
    handles = {}
    for axis, result in zip(axes[0], results, strict=True):
        for position, name in enumerate(names):
            if name in result.times:
                handles[name] = _point(axis, result, name, position)
        axis.set_title(f"{result.operation} {result.case.name}", fontsize=9)
        axis.set_xlabel("backward peak above output and gradients, MiB", fontsize=9)
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.axhline(1.0, color="#999999", linewidth=0.8, zorder=0)
    axes[0][0].set_ylabel("time, x eager (median, p20-p80)", fontsize=9)
    figure.tight_layout(rect=(0, legend_inches / height, 1, 1))
    figure.legend(
        [handles[name] for name in names], names, loc="lower center", ncols=columns, fontsize=8, frameon=False
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _point(axis: plt.Axes, result: CaseResult, name: str, position: int) -> plt.Artist:
    ratio = result.ratio(name, EAGER)
    return axis.errorbar(
        mib(result.memory[name].backward_peak_above_gradients_bytes),
        ratio.median,
        yerr=[[ratio.median - ratio.p20], [ratio.p80 - ratio.median]],
        fmt=_MARKERS[position % len(_MARKERS)],
        color=_COLOURS[position % len(_COLOURS)],
        markersize=7,
        linewidth=1,
    )
