"""`fused-remat profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fused_remat.commands import options
from fused_remat.commands.finish import FAILED, check_file, could_not_measure, show, working
from fused_remat.commands.subject import subject
from fused_remat.sizes import format_bytes, parse_bytes

_AXES = ("batch", "sequence", "resolution")


def profile(
    model: options.Model,
    config: options.Config = None,
    inputs: options.Inputs = None,
    batch: options.Batch = None,
    loss: options.Loss = None,
    optimizer: options.Optimizer = "adamw",
    device: options.Device = "cpu",
    seed: options.Seed = "0",
    fake: options.Fake = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="Also change a size of the inputs and say how bytes grow: batch (dimension 0), sequence (1) or "
            "resolution (2 and 3); may be repeated.",
            metavar="AXIS",
        ),
    ] = None,
    largest_size: Annotated[
        str | None,
        typer.Option(
            help="With --sweep: also predict the largest size of each axis whose peak is within this much, such as "
            "6GiB, weights and optimizer included.",
            metavar="BYTES",
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a report with pictures.", metavar="FILE")] = None,
    as_json: options.Json = False,
) -> None:
    """Say where the memory of an optimizer step goes, which lines keep it, and whether recompute would help.

    Exits with 1 if of an axis no size at all is within --largest-size, with 3 if the step cannot be run or measured.
    """
    from fused_remat.profile import profile as profile_step

    for axis in sweep or ():
        if axis not in _AXES:
            raise options.bad_value("--sweep", axis, ", ".join(_AXES), "for example --sweep batch")
    limit = None if largest_size is None else _bytes(largest_size, sweep)
    check_file("--html", html)
    if html is not None:
        options.require(("matplotlib",), "--html")
    with (
        subject(
            model, config=config, inputs=inputs, batch=batch, loss=loss, optimizer=optimizer, device=device, seed=seed,
            fake=fake,
        ) as one,
        could_not_measure(),
        working("profiling") as say,
    ):  # fmt: skip
        found = profile_step(one.model, *one.args, **one.named(), fake=fake, sweep=sweep or None, progress=say)
    sizes = {} if limit is None else {axis: found.largest_size(axis, limit) for axis in found.growth}
    asked = None if limit is None else {"largest_size": {"budget_bytes": limit, "predicted": sizes}}
    show(
        as_json, found, "\n\n".join([str(found), *(_largest(axis, size, limit) for axis, size in sizes.items())]), asked
    )
    if html is not None:
        from fused_remat.show import write_report

        write_report(html, profile=found, title=one.title)
    if 0 in sizes.values():
        raise typer.Exit(FAILED)


def _bytes(text: str, sweep: list[str] | None) -> int:
    """What --largest-size is. Raises typer.BadParameter."""
    if not sweep:
        raise options.bad_value("--largest-size", text, "an axis to predict along", "add --sweep batch")
    try:
        return parse_bytes("bytes", options.as_number(text))
    except (TypeError, ValueError) as error:
        raise options.bad_value("--largest-size", text, "bytes", "for example --largest-size 6GiB") from error


def _largest(axis: str, size: int, limit: int) -> str:
    if size == 0:
        return f"No {axis} at all is predicted to have a peak within {format_bytes(limit)}."
    return f"Largest {axis} with a predicted peak within {format_bytes(limit)}: {size} (predicted, not run)."
