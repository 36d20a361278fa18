"""`fused-remat compare`, end to end on small sizes: its numbers, its files, its refusals."""

from __future__ import annotations

import base64
import csv
import json
import math
import socket
import warnings
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import fused_remat
from fused_remat import _extension
from fused_remat.budget import MIB
from fused_remat.compare.command import MODELS, compare, load_workload
from fused_remat.compare.evidence import describe_path, ran_compiled
from fused_remat.compare.page import page
from fused_remat.compare.picture import passes
from fused_remat.compare.report import Settings, notes, summary, table, table_rows, write_csv
from fused_remat.compare.results import ModelResult, spread
from fused_remat.compare.run import compare_model, work_units
from fused_remat.compare.train import rate_share
from fused_remat.compare.variants import CHECKPOINT, FUSED, STOCK, make_variants
from fused_remat.compare.workload import Workload
from fused_remat.measure import Timeline

CPU = torch.device("cpu")
STEPS = 3
WORKSPACE_MIB = 1
NAMES = [STOCK, CHECKPOINT, FUSED]

app = typer.Typer()
app.command()(compare)


SIZES = {
    "vit": {"batch_size": 32, "width": 64, "depth": 2},
    "llama": {"batch_size": 4, "length": 64, "width": 64, "depth": 2},
}


@pytest.fixture(scope="module", autouse=True)
def offline():
    """No way out to a network, and one thread: the sizes are small.

    Loads the extension first, whose warning (if it is missing) belongs to no test here.
    """

    def refuse(*_):
        raise AssertionError("compare opened a network connection")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        _extension.load()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=list(MODELS))
def small(request) -> type[Workload]:
    """The command's own workload, at test size while the fixture lasts."""
    for package in MODELS[request.param].packages:
        pytest.importorskip(package, reason=f"{request.param} needs the optional package", exc_type=ImportError)
    workload = load_workload(request.param)
    with pytest.MonkeyPatch.context() as patch:
        for size, value in SIZES[request.param].items():
            patch.setattr(workload, size, value)
        yield workload


@pytest.fixture(scope="module")
def report(small, tmp_path_factory) -> tuple[str, Path, str]:
    """(model, output folder, printed text) of one run of the command."""
    folder = tmp_path_factory.mktemp(small.name) / "made" / "on the way"
    options = {"--model": small.name, "--steps": STEPS, "--out": folder, "--seed": 5, "--workspace": WORKSPACE_MIB}
    run = CliRunner().invoke(app, [str(word) for pair in options.items() for word in pair])
    assert run.exit_code == 0, run.output
    return small.name, folder, run.output


@pytest.fixture(scope="module")
def result_and_progress(small) -> tuple[ModelResult, int]:
    """The same run again, through the Python function, and the units of work that it reported."""
    units = []
    with fused_remat.workspace(WORKSPACE_MIB * MIB):
        return compare_model(small(5, CPU), STEPS, lambda text, done: units.append(done)), sum(units)


@pytest.fixture(scope="module")
def result(result_and_progress) -> ModelResult:
    return result_and_progress[0]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_compare_writes_every_file(report):
    model, folder, output = report
    expected = {f"{model}.png", "losses.csv", "summary.csv", "summary.json", "report.html"}
    assert {path.name for path in folder.iterdir()} == expected
    assert (folder / f"{model}.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert all(name in output for name in expected)


def test_compare_losses_csv(report):
    model, folder, _ = report
    rows = _rows(folder / "losses.csv")
    assert list(rows[0]) == ["model", "step", "variant", "loss", "seconds"]
    seen = {(row["model"], int(row["step"]), row["variant"]) for row in rows}
    assert seen == {(model, step, name) for step in range(1, STEPS + 1) for name in NAMES}
    assert all(0.0 < float(row["loss"]) < 10.0 and 0.0 < float(row["seconds"]) < 1e4 for row in rows)


def test_compare_summary_csv_and_json_agree(report):
    model, folder, output = report
    rows = _rows(folder / "summary.csv")
    assert [row["variant"] for row in rows] == NAMES
    content = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert content["settings"]["seed"] == 5 and content["settings"]["steps"] == STEPS
    assert content["settings"]["versions"]["torch"] == torch.__version__
    (found,) = content["models"]
    assert [{key: str(value) for key, value in variant.items()} for variant in found["variants"]] == rows
    numbers = [value for row in rows for key, value in row.items() if key not in ("model", "variant", "metric")]
    assert all(math.isfinite(float(number)) for number in numbers)
    assert found["workspace_bytes"] == WORKSPACE_MIB * MIB
    assert found["name"] == model and found["path"] in " ".join(output.split())


def test_compare_loss_curves_agree(report):
    _, folder, _ = report
    losses = {(row["step"], row["variant"]): float(row["loss"]) for row in _rows(folder / "losses.csv")}
    for step in map(str, range(1, STEPS + 1)):
        assert losses[step, CHECKPOINT] == losses[step, STOCK]
        assert losses[step, FUSED] == pytest.approx(losses[step, STOCK], rel=1e-4)
    assert losses["1", STOCK] != losses[str(STEPS), STOCK]


def test_compare_repeats_bit_for_bit(report, result, tmp_path):
    _, folder, _ = report
    write_csv([result], tmp_path)
    first, second = _rows(folder / "losses.csv"), _rows(tmp_path / "losses.csv")
    assert [row["loss"] for row in first] == [row["loss"] for row in second]
    kinds = ("validation", "kept_mib", "forward_peak_mib", "backward_peak_mib", "redone_gflop")
    first, second = _rows(folder / "summary.csv"), _rows(tmp_path / "summary.csv")
    assert [[row[kind] for kind in kinds] for row in first] == [[row[kind] for kind in kinds] for row in second]


class _Links(HTMLParser):
    """Collects what a browser would load, and the tags."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.tags: Counter[str] = Counter()

    def handle_starttag(self, tag, attrs) -> None:
        self.tags[tag] += 1
        self.targets += [value for name, value in attrs if name in ("src", "srcset", "href", "data", "poster")]


def test_compare_html_is_self_contained(report):
    _, folder, _ = report
    text = (folder / "report.html").read_text(encoding="utf-8")
    links = _Links()
    links.feed(text)
    assert links.tags["img"] == 1 and links.tags["source"] == 1 and links.tags["table"] == 1
    assert links.tags["script"] == links.tags["link"] == links.tags["iframe"] == 0
    prefix = "data:image/png;base64,"
    pictures = [base64.b64decode(target.removeprefix(prefix), validate=True) for target in links.targets]
    assert len(pictures) == 2 and all(picture.startswith(b"\x89PNG\r\n") for picture in pictures)
    assert pictures[0] != pictures[1]  # dark and light
    assert "://" not in text and "@import" not in text and "url(" not in text
    assert "prefers-color-scheme: dark" in text


def test_compare_html_escapes_text(result):
    settings = Settings(("vit",), 1, "cpu", "<i>chip</i>", 2, 0, {"torch": "<u>"})
    text = page([replace(result, title="a <b> & c")], settings)
    assert "a &lt;b&gt; &amp; c" in text and "&lt;i&gt;chip" in text and "&lt;u&gt;" in text
    assert "<b>" not in text and "<i>" not in text and "<u>" not in text


def test_compare_html_shows_the_numbers_of_the_table(result):
    text = page([result], Settings(("vit",), STEPS, "cpu", "chip", 2, 0, {}))
    for label, values in table_rows(result):
        assert label.strip() in text
        assert all(f">{value}</td>" in text for value in values)


def test_compare_table_fits_80_columns(result, capsys):
    from rich.console import Console

    Console(width=80).print(table(result))
    printed = capsys.readouterr().out
    assert "…" not in printed and max(map(len, printed.splitlines())) <= 80
    for _, values in table_rows(result):
        assert all(value in printed for value in values)


ATTENTION_UNITS = 4  # tensors of the input's size


def redone(result: ModelResult) -> int:
    """FLOP of the products that backward repeats: up (and gate) of each MLP; q, k and v of each attention."""
    shape = result.shape
    projections = 3 * 2 * shape.rows * shape.width**2
    return (2 if shape.gated else 1) * shape.count * shape.gemm_flop + shape.count * projections


def test_compare_measures_bytes_and_products(result):
    stock, checkpoint, fused = (result.variants[name] for name in NAMES)
    shape = result.shape
    hidden_mib = shape.rows * shape.hidden * 4 / MIB  # fp32
    # Stock keeps up and hidden (plain), or up, gate, act(gate) and hidden (gated), in every MLP; in an attention q, k,
    # v and the output (and a copy of its input in the place of the input).
    held = (4 if shape.gated else 2) * hidden_mib * shape.count
    held += shape.count * ATTENTION_UNITS * shape.rows * shape.width * 4 / MIB
    assert stock.kept_mib - checkpoint.kept_mib == pytest.approx(held, rel=0.02)
    assert result.redone_flop(STOCK) == 0
    assert result.redone_flop(CHECKPOINT) == redone(result)
    assert checkpoint.mlps == fused.mlps == shape.count and stock.mlps == 0
    assert checkpoint.attentions == fused.attentions == shape.count and stock.attentions == 0
    for variant in (stock, checkpoint, fused):
        assert variant.forward_peak_mib >= variant.kept_mib
        assert variant.backward_peak_mib >= variant.gradient_mib > 0
        assert max(variant.timeline.nbytes) / MIB == pytest.approx(
            max(variant.forward_peak_mib, variant.backward_peak_mib), rel=0.01
        )


def test_compare_says_which_layers_were_converted(result, report):
    model, folder, output = report
    if model == "vit":
        expected = [
            "4 x LayerNorm (encoder.layers.encoder_layer_0.ln_1, ...): layer_norm, "
            "applied by the fused layers that read it",
            "2 x MultiheadAttention (encoder.layers.encoder_layer_0.self_attention, ...): attention, keep=('out',)",
            "2 x MLPBlock (encoder.layers.encoder_layer_0.mlp, ...): mlp, gelu, keep=()",
        ]
    else:
        expected = [
            "2 x LlamaAttention (model.layers.0.self_attn, ...): attention, 1 heads, keep=('out',)",
            "2 x LlamaMLP (model.layers.0.mlp, ...): gated mlp, silu, keep=()",
            "4 x LlamaRMSNorm (model.layers.0.input_layernorm, ...): rms_norm, "
            "applied by the fused layers that read it",
        ]
    assert list(result.variants[FUSED].converted) == expected
    html = (folder / "report.html").read_text(encoding="utf-8")
    rows = dict(table_rows(result))
    for line in expected:
        assert line.replace("'", "&#x27;") in html and line in " ".join(output.split())
    assert rows["attentions changed"] == ["0 of 2", *["2 of 2"] * 2]
    (found,) = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["models"]
    assert found["converted"] == expected


def test_compare_fused_keeps_the_least(result):
    reason = _extension.load()
    if reason is not None:
        pytest.skip(f"the compiled extension is not available: {reason}")
    stock, checkpoint, fused = (result.variants[name] for name in NAMES)
    assert fused.path.startswith("compiled operators")
    assert fused.memory.kept_bytes <= checkpoint.memory.kept_bytes < stock.memory.kept_bytes
    assert fused.memory.backward_peak_bytes <= checkpoint.memory.backward_peak_bytes
    assert fused.memory.backward_peak_bytes < stock.memory.backward_peak_bytes
    assert result.redone_flop(FUSED) == redone(result)


def test_compare_ratios_come_from_the_recorded_steps(result):
    own = [2.0, 9.0, 9.0, 4.0, 3.0, 5.0]
    base = [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    variants = {
        name: replace(v, curve=replace(v.curve, seconds=own if name == FUSED else base, losses=[0.5] * 6))
        for name, v in result.variants.items()
    }
    timed = replace(result, variants=variants)
    assert timed.step_time_ratio(STOCK).p50 == 1.0
    assert (timed.step_time_ratio(FUSED).p20, timed.step_time_ratio(FUSED).p50) == (pytest.approx(1.7), 2.0)
    assert summary(timed, FUSED)["step_time_ratio_p80"] == pytest.approx(2.3)
    assert timed.step_seconds(FUSED) == 4.0


def test_variants_start_from_equal_weights_of_their_own(small):
    variants = make_variants(small(3, CPU))
    states = [variant.model.state_dict() for variant in variants.values()]
    assert list(states[0]) == list(states[1]) == list(states[2])
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]) and torch.equal(value, states[2][name])
    storages = [{value.data_ptr() for value in state.values()} for state in states]
    assert not storages[0] & storages[1] and not storages[0] & storages[2] and not storages[1] & storages[2]


def test_workload_is_a_function_of_its_seed(small):
    one, same, other = small(1, CPU), small(1, CPU), small(2, CPU)
    for step in (0, 7, 100):
        assert all(torch.equal(a, b) for a, b in zip(one.batch(step), same.batch(step), strict=True))
        assert not torch.equal(one.batch(step)[0], other.batch(step)[0])
    assert not torch.equal(one.batch(0)[0], one.batch(1)[0])
    before = torch.get_rng_state()
    weights, again = one.build().state_dict(), same.build().state_dict()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_workload_vit_holds_images_out(small):
    if small.name != "vit":
        pytest.skip("images are the vit workload's")
    workload = small(0, CPU)
    held_out = {image.numpy().tobytes() for image in workload._held_out[0]}
    per_epoch = len(workload._train[1]) // workload.batch_size
    seen = [image.numpy().tobytes() for step in range(per_epoch) for image in workload.batch(step)[0]]
    assert len(held_out) == 360 and not held_out & set(seen)
    assert len(set(seen)) == len(seen) == per_epoch * workload.batch_size


def test_workload_llama_targets_follow_their_inputs(small):
    if small.name != "llama":
        pytest.skip("text is the llama workload's")
    workload = small(0, CPU)
    inputs, targets = workload.batch(3)
    assert inputs.shape == targets.shape == (4, 64) and inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    text = bytes(workload._train.tolist())
    assert all(bytes(row.tolist()) in text for row in inputs)
    assert "def " in text.decode("utf-8", errors="replace")


@pytest.mark.parametrize("steps", [1, 2, 7, 60])
def test_rate_share_warms_up_and_decays(steps):
    shares = [rate_share(step, steps) for step in range(steps)]
    top = shares.index(max(shares))
    assert shares[top] == 1.0 and all(0.0 < share <= 1.0 for share in shares)
    assert shares[: top + 1] == sorted(shares[: top + 1]) and shares[top:] == sorted(shares[top:], reverse=True)
    assert steps < 7 or shares[-1] == pytest.approx(0.1)


def test_spread_of_one_and_of_many():
    assert spread([2.0]) == type(spread([2.0]))(2.0, 2.0, 2.0)
    many = spread([float(value) for value in range(11)])
    assert (many.p20, many.p50, many.p80) == (2.0, 5.0, 8.0)


def test_passes_places_forward_before_backward():
    timeline = Timeline((0.0, 1.0, 2.0, 3.0, 4.0), (0, MIB, 2 * MIB, MIB, 0), {"forward": (0, 2), "backward": (3, 3.5)})
    positions, mib = passes(timeline)
    assert positions == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0, 2.0]) and mib == [0.0, 1.0, 2.0, 1.0, 1.0]


def test_describe_path_names_operators_or_the_reference_path():
    ran = Counter({"mlp": 2, "mlp_fwd_chunk_cpp": 4, "mlp_bwd_chunk_cpp": 8})
    assert ran_compiled(ran)
    assert describe_path(ran) == "compiled operators, per step mlp_bwd_chunk_cpp x 8, mlp_fwd_chunk_cpp x 4."
    assert not ran_compiled(Counter())
    assert "reference path" in describe_path(Counter()) and "compiled" not in describe_path(Counter()).split("(")[0]


def test_notes_name_what_convert_left_alone(result):
    variants = dict(result.variants)
    variants[FUSED] = replace(variants[FUSED], skipped=("blocks.0.mlp: has forward hooks",))
    assert any("blocks.0.mlp: has forward hooks" in note for note in notes(replace(result, variants=variants)))


def test_compare_reports_its_progress(result_and_progress):
    assert result_and_progress[1] == work_units(STEPS)
