"""`fused-remat check`: its options and its table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from fused_remat import _extension, dispatch, ops
from fused_remat.check.run import Row, as_json, run, unavailable
from fused_remat.commands.options import check_device

_MARKS = {True: "ok", False: "FAIL", None: "-"}


def check(
    device: Annotated[
        str | None, typer.Option(help="Where to check: cpu or cuda. By default a GPU where torch finds one.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Only this backend; an error with its reasons where it cannot run.")
    ] = None,
    as_json_object: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Check every op on this machine: gradients against finite differences, results against float64.

    Exits with 1 if a check fails, or if the backend that was named cannot run here.
    """
    where = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    _check_name(backend)
    # May compile for some minutes, and says so: before the progress line.
    ops.ready()
    if where == "cuda" and backend in (None, "cuda"):
        _extension.load_cuda()
    _check_can_run(backend, where)
    console = Console(stderr=True)
    rows = []
    with console.status("checking") as status:
        for row in run(where, backend):
            rows.append(row)
            status.update(f"{len(rows)} checks done; {row.op}: {row.case}")
    if as_json_object:
        print(json.dumps(as_json(where, rows), indent=2))
    else:
        _show(rows, Console())
    raise typer.Exit(int(any(row.passed is False for row in rows)))


def _check_name(backend: str | None) -> None:
    if backend is not None and backend not in dispatch.BACKENDS:
        expected = ", ".join(dispatch.BACKENDS)
        raise typer.BadParameter(f"got {backend!r}, expected one of {expected}", param_hint="--backend")


def _check_can_run(backend: str | None, device: str) -> None:
    reasons = unavailable(device, backend) if backend else []
    if reasons:
        typer.echo(f"Error: backend {backend!r} cannot run on {device}: {'; '.join(reasons)}", err=True)
        raise typer.Exit(1)


def _show(rows: Sequence[Row], console: Console) -> None:
    """One line per case, one column per check and backend that could run; then failures, and who could not run."""
    columns = list(dict.fromkeys((row.check, row.backend) for row in rows if row.passed is not None))
    table = Table(box=None, padding=(0, 1))
    for name in ("op", "case"):
        table.add_column(name)
    for label, backend in columns:
        table.add_column(f"{label}\n{backend}", justify="center")
    for (op, case), group in groupby(rows, key=lambda row: (row.op, row.case)):
        marks = {(row.check, row.backend): _MARKS[row.passed] for row in group}
        table.add_row(op, case, *(marks.get(column, "-") for column in columns))
    console.print(table)
    for row in rows:
        if row.passed is False:
            console.print(f"FAIL {row.op} ({row.case}), {row.check} on {row.backend}: {row.detail}", markup=False)
    for backend in dict.fromkeys(row.backend for row in rows):
        reasons = dict.fromkeys(row.detail for row in rows if row.backend == backend and row.passed is None)
        for reason in reasons:
            console.print(f"not run on {backend}: {reason}", markup=False, highlight=False)
    done = [row for row in rows if row.passed is not None]
    failed = sum(not row.passed for row in done)
    console.print(f"{len(done)} checks in {sum(row.seconds for row in done):.0f} s, {failed} failed")
