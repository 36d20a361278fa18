"""`fused-remat audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fused_remat.commands import options
from fused_remat.commands.finish import FAILED, could_not_measure, show, working
from fused_remat.commands.subject import subject


def audit(
    model: options.Model,
    config: options.Config = None,
    inputs: options.Inputs = None,
    batch: options.Batch = None,
    loss: options.Loss = None,
    optimizer: options.Optimizer = "adamw",
    device: options.Device = "cpu",
    seed: options.Seed = "0",
    policy: Annotated[
        str | None, typer.Option(help="Policy to convert the model with first, such as full.", metavar="POLICY")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Instead of --policy: a plan that `fused-remat plan --out` wrote.")
    ] = None,
    verify: Annotated[
        str | None,
        typer.Option(
            help="With --policy or --plan: off, once or always, whether recomputed regions compare what they rebuild "
            "with what forward made.",
            metavar="WHEN",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Take a step and say, layer by layer, whether it kept what was promised.

    Converts the model by --policy or --plan; without either the model is taken as its factory makes it. Exits with 1
    if a layer kept more or less than promised, or if none promises anything without a policy or plan that says so; with
    3 if the step cannot be run, a region that rebuilds other values under --verify included.
    """
    from fused_remat.audit import audit as audit_step
    from fused_remat.convert import convert
    from fused_remat.guards.region import VERIFY
    from fused_remat.plan import Plan
    from fused_remat.training_step import make_step

    if policy is not None and plan is not None:
        raise options.bad_value("--plan", str(plan), "no --policy beside it", "give one of them")
    if verify is not None and verify not in VERIFY:
        raise options.bad_value("--verify", verify, ", ".join(VERIFY), "for example --verify once")
    if verify is not None and policy is None and plan is None:
        raise options.bad_value("--verify", verify, "a --policy or --plan, whose regions compare", "give one of them")
    with (
        subject(
            model, config=config, inputs=inputs, batch=batch, loss=loss, optimizer=optimizer, device=device, seed=seed
        ) as one,
        could_not_measure(),
        working("taking a step"),
    ):
        if plan is not None:
            try:
                Plan.load(plan).apply(one.model, verify=verify)
            except (OSError, TypeError, ValueError) as error:
                raise options.bad_value(
                    "--plan", str(plan), f"a plan for this model ({error})", "plan again"
                ) from error
        elif policy is not None:
            try:
                convert(one.model, policy=policy, verify=verify)
            except (TypeError, ValueError) as error:
                raise typer.BadParameter(str(error), param_hint="--policy") from error
        step = make_step(one.model, one.args, one.kwargs, loss=one.loss, optimizer=one.optimizer)
        found = audit_step(one.model, step=step)
    show(as_json, found)
    if not found.ok:
        raise typer.Exit(FAILED)
