"""The report as one HTML file: no script, nothing loaded from elsewhere, readable in light and dark."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from fused_remat.compare.picture import DARK, LIGHT, draw
from fused_remat.compare.report import Settings, explanations, notes, table_rows
from fused_remat.compare.results import ModelResult
from fused_remat.compare.variants import FUSED

_STYLE = """
:root { color-scheme: light dark;
  --ground: #ffffff; --ink: #1f2328; --quiet: #57606a; --line: #d8dee4; --accent: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #15181d; --ink: #e6e8eb; --quiet: #a7afb9; --line: #2c323a; --accent: #56b4e9; }
}
body { background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .9rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
.fused { color: var(--accent); font-weight: 600; }
img { height: auto; margin: 1rem 0; max-width: 100%; }
ul, .quiet { color: var(--quiet); font-size: .9rem; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem 1.2rem; }
"""


def page(results: Sequence[ModelResult], settings: Settings) -> str:
    """The whole document. Every text in it is escaped; pictures are embedded once per colour scheme."""
    versions = ", ".join(f"{name} {version}" for name, version in settings.versions.items())
    kinds = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in explanations(results))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>fused-remat compare</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        "<h1>The same training, side by side</h1>\n"
        f"<dl>{kinds}</dl>\n"
        f'<p class="quiet">{escape(settings.device_name)}, {settings.threads} CPU threads, seed {settings.seed}; '
        f"{escape(versions)}</p>\n{''.join(_section(result) for result in results)}</body>\n</html>\n"
    )


def _section(result: ModelResult) -> str:
    return (
        f"<section>\n<h2>{escape(result.title)}</h2>\n{_picture(result)}"
        f'<div class="scroll">{_table(result)}</div>\n'
        f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes(result))}</ul>\n</section>\n"
    )


def _picture(result: ModelResult) -> str:
    kept = "; ".join(
        f"{v.name} keeps {v.kept_mib:.1f} MiB, backward peak {v.backward_peak_mib:.1f} MiB"
        for v in result.variants.values()
    )
    alt = escape(f"Loss curves and memory over one step. {kept}.", quote=True)
    light, dark = (_data_uri(draw(result, theme, heading=False)) for theme in (LIGHT, DARK))
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{alt}"></picture>\n'
    )


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"


def _table(result: ModelResult) -> str:
    names = list(result.variants)
    head = "".join(f'<th scope="col"{_emphasis(name)}>{escape(name)}</th>' for name in names)
    body = "".join(
        f'<tr><th scope="row">{escape(label.strip())}</th>'
        + "".join(f"<td{_emphasis(name)}>{escape(text)}</td>" for name, text in zip(names, texts, strict=True))
        + "</tr>"
        for label, texts in table_rows(result)
    )
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>"


def _emphasis(name: str) -> str:
    return ' class="fused"' if name == FUSED else ""
