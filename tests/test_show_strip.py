"""The layer strip: letters for the terminal."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest

from fused_remat import show
from fused_remat.show.layer_strip import LETTERS, rows

MIXED = {
    "layers": {
        f"encoder.layers.{i}.{name}": keep
        for i in range(12)
        for name, keep in (
            ("self_attn", ("out",) if i < 8 else ()),
            ("mlp", 0.25 if i < 4 else None if i < 6 else ()),
        )
    },
    "regions": [["encoder.layers.4", "encoder.layers.5"], ["encoder.layers.6", "encoder.layers.7"]],
}


def cells(text: str) -> dict[str, str]:
    """Name of a line -> its letters, without the explanations below."""
    lines = (line.partition("  ") for line in text.splitlines() if line.partition(" ")[0] not in LETTERS)
    return {name: rest.strip() for name, _, rest in lines}


def test_strip_has_a_letter_per_layer_and_gaps_between_runs():
    text = show.strip(MIXED)
    assert cells(text) == {
        "encoder.layers.*.self_attn": "RRRRRRRRRRRR",
        "encoder.layers.*.mlp": "FFFF KK RRRRRR",
        "encoder.layers.*": ".... [RR] [RR] ....",
    }
    assert "F a fraction kept, the rest rebuilt piece by piece inside the layer (0.25)" in text
    assert [line[0] for line in text.splitlines()[3:]] == ["K", "F", "R", "."]


@pytest.mark.parametrize(
    ("keep", "letter"),
    [
        (None, "K"),
        ((), "R"),
        (("up",), "R"),
        (["gate", "up"], "K"),
        (("out",), "R"),
        (("q", "k", "v", "out"), "K"),
        (0.5, "F"),
        (0, "R"),
        (0.0, "R"),
        (1.0, "K"),
    ],
)
def test_strip_letter_of_a_layer(keep, letter):
    assert cells(show.strip({"layers": {"mlp": keep}})) == {"mlp": letter}


def test_strip_takes_a_plan_and_shows_layers_before_the_regions():
    class Assignment:
        layers: ClassVar = {}
        regions = (("stage.2", "stage.3"), ("stage.4",))

    class Plan:
        assignment = Assignment

    assert cells(show.strip(Plan)) == {"stage.*": "KK [RR] [R]"}
    chains = [[f"stage.{i}" for i in range(7)]]
    assert cells(show.strip(Assignment, chains=chains)) == {"stage.*": "KK [RR] [R] KK"}
    assert [cell.letter for cell in rows(Plan, chains)["stage.*"]] == list("KKRRRKK")


def test_strip_shows_every_unit_of_a_plan():
    class Plan:
        assignment: ClassVar = {"layers": {"h.1.mlp": 0.5}, "regions": [["h.0"]]}
        units = tuple(SimpleNamespace(path=f"h.{i}", layers={}) for i in range(4))

    assert cells(show.strip(Plan)) == {"h.*.mlp": "F", "h.*": "[R] . KK"}
    Plan.assignment = {"layers": {}}
    assert cells(show.strip(Plan)) == {"h.*": "KKKK"}
    Plan.assignment = {"layers": {"h.1.mlp": ("up",), "h.2.mlp": ("up",)}}
    Plan.units[2].layers["h.2.mlp"] = "K"  # one without a gate: that is everything
    assert cells(show.strip(Plan)) == {"h.*.mlp": "R K", "h.*": "K .. K"}


def test_the_model_itself_may_be_the_unit():
    class Plan:
        assignment: ClassVar = {"layers": {"0": ()}, "regions": []}
        units = (SimpleNamespace(path="", layers={"0": "R"}),)

    assert cells(show.strip(Plan)) == {"*": "R", "(the model)": "."}


def test_a_fused_layer_that_is_run_again_is_rebuilt():
    assert cells(show.strip({"layers": {"l.0": (), "l.1": ()}, "regions": [["l.1"]]})) == {"l.*": "R [R]"}


@pytest.mark.parametrize("width", [40, 80, 120])
def test_strip_folds_long_lines_and_keeps_to_the_width(width):
    long = {"layers": {f"blocks.{i}": [None, (), 0.5][i % 3] for i in range(90)}, "regions": []}
    regions = {"layers": {}, "regions": [[f"blocks.{i + j}" for j in range(10)] for i in range(20, 120, 10)]}
    named = {"layers": {f"a_very_long_name_of_a_module.that_goes_on.{i}.and_on": () for i in range(99)}}
    for assignment in (long, regions, named, MIXED):
        assert max(map(len, show.strip(assignment, width=width).splitlines())) <= width
    letters = "".join(show.strip(long, width=width).split("\nK ")[0].split()[1:])
    assert letters == "KRF" * 30
    if width < 120:
        assert "K x20  R x100 in [ ] x10" in show.strip(regions, width=width)
    assert "R x99" in show.strip(named, width=40)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (dict(assignment=3), TypeError, "must be an Assignment, a Plan or a dict with 'layers', got int"),
        (dict(assignment={"layers": {}}), ValueError, "no layer and no region"),
        (dict(assignment=MIXED, width=39), ValueError, "width must be an int of at least 40"),
    ],
)
def test_strip_refuses(arguments, error, says):
    with pytest.raises(error, match=says):
        show.strip(**arguments)


def test_print_strip_has_colours_only_in_a_terminal_that_has_them(monkeypatch):
    pytest.importorskip("rich")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    plain, coloured, refused = io.StringIO(), Terminal(), Terminal()
    show.print_strip(MIXED, file=plain)
    assert plain.getvalue() == show.strip(MIXED) + "\n"
    show.print_strip(MIXED, file=coloured)
    assert "\x1b[" in coloured.getvalue() and "RRRRRRRRRRRR" in coloured.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    show.print_strip(MIXED, file=refused)
    assert "\x1b[3" not in refused.getvalue()  # no colour; bold is none
    monkeypatch.setitem(sys.modules, "rich.console", None)
    bare = io.StringIO()
    show.print_strip(MIXED, file=bare)
    assert bare.getvalue() == show.strip(MIXED) + "\n"
