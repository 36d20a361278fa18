"""How a command ends: what it prints and writes, and the exit codes that a script can rely on."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fused_remat.commands.options import bad_value

# 0: everything asked for was done, and holds. 2 is typer's own: an option that cannot be used.
FAILED = 1  # over budget, nothing fits, a promise that was not kept
NOT_MEASURED = 3  # the step could not be run or its numbers would be wrong

SECONDS = 10.0  # between lines about the progress


def show(as_json: bool, result: Any, text: str | None = None, more: Mapping[str, Any] | None = None) -> None:
    """Prints `result.to_dict()`, and `more` beside it, as one JSON object, or `text` (by default the result itself)."""
    if as_json:
        print(json.dumps({**result.to_dict(), **(more or {})}, indent=2))
    else:
        print(str(result) if text is None else text)


@contextmanager
def could_not_measure(arguments: Iterable[str] = ()) -> Iterator[None]:
    """An error of what is being measured becomes one line on stderr and exit code 3; those of typer pass.

    A TypeError or ValueError that begins with the name of one of `arguments` is about the option of that name.
    """
    try:
        yield
    except (typer.Exit, typer.BadParameter, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:  # the user's model and loss may raise anything, and end the process
        text = str(error).strip()
        name = re.split(r"\W", text, maxsplit=1)[0]
        if isinstance(error, (TypeError, ValueError)) and name in arguments:
            raise typer.BadParameter(text, param_hint=f"--{name.replace('_', '-')}") from error
        named = f"{type(error).__name__}: {text}" if text else type(error).__name__
        typer.echo(f"Error: could not measure: {named}", err=True)
        raise typer.Exit(NOT_MEASURED) from error


@contextmanager
def working(text: str) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr while the work runs; where that is no terminal, a plain line every `SECONDS`.

    Yields a function of (what runs now, pieces done, pieces in all), the `progress` of `profile` and `plan`; without
    the two numbers the bar tells only that something goes on.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(text).say
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text, total=None)

        def say(what: str, done: int = 0, total: int | None = None) -> None:
            bar.update(task, description=_line(text, what, done, total), completed=done, total=total)

        yield say


class _Lines:
    """For logs: says how far the work has come, but not more often than every `SECONDS`."""

    def __init__(self, text: str):
        self._text, self._last = text, time.monotonic()

    def say(self, what: str, done: int = 0, total: int | None = None) -> None:
        if time.monotonic() - self._last >= SECONDS:
            self._last = time.monotonic()
            print(_line(self._text, what, done, total), file=sys.stderr, flush=True)


def _line(text: str, what: str, done: int, total: int | None) -> str:
    return f"{text}: {what}" if total is None else f"{text} ({done} of {total}): {what}"


def check_file(option: str, path: Path | None) -> Path | None:
    """`path`, in a folder that exists and is no folder itself. Raises typer.BadParameter, before anything is run."""
    if path is None:
        return None
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise bad_value(option, str(path), "a file in a folder that exists", "choose another path")
    return path


def write(path: Path, text: str) -> None:
    """Writes `text` (UTF-8) and says so on stderr."""
    path.write_text(text, encoding="utf-8")
    print(f"Written: {path}", file=sys.stderr)
