"""The run as text for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unicodedata import category, east_asian_width

import torch

from fused_remat.demo.observe import Observation
from fused_remat.demo.run import SCHEMA, Run, Step
from fused_remat.demo.words import Words, fill, fillings, listed, shown

WIDTH = 78  # columns of a line
VALUES = ("x", "a", "b", "z")
GRADIENTS = {"db": "dz/db", "da": "dz/da", "dx": "dz/dx"}
_LABEL = 20  # columns of "x = 2" before its state
_MAY_NOT_START_A_LINE, _MAY_NOT_END_A_LINE = ("Pe", "Pf", "Po"), ("Ps", "Pi")  # Unicode categories
_JOINS_BOTH, _JOINS_NEXT = "·+", "="  # a formula is broken before an equals sign only


def state_of(step: Step, value: str, steps: Sequence[Step]) -> str:
    """The word for what has become of `value` at `step`: absent, exists, kept, freed or rebuilt."""
    if value in step.rebuilt:
        return "rebuilt"
    if value in step.exists:
        return "kept" if value in step.kept else "exists"
    earlier = steps[: steps.index(step) + 1]
    return "freed" if any(value in one.exists for one in earlier) else "absent"


def pairs(run: Run, names: Sequence[str]) -> list[str]:
    """ "x = 2", "b = 5", "dz/db = 10", ..."""
    return [f"{GRADIENTS.get(name, name)} = {shown(run.values[name])}" for name in names]


def sentence(table: Words, run: Run, step: Step) -> str:
    return fill(table[step.name], fillings(run.values))


def step_lines(table: Words, run: Run, number: int) -> list[str]:
    """One step (counted from 0) as lines of at most `WIDTH` columns."""
    step = run.steps[number]
    place = {
        "number": number + 1,
        "total": len(run.steps),
        "phase": table[f"phase_{step.phase}"],
        "variant": table["variant_keep" if run.keep_b else "variant_drop"],
    }
    lines = [*wrap(fill(table["heading"], place)), *wrap(sentence(table, run, step))]
    for value in VALUES:
        state = state_of(step, value, run.steps)
        label = f"{value} = {shown(run.values[value])}" if value in step.exists else value
        lines.append(f"  {label:{_LABEL}} {table[f'state_{state}']}")
    for line in counter_lines(table, run, step):
        lines += wrap(line)
    return lines


def counter_lines(table: Words, run: Run, step: Step) -> list[str]:
    """Gradients so far, kept values and redone operations, a sentence each."""
    counts = {
        "gradients": pairs(run, step.gradients),
        "kept": pairs(run, step.counted),
        "redone": list(step.redone),
    }
    return [fill(table[name], {"values": listed(table, items), "count": len(items)}) for name, items in counts.items()]


def notes(table: Words, torch_check: str) -> list[str]:
    """What the counters leave out, how numbers are shown, and what torch did, as wrapped paragraphs."""
    lines: list[str] = []
    for text in (table["left_out"], table["rounded"], torch_check):
        lines += ["", *wrap(text)]
    return lines


def torch_check(table: Words, observed: dict[bool, Observation], x: float) -> str:
    """One paragraph: what torch kept and redid, b kept (True) and dropped (False)."""
    facts: dict[str, object] = {"version": torch.__version__, "x": shown(x)}
    for keep_b, name in ((True, "keep"), (False, "drop")):
        facts[f"{name}_kept"] = listed(table, [shown(value) for value in observed[keep_b].kept])
        facts[f"{name}_redone"] = len(observed[keep_b].redone)
    return fill(table["torch_check"], facts)


def to_dict(table: Words, language: str, runs: Sequence[Run], observed: dict[bool, Observation]) -> dict[str, Any]:
    """The object that `--json` prints; numbers are whole float64, texts are in `language`."""
    return {
        "schema": SCHEMA,
        "example": "z = (x^2 + 1)^2",
        "language": language,
        "x": runs[0].values["x"],
        "variants": [_variant(table, run, observed[run.keep_b]) for run in runs],
        "left_out": table["left_out"],
        "torch_version": torch.__version__,
    }


def _variant(table: Words, run: Run, observation: Observation) -> dict[str, Any]:
    return {
        "b": "kept" if run.keep_b else "dropped",
        "z": run.values["z"],
        "gradient": run.values["dx"],
        "factors": {"dz/db": run.values["factor_b"], "db/da": run.values["factor_a"], "da/dx": run.values["factor_x"]},
        "kept": run.kept,
        "kept_count": len(run.kept),
        "redone": list(run.redone),
        "redone_count": len(run.redone),
        "steps": [_step(table, run, number) for number in range(len(run.steps))],
        "torch": {
            "z": observation.z,
            "gradient": observation.gradient + 0.0,
            "kept": list(observation.kept),
            "redone": list(observation.redone),
        },
    }


def _step(table: Words, run: Run, number: int) -> dict[str, Any]:
    step, values = run.steps[number], run.values
    name = step.computes
    return {
        "number": number + 1,
        "name": step.name,
        "phase": step.phase,
        "text": sentence(table, run, step),
        "computes": None if name is None else {"name": GRADIENTS.get(name, name), "value": values[name]},
        "exists": {value: values[value] for value in step.exists},
        "kept": list(step.kept),
        "freed": list(step.freed),
        "rebuilt": list(step.rebuilt),
        "gradients": {GRADIENTS[gradient]: values[gradient] for gradient in step.gradients},
        "counter": {"kept": list(step.counted), "redone": list(step.redone)},
    }


def columns(text: str) -> int:
    """The columns that a terminal needs: two for a wide East Asian character."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def wrap(text: str, width: int = WIDTH) -> list[str]:
    """`text` as lines of at most `width` columns, broken at spaces and between East Asian characters."""
    lines, line = [], ""
    for piece in _pieces(text):
        if columns(line + piece.rstrip()) > width and line:
            lines.append(line.rstrip())
            line = ""
        line += piece if line else piece.lstrip()
    return [*lines, line.rstrip()]


def _pieces(text: str) -> list[str]:
    """What must stay together on a line; a space ends the piece before it."""
    pieces, piece = [], ""
    for letter, following in zip(text, (text + " ")[1:], strict=True):
        piece += letter
        wide = columns(letter) == 2 or columns(following) == 2
        together = category(following) in _MAY_NOT_START_A_LINE or category(letter) in _MAY_NOT_END_A_LINE
        formula = following in _JOINS_BOTH or (len(piece) > 1 and piece[-2] in _JOINS_BOTH + _JOINS_NEXT)
        if (letter == " " and not formula) or (wide and following != " " and not together):
            pieces.append(piece)
            piece = ""
    return [*pieces, piece] if piece else pieces
