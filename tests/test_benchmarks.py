"""The benchmark's gate, bookkeeping and output. Nothing here depends on how fast anything is."""

import csv
import json
import math
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import cases, mlp, run, table
from benchmarks.cases import DTYPES, MLP_CASES, OURS, MLPCase, parse_mlp
from benchmarks.operation import CHECKPOINT, EAGER, NotRun
from benchmarks.parity import DEFAULT_LIMIT, Gate, failures
from benchmarks.results import CaseResult
from fused_remat import ops, reference
from fused_remat.measure import Measurement, Timing

M, D, F = 64, 16, 48
SHAPE = f"{M},{D},{F}"
MIB = 2**20
CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def benchmark(tmp_path, capsys):
    """Runs the command line into `tmp_path`; returns status, the CSV by (case, provider, metric), stdout, stderr."""

    def benchmark(*arguments: str):
        status = run.main(["mlp", "--rounds", "2", "--out", str(tmp_path), *arguments])
        file = tmp_path / "results.csv"
        lines = list(csv.DictReader(file.read_text().splitlines())) if file.exists() else []
        rows = {(row["x_value"], row["kernel_provider"], row["metric_name"]): row for row in lines}
        assert len(rows) == len(lines)
        return status, rows, *capsys.readouterr()

    return benchmark


def with_providers(monkeypatch, **providers):
    monkeypatch.setitem(run.OPERATIONS, "mlp", replace(mlp.MLP, providers={EAGER: mlp._eager, **providers}))


# Cases


@pytest.mark.parametrize(
    "text, expected",
    [
        ("8,4,6", MLPCase(8, 4, 6)),
        ("gated:8,4,6", MLPCase(8, 4, 6, gated=True, activation="silu")),
        ("4096,768,3072", MLP_CASES[0]),
        ("gated:4096,512,1408", MLP_CASES[2]),
    ],
)
def test_shapes(text, expected):
    assert parse_mlp(text, None, None) == expected


@pytest.mark.parametrize("text", ["", "8,4", "8,4,6,2", "8,4,x", "8,4,0", "8,-4,6", "plain:8,4,6", "8,4,\u0663"])
def test_bad_shapes(text):
    with pytest.raises(ValueError, match=r"expected M,D,F or gated:M,D,F with three whole numbers above 0, got"):
        parse_mlp(text, None, None)


def test_goals_belong_to_their_exact_case():
    assert parse_mlp("4096,768,3072", torch.float16, None).bars == ()
    assert parse_mlp("4096,768,3072", None, "relu").bars == ()
    assert MLP_CASES[0].with_dtype(torch.float32).bars == MLP_CASES[0].bars
    assert MLP_CASES[0].with_dtype(torch.bfloat16).bars == ()
    assert len({case.name for case in (*MLP_CASES, *cases.MLP_QUICK_CASES)}) == 6


# Gate


def gate_of(case: MLPCase) -> tuple[Gate, dict]:
    leaves = mlp._leaves(case, CPU)
    return Gate(lambda leaves: mlp._plain(case, leaves), leaves), leaves


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("gated", [False, True])
def test_gate_lets_the_right_ones_pass(dtype, gated):
    case = MLPCase(M, D, F, gated=gated, dtype=dtype, activation="silu" if gated else "gelu")
    gate, leaves = gate_of(case)
    names = [EAGER, CHECKPOINT, "checkpoint-reentrant", OURS, f"{OURS}-keep-all", f"{OURS}-keep-0.25", f"{OURS}-MF/4"]
    errors = {name: gate.errors(mlp.MLP.providers[name](case, leaves)) for name in names}
    assert set(errors[EAGER]) == {"output", *(f"d{name}" for name in leaves)}
    assert failures(gate.relative(errors), {}) == []
    assert all(leaf.grad is None for leaf in leaves.values())


def test_gate_refuses_a_gradient_that_is_off_by_a_little():
    case = MLPCase(M, D, F)
    gate, leaves = gate_of(case)

    def wrong():
        scaled = {**leaves, "w_up": leaves["w_up"] * 1.0}
        scaled["w_up"].register_hook(lambda gradient: gradient * (1 + 1e-5))
        return mlp._plain(case, scaled)

    relative = gate.relative({EAGER: gate.errors(mlp._eager(case, leaves)), "wrong": gate.errors(wrong)})
    (failure,) = failures(relative, {})
    assert (failure.provider, failure.tensor, failure.limit) == ("wrong", "dw_up", DEFAULT_LIMIT)
    assert failure.error > DEFAULT_LIMIT
    assert str(failure).startswith("wrong: the error of dw_up is ")
    assert failures(relative, {"wrong": 1.01 * failure.error}) == []


def test_gate_refuses_nan():
    case = MLPCase(M, D, F)
    gate, leaves = gate_of(case)
    errors = {
        EAGER: gate.errors(mlp._eager(case, leaves)),
        "nan": gate.errors(lambda: mlp._plain(case, leaves) * 0 / 0),
    }
    found = failures(gate.relative(errors), {"nan": math.inf})
    assert {failure.tensor for failure in found} == {"output", *(f"d{name}" for name in leaves)}


@pytest.mark.parametrize("factor, passes", [(1.99, True), (2.01, False)])
def test_gate_allows_twice_the_error_of_eager(factor, passes):
    gate, leaves = gate_of(MLPCase(M, D, F, dtype=torch.bfloat16))
    eager = gate.errors(mlp._eager(MLPCase(M, D, F, dtype=torch.bfloat16), leaves))
    other = {name: factor * error for name, error in eager.items()}
    relative = gate.relative({EAGER: eager, "other": other})
    assert max(relative["other"].values()) == pytest.approx(factor)
    assert (failures(relative, {}) == []) is passes


def test_a_wrong_provider_stops_the_run_before_any_number(benchmark, monkeypatch, tmp_path):
    def wrong(case, leaves):
        return lambda: reference.mlp(**leaves, activation="relu")

    with_providers(monkeypatch, wrong=wrong)
    status, rows, out, err = benchmark("--shapes", SHAPE)
    assert (status, rows, out) == (1, {}, "")
    assert f"parity failed: plain-{M}x{D}x{F}-gelu-fp32: wrong: the error of output is " in err
    assert "no numbers are shown" in err
    assert list(tmp_path.iterdir()) == []


# Whole runs


def test_table_csv_and_picture(benchmark, tmp_path):
    pytest.importorskip("matplotlib")
    status, rows, out, _ = benchmark(
        "--shapes", SHAPE, f"gated:{SHAPE}", "--providers", CHECKPOINT, "checkpoint-reentrant", "liger", "quack"
    )
    assert status == 0
    plain, gated = f"plain-{M}x{D}x{F}-gelu-fp32", f"gated-{M}x{D}x{F}-silu-fp32"

    def value(case, provider, metric):
        return float(rows[case, provider, metric]["y_value_50"])

    assert value(plain, EAGER, "kept_memory") == 2 * M * F * 4 / MIB
    assert value(gated, EAGER, "kept_memory") == 4 * M * F * 4 / MIB
    assert value(plain, EAGER, "backward_peak_above_gradients") == 3 * M * F * 4 / MIB
    assert value(plain, EAGER, "speed_to_eager") == value(plain, EAGER, "error_to_eager") == 1.0
    for case, products in ((plain, (6, 7, 8)), (gated, (9, 11, 12))):
        providers = (EAGER, CHECKPOINT, "checkpoint-reentrant")
        assert tuple(value(case, name, "products") for name in providers) == products
        assert tuple(value(case, name, "products_redone") for name in providers) == (
            0, products[1] - products[0], products[2] - products[0],
        )  # fmt: skip
    row = rows[plain, CHECKPOINT, "speed"]
    assert row["metric_unit"] == "ms"
    assert 0 < float(row["y_value_20"]) <= float(row["y_value_50"]) <= float(row["y_value_80"])
    config = json.loads(row["extra_benchmark_config_str"])
    assert (config["M"], config["D"], config["F"], config["rounds"]) == (M, D, F, 2)
    assert row["torch_version"] == torch.__version__
    assert json.loads(rows[gated, "liger", "not run"]["extra_benchmark_config_str"])["reason"] == "needs a CUDA device"
    assert rows[gated, "liger", "not run"]["y_value_50"] == ""
    assert plain in out and gated in out and "quack: not run: " in out
    assert (tmp_path / "time-against-memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fused_remat_keeps_nothing_and_redoes_one_product(benchmark, dtype):
    unavailable = ops.ready()
    if unavailable:
        pytest.skip(f"the compiled extension is not available: {unavailable}")
    names = (OURS, f"{OURS}-keep-all")
    status, rows, _, _ = benchmark("--shapes", SHAPE, "--dtype", dtype, "--providers", *names)
    assert status == 0
    case = f"plain-{M}x{D}x{F}-gelu-{dtype}"
    kept, redone = (
        [float(rows[case, name, metric]["y_value_50"]) for name in names]
        for metric in ("kept_memory", "products_redone")
    )
    size = DTYPES[dtype].itemsize
    assert kept == [0.0, M * F * size / MIB]
    assert redone == [1.0, 0.0]


def test_providers_that_cannot_run_say_why(benchmark, monkeypatch):
    def missing(case, leaves):
        raise NotRun("not installed")

    def too_big(case, leaves):
        def forward():
            raise torch.OutOfMemoryError("CUDA out of memory")

        return forward

    def no_compiler(graph, inputs):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: no_compiler)
    with_providers(monkeypatch, missing=missing, too_big=too_big, compile=mlp.MLP.providers["compile"])
    status, rows, out, _ = benchmark("--shapes", SHAPE)
    assert status == 0
    case = f"plain-{M}x{D}x{F}-gelu-fp32"
    reasons = {
        name: json.loads(rows[case, name, "not run"]["extra_benchmark_config_str"])["reason"]
        for name in ("missing", "too_big", "compile")
    }
    assert (reasons["missing"], reasons["too_big"]) == ("not installed", "out of memory")
    assert reasons["compile"].startswith("torch.compile failed: ") and "no compiler here" in reasons["compile"]
    assert "too_big: not run: out of memory" in out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_providers(benchmark):
    """The warnings are the compiler's own."""
    status, rows, _, _ = benchmark("--shapes", SHAPE, "--providers", "compile", "compile-budget-0")
    assert status == 0
    case = f"plain-{M}x{D}x{F}-gelu-fp32"
    assert float(rows[case, "compile", "products"]["y_value_50"]) == 6
    assert float(rows[case, "compile-budget-0", "products"]["y_value_50"]) == 7
    assert float(rows[case, "compile-budget-0", "kept_memory"]["y_value_50"]) == 0


def test_quick_leaves_out_what_compiles():
    options = run._parser().parse_args(["mlp", "--quick"])
    assert set(mlp.MLP.providers) - set(run._provider_names(mlp.MLP, options)) == {"compile", "compile-budget-0"}
    assert run._cases(mlp.MLP, options) == cases.MLP_QUICK_CASES


def test_the_default_folder_is_ignored_by_git():
    options = run._parser().parse_args(["mlp"])
    folder = run._folder(options, CPU)
    folder.rmdir()
    assert folder.parent.name == "results"
    assert "/results/" in (folder.parent.parent / ".gitignore").read_text().split()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--shapes", "8,4"], "argument --shapes: expected M,D,F"),
        (["--rounds", "0"], "argument --rounds: expected at least 1, got 0"),
        (["--providers", "fastest"], "argument --providers: no fastest; expected eager, "),
        (["--activation", "relu"], "argument --activation: needs --shapes"),
        (["--device", "tpu"], "argument --device: expected cpu or cuda, got 'tpu'"),
        (["--out", __file__], "argument --out: cannot make the folder"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        run.main(["mlp", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


# Table


def result_of(case: MLPCase) -> CaseResult:
    measured = Measurement("cpu", *[12345678] * 7, 6, 6 * case.gemm_flop, *[12345678] * 3, 0, 0)
    times = {EAGER: Timing((1.0, 2.0)), CHECKPOINT: Timing((1.5, 3.0)), OURS: Timing((0.5, 1.0))}
    return CaseResult("mlp", case, dict.fromkeys(times, measured), times, dict.fromkeys(times, 1.5), {})


@pytest.mark.parametrize("rich, columns", [(True, 200), (True, 80), (False, 80)])
def test_no_number_is_cut_off(monkeypatch, capsys, rich, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    if not rich:
        monkeypatch.setitem(sys.modules, "rich", None)
    table.print_results([result_of(MLP_CASES[0])])
    printed = capsys.readouterr().out
    assert "\u2026" not in printed
    cells = next(text for text in printed.splitlines() if text.strip().startswith(f"{OURS} ")).split()
    assert cells[1:5] == ["750.0", "0.50", "0.50-0.50", "0.33"]
    assert "goal: fused_remat in at most 1.10 x the time of eager; measured 0.50" in printed
