"""`python -m benchmarks.run OPERATION`: the parity gate, then bytes, products and times as table, CSV and picture.

Exit status: 0 done, 1 a provider failed the gate (nothing is printed of anyone's numbers then), 2 bad arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.attention import ATTENTION
from benchmarks.cases import DTYPES
from benchmarks.mha import MHA
from benchmarks.mlp import MLP
from benchmarks.operation import EAGER, Case, Forward, Leaves, NotRun, Operation
from benchmarks.parity import Failure, Gate, failures
from benchmarks.results import CaseResult, environment, rows, write_csv
from benchmarks.table import print_results
from fused_remat.activations import ACTIVATIONS
from fused_remat.measure import compare_time, measure

OPERATIONS: dict[str, Operation] = {operation.name: operation for operation in (MLP, ATTENTION, MHA)}


@dataclass(frozen=True)
class _Entry:
    """A case with its inputs, the providers that run here with their largest errors, and why the others do not."""

    case: Case
    leaves: Leaves
    forwards: dict[str, Forward] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    operation = OPERATIONS[options.operation]
    try:
        names = _provider_names(operation, options)
        cases = _cases(operation, options)
        rounds = _rounds(options)
        device = _device(options.device)
        folder = _folder(options, device)
    except ValueError as error:
        parser.error(str(error))
    entries = [_prepare(operation, case, device, names) for case in cases]
    wrong = [f"{entry.case.name}: {failure}" for entry in entries for failure in _failures(operation, entry)]
    for line in wrong:
        print(f"parity failed: {line}", file=sys.stderr)
    if wrong:
        print("no numbers are shown, since some of them would be of a wrong result", file=sys.stderr)
        return 1
    results = [_measure(operation, entry, rounds) for entry in entries]
    print_results(results)
    _write(results, folder, device)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.run", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="operation", required=True)
    for name, operation in OPERATIONS.items():
        command = commands.add_parser(name, help=f"benchmark {name}")
        command.add_argument("--shapes", nargs="+", metavar="SHAPE", help=operation.shape_help)
        command.add_argument("--dtype", choices=DTYPES, help="of every case; by default each case has its own")
        command.add_argument("--activation", choices=ACTIVATIONS, help="of the cases given by --shapes")
        command.add_argument("--device", default="cpu", help="cpu (default) or cuda")
        command.add_argument("--rounds", type=int, help="timed rounds (default 7; 3 with --quick)")
        command.add_argument("--providers", nargs="+", metavar="NAME", help="only these, and eager")
        command.add_argument("--quick", action="store_true", help="small shapes, few rounds, nothing that compiles")
        command.add_argument("--out", type=Path, help="folder for CSV and picture (default below benchmarks/results)")
    return parser


def _provider_names(operation: Operation, options: argparse.Namespace) -> list[str]:
    """The providers asked for, in the operation's order, eager always among them."""
    if options.providers is None:
        return [name for name in operation.providers if not (options.quick and name in operation.slow_providers)]
    unknown = [name for name in options.providers if name not in operation.providers]
    if unknown:
        raise ValueError(f"argument --providers: no {', '.join(unknown)}; expected {', '.join(operation.providers)}")
    return [name for name in operation.providers if name in (EAGER, *options.providers)]


def _cases(operation: Operation, options: argparse.Namespace) -> Sequence[Case]:
    dtype = DTYPES.get(options.dtype)
    if options.shapes:
        try:
            return [operation.parse(text, dtype, options.activation) for text in options.shapes]
        except ValueError as error:
            raise ValueError(f"argument --shapes: {error}") from None
    if options.activation:
        raise ValueError("argument --activation: needs --shapes, since the default cases have activations of their own")
    cases = operation.quick_cases if options.quick else operation.cases
    return cases if dtype is None else [case.with_dtype(dtype) for case in cases]


def _rounds(options: argparse.Namespace) -> int:
    if options.rounds is None:
        return 3 if options.quick else 7
    if options.rounds < 1:
        raise ValueError(f"argument --rounds: expected at least 1, got {options.rounds}")
    return options.rounds


def _device(name: str) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise ValueError(f"argument --device: expected cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("argument --device: torch finds no usable CUDA device; use --device cpu")
    return torch.device(name)


def _folder(options: argparse.Namespace, device: torch.device) -> Path:
    """The output folder, made. By default one per run, below a folder that git ignores."""
    folder = options.out
    if folder is None:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = Path(__file__).parent / "results" / f"{options.operation}-{device.type}-{stamp}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"argument --out: cannot make the folder {folder} ({error.strerror})") from error
    return folder


def _prepare(operation: Operation, case: Case, device: torch.device, names: Sequence[str]) -> _Entry:
    _say(f"{case.name}: preparing {len(names)} providers")
    entry = _Entry(case, operation.leaves(case, device))
    for name in names:
        try:
            entry.forwards[name] = operation.providers[name](case, entry.leaves)
        except NotRun as reason:
            entry.not_run[name] = str(reason)
    return entry


def _failures(operation: Operation, entry: _Entry) -> list[Failure]:
    """What does not pass the gate. Fills in the errors; who runs out of the device's memory moves to `not_run`."""
    _say(f"{entry.case.name}: comparing with float64")
    judged = operation.judged(entry.case)
    gate = Gate(lambda leaves: operation.truth(judged, leaves), entry.leaves)
    errors = {}
    for name, forward in list(entry.forwards.items()):
        try:
            errors[name] = gate.errors(
                forward if judged == entry.case else operation.providers[name](judged, entry.leaves)
            )
        except torch.OutOfMemoryError:
            del entry.forwards[name]
            entry.not_run[name] = "out of memory"
    relative = gate.relative(errors)
    entry.errors.update({name: max(own.values()) for name, own in relative.items()})
    return failures(relative, operation.error_limits)


def _measure(operation: Operation, entry: _Entry, rounds: int) -> CaseResult:
    _say(f"{entry.case.name}: measuring bytes and products")
    memory = {name: measure(forward, repeats=0) for name, forward in entry.forwards.items()}
    _say(f"{entry.case.name}: timing {rounds} rounds")
    times = compare_time(entry.forwards, rounds=rounds)
    return CaseResult(operation.name, entry.case, memory, times, entry.errors, entry.not_run)


def _write(results: Sequence[CaseResult], folder: Path, device: torch.device) -> None:
    where = environment(device)
    write_csv(folder / "results.csv", [row for result in results for row in rows(result, where)])
    print(f"wrote {folder / 'results.csv'}")
    if find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed; pip install 'fused_remat[bench]'")
        return
    from benchmarks.plot import save_picture

    save_picture(results, folder / "time-against-memory.png")
    print(f"wrote {folder / 'time-against-memory.png'}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
