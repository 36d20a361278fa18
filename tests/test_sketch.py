"""A step in few numbers: what is drawn from a sketch is what is drawn from its recording."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

pytest.importorskip("matplotlib")

import numpy as np
from show_cases import UNIT, chain

from fused_remat import show
from fused_remat.plan.peak import Peak, stage_timeline
from fused_remat.recording import Allocation, Recording
from fused_remat.show.lives import lives
from fused_remat.show.sketch import LANES, ROWS, SPANS, Sketch, _chosen
from fused_remat.show.stack import layout, numbers, positions, stack

REGIONS = tuple(tuple(f"layers.{first + i}" for i in range(4)) for first in (0, 4, 8))


def long(layers: int = 500) -> Recording:
    """60 events per layer of forward, one of them far above all others, and six kept values of each layer."""
    rng, made = random.Random(0), []
    for i in range(30 * layers):
        made.append(
            Allocation(rng.randrange(1, 999), 2 * i + 0.1, 2 * i + 1, "temporary", f"layers.{i // 30}", "forward")
        )
    made[777] = replace(made[777], nbytes=10**6)
    for i in range(layers):
        for j in range(6):
            born, died = 60 * i + j + 0.6, 120 * layers - 60 * i - j
            made.append(Allocation(64 + j, born, died, "kept", f"layers.{i}.{'abcdefghijklmno'[j]}", "forward"))
    phases = {"forward": (0.0, 60.0 * layers), "backward": (60.0 * layers, 120.0 * layers)}
    return Recording("cpu", "predicted", {"parameters": 5}, tuple(sorted(made, key=lambda a: a.born)), (), phases)


@pytest.mark.parametrize("recording", [chain(12), chain(12, segment=4), long()], ids=["chain", "regions", "long"])
def test_the_stack_of_a_sketch_is_that_of_its_recording_at_fewer_events(recording):
    sketch = Sketch.of(recording)
    whole, thin = stack(recording), stack(sketch)
    assert thin.kinds == whole.kinds and len(thin.times) <= 2 * SPANS + 10
    assert np.array_equal(thin.levels, whole.levels[thin.events]) and np.array_equal(
        thin.totals, whole.totals[thin.events]
    )
    assert sketch.peak_bytes == recording.peak_bytes and thin.events[thin.top] == whole.top
    assert {p: int(thin.events[i]) for p, i in thin.starts.items()} == dict(whole.starts) == dict(sketch.starts)
    assert layout([thin]) == layout([whole])
    where = positions(whole, *layout([whole]))
    assert positions(thin, *layout([thin])) == pytest.approx(where[thin.events])
    size = -(-len(whole.times) // SPANS)
    for first in range(0, len(whole.times), size):  # no stretch loses its lowest and its highest
        part = np.arange(first, min(first + size, len(whole.times)))
        inside = part[np.isin(part, thin.events)]
        for extreme in (np.min, np.max):
            assert extreme(whole.totals[inside]) == extreme(whole.totals[part])
    facts, of_sketch = numbers(recording, whole, 9 * UNIT), numbers(sketch, thin, 9 * UNIT)
    exact = [*("device", "source", "peak_bytes", "peak_phase", "peak_module", "kept_bytes"),
             *("bytes_at_peak", "budget_bytes", "events", "phase_peak_bytes")]  # fmt: skip
    assert {name: of_sketch[name] for name in exact} == {name: facts[name] for name in exact}


def test_a_sketch_is_small_json_however_long_the_step_is():
    sketch = Sketch.of(long())
    text = json.dumps(sketch.to_dict())
    assert Sketch.from_dict(json.loads(text)) == sketch and len(text) < 40_000
    assert len(sketch.rows) == 6 and all(row.values == 500 and len(row.lives) == LANES for row in sketch.rows)
    assert sum(row.nbytes for row in sketch.rows) == 500 * sum(range(64, 70)) and sketch.left_out == 0
    for recording in (chain(40), chain(40, segment=5)):
        made = Sketch.of(recording)
        assert Sketch.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_the_smallest_lives_are_left_out_and_counted():
    recording = chain(ROWS + 3)
    kept = tuple(
        replace(a, module=f"m{i}", nbytes=UNIT + i) if a.kind == "kept" else a
        for i, a in enumerate(recording.allocations)
    )
    recording = replace(recording, allocations=kept)
    sketch = Sketch.of(recording)
    nbytes = sorted(life.nbytes for life in lives(recording))
    assert (len(sketch.rows), sketch.left_out, sketch.left_out_bytes) == (ROWS, 3, sum(nbytes[:3]))
    figure = show.life_bars(sketch)
    assert figure.axes[0].get_title(loc="left").endswith("; 3 smaller rows left out")
    assert len(show.life_bars(sketch, largest=2).axes[0].get_yticklabels()) == 2


def bars(figure) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for part in figure.findobj(lambda a: (a.get_gid() or "").startswith("life-") and hasattr(a, "get_paths")):
        across = part.get_paths()[0].vertices[:, 0]
        found.setdefault(part.get_gid(), []).append((float(across.min()), float(across.max())))
    return found


def with_noise(recording: Recording, each: int = 20) -> Recording:
    """`each` short-lived bytes between any two events of the recording, so that its sketch has to leave events out."""
    scale = 2 * each + 1
    ends = {phase: (first * scale, last * scale) for phase, (first, last) in recording.phases.items()}
    made = [replace(a, born=a.born * scale, died=a.died * scale) for a in recording.allocations]
    for i in range(each * int(recording.phases["optimizer"][1])):
        born = i // each * scale + 2 * (i % each) + 1
        phase = next(phase for phase, (_, last) in ends.items() if born <= last)
        made.append(Allocation(1, born, born + 1, "temporary", "noise", phase))
    return replace(recording, allocations=tuple(sorted(made, key=lambda a: a.born)), phases=ends)


def test_the_highest_of_a_phase_stays_where_it_shares_its_stretch_with_a_higher_one():
    totals = [100] * 5 + [20, 10, 50] + [30] * (10 * SPANS - 8)
    assert {0, 4, 5, 7} <= set(_chosen(totals, [0, 5]))


def test_life_bars_of_a_sketch_lie_where_those_of_the_recording_do():
    recording = with_noise(chain(12, segment=4))
    assert len(Sketch.of(recording).events) < len(recording.timeline()) // 5
    drawn, from_sketch = (
        bars(show.life_bars(one, regions=REGIONS)) for one in (recording, Sketch.of(recording, REGIONS))
    )
    assert {state: len(ends) for state, ends in drawn.items()} == {"life-kept": 3, "life-dropped": 9, "life-rebuilt": 9}
    for state, ends in drawn.items():
        assert np.array(from_sketch[state]) == pytest.approx(np.array(ends))


def test_memory_of_a_sketch_names_the_peak_and_draws_the_budget():
    sketch = Sketch.of(chain(12, segment=4, source="predicted"))
    figure = show.memory(sketch, budget="12MiB")
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert (
        "budget 12.0 MiB" in texts
        and f"peak {sketch.peak_bytes / UNIT:.1f} MiB\nbackward of {sketch.peak_module}" in texts
    )
    assert figure.axes[0].get_title(loc="left") == "Memory over one step, predicted on cpu"


def test_a_pipeline_stage_is_sketched_with_what_the_others_hold():
    recording = chain(6)
    for in_flight in (1, 3):
        sketch = Sketch.of(recording, timeline=stage_timeline(recording, in_flight))
        assert sketch.peak_bytes == Peak.of(recording, in_flight).peak
    assert max(sketch.levels["kept"]) == 3 * recording.kept_bytes
    assert set(sketch.levels["inputs"]) == {3 * UNIT // 2, UNIT // 2}  # those of the others are gone in the optimizer's


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"events": [0, 5, 5]}, "not in order"),
        ({"events": []}, "not in order"),
        ({"starts": {}}, "not in order"),
        ({"bytes": {}}, "bytes of kinds among"),
        ({"bytes": {"kept": [1]}}, "bytes of kinds among"),
        ({"bytes": {"dreams": [0] * 1000}}, "bytes of kinds among"),
        ({"lives": [{"name": "a", "bytes_each": 1, "values": 1, "rebuilt": 0,
                     "shown": [{"name": "a", "rebuilt_from": "", "segments": [[0, 1, "sold"]]}]}]}, "states among"),
    ],
)  # fmt: skip
def test_damaged_sketches_are_refused(damage, says):
    data = Sketch.of(chain(3)).to_dict()
    with pytest.raises(ValueError, match=says):
        Sketch.from_dict(data | damage)


def test_a_page_of_a_plan_shows_its_step_from_the_sketch(tmp_path):
    from types import SimpleNamespace

    from fused_remat.plan import FrontPoint
    from fused_remat.policy import Assignment

    sketch = Sketch.of(chain(12, segment=4), REGIONS)
    plan = SimpleNamespace(
        front=(FrontPoint(17 * UNIT, 0, None, True), FrontPoint(15 * UNIT, 10**9, 15 * UNIT)), chosen=1,
        everything_kept=17 * UNIT, minimise="flops", budget_bytes=16 * UNIT, explain=lambda: "the plan",
        assignment=Assignment({}, REGIONS), sketch=sketch,
    )  # fmt: skip
    text = show.write_report(tmp_path / "plan.html", plan=plan).read_text("utf-8")
    assert f"Memory over one step, measured on cpu: peak {sketch.peak_bytes / UNIT:.1f} MiB in backward" in text
    assert "The budget is 16.0 MiB" in text and "3 values kept until backward uses them, 9 dropped and rebuilt" in text
    for heading in (
        "Memory over one step",
        "Lives of activations",
        "Cost against peak memory",
        "What every layer does",
    ):
        assert f">{heading}</h2>" in text
