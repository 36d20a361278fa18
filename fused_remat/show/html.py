"""The page that every HTML report of the package shares: nothing loaded from elsewhere, readable in light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from fused_remat.show.theme import DARK, LIGHT, variables

_STYLE = (
    f"""
:root {{ color-scheme: light dark; --quiet: #57606a; --line: #d8dee4; {variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{
  :root {{ --quiet: #a7afb9; --line: #2c323a; {variables(DARK)} }}
}}
"""
    + """
body { background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.scroll { margin: 0 0 1rem; overflow-x: auto; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .9rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
caption { color: var(--quiet); font-size: .9rem; padding: .3rem 0; text-align: left; }
img, svg { height: auto; margin: 1rem 0; max-width: 100%; }
svg { min-width: 44rem; }
svg * { stroke-linecap: butt; stroke-linejoin: round; }
figure { margin: 0; overflow-x: auto; }
pre { overflow-x: auto; }
ul, .quiet { color: var(--quiet); font-size: .9rem; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem 1.2rem; }
:focus-visible { outline: 2px solid var(--fused); outline-offset: 3px; }
"""
)


def document(title: str, body: str, *, style: str = "", language: str = "en") -> str:
    """The whole page around `body` (HTML, escaped by the caller); `title` is text, `style` is added to the CSS.

    Colours are CSS variables by the field names of `Theme` (`--ink`, `--fused`, ...) plus `--quiet` and `--line`.
    """
    return (
        f'<!doctype html>\n<html lang="{escape(language, quote=True)}">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in a box that scrolls sideways and takes the keyboard's focus; the first cell of a row is its heading.

    A cell is text, or (number, text): the text is shown and the exact number is there for machines.
    """
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = "".join(
        f'<tr><th scope="row">{_cell(first)}</th>{"".join(f"<td>{_cell(cell)}</td>" for cell in cells)}</tr>\n'
        for first, *cells in rows
    )
    name = escape(caption, quote=True)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{name}"><table><caption>{name}</caption>'
        f"<thead><tr>{top}</tr></thead>\n<tbody>{lines}</tbody></table></div>\n"
    )


def picture(svg: str, alternative: str) -> str:
    """An inline SVG that takes the keyboard's focus and is read out as `alternative` (text)."""
    return f'<figure><div role="img" tabindex="0" aria-label="{escape(alternative, quote=True)}">{svg}</div></figure>\n'


def preformatted(text: str, name: str) -> str:
    """Text for a fixed-width font in a box that takes the keyboard's focus."""
    return f'<pre role="region" tabindex="0" aria-label="{escape(name, quote=True)}">{escape(text)}</pre>\n'


def listing(items: Iterable[str]) -> str:
    """A bullet list of texts; nothing for no items."""
    lines = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<ul>{lines}</ul>\n" if lines else ""


def _cell(cell: object) -> str:
    if isinstance(cell, tuple):
        number, text = cell
        return f'<data value="{number}">{escape(str(text))}</data>'
    return escape(str(cell))
