"""`fused-remat plan`, and `fused-remat explain` for what it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fused_remat.commands import options
from fused_remat.commands.finish import FAILED, check_file, could_not_measure, show, working, write
from fused_remat.commands.subject import Subject, subject

if TYPE_CHECKING:
    from fused_remat.plan import Plan

_MINIMISE = ("flops", "time")
_MOST_IN_FLIGHT = 10**4

Html = Annotated[Path | None, typer.Option(help="Also write a report with pictures.", metavar="FILE")]


def plan(
    model: options.Model,
    budget: Annotated[
        str,
        typer.Option(
            help='Highest peak of the step, weights and optimizer included: "6GiB", a fraction, min, or knee.',
            metavar="BUDGET",
        ),
    ],
    config: options.Config = None,
    inputs: options.Inputs = None,
    batch: options.Batch = None,
    loss: options.Loss = None,
    optimizer: options.Optimizer = "adamw",
    device: options.Device = "cpu",
    seed: options.Seed = "0",
    fake: options.Fake = False,
    minimise: Annotated[str, typer.Option(help="What to spend least of: flops or time.", metavar="WHAT")] = "flops",
    in_flight: Annotated[
        str, typer.Option(help="Micro-batches whose activations a pipeline stage holds at once.", metavar="N")
    ] = "1",
    device_memory: Annotated[
        str | None, typer.Option(help="Memory of the device that is planned for, such as 80GiB.", metavar="BYTES")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan, as JSON, to this file.", metavar="FILE")] = None,
    html: Html = None,
    as_json: options.Json = False,
) -> None:
    """Choose what every layer keeps so that the peak of a step stays within a budget, then measure that it does.

    Exits with 1 if no plan fits the budget, with 3 if the step cannot be run or measured.
    """
    if minimise not in _MINIMISE:
        raise options.bad_value("--minimise", minimise, " or ".join(_MINIMISE), "leave it out for flops")
    if fake and minimise == "time":
        raise options.bad_value("--minimise", minimise, "flops with --fake, which runs no step", "drop one of them")
    stages = options.check_whole_number("--in-flight", in_flight, 1, _MOST_IN_FLIGHT)
    check_file("--out", out)
    check_file("--html", html)
    if html is not None:
        options.require(("matplotlib",), "--html")
    with (
        subject(
            model, config=config, inputs=inputs, batch=batch, loss=loss, optimizer=optimizer, device=device, seed=seed,
            fake=fake,
        ) as one,
        could_not_measure(("budget", "device_bytes")),
        working("planning") as say,
    ):  # fmt: skip
        found = _planned(
            one,
            budget=options.as_number(budget),
            minimise=minimise,
            fake=fake,
            in_flight=stages,
            device_bytes=options.as_number(device_memory),
            progress=say,
        )
    show(as_json, found, found.explain())
    if out is not None:
        write(out, found.to_json())
    if html is not None:
        from fused_remat.show import write_report

        write_report(html, plan=found, title=f"{one.title}: plan for {budget}")


def _planned(one: Subject, **asked: Any) -> Plan:
    """The plan; an infeasible budget becomes one line on stderr and exit code 1."""
    from fused_remat.plan import InfeasibleBudget
    from fused_remat.plan import plan as make_plan

    try:
        return make_plan(one.model, *one.args, **one.named(), **asked)
    except InfeasibleBudget as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(FAILED) from error


def explain(
    file: Annotated[Path, typer.Argument(help="A plan that `fused-remat plan --out` wrote.", metavar="PLAN")],
    html: Html = None,
    as_json: options.Json = False,
) -> None:
    """Print a plan: what every layer keeps, the peak and its moment, and the next faster and the next smaller plan."""
    from fused_remat.plan import Plan

    check_file("--html", html)
    try:
        found = Plan.load(file)
    except (OSError, TypeError, ValueError) as error:
        raise options.bad_value("PLAN", str(file), f"a plan ({error})", "make one with fused-remat plan") from error
    show(as_json, found, found.explain())
    if html is not None:
        options.require(("matplotlib",), "--html")
        from fused_remat.show import write_report

        write_report(html, plan=found, title=f"Plan {file.name}")
