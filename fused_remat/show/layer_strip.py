"""The layer strip: one letter per layer, for the terminal and for a log line."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TextIO

from fused_remat._folding import MODEL, order_of, starred
from fused_remat.convert.keep import ATTENTION_RESIDUALS, MLP_RESIDUALS

LETTERS = {
    "K": "all kept",
    "F": "a fraction kept, the rest rebuilt piece by piece inside the layer",
    "R": "rebuilt piece by piece inside the layer; in [ ]: run again, as one region",
    ".": "not run again; what its layers do has a line of its own",
}
NARROWEST = 40

_COLOURS = {"K": "bold blue", "F": "bold magenta", "R": "bold yellow"}
_LONGEST_NAME = 28


@dataclass(frozen=True)
class Cell:
    """One layer: its letter, and the number of its recomputed region (None: in none)."""

    path: str
    letter: str
    region: int | None = None


def strip(assignment: Any, *, chains: Iterable[Sequence[str]] = (), width: int = 80) -> str:
    """Letters of every layer, a line per kind of layer, runs of equal treatment apart; readable without colour.

        layers.*.mlp  FFFF RRRRRRRR
        layers.*      KKKK [RRRR] [RRRR]

    An assignment alone does not tell whether an MLP has a gate: ("up",) is R there, and what it is in a plan.

    Lines that do not fit are folded to "K x40  R x8 in [ ] x2". Below are the letters in use and what they mean.

    Args:
        assignment: an `Assignment`, a `Plan` (its assignment, with every unit of the plan), or the
            `to_dict()` form of an assignment.
        chains: paths of the repeated modules (`Arrangement.chains`), so that those outside of regions are shown too.
        width: columns, at least 40.

    Raises:
        TypeError: `assignment` is none of these.
        ValueError: it names no layer and no region, or `width` is below 40.
    """
    return "\n".join(map(_plain, _lines(assignment, chains, width)))


def print_strip(
    assignment: Any, *, chains: Iterable[Sequence[str]] = (), width: int = 80, file: TextIO | None = None
) -> None:
    """Print `strip`, coloured where rich is installed and `file` (standard output) is a terminal that has colours."""
    lines = _lines(assignment, chains, width)
    file = file or sys.stdout
    try:
        from rich.console import Console
        from rich.text import Text
    except ModuleNotFoundError:
        print("\n".join(map(_plain, lines)), file=file)
        return
    console = Console(file=file, highlight=False, soft_wrap=True)
    for line in lines:
        console.print(Text.assemble(*((text, _COLOURS.get(letter, "")) for text, letter in line)))


def rows(assignment: Any, chains: Iterable[Sequence[str]] = ()) -> dict[str, list[Cell]]:
    """The cells of each line by its name (a path with stars for indices), in order of the layers."""
    layers, regions = _parts(assignment)
    made: dict[str, list[Cell]] = {}
    known = {path: letter for unit in getattr(assignment, "units", ()) for path, letter in unit.layers.items()}
    for path, keep in layers.items():
        letter = known.get(path) or _letter(keep)
        made.setdefault(starred(path), []).append(Cell(path, letter))
    inside = {path: number for number, region in enumerate(regions) for path in region}
    units = [unit.path for unit in getattr(assignment, "units", ())]
    members = dict.fromkeys([*units, *(path for chain in chains for path in chain)])
    for path in [*layers, *inside]:
        members.update(dict.fromkeys(_indexed_parents(path)))
    lines = {starred(path) for path in [*inside, *units]}
    for path in sorted({*members, *inside}, key=order_of):
        if starred(path) in lines and path not in layers:
            outside = "." if any(layer.startswith(f"{path}.") or not path for layer in layers) else "K"
            cell = Cell(path, "R", inside[path]) if path in inside else Cell(path, outside)
            made.setdefault(starred(path), []).append(cell)
        elif path in inside:  # a fused layer that is run again too
            cells = made[starred(path)]
            cells[[c.path for c in cells].index(path)] = Cell(path, "R", inside[path])
    if not made:
        raise ValueError("assignment names no layer and no region, so there is no strip to show")
    return made


Word = tuple[str, str]  # text, and the letter that it shows ("" for other text)


def _lines(assignment: Any, chains: Iterable[Sequence[str]], width: int) -> list[list[Word]]:
    if isinstance(width, bool) or not isinstance(width, int) or width < NARROWEST:
        raise ValueError(f"width must be an int of at least {NARROWEST} (columns), got {width!r}")
    made = rows(assignment, chains)
    names = {name: _shortened(name) for name in made}
    indent = max(map(len, names.values())) + 2
    lines = []
    for name, cells in made.items():
        runs = [list(run) for _, run in groupby(cells, key=lambda cell: (cell.letter, cell.region))]
        letters = _wrapped(names[name], [(_letters(run), run[0].letter) for run in runs], indent, width)
        counts = _wrapped(names[name], _folded_runs(runs), indent, width, "  ")
        fits = all(len(_plain(line)) <= width for line in letters)
        lines += letters if fits and (len(letters) == 1 or len(letters) < len(counts)) else counts
    used = [letter for letter in LETTERS if any(cell.letter == letter for cells in made.values() for cell in cells)]
    fractions = sorted({keep for keep in _parts(assignment)[0].values() if isinstance(keep, float) and 0 < keep < 1})
    for letter in used:
        more = f" ({', '.join(f'{fraction:g}' for fraction in fractions)})" if letter == "F" else ""
        lines += _wrapped(letter, [(word, "") for word in f"{LETTERS[letter]}{more}".split(" ")], 2, width)
    return lines


def _letters(run: Sequence[Cell]) -> str:
    letters = "".join(cell.letter for cell in run)
    return letters if run[0].region is None else f"[{letters}]"


def _folded_runs(runs: Sequence[Sequence[Cell]]) -> list[Word]:
    """ "K x40", "R x8 in [ ] x2": neighbouring runs of one letter together, those in regions apart."""
    words = []
    for (letter, again), group in groupby(runs, key=lambda run: (run[0].letter, run[0].region is not None)):
        together = list(group)
        regions = f" in [ ] x{len(together)}" if again else ""
        words.append((f"{letter} x{sum(map(len, together))}{regions}", letter))
    return words


def _wrapped(name: str, words: Sequence[Word], indent: int, width: int, gap: str = " ") -> list[list[Word]]:
    lines: list[list[Word]] = [[(f"{name:<{indent}}", name if name in LETTERS else "")]]
    for text, letter in words:
        line = lines[-1]
        if len(line) > 1 and len(_plain(line)) + len(gap) + len(text) > width:
            line = [(" " * indent, "")]
            lines.append(line)
        line += [*([(gap, "")] if len(line) > 1 else []), (text, letter)]
    return lines


def _plain(line: Sequence[Word]) -> str:
    return "".join(text for text, _ in line)


def _letter(keep: Any) -> str:
    if keep is None:
        return "K"
    if isinstance(keep, (int, float)):
        return "F" if 0 < keep < 1 else "K" if keep else "R"
    return "K" if any(set(residuals) <= set(keep) for residuals in (MLP_RESIDUALS, ATTENTION_RESIDUALS)) else "R"


def _parts(assignment: Any) -> tuple[Mapping[str, Any], Sequence[Sequence[str]]]:
    """(layers, regions) of an Assignment, a Plan or a dict."""
    assignment = getattr(assignment, "assignment", assignment)
    if isinstance(assignment, Mapping) and "layers" in assignment:
        return assignment["layers"], assignment.get("regions", ())
    if hasattr(assignment, "layers") and hasattr(assignment, "regions"):
        return assignment.layers, assignment.regions
    raise TypeError(
        f"assignment must be an Assignment, a Plan or a dict with 'layers', got {type(assignment).__name__}"
    )


def _indexed_parents(path: str) -> list[str]:
    """Modules with an index on the way to `path`, those before each of them in its chain too."""
    parts, found = path.split("."), []
    for place, part in enumerate(parts):
        if part.isdecimal():
            found += [".".join([*parts[:place], str(index)]) for index in range(int(part) + 1)]
    return found


def _shortened(name: str) -> str:
    name = name or MODEL
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME // 2 - 1]}…{name[-_LONGEST_NAME // 2 :]}"
