"""The results of a case as a table: through rich where it is installed and fits the terminal, else as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.operation import CHECKPOINT, EAGER
from benchmarks.results import CaseResult, mib

_HEADERS = (
    ("", "provider"),
    ("time", "ms"),
    ("x", "eager"),
    ("", "p20-p80"),
    ("x check-", "point"),
    ("kept", "MiB"),
    ("forward", "peak"),
    ("back-", "ward"),
    ("pro-", "ducts"),
    ("re-", "done"),
    ("error", "x eager"),
)
_WIDEST = 1000
_NOTE = """\
time: median of forward + backward; x: median of the ratios within each round, with its spread.
kept: alive between forward and backward. Peaks (MiB): forward above the output; backward above output and gradients,
the kept part included. products: matrix products in units of one of the layer; redone: beyond eager's. error: the
largest against float64, of output and gradients. Bytes, products and errors are taken apart from time."""


def print_results(results: Sequence[CaseResult]) -> None:
    """Per case a table, who did not run, and the goals beside what was reached; then what the columns mean."""
    for result in results:
        show(f"{result.operation} {result.case.name}", _HEADERS, _cells(result))
        for provider, reason in result.not_run.items():
            print(f"  {provider}: not run: {reason}")
        for line in _goals(result):
            print(f"  {line}")
        print()
    print(_NOTE)


def show(title: str, headers: Sequence[tuple[str, str]], cells: Sequence[Sequence[str]]) -> None:
    """A table with two header lines to stdout; all columns but the first are right-aligned."""
    if _show_rich(title, headers, cells):
        return
    lines = [*zip(*headers, strict=True), *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(title)
    for first, *others in lines:
        right = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *right]).rstrip())


def _show_rich(title: str, headers: Sequence[tuple[str, str]], cells: Sequence[Sequence[str]]) -> bool:
    """False, with nothing printed, without rich or where it would have to cut numbers off."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for position, header in enumerate(headers):
        table.add_column("\n".join(header), justify="right" if position else "left", no_wrap=True)
    for line in cells:
        table.add_row(*line)
    console = Console()
    fits = console.measure(table, options=console.options.update(max_width=_WIDEST)).minimum <= console.width
    if fits:
        console.print(table)
    return fits


def _cells(result: CaseResult) -> list[list[str]]:
    lines = []
    for provider, timing in result.times.items():
        memory = result.memory[provider]
        to_eager, to_checkpoint = result.ratio(provider, EAGER), result.ratio(provider, CHECKPOINT)
        peaks = (memory.forward_peak_above_output_bytes, memory.backward_peak_above_gradients_bytes)
        lines.append(
            [
                provider,
                f"{1e3 * timing.seconds.median:.1f}",
                f"{to_eager.median:.2f}",
                f"{to_eager.p20:.2f}-{to_eager.p80:.2f}",
                f"{to_checkpoint.median:.2f}" if to_checkpoint else "",
                *(f"{mib(nbytes):.2f}" for nbytes in (memory.kept_bytes, *peaks)),
                f"{result.products(provider):.4g}",
                f"{result.redone(provider):.4g}",
                f"{result.errors[provider]:.2g}",
            ]
        )
    return lines


def _goals(result: CaseResult) -> Iterator[str]:
    for bar in result.case.bars:
        reached = result.ratio(bar.provider, bar.baseline) if bar.provider in result.times else None
        measured = f"measured {reached.median:.2f}" if reached else "not measured"
        yield f"goal: {bar.provider} in at most {bar.most:.2f} x the time of {bar.baseline}; {measured}"
