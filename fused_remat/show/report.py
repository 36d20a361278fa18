"""One offline HTML page: every picture that profile, plan and recordings allow, each with a table of its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fused_remat._about import in_words
from fused_remat._folding import MODEL
from fused_remat.show import growth_picture, life_picture, lives, memory_picture, tradeoff_picture
from fused_remat.show.html import document, listing, picture, preformatted, table
from fused_remat.show.labels import format_cost
from fused_remat.show.layer_strip import strip
from fused_remat.show.render import inline_svg
from fused_remat.show.stack import Stack, check_recording, numbers, place, sentence, stack
from fused_remat.show.theme import LIGHT, require_matplotlib, style
from fused_remat.sizes import format_bytes, parse_bytes

_MOST_ROWS = 40  # of a table
_INDENT = "\u2003"  # of a module inside of another; browsers fold plain spaces

LEFT_OUT = (
    "Kept and peak are two numbers: kept is what forward leaves for backward, the peak the highest sum of everything "
    "alive, rebuilt and temporary values included.",
    "Not in these pictures: memory that the allocator holds in reserve, the CUDA context and libraries, and what other "
    "processes use.",
    "Bytes are those of distinct storages: tensors that share one are counted once.",
    "Measured: allocator events of a run. Predicted: fake tensors and formulas; nothing was run.",
)


def write_report(
    path: str | Path,
    *,
    profile: Any = None,
    plan: Any = None,
    recordings: Any = None,
    baselines: Iterable[tradeoff_picture.Point] = (),
    budget: int | str | None = None,
    title: str = "Which activations are kept",
) -> Path:
    """Write one HTML file, without scripts and without anything loaded from elsewhere, for light and dark screens.

    Args:
        path: of the file, ending in .html.
        profile: a `Profile`: its recording (without `recordings`), verdict, modules, largest tensors and growth, and
            (without `plan`) cost against memory of the model as it is and converted.
        plan: a `Plan`: its layers, its explanation, cost against memory, its budget and (without `recordings` and
            `profile`) its own sketch of the step.
        recordings: a Recording, several, or a mapping of names to them (such as {"before": ..., "after": ...}), drawn
            to one scale.
        baselines: named `Point`s to draw beside those of the plan ("selective", "full", "sqrt"), of the same cost.
        budget: bytes or a size such as "6GiB", where there is no plan or another one is meant.
        title: heading of the page.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
        TypeError, ValueError: there is nothing to show, a recording is empty, or an argument is wrong.
    """
    require_matplotlib()
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"path must end in .html, got {str(path)!r}")
    if profile is None and plan is None and recordings is None:
        raise ValueError("there is nothing to show; give profile=, plan= or recordings=")
    if recordings is None:
        recordings = getattr(profile, "recording", None) or getattr(plan, "sketch", None)
    named = _named(recordings)
    for name, recording in named.items():
        check_recording(recording, f"recordings[{name!r}]")
    limit = budget if budget is not None else getattr(plan, "budget_bytes", None)
    limit = None if limit is None else parse_bytes("budget", limit)
    path.write_text(page(named, profile, plan, list(baselines), limit, title), "utf-8")
    return path


def page(
    named: Mapping[str, Any],
    profile: Any,
    plan: Any,
    baselines: list[tradeoff_picture.Point],
    budget: int | None,
    title: str,
) -> str:
    """The whole document; the same bytes for the same numbers."""
    regions = [] if plan is None else plan.assignment.regions
    hidden: list[str] = []
    with style(LIGHT, math=False):
        body = "".join(
            [
                f"<h1>{escape(title)}</h1>\n",
                _words(profile, plan),
                _memory(named, budget) if named else "",
                *(_lives(name, recording, regions, number, hidden) for number, (name, recording) in _numbered(named)),
                _tradeoff(profile, plan, baselines, budget, hidden),
                _layers(plan) if plan is not None else "",
                _growth(profile) if getattr(profile, "growth", None) else "",
                _modules(profile) if profile is not None else "",
                _largest(profile, hidden) if profile is not None else "",
            ]
        )
    return document(title, f"<main>\n{body}</main>\n<footer>\n{listing([*hidden, *LEFT_OUT])}</footer>\n")


def _named(recordings: Any) -> dict[str, Any]:
    if recordings is None:
        return {}
    if isinstance(recordings, Mapping):
        return {str(name): recording for name, recording in recordings.items()}
    if isinstance(recordings, Sequence):
        if len(recordings) == 1:
            return {"": recordings[0]}
        return {f"recording {number}": recording for number, recording in enumerate(recordings, start=1)}
    return {"": recordings}


def _numbered(named: Mapping[str, Any]) -> list[tuple[int, tuple[str, Any]]]:
    return list(enumerate(named.items(), start=1))


def _section(heading: str, name: str, content: str) -> str:
    return f'<section aria-labelledby="{name}">\n<h2 id="{name}">{escape(heading)}</h2>\n{content}</section>\n'


def _words(profile: Any, plan: Any) -> str:
    parts = []
    about = getattr(profile, "about", None)
    if about:
        parts.append(f"<p>{escape(f'One optimizer step of {in_words(about)}, {profile.recording.source}.')}</p>\n")
    if profile is not None:
        parts.append(f"<p>{escape(profile.verdict)}</p>\n{listing([*profile.advice, *getattr(profile, 'notes', ())])}")
    if plan is not None:
        parts.append(preformatted(str(plan.explain()), "What the plan does"))
    return "".join(parts)


def _memory(named: Mapping[str, Any], budget: int | None) -> str:
    figure = memory_picture.draw(tuple(named.values()), tuple(named), budget)
    stacks = {name: stack(recording) for name, recording in named.items()}
    values = {name: numbers(recording, stacks[name], budget) for name, recording in named.items()}
    spoken = " ".join((f"{name}: " if name else "") + sentence(values[name]) for name in named)
    tables = "".join(_memory_table(name, values[name], stacks[name]) for name in named)
    return _section("Memory over one step", "memory", picture(inline_svg(figure, "memory"), spoken) + tables)


def _memory_table(name: str, values: Mapping[str, Any], made: Stack) -> str:
    rows: list[Sequence[object]] = [
        (kind, _size(values["bytes_at_peak"][kind]), _size(values["highest_bytes"][kind]))
        for kind in reversed(made.kinds)
    ]
    rows.append(("together", _size(sum(values["bytes_at_peak"].values())), _size(values["peak_bytes"])))
    rows += [(f"peak of {phase}", "", _size(nbytes)) for phase, nbytes in values["phase_peak_bytes"].items()]
    rows.append(("kept for backward", "", _size(values["kept_bytes"])))
    if values["budget_bytes"] is not None:
        rows.append(("budget", "", _size(values["budget_bytes"])))
    where = place(values["peak_phase"], values["peak_module"])
    caption = f"{name or 'Bytes by kind'}, {values['source']} on {values['device']}; peak in {where}"
    return table(caption, ("kind", "at the peak", "highest in the step"), rows)


def _lives(name: str, recording: Any, regions: Sequence[Sequence[str]], number: int, hidden: list[str]) -> str:
    shown, left_out, left_out_bytes = life_picture.rows_of(recording, regions)
    if not shown:
        return ""
    heading = f"Lives of activations{f': {name}' if name else ''}"
    if left_out:
        together = format_bytes(left_out_bytes)
        hidden.append(f"{heading}: {left_out} rows with the fewest bytes ({together} together) are left out.")
    lanes = max(len(row.lives) for row in shown)
    if any(row.values > len(row.lives) for row in shown):
        hidden.append(f"{heading}: a row of more values shows {lanes} of them, evenly chosen.")
    figure = life_picture.draw(recording, shown, left_out)
    rows = [
        (row["name"], row["values"], _size(row["bytes_each"]), _size(row["bytes"]), row["kept"], row["rebuilt"])
        for row in (row.to_dict() for row in shown)
    ]
    head = ("value", "how many", "each", "together", "kept", "dropped and rebuilt")
    spoken = lives.sentence(shown, left_out, f"{recording.source} on {recording.device}")
    content = picture(inline_svg(figure, f"lives-{number}"), spoken) + table(
        f"{heading}, {recording.source}", head, rows
    )
    return _section(heading, f"lives-of-{number}", content)


def _tradeoff(
    profile: Any, plan: Any, baselines: list[tradeoff_picture.Point], budget: int | None, hidden: list[str]
) -> str:
    if plan is not None:
        points, cost = tradeoff_picture.points_of(plan)
    elif getattr(profile, "recompute", None) is not None:
        points, cost = tradeoff_picture.points_of_profile(profile), "flop"
    else:
        return ""
    points += baselines
    if not points:
        return ""
    tradeoff_picture.check_points(points, cost)
    figure = tradeoff_picture.draw(points, cost, budget)
    shown, left_out = tradeoff_picture.table_rows(points, cost, _MOST_ROWS)
    if left_out:
        hidden.append(f"Cost against memory: the table leaves out {left_out} of {len(points)} points.")
    rows = [
        (row["label"] or ("chosen" if row["chosen"] else "considered"), _size(row["peak_bytes"]),
         (row["cost"], format_cost(cost, row["cost"])), row["source"], "yes" if row["chosen"] else "")
        for row in shown
    ]  # fmt: skip
    head = ("way", "peak", tradeoff_picture.COSTS[cost], "source", "chosen")
    spoken = tradeoff_picture.sentence(points, cost, budget)
    content = picture(inline_svg(figure, "tradeoff"), spoken) + table("Cost against peak memory", head, rows)
    return _section("Cost against peak memory", "tradeoff", content)


def _layers(plan: Any) -> str:
    assignment = plan.assignment
    if not (assignment.layers or assignment.regions or getattr(plan, "units", ())):
        return ""
    return _section("What every layer does", "layers", preformatted(strip(plan), "One letter per layer"))


def _growth(profile: Any) -> str:
    curves = growth_picture.curves_of(profile)
    figure = growth_picture.draw(curves)
    rows = [
        (f"{curve.label} over {curve.axis}", size, _size(nbytes), curve.source, curve.law if number == 0 else "")
        for curve in curves
        for number, (size, nbytes) in enumerate(zip(curve.sizes, curve.nbytes, strict=True))
    ]
    head = ("bytes", "size", "bytes there", "source", "law")
    content = picture(inline_svg(figure, "growth"), growth_picture.sentence(curves)) + table("Growth", head, rows)
    return _section("Growth with the size of the inputs", "growth", content)


def _modules(profile: Any) -> str:
    from fused_remat.profile.modules import folded  # which brings in all that converts models

    rows = [
        (f"{_INDENT * row.depth}{row.name}", _size(row.kept_bytes), _size(row.module.parameter_bytes),
         _size(row.module.forward_transient_bytes), _size(row.module.backward_transient_bytes))
        for row in folded(profile.modules, rows=_MOST_ROWS)
    ]  # fmt: skip
    head = ("module", "kept, all of them", "parameters each", "transient in forward", "in backward")
    return _section("Bytes by module", "modules", table("Equal layers share a row", head, rows))


def _largest(profile: Any, hidden: list[str]) -> str:
    from fused_remat.profile.modules import alike  # which brings in all that converts models

    found = alike(profile.kept, profile.modules)
    if not found:
        return ""
    shown, rest = found[:_MOST_ROWS], found[_MOST_ROWS:]
    rows = [
        (same.module or MODEL, same.tensor.op, " x ".join(map(str, same.tensor.shape)), same.tensor.dtype, same.count,
         _size(same.tensor.nbytes), _size(same.tensor.nbytes * same.count), same.tensor.source or "")
        for same in shown
    ]  # fmt: skip
    if rest:
        hidden.append(f"Largest kept tensors: {sum(same.count for same in rest)} smaller ones are left out.")
    head = ("module", "operation", "shape", "dtype", "how many", "each", "together", "source")
    return _section("Largest kept tensors", "largest", table("Equal layers share a row", head, rows))


def _size(nbytes: int) -> tuple[int, str]:
    return nbytes, format_bytes(nbytes)
