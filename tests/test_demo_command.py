"""`fused-remat demo` on the command line: options, languages, stepping, exit codes."""

from __future__ import annotations

import json
import re
import sys

import pytest
import typer
from typer.testing import CliRunner

from fused_remat.cli import build_app
from fused_remat.demo import command, mlp_example
from fused_remat.demo.observe import Observation
from fused_remat.demo.words import LANGUAGES, words

app = typer.Typer()
app.command()(command.demo)


def invoke(*arguments: str, typed: str = ""):
    return CliRunner().invoke(app, list(arguments), input=typed)


def plain(text: str) -> str:
    """Without the frame and the line breaks of an error."""
    return re.sub(r"\s+", " ", re.sub(r"[│╭╮╰╯─]|\x1b\[[0-9;]*m", "", text))


class Terminal:
    """Standard input that says it is a terminal."""

    def __init__(self, *lines: str) -> None:
        self.lines = [f"{line}\n" for line in lines]

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return self.lines.pop(0) if self.lines else ""


@pytest.fixture
def step_through(monkeypatch, capsys):
    """What is printed when the lines are typed in a terminal, and `arguments` were given."""

    def run(*lines: str, arguments=()):
        monkeypatch.setattr(sys, "stdin", Terminal(*lines))
        app(list(arguments), standalone_mode=False)
        return capsys.readouterr().out

    return run


# What is printed


@pytest.mark.parametrize("x", ["-3", "-3.0", "-0.3e1"])
def test_json_of_a_negative_x_has_both_variants(x):
    done = invoke("--x", x, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["x"] == -3
    assert [(one["b"], one["z"], one["gradient"], one["kept"], one["redone"]) for one in found["variants"]] == [
        ("kept", 100, -120, {"x": -3, "b": 10}, []),
        ("dropped", 100, -120, {"x": -3}, ["a", "b"]),
    ]
    assert invoke("--x", x, "--json").stdout == done.stdout


@pytest.mark.parametrize(("option", "variants"), [("--keep", ["kept"]), ("--drop", ["dropped"])])
def test_one_variant_can_be_chosen(option, variants):
    found = json.loads(invoke("--json", option, "b").stdout)
    assert found["x"] == 2 and [one["b"] for one in found["variants"]] == variants
    printed = invoke(option, "b").stdout
    assert printed.count("Step 1 of") == 1 and ("Step 6 of 10" in printed) == (option == "--drop")


@pytest.mark.parametrize("language", LANGUAGES)
def test_without_a_terminal_every_step_is_printed_in_the_language(language):
    done = invoke("--x", "0", "--lang", language)
    table = words(language)
    assert done.exit_code == 0
    assert len(re.findall(r"^(?:Step|Krok|ステップ) \d+ ", done.stdout, re.MULTILINE)) == 8 + 10
    flat = re.sub(r"\s", "", done.stdout)
    assert re.sub(r"\s", "", table["left_out"]) in flat
    assert done.stdout.count(table["state_rebuilt"]) >= 3
    assert "2b · 1 · 2x = 2 · 1 · 0 = 0" in re.sub(r"\n", " ", done.stdout)
    assert "\x1b" not in done.stdout


def test_it_is_a_command_of_fused_remat():
    done = CliRunner().invoke(build_app(), ["demo", "--x", "1e1", "--drop", "b", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["variants"][0]["z"] == 10201


# Stepping


def test_enter_and_n_go_on_p_goes_back(step_through):
    printed = step_through("", "n", "p", "q", "n")
    assert re.findall(r"Step (\d+) of 8", printed) == ["1", "2", "3", "2"]
    assert words("en")["left_out"][:40] in printed.replace("\n", " ")


def test_the_ends_are_named_and_nothing_is_printed_twice(step_through):
    printed = step_through("p", *[""] * 8)
    assert re.findall(r"Step (\d+) of 8", printed) == [str(number) for number in range(1, 9)]
    assert printed.count("This is the first step.") == printed.count("This is the last step.") == 1


def test_t_changes_the_variant_and_r_starts_again(step_through):
    printed = step_through("n", "t", "n", "r", arguments=["--x", "-3", "--drop", "b"])
    assert re.findall(r"Step (\d+) of (\d+)", printed) == [("1", "10"), ("2", "10"), ("1", "8"), ("2", "8"), ("1", "8")]


def test_other_keys_are_answered(step_through):
    assert "“x” does nothing here." in step_through("X")


# What is refused


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--x", "two"], ["--x", "“two”", "a number", "-3, 0.5, 1e3"]),
        (["--x", "0,5"], ["--x", "“0,5”", "decimal point"]),
        (["--x", ""], ["--x", "x is missing"]),
        (["--x", "nan"], ["--x", "“nan”", "finite"]),
        (["--x", "-inf"], ["--x", "“-inf”", "finite"]),
        (["--x", "1e78"], ["--x", "“1e+78”", "float64", "from -1.1e77 to 1.1e77"]),
        (["--x", "dwa", "--lang", "pl"], ["--x", "„dwa”", "potrzebna jest liczba"]),
        (["--x", "二", "--lang", "ja"], ["--x", "「二」"]),
        (["--keep", "a"], ["--keep", "'a'", "write --keep b"]),
        (["--drop", "x"], ["--drop", "'x'", "write --drop b"]),
        (["--keep", "b", "--drop", "b"], ["--drop", "not both", "leave both out"]),
        (["--lang", "de"], ["--lang", "'de'", "en, pl, ja", "for English"]),
    ],
)
def test_bad_options_are_refused_before_anything_is_run(arguments, expected, monkeypatch):
    monkeypatch.setattr(command, "observe", None)
    done = invoke(*arguments)
    text = plain(done.output)
    assert done.exit_code == 2 and done.stdout == ""
    assert all(word in text for word in expected), text


def test_it_fails_with_1_where_torch_disagrees(monkeypatch):
    monkeypatch.setattr(command, "observe", lambda x, keep_b: Observation(25.0, 40.0, (2.0, 5.0), ()))
    done = invoke("--json")
    assert done.exit_code == 1 and done.stdout == ""
    assert "kept values: the demo says (2.0,), torch (2.0, 5.0)" in done.stderr
    assert "redone operations: the demo says 2, torch 0" in done.stderr


class Narrow:
    encoding = "ascii"


def test_an_ascii_terminal_gets_plain_english_and_no_japanese(monkeypatch, capsys):
    monkeypatch.setattr(command.sys, "stdout", Narrow())
    say = command._say("en")
    monkeypatch.undo()
    say("a = x² = 2 · 2 “x”")
    assert capsys.readouterr().out == 'a = x^2 = 2 * 2 "x"\n'
    monkeypatch.setattr(command.sys, "stdout", Narrow())
    for language in ("pl", "ja"):
        with pytest.raises(typer.BadParameter, match=r"ascii.*--lang en"):
            command._say(language)


# The page


def test_html_is_written_and_standard_output_stays_clean(tmp_path, monkeypatch):
    monkeypatch.setattr(mlp_example, "mlp_example", mlp_example.by_formula)
    file = tmp_path / "demo.html"
    done = invoke("--x", "-3", "--lang", "pl", "--html", str(file))
    assert done.exit_code == 0 and done.stdout == "" and str(file) in done.stderr.replace("\n", "")
    text = file.read_text(encoding="utf-8")
    assert '<html lang="pl">' in text and "<title>Zachować czy odtworzyć</title>" in text and '"x": -3.0' in text
    again = invoke("--x", "-3", "--lang", "pl", "--html", str(file), "--json")
    assert json.loads(again.stdout)["x"] == -3 and file.read_text(encoding="utf-8") == text


def test_html_that_cannot_be_written_is_refused_before_anything_is_run(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "observe", None)
    for path in (tmp_path, tmp_path / "no folder" / "demo.html"):
        done = invoke("--html", str(path))
        assert done.exit_code == 2 and "--html" in plain(done.output) and "choose another path" in plain(done.output)
    monkeypatch.setattr(command, "parse", None)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_leaves_no_empty_file(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "observe", lambda x, keep_b: Observation(0.0, 0.0, (), ()))
    assert invoke("--html", str(tmp_path / "demo.html")).exit_code == 1
    assert list(tmp_path.iterdir()) == []
