"""Tiles measured on this machine: what `fused_remat.tune` finds, and the JSON file that keeps it between processes.

The file is named after the GPU and the Triton version. A choice is made once and holds for every later process; nothing
is ever timed while a model runs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from fused_remat import _build
from fused_remat.triton import configs
from fused_remat.triton.configs import Config, Key

_KEY = ("op", "width", "dtype", "arch", "variant")
# What a candidate may try beside the sizes of the table's own rows.
_WARPS, _STAGES = (4, 8), (1, 2, 3, 4)
# Where warp specialisation compiles within the tensor memory there is. No row of the tables has it: none was timed yet.
_WARP_SPECIALIZED = (("attention_fwd", 100),)
# Raised where a candidate does not fit the GPU or the compiler gives up on it.
_UNFIT = (triton.runtime.errors.OutOfResources, triton.CompilationError, RuntimeError)


def path() -> Path:
    """The file of this machine's rows, whether or not it exists."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreter"
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", f"{gpu}-triton{triton.__version__}")
    return _build.cache_root() / "tiles" / f"{slug}.json"


def load() -> dict[Key, Config]:
    """The rows of that file; none without one. Raises ValueError for a file that holds something else."""
    file = path()
    if not file.is_file():
        return {}
    try:
        rows = json.loads(file.read_text())["rows"]
        return {tuple(row[name] for name in _KEY): Config(**row["config"]) for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a file of tuned tiles ({error}); delete it, or tune again") from error


def save(rows: dict[Key, Config]) -> Path:
    """Write the rows, beside those that are there already; in one step, so that no reader sees half a file."""
    file, merged = path(), load() | rows
    listed = [dict(zip(_KEY, key, strict=True)) | {"config": dataclasses.asdict(merged[key])} for key in sorted(merged)]
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"triton": triton.__version__, "rows": listed}, indent=1) + "\n")
    draft.replace(file)
    return file


def candidates(key: Key) -> list[Config]:
    """Other tiles for that row: those of the same op, dtype and architecture, with each number of warps and stages.

    None of another architecture: too much tensor memory compiles without an error, and kills the process when it runs.
    """
    op, _, precision, arch, _ = key
    arch = 80 if arch == 86 else arch
    found = (row for (other, _, *of, _), row in configs.rows().items() if (other, *of) == (op, precision, arch))
    shapes = {(row.block_m, row.block_n, row.block_k, row.tma) for row in found}
    return [
        Config(*blocks, num_warps=warps, num_stages=stages, tma=tma, warp_specialize=specialize)
        for *blocks, tma in sorted(shapes)
        for warps in _WARPS
        for stages in _STAGES
        for specialize in ((False, True) if (op, arch) in _WARP_SPECIALIZED else (False,))
    ]


def search(run: Callable[[], Any], *, seconds: Callable[[Callable[[], Any]], float]) -> dict[Key, Config]:
    """The fastest tiles of every kernel that `run()` starts, one kernel after the other.

    Each candidate runs the whole of `run()`, which makes its own buffers: nothing that is accumulated into is ever used
    twice. `seconds(run)` is the time of one run.
    """
    with configs.asked() as keys:
        run()
    best: dict[Key, Config] = {}
    for key in keys:
        with configs.forced(best):
            fastest, least = configs.choose_row(key), seconds(run)
        for config in candidates(key):
            with configs.forced(best | {key: config}):
                try:
                    run()  # compiles
                    taken = seconds(run)
                except _UNFIT:
                    continue
            if taken < least:
                fastest, least = config, taken
        best[key] = fastest
    return best
