"""The report as one HTML file: no script, nothing loaded from elsewhere, readable in light and dark."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from fused_remat.compare.picture import draw
from fused_remat.compare.report import Settings, explanations, notes, table_rows
from fused_remat.compare.results import ModelResult
from fused_remat.compare.variants import FUSED
from fused_remat.show.html import document
from fused_remat.show.theme import DARK, LIGHT

_STYLE = ".fused { color: var(--fused); font-weight: 600; }"


def page(results: Sequence[ModelResult], settings: Settings) -> str:
    """The whole document. Every text in it is escaped; pictures are embedded once per colour scheme."""
    versions = ", ".join(f"{name} {version}" for name, version in settings.versions.items())
    kinds = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in explanations(results))
    body = (
        "<h1>The same training, side by side</h1>\n"
        f"<dl>{kinds}</dl>\n"
        f'<p class="quiet">{escape(settings.device_name)}, {settings.threads} CPU threads, seed {settings.seed}; '
        f"{escape(versions)}</p>\n{''.join(_section(result) for result in results)}"
    )
    return document("fused-remat compare", body, style=_STYLE)


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
