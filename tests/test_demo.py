"""The demo's example: its numbers, its steps and its words, against torch."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlp_cases import needs_extension

import fused_remat
from fused_remat import ops
from fused_remat.demo import mlp_example as mlp
from fused_remat.demo import observe as observing
from fused_remat.demo.observe import Observation, disagreements, observe
from fused_remat.demo.report import VALUES, columns, state_of, step_lines, to_dict, wrap
from fused_remat.demo.run import LARGEST, BadNumber, parse, run, steps, values_at
from fused_remat.demo.words import LANGUAGES, fill, fillings, shown, words

PROMISED = {2.0: (25.0, 40.0, 5.0), 0.0: (1.0, 0.0, 1.0), -3.0: (100.0, -120.0, 10.0)}  # x: z, dz/dx, b
BOTH = pytest.mark.parametrize("keep_b", [True, False], ids=["keep", "drop"])


# Numbers


@BOTH
@pytest.mark.parametrize("x", PROMISED)
def test_run_has_the_promised_numbers(x, keep_b):
    z, gradient, b = PROMISED[x]
    one = run(x, keep_b)
    assert (one.values["z"], one.values["dx"]) == (z, gradient)
    assert one.kept == ({"x": x, "b": b} if keep_b else {"x": x})
    assert one.redone == (() if keep_b else ("a", "b"))
    factors = [one.values[f"factor_{name}"] for name in "bax"]
    assert factors == [2 * b, 1, 2 * x] and math.prod(factors) == gradient


@BOTH
@pytest.mark.parametrize("x", PROMISED)
def test_torch_keeps_and_redoes_what_the_demo_says(x, keep_b):
    z, gradient, b = PROMISED[x]
    kept, redone = ((x, b), ()) if keep_b else ((x,), ("pow", "add"))
    assert observe(x, keep_b) == Observation(z, gradient, kept, redone)
    assert disagreements(run(x, keep_b), observe(x, keep_b)) == []


@BOTH
@settings(deadline=None, max_examples=50)
@given(x=st.floats(-1e77, 1e77))
@example(x=float(LARGEST))
@example(x=-float(LARGEST))
@example(x=5e-324)
@example(x=-0.0)
def test_any_x_agrees_with_autograd_to_the_last_bit(keep_b, x):
    one = run(x, keep_b)
    assert disagreements(one, observe(x, keep_b)) == []
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad((leaf.square() + 1).square(), leaf)
    assert one.values["dx"] == gradient.item()


def test_torch_without_early_stop_would_redo_z_too(monkeypatch):
    stop = observing.set_checkpoint_early_stop
    monkeypatch.setattr(observing, "set_checkpoint_early_stop", lambda _: stop(False))
    without = observe(2.0, keep_b=False)
    assert without.redone == ("pow", "add", "pow")
    assert disagreements(run(2.0, keep_b=False), without) == ["redone operations: the demo says 2, torch 3"]


def test_observe_works_where_gradients_are_off_and_leaves_the_setting_alone():
    with torch.no_grad():
        assert observe(2.0, keep_b=False).gradient == 40
        assert not torch.is_grad_enabled()


def test_disagreements_name_every_difference():
    wrong = disagreements(run(2.0, keep_b=True), Observation(26.0, 41.0, (2.0,), ("add",)))
    assert [text.partition(":")[0] for text in wrong] == ["z", "dz/dx", "kept values", "redone operations"]
    assert "(2.0, 5.0)" in wrong[2] and "(2.0,)" in wrong[2]


# What x may be


@pytest.mark.parametrize(
    ("text", "x"),
    [("2", 2), ("-3", -3), (" +.5 ", 0.5), ("5.", 5), ("1e3", 1000), ("-2.5E-3", -0.0025), ("\u22123", -3),
     ("\u30fc3", -3),     ("\uff0d\uff13", -3), ("-0", 0), ("1e-400", 0), (LARGEST, float(LARGEST))],
)  # fmt: skip
def test_parse_reads_numbers_as_people_type_them(text, x):
    assert parse(text) == x


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "empty"), ("  ", "empty"), ("two", "not a number"), ("0,5", "not a number"), ("1_000", "not a number"),
     ("0x10", "not a number"), ("1e", "not a number"), ("--1", "not a number"), (".", "not a number"),
     ("\u0663", "not a number"),     ("2\n3", "not a number"), ("nan", "not finite"), ("-Inf", "not finite"),
     ("infinity", "not finite"),
     ("1.2e77", "too large"), ("-1e200", "too large"), ("1e400", "too large")],
)  # fmt: skip
def test_parse_refuses_what_is_no_usable_number(text, why):
    with pytest.raises(BadNumber) as raised:
        parse(text)
    assert raised.value.why == why
    assert raised.value.got in (text, repr(float(text)) if why == "too large" else text)


@pytest.mark.parametrize("x", [math.nan, math.inf, -math.inf])
def test_values_refuse_what_is_not_finite(x):
    with pytest.raises(BadNumber, match="not finite"):
        values_at(x)


# Steps


def test_steps_of_keeping_b():
    assert [(step.name, step.computes, "".join(step.exists), "".join(step.kept)) for step in steps(True)] == [
        ("start", None, "x", ""),
        ("forward_a", "a", "xa", "x"),
        ("forward_b", "b", "xab", "x"),
        ("forward_z_keep", "z", "xabz", "xb"),
        ("forward_over_keep", None, "xbz", "xb"),
        ("backward_b_keep", "db", "xz", "x"),
        ("backward_a", "da", "xz", "x"),
        ("backward_x", "dx", "xz", ""),
    ]


def test_steps_of_dropping_b():
    assert [
        (
            step.name,
            step.computes,
            "".join(step.exists),
            "".join(step.rebuilt),
            "".join(step.freed),
            "".join(step.redone),
        )
        for step in steps(False)
    ] == [
        ("start", None, "x", "", "", ""),
        ("forward_a", "a", "xa", "", "", ""),
        ("forward_b", "b", "xab", "", "", ""),
        ("forward_z_drop", "z", "xabz", "", "", ""),
        ("forward_over_drop", None, "xz", "", "ab", ""),
        ("redo_a", "a", "xaz", "a", "", "a"),
        ("redo_b", "b", "xabz", "ab", "", "ab"),
        ("backward_b_drop", "db", "xz", "", "ab", "ab"),
        ("backward_a", "da", "xz", "", "", "ab"),
        ("backward_x", "dx", "xz", "", "", "ab"),
    ]


@BOTH
def test_counter_grows_in_forward_and_stands_still_in_backward(keep_b):
    script = steps(keep_b)
    assert all(step.counted == step.kept for step in script if step.phase != "backward")
    backward = [step for step in script if step.phase == "backward"]
    assert {step.counted for step in backward} == {("x", "b") if keep_b else ("x",)}
    assert [step.gradients for step in backward][-3:] == [("db",), ("db", "da"), ("db", "da", "dx")]


def test_states_tell_kept_rebuilt_and_freed_apart():
    script = steps(False)
    states = {step.name: [state_of(step, value, script) for value in VALUES] for step in script}
    assert states["start"] == ["exists", "absent", "absent", "absent"]
    assert states["forward_z_drop"] == ["kept", "exists", "exists", "exists"]
    assert states["forward_over_drop"] == ["kept", "freed", "freed", "exists"]
    assert states["redo_b"] == ["kept", "rebuilt", "rebuilt", "exists"]
    assert states["backward_x"] == ["exists", "freed", "freed", "exists"]


# Words


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_has_the_same_words_and_fillings(language):
    table, english = words(language), words("en")
    assert list(table) == list(english)
    for name, text in table.items():
        assert text and (text.strip() == text or name == "separator"), name
        assert set(re.findall(r"\{[^}]+\}", text)) == set(re.findall(r"\{[^}]+\}", english[name])), name
        assert "checkpoint" not in text.lower(), name
    if language != "en":
        same = {name for name in table if table[name] == english[name]}
        assert same <= {"separator", "x_label", "mlp_fused", "measured"}


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("x", [2.0, -3.0, -1.2345678901234e76, 0.1])
@BOTH
def test_every_step_fits_a_terminal_of_80_columns(language, x, keep_b):
    one = run(x, keep_b)
    for number, step in enumerate(one.steps):
        lines = step_lines(words(language), one, number)
        assert max(map(columns, lines)) < 80
        text = "".join(lines)
        assert not re.search(r"[{}]|\b(nan|inf)\b", text, re.IGNORECASE)
        assert all(f"{value} = {shown(one.values[value])}" in text for value in step.exists)


def test_wrap_breaks_at_spaces_between_wide_characters_and_never_inside_a_product():
    assert wrap("one two three", 7) == ["one two", "three"]
    assert wrap("aaaa b = 2 · 5 = 10.", 12) == ["aaaa b", "= 2 · 5", "= 10."]
    assert wrap("逆伝播が終わりました。勾配", 20) == ["逆伝播が終わりまし", "た。勾配"]
    assert wrap("あいうえ。お", 8) == ["あいう", "え。お"]
    assert wrap("") == [""]
    text = words("ja")["lead"]
    assert "".join(wrap(text, 30)).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (-0.0, "0"), (25, "25"), (-120.0, "-120"), (0.1 * 0.1, "0.01"), (1 / 3, "0.3333333333"),
     (1e-5, "0.00001"),     (1e-6, "1e-6"), (-1.5e-7, "-1.5e-7"), (999999999999, "1e+12"),
     (123456789012, "123456789000"), (1e12, "1e+12"),
     (1234567890.5, "1234567891"), (-1234567890.5, "-1234567891"), (1.1e77, "1.1e+77")],
)  # fmt: skip
def test_numbers_are_shown_with_ten_digits(number, text):
    assert shown(number) == text


def test_negative_values_are_put_in_brackets_where_they_are_multiplied():
    texts = fillings({"x": -3.0, "a": 9.0})
    assert fill("{(x)}² = {a}, {x}, {(a)}", texts) == "(-3)² = 9, -3, 9"
    with pytest.raises(KeyError):
        fill("{b}", texts)


def test_json_is_whole_and_the_same_every_time():
    runs = [run(-3.0, keep_b) for keep_b in (True, False)]
    observed = {keep_b: observe(-3.0, keep_b) for keep_b in (True, False)}
    found = to_dict(words("en"), "en", runs, observed)
    assert json.dumps(found) == json.dumps(to_dict(words("en"), "en", runs, observed))
    assert found["schema"] == 1 and found["x"] == -3 and found["language"] == "en"
    assert "no measurement of peak memory" in found["left_out"]
    kept, dropped = found["variants"]
    assert (kept["b"], kept["kept"], kept["kept_count"], kept["redone_count"]) == ("kept", {"x": -3, "b": 10}, 2, 0)
    assert (dropped["b"], dropped["kept"], dropped["redone"]) == ("dropped", {"x": -3}, ["a", "b"])
    assert dropped["torch"] == {"z": 100, "gradient": -120, "kept": [-3], "redone": ["pow", "add"]}
    redo = dropped["steps"][6]
    assert redo["computes"] == {"name": "b", "value": 10} and redo["exists"] == {"x": -3, "a": 9, "b": 10, "z": 100}
    assert redo["counter"] == {"kept": ["x"], "redone": ["a", "b"]} and redo["number"] == 7
    assert dropped["steps"][-1]["gradients"] == {"dz/db": 20, "dz/da": 20, "dz/dx": -120}
    assert "2 · (-3) = -120" in dropped["steps"][-1]["text"]


# The MLP


def test_mlp_by_formula():
    found = mlp.by_formula()
    assert not found.measured and found.peak_plain is None and found.peak_fused is None
    assert (found.kept_plain, found.kept_fused) == (65536 + 2 * 1048576, 65536)
    assert found.chunks == 4 and found.workspace_bytes == mlp.WORKSPACE


@pytest.mark.skipif(needs_extension is not None, reason=str(needs_extension))
def test_mlp_measured_agrees_with_the_formula_and_keeps_the_gradients():
    found, formula = mlp.mlp_example(), mlp.by_formula()
    assert found.measured
    assert (found.kept_plain, found.kept_fused) == (formula.kept_plain, formula.kept_fused)
    assert found.workspace_bytes <= mlp.WORKSPACE
    assert found.kept_fused < found.peak_fused <= found.kept_fused + mlp.WORKSPACE
    assert found.peak_plain > 3 * mlp.full_bytes() * 0.98
    buffers = 2 * mlp.TOKENS * found.chunk_features * 4
    assert buffers <= found.workspace_bytes <= buffers * 1.05
    assert found == mlp.mlp_example()


def test_mlp_without_operators_is_by_formula(monkeypatch):
    monkeypatch.setattr(ops, "ready", lambda: "no compiler")
    monkeypatch.setattr(fused_remat, "measure", None)
    assert mlp.mlp_example() == mlp.by_formula()


def test_mlp_steps_go_through_every_chunk_once():
    script = mlp.mlp_steps(5)
    assert len(script) == 2 + 3 * 5 + 1
    assert [step.chunk for step in script if step.name == "mlp_up"] == [1, 2, 3, 4, 5]
    assert [step.done for step in script if step.name == "mlp_use"] == [1, 2, 3, 4, 5]
    assert script[-1].rebuilt == script[-1].done == 5
    assert {step.workspace for step in script} == {(), ("up",), ("hidden", "dup")}
