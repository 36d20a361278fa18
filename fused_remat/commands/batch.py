"""`fused-remat batch`."""

from __future__ import annotations

from typing import Annotated

import typer

from fused_remat.commands import options
from fused_remat.commands.finish import FAILED, could_not_measure, show, working
from fused_remat.commands.subject import subject

_MOST = 2**40


def batch(
    model: options.Model,
    config: options.Config = None,
    inputs: options.Inputs = None,
    batch: options.Batch = None,
    loss: options.Loss = None,
    optimizer: options.Optimizer = "adamw",
    device: options.Device = "cpu",
    seed: options.Seed = "0",
    limit: Annotated[
        str | None,
        typer.Option(
            help="Memory that training may take, weights and optimizer included, such as 6GiB. By default what is free "
            "on the GPU; needed on a CPU.",
            metavar="BYTES",
        ),
    ] = None,
    largest: Annotated[str | None, typer.Option(help="No larger size, e.g. of the dataset.", metavar="N")] = None,
    target: Annotated[
        str | None, typer.Option(help="Rows of a global batch, to be reached by accumulation.", metavar="N")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Policies to compare, by default everything and full; may be repeated.", metavar="POLICY"),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Find the largest batch whose whole optimizer steps fit, with and without a policy.

    The inputs are those of --inputs or --batch with their rows (dimension 0) repeated or cut, so give the worst case:
    the longest sequence, the largest image. Exits with 1 if under one of the policies no batch fits, with 3 if a step
    fails for another reason than memory.
    """
    from fused_remat.batch import find_batch_size

    sizes = {
        name: None if text is None else options.check_whole_number(f"--{name}", text, 1, _MOST)
        for name, text in (("largest", largest), ("target", target))
    }
    with (
        subject(
            model, config=config, inputs=inputs, batch=batch, loss=loss, optimizer=optimizer, device=device, seed=seed
        ) as one,
        could_not_measure(("limit", "policy", "policies")),
        working("looking for a batch size") as say,
    ):
        found = find_batch_size(
            one.model,
            one.resized,
            loss=one.loss,
            optimizer=one.optimizer,
            limit=options.as_number(limit),
            **sizes,
            policies=policy or ("everything", "full"),
            worst=True,
            progress=lambda label, stage, size, trial: say(f"{label}: {stage}, batch {size}"),
        )
    show(as_json, found)
    if any(result.batch is None for result in found.results):
        raise typer.Exit(FAILED)
