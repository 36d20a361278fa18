"""Colours, hatches and the style that every picture of the package shares; matplotlib is imported when one is drawn."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

FONT = "DejaVu Sans"  # comes with matplotlib: no look-up of system fonts, the same widths everywhere


@dataclass(frozen=True)
class Theme:
    """Colours of one picture. Every field is another colour, so that a page can put a variable in the place of each."""

    ground: str
    ink: str
    grid: str
    stock: str
    checkpoint: str
    fused: str
    parameters: str
    buffers: str
    optimizer: str
    inputs: str
    gradients: str
    rebuilt: str
    temporary: str
    output: str
    alarm: str

    @property
    def kept(self) -> str:
        """Kept activations have the colour of what the package does."""
        return self.fused


# Okabe and Ito's colour-blind-safe palette; in greys what the others are held against and what a step finds in place.
LIGHT = Theme(
    "#ffffff", "#1f2328", "#e3e6ea", "#7a828c", "#d55e00", "#0072b2",
    "#5b6570", "#97a1ab", "#b9c1c9", "#d6dce2", "#009e73", "#e69f00", "#f0e442", "#cc79a7", "#b3261e",
)  # fmt: skip
DARK = Theme(
    "#15181d", "#e6e8eb", "#2c323a", "#a7afb9", "#f0904a", "#56b4e9",
    "#8a94a0", "#6d7783", "#565f6a", "#414954", "#2fbf95", "#f2b134", "#d8cd3f", "#d795bb", "#ff8a80",
)  # fmt: skip

# Kinds of memory from the bottom of a stack to its top: what a step finds in place, what it makes and keeps, what comes
# and goes. Each has a hatch, so that neighbours differ without colour too.
HATCHES = {
    "parameters": "",
    "buffers": "...",
    "optimizer": "//",
    "inputs": "xx",
    "gradients": "\\\\",
    "kept": "",
    "rebuilt": "////",
    "output": "xxx",
    "temporary": "...",
}


def require_matplotlib() -> None:
    """Raises ModuleNotFoundError that names the extra to install if matplotlib cannot be imported."""
    try:
        importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"pictures need {error.name}, which is not installed: pip install 'fused_remat[bench]'", name=error.name
        ) from error


def theme_named(name: object) -> Theme:
    """The theme "light" or "dark". Raises ValueError for another name."""
    themes = {"light": LIGHT, "dark": DARK}
    if not isinstance(name, str) or name not in themes:
        raise ValueError(f"theme must be one of {', '.join(map(repr, themes))}, got {name!r}")
    return themes[name]


def variables(theme: Theme) -> str:
    """The colours as CSS variables: `--ground: #ffffff; --ink: ...`."""
    return " ".join(f"--{field.name}: {getattr(theme, field.name)};" for field in fields(theme))


@contextmanager
def style(theme: Theme, *, math: bool = True) -> Iterator[None]:
    """matplotlib's settings for pictures in `theme`, afterwards as they were; without `math` a dollar is a dollar."""
    require_matplotlib()
    import matplotlib

    settings = {
        "figure.facecolor": theme.ground,
        "axes.facecolor": theme.ground,
        "savefig.facecolor": theme.ground,
        "text.color": theme.ink,
        "text.parse_math": math,
        "axes.labelcolor": theme.ink,
        "axes.titlecolor": theme.ink,
        "axes.titlesize": 10.5,
        "axes.titlelocation": "left",
        "axes.edgecolor": theme.ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme.grid,
        "hatch.linewidth": 0.6,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
        "legend.frameon": True,
        "legend.facecolor": theme.ground,
        "legend.edgecolor": theme.ground,
        "legend.framealpha": 1.0,
        "font.family": FONT,
        "font.size": 9.5,
    }
    with matplotlib.rc_context(settings):
        yield
