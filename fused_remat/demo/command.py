"""`fused-remat demo`: the options, their checks, and stepping in a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from fused_remat.demo.observe import Observation, disagreements, observe
from fused_remat.demo.report import notes, step_lines, to_dict, torch_check, wrap
from fused_remat.demo.run import LARGEST, BadNumber, Run, parse, run
from fused_remat.demo.words import LANGUAGES, Words, fill, words

# For terminals that cannot show what the English texts have beyond ASCII.
_PLAIN = str.maketrans({"²": "^2", "·": "*", "“": '"', "”": '"', "\u2013": "-"})
_CHECK_FAILED = 1


def demo(
    x: Annotated[str, typer.Option("--x", help="Any number: 0, -3, 0.5, 1e3.", metavar="NUMBER")] = "2",
    keep: Annotated[str | None, typer.Option(help="Show the variant that keeps b.", metavar="b")] = None,
    drop: Annotated[str | None, typer.Option(help="Show the variant that rebuilds b.", metavar="b")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole run as one JSON object.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(help="Write one offline page instead: every step, and a fused MLP.", metavar="FILE"),
    ] = None,
    lang: Annotated[str, typer.Option(help="Language of the texts: en, pl or ja.")] = "en",
) -> None:
    """Go through z = (x^2 + 1)^2 and its gradient a step at a time: what is kept, dropped, rebuilt.

    In a terminal, Enter shows the next step; where standard input is none, every step is printed. Both variants are
    shown unless --keep b or --drop b chooses one. The page also steps through a real call of fused_remat.mlp, whose
    bytes are measured (a first use may compile for some minutes).
    """
    if lang not in LANGUAGES:
        raise _bad_value("--lang", lang, ", ".join(LANGUAGES), "leave it out for English")
    table = words(lang)
    variants = _check_variants(keep, drop)
    runs = _runs(x, table)
    prints = as_json or html is None
    say = _say(lang) if prints else typer.echo
    if html is not None:
        _check_file(html)
    observed = {one.keep_b: observe(one.values["x"], one.keep_b) for one in runs}
    _refuse_disagreement(runs, observed)
    chosen = [one for one in runs if one.keep_b in variants]
    if html is not None:
        _write_page(html, lang, runs, observed)
    if as_json:
        say(json.dumps(to_dict(table, lang, chosen, observed), ensure_ascii=False, indent=2, allow_nan=False))
    elif prints:
        if sys.stdin is not None and sys.stdin.isatty():
            _step_through(table, runs, chosen[0].keep_b, say)
        else:
            _print_all(table, chosen, say)
        for line in notes(table, torch_check(table, observed, runs[0].values["x"])):
            say(line)


def _check_variants(keep: str | None, drop: str | None) -> tuple[bool, ...]:
    """The values of `keep_b` to show."""
    for option, value in (("--keep", keep), ("--drop", drop)):
        if value not in (None, "b"):
            raise _bad_value(option, value, "b, the one value that can be kept or dropped here", f"write {option} b")
    if keep and drop:
        raise _bad_value("--drop", drop, "--keep b or --drop b, not both", "leave both out to see both variants")
    return (True,) if keep else (False,) if drop else (True, False)


def _runs(x: str, table: Words) -> list[Run]:
    try:
        return [run(parse(x), keep_b) for keep_b in (True, False)]
    except BadNumber as error:
        message = table[f"error_{error.why.replace(' ', '_')}"]
        raise typer.BadParameter(fill(message, {"got": error.got, "largest": LARGEST}), param_hint="--x") from error


def _refuse_disagreement(runs: Sequence[Run], observed: dict[bool, Observation]) -> None:
    """Exits with 1 where torch did something else than the demo is about to say."""
    wrong = [text for one in runs for text in disagreements(one, observed[one.keep_b])]
    for text in wrong:
        typer.echo(f"Error: {text}", err=True)
    if wrong:
        raise typer.Exit(_CHECK_FAILED)


def _check_file(html: Path) -> None:
    """Refuses a path that cannot be written to, before anything is measured."""
    existed = html.exists()
    try:
        with html.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        expected = f"a file that can be written ({error.strerror})"
        raise _bad_value("--html", str(html), expected, "choose another path") from error
    if not existed:
        html.unlink()


def _write_page(html: Path, lang: str, runs: Sequence[Run], observed: dict[bool, Observation]) -> None:
    from fused_remat.demo.mlp_example import mlp_example
    from fused_remat.demo.page import page

    html.write_text(page(lang, runs, observed, mlp_example()), encoding="utf-8")
    typer.echo(f"Written to {html}", err=True)


def _say(lang: str) -> Callable[[str], None]:
    """Prints a line; refuses a language that standard output cannot show, and spells English in ASCII where needed."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sample = "".join(words(lang).values())
    if _fits(sample, encoding):
        return typer.echo
    if not _fits(sample.translate(_PLAIN).replace("ᵀ", ""), encoding):
        expected = f"a language that standard output in {encoding} can show"
        raise _bad_value("--lang", lang, expected, "use --lang en, or set PYTHONIOENCODING=utf-8")
    return lambda line: typer.echo(line.translate(_PLAIN))


def _fits(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def _print_all(table: Words, runs: Sequence[Run], say: Callable[[str], None]) -> None:
    for one in runs:
        for number in range(len(one.steps)):
            for line in (*step_lines(table, one, number), ""):
                say(line)


def _step_through(table: Words, runs: Sequence[Run], keep_b: bool, say: Callable[[str], None]) -> None:
    """One step per answer, below each other: nothing is overwritten, so that a screen reader can follow."""
    by_variant = {one.keep_b: one for one in runs}
    number, show = 0, True
    while True:
        current = by_variant[keep_b]
        if show:
            for line in step_lines(table, current, number):
                say(line)
        key = _answer(table, say)
        show = True
        if key == "q":
            return
        if key == "r":
            number = 0
        elif key == "t":
            keep_b, number = not keep_b, 0
        elif key in ("", "n", "p"):
            wanted = number + (-1 if key == "p" else 1)
            show = 0 <= wanted < len(current.steps)
            if show:
                number = wanted
            else:
                say(table["first_step" if wanted < 0 else "last_step"])
        else:
            show = False
            say(fill(table["unknown_key"], {"key": key}))


def _answer(table: Words, say: Callable[[str], None]) -> str:
    """What was typed, in lower case; q at the end of the input."""
    say("")
    for line in wrap(table["prompt"]):
        say(line)
    answer = sys.stdin.readline()
    say("")
    return answer.strip().lower() if answer else "q"


def _bad_value(option: str, got: str, expected: str, remedy: str) -> typer.BadParameter:
    return typer.BadParameter(f"got {got!r}, expected {expected}; {remedy}", param_hint=option)
