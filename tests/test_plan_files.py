"""Plans as files: the same bytes every time, for the model that they were made for and for no other."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import pickle

import pytest
import torch
from plan_cases import Case, Listed, applied, assert_stock_results, drawn, peak_of, planned
from policy_cases import MLPBlock, seeded, state_of
from torch import nn

import fused_remat
from fused_remat.plan import InfeasibleBudget, Plan

CASE = Case(lambda: Listed(3), (drawn(2, 64, 8),))


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """The models are small."""


@pytest.fixture(scope="module")
def measured() -> Plan:
    return planned(CASE, "min")


@pytest.fixture(scope="module")
def predicted() -> Plan:
    return planned(CASE, "min", fake=True)


def test_files_round_trip_byte_for_byte(measured, tmp_path):
    text = measured.to_json()
    path = tmp_path / "plan.json"
    measured.save(path)
    assert path.read_bytes() == text.encode()
    for loaded in (Plan.load(path), Plan.load(str(path)), Plan.from_json(text), Plan.from_dict(json.loads(text))):
        assert loaded == measured and loaded.to_json() == text
        assert loaded.explain() == measured.explain() == str(loaded)
    assert json.loads(text)["measured"]["source"] == "measured"


@pytest.mark.parametrize("fake", [True, False])
def test_the_same_inputs_give_the_same_bytes(fake, measured, predicted):
    again = planned(CASE, "min", fake=fake)
    before = predicted if fake else measured
    one, other = again.to_dict(), before.to_dict()
    if not fake:  # when something small is freed may differ from run to run
        assert one.pop("sketch").keys() == other.pop("sketch").keys()
    assert json.dumps(one) == json.dumps(other)
    assert (again.measured is None) == fake and again.assignment == before.assignment
    assert ("not measured" in again.explain()) == fake


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Listed(4), "blocks.*: planned 3 x policy_cases.MLPBlock, here 4 x policy_cases.MLPBlock"),
        (lambda: nn.Sequential(*(MLPBlock() for _ in range(3))), "the model itself: planned plan_cases.Listed, here"),
        (lambda: Listed(3).half(), "inlet.weight: planned [32, 8] float32, here [32, 8] float16"),
        (lambda: swapped(nn.ReLU()), "blocks.*.mlp.*: planned "),
        (lambda: swapped_inlet(), "inlet.bias: planned [32] float32, here nothing"),
    ],
)
def test_another_model_is_refused_and_left_alone(make, says, predicted):
    model = make()
    before = state_of(model)
    with pytest.raises(ValueError, match=r"the plan is for another model \(nothing was changed\)") as raised:
        predicted.apply(model)
    assert says in str(raised.value)
    with pytest.raises(ValueError):
        fused_remat.convert(model, policy=predicted)
    assert state_of(model) == before


def swapped(activation: nn.Module) -> nn.Module:
    model = Listed(3)
    model.blocks[1].mlp[1] = activation
    return model


def swapped_inlet() -> nn.Module:
    model = Listed(3)
    model.inlet = nn.Linear(8, 32, bias=False)
    return model


def test_plans_are_applied_and_taken_back(measured):
    model = CASE.model()
    before, whole = state_of(model), peak_of(CASE, model)
    loaded = Plan.from_json(measured.to_json())
    with pytest.raises(ValueError, match=r"pass the model: plan\.apply\(model\)"):
        loaded.apply()
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got int"):
        loaded.apply(3)
    report = loaded.apply(model)
    assert peak_of(CASE, model) == measured.measured.peak < whole
    assert report.converted and "region" in str(report) + "mlp"
    report.revert()
    assert state_of(model) == before and peak_of(CASE, model) == whole
    # Other weights are no other model, and neither is one that is converted or planned already.
    other = seeded(CASE.make, seed=9)
    fused_remat.convert(other)
    loaded.apply(other)
    loaded.apply(other)
    assert peak_of(CASE, other) == measured.measured.peak


def test_the_model_is_held_weakly():
    model = CASE.model()
    found = planned(CASE, "min", model, fake=True)
    found.apply().revert()
    del model
    with pytest.raises(ValueError, match="its model is gone"):
        found.apply()


def test_pickles_hold_the_plan_without_its_model():
    model = CASE.model()
    found = planned(CASE, "min", model, fake=True)
    file = io.BytesIO()
    torch.save({"plan": found}, file)
    file.seek(0)
    loaded = [pickle.loads(pickle.dumps(found, protocol)) for protocol in (0, 2, pickle.HIGHEST_PROTOCOL)]
    for one in (*loaded, torch.load(file, weights_only=False)["plan"]):
        assert one == found and one.to_json() == found.to_json()
        with pytest.raises(ValueError, match=r"pass the model: plan\.apply\(model\)"):
            one.apply()
    assert loaded[0].apply(model).converted
    for copied in (copy.copy(found), copy.deepcopy(found)):  # in this process the model is still there
        assert copied == found
        copied.apply().revert()


def test_convert_takes_a_plan(measured):
    one, other = CASE.model(), applied(CASE, measured)
    fused_remat.convert(one, policy=measured)
    assert [row[:3] for row in state_of(one)] == [row[:3] for row in state_of(other)] or repr(one) == repr(other)
    assert peak_of(CASE, one) == measured.measured.peak
    assert_stock_results(CASE, one)


def test_a_plan_survives_the_state_dict(measured):
    model, stock = applied(CASE, measured), CASE.model()
    assert list(model.state_dict()) == list(stock.state_dict())
    model.load_state_dict(stock.state_dict())


def test_the_table_tells_units_peaks_and_neighbours(measured):
    text = measured.explain()
    for said in (
        'plan for the budget "min"', "device cpu", "fewest FLOP redone", "kept each, predicted", "kept each, measured",
        "peak with everything as it is", "the peak (measured) consists of", "next faster plan", "outside of the units",
        "parameters, there before the step", "not in it",
    ):  # fmt: skip
        assert said.lower() in text.lower(), said
    assert "next smaller plan" not in text or measured.chosen + 1 < len(measured.front)
    assert text == measured.explain() and max(map(len, text.splitlines())) <= 110
    units = {unit.path for unit in measured.units}
    assert {"blocks.0", "blocks.1", "blocks.2"} <= units
    assert all(unit.letter in "KFR" for unit in measured.units)


def test_the_table_wraps_what_is_long_and_cuts_nothing(measured):
    words = [f"word{i}" for i in range(60)]
    path = ".".join(words[:20])
    unit = dataclasses.replace(measured.units[0], path=path, does=" ".join(words[20:40]))
    long = dataclasses.replace(
        measured, units=(unit, *measured.units[1:]), notes=(" ".join(words),), inputs=tuple(words[:30]),
        outside=((" ".join(words), 4096),), measured=dataclasses.replace(measured.measured, module=path),
    )  # fmt: skip
    text = long.explain()
    assert max(map(len, text.splitlines())) <= 110
    squeezed = "".join(text.split())
    assert squeezed.count("".join(words)) == 2  # the note, and what is outside
    for word in words:
        assert word in squeezed
    assert "\n  word" in text.partition("note:")[2]


def test_a_plan_has_a_sketch_of_the_step_that_it_was_chosen_by(measured, predicted):
    assert (measured.sketch.source, predicted.sketch.source) == ("measured", "predicted")
    for found in (measured, predicted):
        peak = found.measured or found.predicted
        assert (found.sketch.peak_bytes, found.sketch.kept_bytes) == (peak.peak, peak.kept)
        assert (found.sketch.peak_phase, found.sketch.peak_module) == (peak.phase, peak.module)
        assert found.sketch.rows and list(found.sketch.starts) == ["forward", "backward"]
    assert len(json.dumps(measured.to_dict()["sketch"])) < 40_000


def test_infeasible_budgets_travel_between_processes():
    error = InfeasibleBudget("too little", 1, 2, "measured")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.budget, copy.smallest, copy.source) == ("too little", 1, 2, "measured")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "expected a fused_remat plan of schema 1, got None, schema None"),
        ("[]", "expected a fused_remat plan"),
        ("3", "expected a fused_remat plan"),
        ("null", "expected a fused_remat plan"),
        ("", "JSON"),
        ("{", "JSON"),
        ('{"kind": "fused_remat plan", "schema": 2}', "schema 2"),
        ('{"kind": "fused_remat plan", "schema": 1}', "the plan has no 'assignment'"),
    ],
)
def test_what_is_no_plan_is_refused(text, says, tmp_path):
    with pytest.raises(ValueError) as raised:
        Plan.from_json(text)
    assert says in str(raised.value)
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError):
        Plan.load(tmp_path / "plan.json")


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "none.json")


@pytest.mark.parametrize("damage", ["assignment", "units", "front", "measured", "count", "chosen", "sketch"])
@pytest.mark.parametrize("value", [None, 7, "x", [3], {"a": 1}])
def test_damaged_files_are_refused_or_harmless(damage, value, predicted):
    """Whatever is in a field, there is a ValueError or a plan, and nothing else."""
    data = predicted.to_dict() | {damage: value}
    try:
        Plan.from_dict(data)
    except ValueError as error:
        assert str(error)


def test_planning_on_one_device_says_so_in_the_file(predicted):
    data = json.loads(predicted.to_json())
    assert data["device"] == "cpu" and data["versions"]["torch"] == torch.__version__
    assert data["inputs"] == ["[2, 64, 8] float32"]
