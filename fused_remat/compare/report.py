"""The table of one model, the notes below it, and the CSV and JSON files."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from fused_remat.budget import MIB
from fused_remat.compare.results import ModelResult
from fused_remat.compare.variants import CHECKPOINT, FUSED

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Settings:
    """What was asked for and what it ran on; `options` are those of a model of the user's own, as given."""

    models: tuple[str, ...]
    steps: int
    device: str
    device_name: str
    threads: int
    seed: int
    versions: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)


def table_rows(result: ModelResult) -> list[tuple[str, list[str]]]:
    """(label, one text per variant) in the order of the table."""
    names = list(result.variants)
    variants = list(result.variants.values())
    return [
        (
            f"train loss, last step{f' ({result.unit})' if result.unit else ''}",
            [f"{v.curve.losses[-1]:.5f}" for v in variants],
        ),
        ("largest loss difference", [_difference(result, name) for name in names]),
        (result.metric, [f"{v.curve.validation:.4f}" for v in variants]),
        ("kept for backward (MiB)", [f"{v.kept_mib:.1f}" for v in variants]),
        ("forward peak (MiB)", [f"{v.forward_peak_mib:.1f}" for v in variants]),
        ("backward peak (MiB)", [f"{v.backward_peak_mib:.1f}" for v in variants]),
        ("step time / stock", [_ratio(result, name) for name in names]),
        ("  20th to 80th percentile", [_ratio_range(result, name) for name in names]),
        ("redone products (GFLOP per step)", [f"{result.redone_flop(name) / 1e9:.1f}" for name in names]),
        *_changed_rows(result),
    ]


def _changed_rows(result: ModelResult) -> list[tuple[str, list[str]]]:
    variants = result.variants.values()
    if result.shape is None:
        return [
            ("blocks checkpointed", [str(v.blocks) for v in variants]),
            ("MLPs converted", [str(v.mlps) for v in variants]),
            ("attentions converted", [str(v.attentions) for v in variants]),
        ]
    count = result.shape.count
    return [
        ("MLPs changed", [f"{v.mlps} of {count}" for v in variants]),
        ("attentions changed", [f"{v.attentions} of {count}" for v in variants]),
    ]


def table(result: ModelResult) -> Table:
    """The rows as a table for the terminal; 80 columns are enough."""
    made = Table(title=result.title, title_justify="left", title_style="bold", caption_justify="left")
    made.add_column("")
    for name in result.variants:
        made.add_column(name, justify="right", style="bold" if name == FUSED else "")
    for label, values in table_rows(result):
        made.add_row(label, *values)
    return made


def notes(result: ModelResult) -> list[str]:
    """What the numbers of the table are, one sentence or two each."""
    fused = result.variants[FUSED]
    skipped = [f"Left alone by convert: {reason}." for reason in fused.skipped]
    return [
        f"{result.description}.",
        *[f"Converted: {line}." for line in fused.converted],
        f"In the converted layers ran: {fused.path} Their workspace: {result.workspace_bytes / MIB:g} MiB.",
        *skipped,
        "Bytes come from allocator events of one forward and backward, above parameters, optimizer state and batch. "
        "Kept: alive between forward and backward. The peaks are measured apart from it; the backward peak includes "
        f"{fused.gradient_mib:.1f} MiB of parameter gradients.",
        "Redone products: FLOP of library matrix products beyond stock's, from the profiler's shapes; what attention "
        "kernels compute inside is not among them.",
        f"Time is that of whole optimizer steps, the variants taking turns step by step; stock's median is "
        f"{result.step_seconds('stock'):.3f} s.",
        *result.remarks,
        *([] if CHECKPOINT in result.variants else [_NO_BLOCKS]),
    ]


_NO_BLOCKS = (
    f"{CHECKPOINT} is left out: the model has no nn.ModuleList or nn.Sequential of blocks of one class to put "
    "torch.utils.checkpoint around."
)


def explanations(results: Sequence[ModelResult]) -> list[tuple[str, str]]:
    """(variant, what it is), once each."""
    return list(dict.fromkeys((v.name, v.explanation) for result in results for v in result.variants.values()))


def summary(result: ModelResult, name: str) -> dict[str, str | int | float]:
    """The numbers of one variant, one CSV row; units are in the names, losses are in nats."""
    variant, ratio = result.variants[name], result.step_time_ratio(name)
    return {
        "model": result.name,
        "variant": name,
        "steps": result.steps,
        "train_loss_last": variant.curve.losses[-1],
        "largest_loss_difference": result.largest_loss_difference(name),
        "metric": result.metric,
        "validation": variant.curve.validation,
        "kept_mib": variant.kept_mib,
        "forward_peak_mib": variant.forward_peak_mib,
        "backward_peak_mib": variant.backward_peak_mib,
        "gradient_mib": variant.gradient_mib,
        "step_seconds_p50": result.step_seconds(name),
        "step_time_ratio_p50": ratio.p50,
        "step_time_ratio_p20": ratio.p20,
        "step_time_ratio_p80": ratio.p80,
        "redone_gflop": result.redone_flop(name) / 1e9,
        "mlps_changed": variant.mlps,
        "attentions_changed": variant.attentions,
        "blocks_checkpointed": variant.blocks,
    }


def write_csv(results: Sequence[ModelResult], folder: Path) -> list[Path]:
    """`losses.csv` (one row per model, step and variant) and `summary.csv` (one row per model and variant)."""
    losses = [
        {"model": r.name, "step": i + 1, "variant": name, "loss": loss, "seconds": seconds}
        for r in results
        for name, v in r.variants.items()
        for i, (loss, seconds) in enumerate(zip(v.curve.losses, v.curve.seconds, strict=True))
    ]
    summaries = [summary(r, name) for r in results for name in r.variants]
    return [_write_rows(folder / "losses.csv", losses), _write_rows(folder / "summary.csv", summaries)]


def write_json(results: Sequence[ModelResult], settings: Settings, folder: Path) -> Path:
    """`summary.json`: the settings, and per model its shape and the rows of `summary.csv`."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "settings": asdict(settings),
        "models": [
            {
                "name": r.name,
                "title": r.title,
                "description": r.description,
                "parameters": r.parameters,
                "mlp_shape": None if r.shape is None else asdict(r.shape),
                "remarks": r.remarks,
                "workspace_bytes": r.workspace_bytes,
                "seconds": r.seconds,
                "path": r.variants[FUSED].path,
                "converted": r.variants[FUSED].converted,
                "skipped": r.variants[FUSED].skipped,
                "variants": [summary(r, name) for name in r.variants],
            }
            for r in results
        ],
    }
    path = folder / "summary.json"
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return path


def _write_rows(path: Path, rows: list[dict]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def _difference(result: ModelResult, name: str) -> str:
    difference = result.largest_loss_difference(name)
    return "0" if difference == 0.0 else f"{difference:.1e}"


def _ratio(result: ModelResult, name: str) -> str:
    return f"{result.step_time_ratio(name).p50:.2f}"


def _ratio_range(result: ModelResult, name: str) -> str:
    ratio = result.step_time_ratio(name)
    return f"{ratio.p20:.2f} to {ratio.p80:.2f}"
