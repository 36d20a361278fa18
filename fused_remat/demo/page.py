"""The demo as one HTML file that works offline: a template, and one JSON object with every text and step in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import torch

from fused_remat.demo.mlp_example import (
    FEATURES,
    TOKENS,
    WIDTH,
    WORKSPACE,
    MlpExample,
    full_bytes,
    mlp_steps,
    x_bytes,
)
from fused_remat.demo.observe import Observation
from fused_remat.demo.report import GRADIENTS, VALUES, state_of, step_lines, torch_check
from fused_remat.demo.run import LARGEST, MINUS, NUMBER, SCHEMA, Run
from fused_remat.demo.words import LANGUAGES, Words, kibibytes, words


def page(language: str, runs: Sequence[Run], observed: dict[bool, Observation], mlp: MlpExample) -> str:
    """The document. `runs`: both variants at one x, which the page shows first; it computes others by itself."""
    template = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    table = words(language)
    data = json.dumps(_data(language, runs, observed, mlp), ensure_ascii=False, allow_nan=False)
    parts = {
        "@LANGUAGE@": language,
        "@TITLE@": escape(table["title"]),
        "@NO_SCRIPT@": escape(table["no_script"]),
        "@ALL_STEPS@": escape("\n\n".join(_printed(table, runs))),
        "@DATA@": data.replace("<", "\\u003c"),  # nothing in it can end the script element
    }
    for mark, text in parts.items():
        template = template.replace(mark, text)
    return template


def _printed(table: Words, runs: Sequence[Run]) -> list[str]:
    return ["\n".join(step_lines(table, run, number)) for run in runs for number in range(len(run.steps))]


def _data(language: str, runs: Sequence[Run], observed: dict[bool, Observation], mlp: MlpExample) -> dict[str, Any]:
    x = runs[0].values["x"]
    tables = {name: words(name) for name in LANGUAGES}
    return {
        "schema": SCHEMA,
        "language": language,
        "words": tables,
        "x": x,
        "number": {"pattern": NUMBER, "minus": MINUS, "largest": LARGEST},
        "values": VALUES,
        "gradients": GRADIENTS,
        "steps": {"keep" if run.keep_b else "drop": _steps(run) for run in runs},
        "torch_check": {name: torch_check(table, observed, x) for name, table in tables.items()},
        "mlp": _mlp(mlp),
    }


def _steps(run: Run) -> list[dict[str, Any]]:
    return [
        asdict(step) | {"states": {value: state_of(step, value, run.steps) for value in VALUES}} for step in run.steps
    ]


def _mlp(mlp: MlpExample) -> dict[str, Any]:
    """Sizes as text, steps, and the table: per row its key, then for plain torch and fused_remat a number and how it
    is known (a key of the words), or the key of what is said instead of a number.
    """
    known = "measured" if mlp.measured else "formula"
    planned = "planned" if mlp.measured else "formula"

    def cell(nbytes: int | None, how: str) -> list[str]:
        return ["not_measured"] if nbytes is None else [kibibytes(nbytes), how]

    rows = [
        ["mlp_row_kept", cell(mlp.kept_plain, known), cell(mlp.kept_fused, known)],
        ["mlp_row_peak", cell(mlp.peak_plain, known), cell(mlp.peak_fused, known)],
        ["mlp_row_full", cell(full_bytes(), "formula"), ["never"]],
        ["mlp_row_workspace", ["not_used"], cell(mlp.workspace_bytes, planned)],
    ]
    return {
        "measured": mlp.measured,
        "facts": {
            "tokens": TOKENS, "width": WIDTH, "features": FEATURES, "dtype": "float32", "limit": kibibytes(WORKSPACE),
            "chunks": mlp.chunks, "chunk_features": mlp.chunk_features, "x": kibibytes(x_bytes()),
            "full": kibibytes(full_bytes()), "version": torch.__version__,
        },
        "steps": [asdict(step) for step in mlp_steps(mlp.chunks)],
        "rows": rows,
    }  # fmt: skip
