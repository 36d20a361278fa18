"""Pictures show the numbers of the recording: read back from the figures."""

from __future__ import annotations

import io
import math
import random
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("matplotlib")

import matplotlib
import numpy as np
from matplotlib.colors import to_hex
from show_cases import UNIT, chain

from fused_remat import show
from fused_remat.recording import KINDS, Allocation, Recording
from fused_remat.show import lives as life
from fused_remat.show.labels import drawable, format_cost
from fused_remat.show.memory_picture import outline
from fused_remat.show.stack import decimate, layout, numbers, positions, sentence, stack
from fused_remat.show.theme import DARK, HATCHES, LIGHT

SEGMENT = 4
REGIONS = [tuple(f"layers.{first + i}" for i in range(SEGMENT)) for first in (0, 4, 8)]


def artists(figure, gid):
    return figure.findobj(lambda artist: artist.get_gid() == gid)


def marked(figure, gid):
    """(x, y) of the only line with that gid."""
    (line,) = artists(figure, gid)
    return [float(v[0]) for v in line.get_data()]


@st.composite
def recordings(draw):
    count = draw(st.integers(1, 30))
    moments = draw(st.permutations(range(2 * count)))
    made = []
    for i in range(count):
        born, died = sorted(moments[2 * i : 2 * i + 2])
        died = math.inf if draw(st.booleans()) else died
        phase = "forward" if born < count else "backward"
        made.append(Allocation(draw(st.integers(0, 2**40)), born, died, draw(st.sampled_from(KINDS)), f"m.{i}", phase))
    static = {kind: draw(st.integers(0, 2**40)) for kind in ("parameters", "optimizer")}
    phases = {"forward": (0, count), "backward": (count, 2 * count)}
    return Recording("cpu", "measured", static, tuple(sorted(made, key=lambda a: a.born)), (), phases)


@settings(deadline=None, max_examples=50)
@given(recordings())
def test_stack_sums_to_the_timeline(recording):
    made = stack(recording)
    timeline = recording.timeline()
    for moment, levels in timeline[1:]:
        row = int(np.searchsorted(made.times[1:], moment, side="right"))
        assert {k: int(v) for k, v in zip(made.kinds, made.levels[row], strict=True) if v} == {
            k: v for k, v in levels.items() if v
        }
        assert made.totals[row] == sum(levels.values())
    assert int(made.totals[made.top]) == recording.peak_bytes
    if made.top:
        assert made.times[made.top] == recording.peak_moment


def test_every_kind_has_a_colour_and_neighbours_differ_without_it():
    assert set(HATCHES) == set(KINDS)
    for theme in (LIGHT, DARK):
        colours = [getattr(theme, name) for name in theme.__dataclass_fields__]
        assert len(set(colours)) == len(colours)  # a page puts a variable in the place of each
        assert all(getattr(theme, kind).startswith("#") for kind in HATCHES)
    looks = list(HATCHES.items())
    assert all(a[1] != b[1] for a, b in pairwise(looks))


@pytest.mark.parametrize("segment", [0, SEGMENT])
def test_memory_marks_the_true_peak_and_the_budget(segment):
    recording = chain(12, segment=segment)
    figure = show.memory(recording, budget="12MiB")
    made = stack(recording)
    x, y = marked(figure, "peak")
    assert y * UNIT == recording.peak_bytes == max(sum(levels.values()) for _, levels in recording.timeline())
    assert x == positions(made, *layout([made]))[made.top]
    (budget,) = artists(figure, "budget")
    assert list(budget.get_ydata()) == [12, 12]
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert f"peak {recording.peak_bytes / UNIT:.1f} MiB\nbackward of {recording.peak_module}" in texts
    assert "budget 12.0 MiB" in texts
    assert figure.axes[0].get_ylim()[1] > max(y, 12)


def test_memory_areas_lie_on_each_other_and_reach_the_total():
    recording = chain(6)
    figure = show.memory(recording)
    made = stack(recording)
    where = positions(made, *layout([made]))
    below = np.zeros(len(where), dtype=np.int64)
    for column, kind in enumerate(made.kinds):
        (area,) = artists(figure, f"kind-{kind}")
        above = below + made.levels[:, column]
        expected = outline(where, below / UNIT, above / UNIT)
        assert np.array_equal(area.get_xy()[: len(expected)], expected) and len(area.get_xy()) <= len(expected) + 1
        assert to_hex(area.get_facecolor()) == getattr(LIGHT, kind) and (area.get_hatch() or "") == HATCHES[kind]
        below = above
    (line,) = artists(figure, "total")
    assert max(line.get_ydata()) * UNIT == recording.peak_bytes


def test_memory_draws_before_and_after_to_one_scale():
    before, after = chain(12), replace(chain(12, segment=SEGMENT), source="predicted")
    figure = show.memory(before, after, names=("before", "after"))
    first, second = figure.axes
    assert first.get_ylim() == second.get_ylim() and first.get_xlim() == second.get_xlim()
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "before: memory over one step, measured on cpu",
        "after: memory over one step, predicted on cpu",
    ]
    stacks = [stack(before), stack(after)]
    counts, widths = layout(stacks)
    assert sum(widths.values()) == pytest.approx(1) and list(widths) == ["forward", "backward", "optimizer"]
    for made in stacks:
        where = positions(made, counts, widths)
        assert (np.diff(where) >= 0).all() and where[made.starts["backward"]] == widths["forward"]


def many(layers: int) -> Recording:
    """100 events per layer, the peak a single one of them."""
    rng, made = random.Random(0), []
    for i in range(50 * layers):
        made.append(Allocation(rng.randrange(1, 1000), 2 * i, 2 * i + 1, "temporary", f"layers.{i // 50}.x", "forward"))
    spike = 25 * layers
    made[spike] = replace(made[spike], nbytes=10**6)
    kept = [Allocation(50, 100 * i + 0.5, 200 * layers - i, "kept", f"layers.{i}", "forward") for i in range(layers)]
    phases = {"forward": (0.0, 100.0 * layers), "backward": (100.0 * layers, 200.0 * layers)}
    allocations = tuple(sorted(made + kept, key=lambda a: a.born))
    return Recording("cpu", "predicted", {"parameters": 5}, allocations, (), phases)


def test_long_recordings_are_decimated_without_losing_the_peak(tmp_path):
    recording = many(1000)
    made = stack(recording)
    assert len(made.times) > 100_000
    drawn = decimate(made)
    assert len(drawn) <= 610 and made.top in drawn and {0, len(made.times) - 1, *made.starts.values()} <= set(drawn)
    for part in np.array_split(np.arange(len(made.times)), 50):  # coarser than the buckets: no low or high is lost
        inside = drawn[(drawn >= part[0]) & (drawn <= part[-1])]
        assert made.totals[inside].max() >= np.sort(made.totals[part])[-3]
    figure = show.memory(recording)
    (line,) = artists(figure, "total")
    assert max(line.get_ydata()) * 1024 == pytest.approx(recording.peak_bytes)
    path = show.write_report(tmp_path / "long.html", recordings=recording)
    assert path.stat().st_size < 2_000_000
    assert "layers.*" in path.read_text("utf-8")


def test_sentence_says_what_the_numbers_are():
    recording = chain(12)
    words = sentence(numbers(recording, stack(recording), 12 * UNIT))
    assert words.startswith(
        "Memory over one step, measured on cpu: peak 16.9 MiB in backward of layers.11, made up of "
    )
    assert "kept 12.0 MiB" in words and "over it by 4.9 MiB" in words
    assert "3.1 MiB below it" in sentence(numbers(recording, stack(recording), 20 * UNIT))


def test_lives_are_the_kept_and_the_rebuilt_allocations():
    recording = chain(12, segment=SEGMENT)
    made = {value.name: value for value in life.lives(recording, REGIONS)}
    assert list(made) == [f"layers.{i}" for i in range(12)]
    assert [name for name, value in made.items() if not value.is_rebuilt] == ["layers.3", "layers.7", "layers.11"]
    for value in made.values():
        own = [a for a in recording.allocations if a.module == value.name and a.nbytes == UNIT]
        expected = [a for a in own if a.phase == "forward" or a.kind == "rebuilt"]
        assert [(s.first, s.last) for s in value.segments] == [(a.born, a.died) for a in expected]
        assert [s.state for s in value.segments] == (["dropped", "rebuilt"] if value.is_rebuilt else ["kept"])
    sources = {name: value.rebuilt_from for name, value in made.items() if value.is_rebuilt}
    assert sources == dict.fromkeys(["layers.0", "layers.1", "layers.2"], "") | dict.fromkeys(
        ["layers.4", "layers.5", "layers.6"], "layers.3"
    ) | dict.fromkeys(["layers.8", "layers.9", "layers.10"], "layers.7")
    assert all(value.rebuilt_from == "" for value in life.lives(recording))  # not known without the regions


def test_a_rebuilt_value_without_a_twin_starts_in_backward():
    recording = chain(12, segment=SEGMENT)
    allocations = tuple(replace(a, nbytes=7) if a.kind == "rebuilt" else a for a in recording.allocations)
    made = life.lives(replace(recording, allocations=allocations))
    assert [[s.state for s in value.segments] for value in made if value.is_rebuilt] == [["rebuilt"]] * 9


def test_life_bars_show_each_segment_and_fold_equal_layers():
    recording = chain(12, segment=SEGMENT)
    figure = show.life_bars(recording, regions=REGIONS)
    count = {state: len(artists(figure, f"life-{state}")) for state in ("kept", "dropped", "rebuilt", "gap", "source")}
    assert count == {"kept": 3, "dropped": 9, "rebuilt": 9, "gap": 9, "source": 2}
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [f"layers.{i}, 1.0 MiB" for i in range(12)]
    made = stack(recording)
    where = positions(made, *layout([made], ("forward", "backward")))
    kept = next(a for a in recording.allocations if a.module == "layers.3" and a.kind == "kept")
    bar = artists(figure, "life-kept")[0].get_paths()[0].vertices[:, 0]
    ends = [where[1:][np.searchsorted(made.times[1:], moment)] for moment in (kept.born, kept.died)]
    assert (bar.min(), bar.max()) == pytest.approx(tuple(ends))
    folds = show.life_bars(recording, largest=3)
    assert [label.get_text() for label in folds.axes[0].get_yticklabels()] == ["layers.* x 12, 12.0 MiB"]
    assert len(artists(folds, "life-rebuilt")) == 9


def test_life_rows_leave_the_smallest_out():
    recording = chain(6)
    kept = [
        replace(a, module=f"m{i}", nbytes=UNIT + i) if a.kind == "kept" else a
        for i, a in enumerate(recording.allocations)
    ]
    values = life.lives(replace(recording, allocations=tuple(kept)))
    shown, hidden = life.rows(values, 2, 48)
    assert [row.name for row in shown] == [value.name for value in values[-2:]] and len(hidden) == 4
    assert "4 smaller rows are left out" in life.sentence(shown, len(hidden), "measured")
    figure = show.life_bars(replace(recording, allocations=tuple(kept)), largest=2)
    assert figure.axes[0].get_title(loc="left").endswith("; 4 smaller rows left out")


POINTS = [
    show.Point(40 * UNIT, 0.0, "measured", "everything"),
    show.Point(10 * UNIT, 9e9, "measured", "full"),
    show.Point(11 * UNIT, 8e9, "predicted", "full"),
    *(show.Point((15 + i) * UNIT, (9 - i) * 1e9, "predicted") for i in range(6)),
    show.Point(18 * UNIT, 4.5e9, "measured", chosen=True),
]


def test_tradeoff_fills_what_was_measured_and_rings_what_was_chosen():
    figure = show.tradeoff(POINTS, budget=20 * UNIT)
    for source in ("measured", "predicted"):
        dots = {(x, y) for line in artists(figure, f"point-{source}") for x, y in zip(*line.get_data(), strict=True)}
        assert dots == {(p.peak_bytes / UNIT, p.cost / 1e9) for p in POINTS if p.source == source}
        faces = {to_hex(line.get_markerfacecolor()) for line in artists(figure, f"point-{source}")}
        assert (faces == {LIGHT.ground}) == (source == "predicted")
    above, below = (artists(figure, f"point-{source}")[0].get_zorder() for source in ("measured", "predicted"))
    assert above > below  # what was measured is not hidden by its prediction
    assert marked(figure, "chosen") == [18.0, 4.5]
    assert list(artists(figure, "budget")[0].get_xdata()) == [20, 20]
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert {"everything", "full", "chosen (measured)", "budget 20.0 MiB"} <= set(texts) and texts.count("full") == 2
    assert figure.axes[0].get_ylabel() == "redone in backward (GFLOP)"
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_tradeoff_thins_dots_but_no_named_point():
    points = [*POINTS, *(show.Point(50 * UNIT + i, i, "predicted") for i in range(3000))]
    figure = show.tradeoff(points)
    drawn = sum(len(line.get_xdata()) for line in artists(figure, "point-predicted"))
    assert 380 <= drawn <= 420 and marked(figure, "chosen") == [18.0, 4.5]


def test_growth_has_the_curves_and_guides_of_slope_1_and_2():
    sizes = (64, 128, 256)
    curves = [
        show.Curve("sequence", sizes, tuple(UNIT * size**2 // 64**2 for size in sizes), law="grows with the square"),
        show.Curve("batch", (1, 2, 3), (UNIT, 2 * UNIT, 3 * UNIT), "peak", "predicted"),
    ]
    figure = show.growth(curves)
    assert [axes.get_xlabel() for axes in figure.axes] == ["sequence", "batch"]
    for axes in figure.axes:
        assert axes.get_xscale() == axes.get_yscale() == "log"
        for slope in (1, 2):
            (guide,) = axes.findobj(lambda artist, slope=slope: artist.get_gid() == f"slope-{slope}")
            (x0, x1), (y0, y1) = guide.get_data()
            assert math.log(y1 / y0) / math.log(x1 / x0) == pytest.approx(slope)
    (measured,) = artists(figure, "curve-measured")
    assert tuple(measured.get_xdata()) == sizes and tuple(measured.get_ydata()) == curves[0].nbytes
    (predicted,) = artists(figure, "curve-predicted")
    assert to_hex(predicted.get_markerfacecolor()) == LIGHT.ground


EMPTY = Recording("cpu", "measured", {"parameters": 1}, (), (), {})
REFUSED = {
    "no recording": (lambda: show.memory(), ValueError, "at least one recording"),
    "not a recording": (lambda: show.memory(3), TypeError, r"recordings\[0\] must be a Recording .* got int"),
    "empty": (lambda: show.memory(EMPTY), ValueError, r"recordings\[0\] is empty: 0 allocations in 0 phases"),
    "empty lives": (lambda: show.life_bars(EMPTY), ValueError, "is empty"),
    "format": (lambda: show.memory(chain(2), path="a.jpeg"), ValueError, "one of .png, .svg, got 'a.jpeg'"),
    "theme": (lambda: show.memory(chain(2), theme="blue"), ValueError, "one of 'light', 'dark', got 'blue'"),
    "names": (lambda: show.memory(chain(2), names=("a", "b")), ValueError, r"one per recording \(1\), got 2"),
    "budget": (lambda: show.memory(chain(2), budget="much"), ValueError, "budget must be"),
    "largest": (lambda: show.life_bars(chain(2), largest=0), ValueError, "largest must be an int of at least 1"),
    "no points": (lambda: show.tradeoff([]), ValueError, "points is empty"),
    "point": (lambda: show.tradeoff([1]), TypeError, "must be fused_remat.show.Point, got int"),
    "source": (lambda: show.tradeoff([show.Point(1, 1.0, "guessed")]), ValueError, "got 'guessed'"),
    "nan": (lambda: show.tradeoff([show.Point(1, math.nan, "measured")]), ValueError, "finite cost"),
    "cost": (lambda: show.tradeoff(POINTS, cost="euros"), ValueError, "cost must be one of 'flop', 'seconds'"),
    "no curves": (lambda: show.growth([]), ValueError, "profile with sweep="),
    "one size": (lambda: show.growth([show.Curve("batch", (1,), (1,))]), ValueError, "at least two sizes"),
    "no bytes": (lambda: show.growth([show.Curve("batch", (1, 2), (0, 1))]), ValueError, "at least 1"),
    "nothing": (lambda: show.write_report("a.html"), ValueError, "give profile=, plan= or recordings="),
    "page format": (lambda: show.write_report("a.pdf", recordings=chain(2)), ValueError, "path must end in .html"),
    "empty in a page": (lambda: show.write_report("a.html", recordings={"x": EMPTY}), ValueError, r"\['x'\] is empty"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_refused_before_anything_is_written(case, tmp_path, monkeypatch):
    call, error, says = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=says):
        call()
    assert not list(tmp_path.iterdir())


def test_a_recording_without_lives_says_so():
    allocation = Allocation(5, 0.0, 1.0, "temporary", "", "forward")
    bare = Recording("cpu", "measured", {}, (allocation,), (), {"forward": (0.0, 2.0)})
    with pytest.raises(ValueError, match="no kept and no rebuilt activation"):
        show.life_bars(bare)
    show.memory(bare)


def test_missing_matplotlib_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pictures need matplotlib.* pip install 'fused_remat\[bench\]'"):
        show.memory(chain(2))
    assert "R rebuilt" in show.strip({"layers": {"mlp": ()}})


def test_pictures_leave_no_state_and_are_the_same_every_time(tmp_path):
    from matplotlib._pylab_helpers import Gcf

    before, figures = {k: v for k, v in matplotlib.rcParams.items() if k != "backend"}, len(Gcf.figs)
    made = {}
    for suffix in ("png", "svg"):
        for number in range(2):
            path = tmp_path / f"{number}.{suffix}"
            show.memory(chain(12), budget="12MiB", path=path, theme="dark")
            made[suffix, number] = path.read_bytes()
        assert made[suffix, 0] == made[suffix, 1]
    assert made["png", 0].startswith(b"\x89PNG\r\n") and made["svg", 0].startswith(b"<?xml")
    assert {k: matplotlib.rcParams[k] for k in before} == before and len(Gcf.figs) == figures
    figure = show.memory(chain(12), budget="12MiB", theme="dark")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    assert buffer.getvalue() == made["png", 0]  # a figure looks the same outside of our style


def test_names_that_the_font_lacks_or_that_look_like_formulas_are_drawn(caplog):
    recording = chain(3)
    allocations = tuple(replace(a, module=f"日本.$x$.{a.module}<&>") for a in recording.allocations)
    figure = show.memory(replace(recording, allocations=allocations))
    texts = "".join(text.get_text() for text in figure.axes[0].texts)
    assert r"\u65e5\u672c.$x$.layers" in texts
    show.life_bars(replace(recording, allocations=allocations))
    assert not [record for record in caplog.records if record.name.startswith("matplotlib")]


def test_labels():
    assert drawable("a" * 60, 11) == "aaaaa…aaaaa" and drawable("short") == "short"
    assert [format_cost("flop", 6.4e9), format_cost("seconds", 0.0125)] == ["6.4 GFLOP", "12.5 ms"]
    assert [format_cost("flop", n) for n in (0, 999, 999.6, 1e3)] == ["0 FLOP", "999 FLOP", "1 kFLOP", "1 kFLOP"]
