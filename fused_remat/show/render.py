"""From a figure to a file: PNG by Agg, SVG that takes its colours from a page. The same bytes every time."""

from __future__ import annotations

import io
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from fused_remat.show.theme import FONT, LIGHT, Theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150
FORMATS = (".png", ".svg")

_NUMBER = re.compile(r"-?\d+\.\d+")


def check_path(path: str | Path | None) -> Path | None:
    """`path` as a Path. Raises ValueError where its ending is no format that pictures are written in."""
    if path is None:
        return None
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"path must end in one of {', '.join(FORMATS)}, got {str(path)!r}")
    return path


def finish(figure: Figure, path: Path | None) -> Figure:
    """Lay `figure` out (within `style`, so that it looks the same wherever it is drawn later) and write it."""
    figure.draw_without_rendering()
    if path is not None:
        path.write_bytes(encode(figure, path.suffix.lower()))
    return figure


def encode(figure: Figure, suffix: str) -> bytes:
    """The figure in the format of that suffix; no date, no version and no random name in it."""
    import matplotlib

    metadata = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}[suffix]
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fused_remat", "text.parse_math": False}):
        figure.savefig(buffer, format=suffix[1:], dpi=DPI, metadata=metadata)
    return buffer.getvalue()


def inline_svg(figure: Figure, prefix: str) -> str:
    """The figure, drawn in the light theme, as SVG to stand in a page of `show.html`.

    Colours become the page's variables, so light and dark need one picture; ids begin with `prefix`, coordinates have
    two decimals, and nothing names another address.
    """
    text = encode(figure, ".svg").decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)  # would hold for the whole page
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(?::xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    seen: Counter[str] = Counter()
    text = re.sub(r'\bid="([^"]*)"', lambda match: f'id="{prefix}-{_unique(match[1], seen)}"', text)
    text = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", text)
    text = re.sub(r'\b(?:d|x|y|transform|points)="[^"]*"', lambda match: _NUMBER.sub(_shorter, match[0]), text)
    for field in fields(Theme):
        text = text.replace(getattr(LIGHT, field.name), f"var(--{field.name})")
    text = text.replace(f"'{FONT}'", f"'{FONT}', Verdana, sans-serif")
    # The picture's words are in the text alternative of the figure around it.
    return re.sub(r"<svg ", '<svg aria-hidden="true" focusable="false" ', text, count=1).strip() + "\n"


def _unique(name: str, seen: Counter[str]) -> str:
    """`name`, numbered from its second use on: panels and bars have the same gid, and no reference leads to one."""
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}-{seen[name]}"


def _shorter(match: re.Match[str]) -> str:
    return f"{float(match[0]):.2f}".rstrip("0").rstrip(".")
