"""The benchmarks of attention and of the block: cases, gate, whole runs. Nothing depends on how fast anything is."""

import csv
import json

import pytest
import torch

from benchmarks import attention, attention_cases, mha, run
from benchmarks.attention_cases import BLOCK_CASES, CORE_CASES, STOCK, BlockCase, CoreCase, parse_block, parse_core
from benchmarks.cases import DTYPES, OURS
from benchmarks.operation import CHECKPOINT, EAGER
from benchmarks.parity import Gate, failures
from fused_remat import ops

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
MIB = 2**20
OPERATIONS = pytest.mark.parametrize("operation", (attention.ATTENTION, mha.MHA), ids=lambda o: o.name)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("2,4,8,16", CoreCase(2, 4, 8, 16)),
        ("causal:2,4,8,16,0.25", CoreCase(2, 4, 8, 16, causal=True, dropout_p=0.25)),
        ("2,8,1024,64,0.1", next(case for case in CORE_CASES if case.bars)),
    ],
)
def test_core_shapes(text, expected):
    assert parse_core(text, None, None) == expected


def test_block_shapes_and_goals():
    assert parse_block("causal:2,8,16,4", torch.bfloat16, None) == BlockCase(2, 8, 16, 4, True, dtype=torch.bfloat16)
    goals = {case.name: [(b.provider, b.baseline, b.most) for b in case.bars] for case in BLOCK_CASES if case.bars}
    assert goals == {
        "full-2x1024x512x8-fp32": [(OURS, EAGER, 1.1), (OURS, CHECKPOINT, 0.9)],
        "full-2x1024x512x8-p0.1-fp32": [(OURS, STOCK, 0.5)],
    }
    case = parse_block("2,1024,512,8", None, None)
    assert case.bars and case.unit_bytes == 4 * MIB
    assert case.with_dtype(torch.bfloat16).bars == () and case.with_dtype(torch.float32) == case


@pytest.mark.parametrize(
    "text",
    ["", "2,4,8", "2,4,8,x", "2,4,0,8", "2,4,8,16,1.0", "2,4,8,16,-1", "2,4,8,16,p", "2,4,8,16,0.1,2", "a:2,4,8,16"],
)
def test_bad_shapes(text):
    for parse in (parse_core, parse_block):
        with pytest.raises(ValueError, match="with four whole numbers above 0, and perhaps a dropout probability"):
            parse(text, None, None)


def test_more_bad_shapes():
    with pytest.raises(ValueError, match="D a multiple of H"):
        parse_block("2,8,15,4", None, None)
    with pytest.raises(ValueError, match="attention has no activation"):
        parse_core("2,4,8,16", None, "relu")


@OPERATIONS
def test_cases_cover_lengths_corners_and_dropout(operation):
    assert {(c.length, c.causal, c.dropout_p) for c in operation.cases} == {
        (length, causal, p) for length in (128, 512, 1024, 4096) for causal in (False, True) for p in (0.0, 0.1)
    }
    assert len({case.name for case in (*operation.cases, *operation.quick_cases)}) == 18


@OPERATIONS
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_gate_lets_the_right_ones_pass(dtype, causal, operation):
    sizes = (2, 2, 48, 16) if operation is attention.ATTENTION else (2, 48, 32, 2)
    case = type(operation.cases[0])(*sizes, causal=causal, dtype=dtype)
    leaves = operation.leaves(case, CPU)
    gate = Gate(lambda leaves: operation.truth(case, leaves), leaves)
    errors = {name: gate.errors(provider(case, leaves)) for name, provider in operation.providers.items()}
    assert set(errors[EAGER]) == {"output", *(f"d{name}" for name in leaves)}
    assert failures(gate.relative(errors), {}) == []


@OPERATIONS
def test_dropout_is_judged_without_and_measured_with_it(operation):
    case = next(case for case in operation.quick_cases if case.dropout_p)
    judged = operation.judged(case)
    assert judged == type(case)(**{**vars(case), "dropout_p": 0.0})
    leaves = operation.leaves(case, CPU)
    for name, provider in operation.providers.items():
        forward = provider(case, leaves)
        assert not torch.equal(forward(), forward()), f"{name} drops nothing"
        forward = provider(judged, leaves)
        assert torch.equal(forward(), forward()), name


@OPERATIONS
def test_quick_run(operation, tmp_path, capsys):
    shape = "1,2,64,16,0.1" if operation is attention.ATTENTION else "1,64,32,2"
    names = [name for name in operation.providers if name != f"{OURS}-U"]  # slow tiles where U is this small
    arguments = [operation.name, "--shapes", shape, "--rounds", "2", "--out", str(tmp_path), "--providers", *names]
    assert run.main(arguments) == 0
    lines = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert {line["kernel_provider"] for line in lines} == set(names)
    found = {(line["kernel_provider"], line["metric_name"]): line for line in lines}
    config = json.loads(found[EAGER, "speed"]["extra_benchmark_config_str"])
    assert (config["L"], config["dtype"], config["rounds"]) == (64, "float32", 2)
    assert operation.name in capsys.readouterr().out
    if ops.ready() is None:
        # The block: out and lse; and lse alone where nothing is kept. The core keeps its output, and lse.
        lse = 4 * 2 * 64
        kept = {name: float(found[name, "kept_memory"]["y_value_50"]) * MIB for name in names}
        if operation is mha.MHA:
            assert kept[OURS] == 4 * 64 * 32 + lse and kept[f"{OURS}-keep-none"] == lse
            assert float(found[OURS, "products_redone"]["y_value_50"]) == 3
        else:
            assert kept[OURS] == lse + 8  # and the seed
        assert kept[OURS] < kept[EAGER]


def test_a_case_that_differs_in_dropout_has_its_own_goals():
    with_dropout, without = (parse_core(f"2,8,1024,64{p}", None, None) for p in (",0.1", ""))
    assert with_dropout.bars and not without.bars
    assert attention_cases.without_dropout(with_dropout).dropout_p == 0.0
