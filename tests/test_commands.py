"""`fused-remat profile`, `plan`, `explain`, `batch` and `audit`: options, output and exit codes."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from fused_remat import cli

OWN = ("--model", "command_models:Blocks", "--inputs", '[{"shape": [64, 32]}]')
# parameters of four blocks of width 32: LayerNorm 64, linears 32 x 128 + 128 and 128 x 32 + 32, four bytes each
PARAMETER_BYTES = 4 * (64 + 2 * 32 * 128 + 128 + 32) * 4


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs `fused-remat` with arguments in an empty folder."""
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    app, runner = cli.build_app(), CliRunner()
    return lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments])


def answer(done) -> dict:
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


# profile ------------------------------------------------------------------------------------------------------------


def test_profile_prints_a_table_or_json(run):
    done = run("profile", *OWN)
    assert done.exit_code == 0, done.output
    assert "Verdict:" in done.stdout and "kept activations" in done.stdout
    found = answer(run("profile", *OWN, "--json"))
    assert found["recording"]["source"] == "measured"
    static = found["recording"]["static"]
    assert static["parameters"] == PARAMETER_BYTES
    assert 2 * PARAMETER_BYTES <= static["optimizer"] <= 2 * PARAMETER_BYTES + 1024  # AdamW: two moments, and counters


def test_profile_takes_a_loss_an_optimizer_and_batches_of_ones_own(run):
    arguments = ("--loss", "command_models:absolute", "--optimizer", "command_models:momentum")
    named = ("--model", "command_models:Blocks", "--batch", "command_models:batch")
    found = answer(run("profile", *named, *arguments, "--json"))
    assert found["recording"]["static"]["optimizer"] == PARAMETER_BYTES
    assert answer(run("profile", *named, "--optimizer", "none", "--json"))["recording"]["static"]["optimizer"] == 0


def test_profile_predicts_without_memory(run):
    wide = ("--model", "command_models:Blocks", "--config", '{"width": 8192, "depth": 8}')
    found = answer(run("profile", *wide, "--inputs", '[{"shape": [4096, 8192]}]', "--fake", "--json"))
    assert found["recording"]["source"] == "predicted"
    assert found["recording"]["static"]["parameters"] > 8 * 2**30


@pytest.mark.parametrize(
    ("arguments", "words"),
    (
        (("--model", "command_models:Blocks"), "needs inputs"),
        (("--model", "command_models:Nothing", *OWN[2:]), "has no 'Nothing'"),
        (("--model", "vit", "--inputs", "[]"), "leave --inputs out"),
        (("--model", "resnet"), "expected vit, llama or module:callable"),
        ((*OWN, "--optimizer", "lion"), "expected adamw, sgd, none or module:callable"),
        ((*OWN, "--sweep", "depth"), "expected batch, sequence, resolution"),
        ((*OWN, "--device", "tpu"), "expected cpu or cuda"),
        ((*OWN, "--html", "missing/report.html"), "a folder that exists"),
    ),
)
def test_a_wrong_option_exits_with_2_and_says_what_is_expected(run, arguments, words):
    done = run("profile", *arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.output.replace("│", " ").split())


def test_profile_predicts_the_largest_size_within_a_limit(run):
    sweep = ("--sweep", "batch", "--fake")
    found = answer(run("profile", *OWN, *sweep, "--largest-size", "700KiB", "--json"))["largest_size"]
    assert found["budget_bytes"] == 700 * 1024 and 0 < found["predicted"]["batch"] < 64
    done = run("profile", *OWN, *sweep, "--largest-size", "700KiB")
    line = f"Largest batch with a predicted peak within 700.0 KiB: {found['predicted']['batch']} (predicted, not run)."
    assert done.exit_code == 0 and done.stdout.splitlines()[-1] == line
    done = run("profile", *OWN, *sweep, "--largest-size", 4096)
    assert done.exit_code == 1 and "No batch at all is predicted to have a peak within 4.0 KiB." in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--largest-size", "6GiB"), "add --sweep batch"), (("--sweep", "batch", "--largest-size", "much"), "6GiB")],
)
def test_a_largest_size_needs_a_sweep_and_bytes(run, arguments, words):
    done = run("profile", *OWN, *arguments)
    assert done.exit_code == 2 and words in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize("command", [("profile",), ("plan", "--budget", "min")])
def test_progress_goes_to_stderr_and_json_stays_pure(run, monkeypatch, command):
    from fused_remat.commands import finish

    monkeypatch.setattr(finish, "SECONDS", 0.0)
    done = run(*command, *OWN, "--fake", "--json")
    assert isinstance(answer(done), dict)
    lines = done.stderr.splitlines()
    assert lines[0].startswith(("profiling (0 of 3): predicting", "planning (0 of 1): predicting"))
    assert ": done" in lines[-1] and len(lines) > 3


def test_a_model_that_fails_exits_with_3(run):
    done = run("profile", "--model", "command_models:Broken", "--inputs", '[{"shape": [2, 4]}]')
    assert done.exit_code == 3
    assert "could not measure" in done.output and "the sensor is unplugged" in done.output


@pytest.mark.parametrize(
    ("model", "says"),
    [("Broken", "RuntimeError: the sensor"), ("Missing", "KeyError: 'x'"), ("Quits", "SystemExit: 0")],
)
@pytest.mark.parametrize("command", [("profile",), ("plan", "--budget", "min")])
def test_what_a_model_raises_is_named(run, command, model, says):
    done = run(*command, "--model", f"command_models:{model}", "--inputs", '[{"shape": [2, 4]}]', "--json")
    assert done.exit_code == 3 and done.stdout == ""
    assert f"Error: could not measure: {says}" in done.stderr


def test_profile_writes_a_report(run, tmp_path):
    pytest.importorskip("matplotlib")
    done = run("profile", *OWN, "--html", tmp_path / "report.html")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for heading in ("Memory over one step", "Lives of activations", "Cost against peak memory", "Bytes by module"):
        assert f">{heading}</h2>" in page
    about = "One optimizer step of Blocks on cpu; parameters: 33,664 float32; inputs: float32 [64, 32]; loss: "
    assert about in page and "optimizer: AdamW; torch 2." in page and "fused_remat 0." in page
    assert "as it is, measured: " in page and "converted, predicted: " in page
    assert "blocks.0-3 (x4)" in page


# plan and explain ---------------------------------------------------------------------------------------------------


def pictures(name: str) -> tuple[str, ...]:
    """The option for a report, where it can be drawn."""
    return ("--html", name) if importlib.util.find_spec("matplotlib") else ()


def test_a_plan_stays_within_its_budget_and_can_be_explained(run, tmp_path):
    whole = answer(run("profile", *OWN, "--json"))["recording"]["peak_bytes"]
    smallest = answer(run("plan", *OWN, "--budget", "min", "--out", "plan.json", "--json", *pictures("plan.html")))
    assert smallest["measured"]["peak_bytes"] < whole
    half_way = (smallest["measured"]["peak_bytes"] + whole) // 2
    planned = answer(run("plan", *OWN, "--budget", half_way, "--json"))
    assert planned["measured"]["peak_bytes"] <= half_way
    written = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert written == smallest
    done = run("explain", "plan.json", *pictures("again.html"))
    assert done.exit_code == 0, done.output
    assert "measured" in done.stdout
    assert answer(run("explain", "plan.json", "--json")) == smallest
    if pictures("plan.html"):
        planned, explained = (
            (tmp_path / name).read_text(encoding="utf-8").partition("</h1>")[2] for name in ("plan.html", "again.html")
        )
        assert "Blocks; parameters: 33,664 float32; loss: " in planned and "optimizer: AdamW" in planned
        assert planned == explained  # the file has all that the pictures need
        for heading in ("Memory over one step", "Lives of activations", "Cost against peak memory", "What every layer"):
            assert heading in planned
        assert "Memory over one step, measured on cpu: peak" in planned


def test_an_impossible_budget_exits_with_1_and_names_the_smallest_peak(run):
    done = run("plan", *OWN, "--budget", "1KiB")
    assert done.exit_code == 1
    assert "smallest" in done.output


@pytest.mark.parametrize(
    "arguments",
    (
        ("--budget", "lots"),
        ("--budget", "min", "--minimise", "sleep"),
        ("--budget", "min", "--in-flight", "0"),
        ("--budget", "min", "--minimise", "time", "--fake"),
    ),
)
def test_a_wrong_option_of_plan_exits_with_2(run, arguments):
    assert run("plan", *OWN, *arguments).exit_code == 2


def test_explain_refuses_what_is_no_plan(run, tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    assert run("explain", "plan.json").exit_code == 2
    assert run("explain", "missing.json").exit_code == 2


# batch --------------------------------------------------------------------------------------------------------------


def test_batch_finds_sizes_with_and_without_a_policy(run):
    found = answer(run("batch", *OWN, "--limit", "700KiB", "--largest", 64, "--json"))
    plain, full = (result["batch"] for result in found["results"])
    assert 0 < plain < full <= 64
    done = run("batch", *OWN, "--limit", "700KiB", "--largest", 64)
    assert done.exit_code == 0 and "everything" in done.stdout and "full" in done.stdout
    first = "Blocks on cpu; parameters: 33,664 float32; inputs: float32 [1, 32]; loss: "
    assert done.stdout.startswith(first) and "optimizer: AdamW; torch " in done.stdout.splitlines()[0]
    assert (found["about"]["batch"], found["about"]["inputs"][0]["shape"]) == (1, [1, 32])


def test_no_size_fits_exits_with_1(run):
    assert run("batch", *OWN, "--limit", "64KiB", "--policy", "full").exit_code == 1


def test_batch_needs_a_limit_on_a_cpu(run):
    done = run("batch", *OWN)
    assert done.exit_code == 2
    assert "limit" in done.output


# audit --------------------------------------------------------------------------------------------------------------


def test_audit_says_whether_each_layer_kept_what_was_promised(run):
    found = answer(run("audit", *OWN, "--policy", "full", "--json"))
    assert found["ok"] is True
    done = run("audit", *OWN, "--policy", "full")
    assert done.exit_code == 0 and "ok" in done.stdout


def test_audit_takes_a_plan_and_refuses_one_for_another_model(run):
    answer(run("plan", *OWN, "--budget", "min", "--out", "plan.json", "--json"))
    assert run("audit", *OWN, "--plan", "plan.json").exit_code == 0
    other = ("--model", "command_models:Blocks", "--config", '{"depth": 3}', "--inputs", '[{"shape": [64, 32]}]')
    done = run("audit", *other, "--plan", "plan.json")
    assert done.exit_code == 2


def test_audit_of_a_model_that_keeps_everything_by_policy_or_plan_is_ok(run):
    from fused_remat.plan import Plan
    from fused_remat.policy import Assignment

    answer(run("plan", *OWN, "--budget", "min", "--fake", "--out", "plan.json", "--json"))
    dataclasses.replace(Plan.load("plan.json"), assignment=Assignment()).save("plan.json")
    for how in (("--plan", "plan.json"), ("--policy", "everything")):
        found = answer(run("audit", *OWN, *how, "--json"))
        assert found["ok"] is True and found["rows"] == []
    done = run("audit", *OWN)
    assert done.exit_code == 1 and "convert the model first" in done.stdout


def test_audit_exits_with_1_for_a_layer_that_runs_its_own_code(run):
    done = run("audit", "--model", "command_models:hooked", "--inputs", '[{"shape": [64, 32]}]')
    assert done.exit_code == 1
    assert "hook" in done.output


def test_audit_names_what_ran(run):
    done = run("audit", *OWN, "--policy", "full")
    first = done.stdout.splitlines()[0]
    assert first.startswith("Blocks on cpu; parameters: 33,664 float32; inputs: float32 [64, 32]; loss: ")
    assert "optimizer: AdamW; torch " in first
    about = answer(run("audit", *OWN, "--policy", "full", "--json"))["about"]
    assert about["inputs"] == [{"name": "0", "shape": [64, 32], "dtype": "float32"}]
    assert about["versions"].keys() == {"fused_remat", "torch", "python"}


def test_audit_verifies_what_regions_rebuild(run):
    one = ("--model", "command_models:Drifting", "--inputs", '[{"shape": [64, 32]}]', "--policy", "sqrt")
    assert run("audit", *one).exit_code == 0
    done = run("audit", *one, "--verify", "once")
    assert done.exit_code == 3 and "the replay rebuilt other values" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--verify", "once"), "a --policy or --plan"), (("--policy", "full", "--verify", "twice"), "off, once, always")],
)
def test_a_wrong_verify_exits_with_2(run, arguments, words):
    done = run("audit", *OWN, *arguments)
    assert done.exit_code == 2 and words in " ".join(done.output.replace("│", " ").split())
