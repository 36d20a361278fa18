"""`fused-remat compare`: the options, their checks, the progress bar, and the files that are written."""

from __future__ import annotations

import contextlib
import importlib
import platform
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import fused_remat
from fused_remat import _extension
from fused_remat.budget import MIB
from fused_remat.commands import options
from fused_remat.commands.options import (
    bad_value,
    check_device,
    check_seed,
    check_whole_number,
    refuse_for_built_in,
    require,
)
from fused_remat.compare.factory import BadOption, importable_from_here

if TYPE_CHECKING:
    from fused_remat.compare.report import Settings
    from fused_remat.compare.results import ModelResult
    from fused_remat.compare.workload import Workload


class Source(NamedTuple):
    """Where a workload's class is, and the optional packages that its module imports."""

    module: str
    class_name: str
    packages: tuple[str, ...]


MODELS = {
    "vit": Source("fused_remat.compare.vit", "DigitsVit", ("torchvision", "sklearn")),
    "llama": Source("fused_remat.compare.llama", "SourceLlama", ("transformers",)),
}
_BOTH = "both"
_OWN = ":"  # in the name of a model of the user's own
DEFAULT_STEPS = "60"
# A quarter of the library's default on a CPU: at that one, each layer of these models would be a single piece.
DEFAULT_WORKSPACE_MIB = "8"
_PICTURES = "matplotlib"
_MOST_STEPS = 10**6
_LARGEST_WORKSPACE_MIB = 2**20


def compare(
    model: Annotated[
        str, typer.Option(help="Which model to train: vit, llama or both, or a factory of your own as module:callable.")
    ] = _BOTH,
    config: options.Config = None,
    inputs: options.Inputs = None,
    batch: options.Batch = None,
    steps: Annotated[
        str, typer.Option(help="Optimizer steps per model and variant, at least 1.", metavar="N")
    ] = DEFAULT_STEPS,
    device: options.Device = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for the report; made if it is not there.", metavar="DIR")] = Path(
        "fused-remat-compare"
    ),
    workspace: Annotated[
        str, typer.Option(help="Scratch memory of each fused call, in MiB; small, as the models are.", metavar="MIB")
    ] = DEFAULT_WORKSPACE_MIB,
    seed: options.Seed = "0",
) -> None:
    """Train real models three ways with the same seeds: as they are, checkpointed, and with fused_remat.

    Trains a Vision Transformer (torchvision) on handwritten digits and a Llama-architecture decoder on the sources of
    Python's standard library; prints losses, memory and time, and writes a report. Nothing is downloaded.

    Or trains a model of your own: --model module:callable with --config, and --inputs or --batch. The loss is the
    output's .loss or the output if it is a scalar, else the mean square of its first floating-point tensor.
    """
    own = {"model": model, "config": config, "inputs": inputs, "batch": batch}
    names = _check_model(own)
    step_count = check_whole_number("--steps", steps, 1, _MOST_STEPS)
    where = check_device(device)
    seed_number = check_seed(seed)
    workspace_bytes = check_whole_number("--workspace", workspace, 1, _LARGEST_WORKSPACE_MIB) * MIB
    require((*(package for name in names for package in MODELS[name].packages), _PICTURES), "compare")
    console = Console()
    with importable_from_here():
        if names:
            folder = _make_folder(out)
            workloads = [load_workload(name)(seed_number, where) for name in names]
        else:
            workloads = [_own_workload(own, seed_number, where)]
            folder = _make_folder(out)
        with fused_remat.workspace(workspace_bytes):
            results = _run(workloads, step_count, console)
    settings = _settings(names, own, step_count, where, seed_number)
    _write(results, settings, folder, console)


def _check_model(own: dict[str, str | None]) -> list[str]:
    """The names of built-in models, none for one of the user's own."""
    model = own["model"]
    if _OWN in model:
        return []
    refuse_for_built_in({option: own[option] for option in ("config", "inputs", "batch")})
    if model == _BOTH:
        return list(MODELS)
    if model not in MODELS:
        expected = f"{', '.join(MODELS)}, {_BOTH} or module:callable"
        raise bad_value("--model", model, expected, "leave it out to train both")
    return [model]


def _own_workload(own: dict[str, str | None], seed: int, device: torch.device) -> Workload:
    from fused_remat.compare.custom import custom_workload

    try:
        return custom_workload(**own, seed=seed, device=device)
    except BadOption as error:
        raise typer.BadParameter(str(error), param_hint=error.option) from error


def _make_folder(out: Path) -> Path:
    """`out` as an existing folder that can be written to."""
    if out.exists() and not out.is_dir():
        raise bad_value("--out", str(out), "a folder or a new path, but this is a file", "choose another path")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        expected = f"a folder that can be written to ({error.strerror})"
        raise bad_value("--out", str(out), expected, "choose another path") from error
    return out


def load_workload(name: str) -> type[Workload]:
    """The class of workload `name` of `MODELS`. Raises ImportError when its optional packages are missing."""
    source = MODELS[name]
    return getattr(importlib.import_module(source.module), source.class_name)


def _run(workloads: Sequence[Workload], steps: int, console: Console) -> list[ModelResult]:
    from fused_remat.compare.run import compare_model, work_units

    _extension.load()  # may compile for some minutes, and says so: before the progress bar
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=len(workloads) * work_units(steps))

        def on_progress(text: str, units: int) -> None:
            progress.update(task, description=text, advance=units)

        try:
            results = [compare_model(workload, steps, on_progress) for workload in workloads]
        except (BadOption, FloatingPointError) as error:
            progress.stop()
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(1) from error
        progress.update(task, description="done")
    return results


def _write(results: Sequence[ModelResult], settings: Settings, folder: Path, console: Console) -> None:
    """Prints a table per model and writes the pictures, the CSV files, `summary.json` and `report.html`."""
    from fused_remat.compare.page import page
    from fused_remat.compare.picture import draw
    from fused_remat.compare.report import notes, table, write_csv, write_json

    for result in results:
        console.print()
        console.print(table(result))
        for note in notes(result):
            console.print(f"- {note}", style="dim", markup=False, highlight=False)
    written = []
    for result in results:
        written.append(folder / f"{result.name}.png")
        written[-1].write_bytes(draw(result))
    written += [*write_csv(results, folder), write_json(results, settings, folder), folder / "report.html"]
    written[-1].write_text(page(results, settings), encoding="utf-8")
    console.print(f"\nWritten to {folder}: {', '.join(path.name for path in written)}", markup=False, highlight=False)


def _settings(
    names: Sequence[str], own: dict[str, str | None], steps: int, device: torch.device, seed: int
) -> Settings:
    from fused_remat.compare.report import Settings

    return Settings(
        models=tuple(names) or (own["model"],),
        steps=steps,
        device=str(device),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        threads=torch.get_num_threads(),
        seed=seed,
        versions=_versions(names, own["model"]),
        options={} if names else own,
    )


def _versions(names: Sequence[str], model: str) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    distributions = {"sklearn": "scikit-learn"}
    for package in (package for name in names for package in MODELS[name].packages):
        found[package] = metadata.version(distributions.get(package, package))
    if not names:
        package = model.partition(_OWN)[0].partition(".")[0]
        with contextlib.suppress(metadata.PackageNotFoundError):  # a module that nobody installed
            found[package] = metadata.version(package)
    return found


def _cpu_name() -> str:
    """The processor's model name where Linux tells it, else what `platform` knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
