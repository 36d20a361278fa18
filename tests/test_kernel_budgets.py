"""What the Triton kernels compile to for three architectures, without a GPU, against `kernel_budgets.json`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import docs
from benchmarks.budgets import __main__ as command
from benchmarks.budgets import run, table
from benchmarks.budgets.table import SHARED_LIMIT, Budget, drifted, unlawful

TABLE = table.load()
TESTS = Path(__file__).parent
FITS = Budget(
    kernel="attention_fwd E=64 plain", arch=90, variant="plain", tiles="M=128 N=128", warps=8, stages=2, registers=200,
    stack_bytes=0, shared_bytes=81920, tensor_memory=0, dots=True, tensor_core={"wgmma": 12}, warnings=[],
)  # fmt: skip


def why_not_compiled() -> str | None:
    """Why this environment cannot compile what the table holds, or None."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if run.triton_version() != TABLE.triton:
        return f"the table of kernel budgets holds for Triton {TABLE.triton}, this is {run.triton_version()}"
    return None


needs_this_triton = pytest.mark.skipif(why_not_compiled() is not None, reason=str(why_not_compiled()))


# The gate


@pytest.fixture(scope="module")
def compiled() -> tuple[dict[str, Budget], list[str]]:
    budgets, errors = table.from_rows(run.measure())
    return {budget.key: budget for budget in budgets}, errors


@needs_this_triton
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_kernel_compiles_within_the_law(compiled):
    budgets, errors = compiled
    assert errors + [line for budget in budgets.values() for line in unlawful(budget, TABLE.reasons)] == []


@needs_this_triton
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_kernel_uses_what_the_table_says(compiled):
    budgets, _ = compiled
    assert sorted(budgets) == sorted(TABLE.budgets), "python -m benchmarks.budgets writes the table anew"
    assert [line for key in budgets for line in drifted(budgets[key], TABLE.budgets[key])] == []


@needs_this_triton
@pytest.mark.slow
def test_kernels_that_break_a_budget_are_found():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_stand_ins"], cwd=TESTS.parent, env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {name: unlawful(Budget(**row), {}) for name, row in json.loads(done.stdout).items()}
    assert found["fits"] == []
    assert [line.split(": ")[1].split(" ", 1)[1] for line in found["spills"]] == ["bytes of stack, allowed 0"]
    assert any("ptxas warnings of serialised wgmma (C75" in line for line in found["serialised"])
    assert [line.split(": ")[1] for line in found["trap"]] == [
        "311328 bytes of shared memory, allowed 232448",
        "1024 columns of tensor memory, allowed 512",
        "0 tensor-core instructions, expected at least 1",
    ]


# The table


def test_the_table_covers_every_kernel_on_every_architecture():
    kernels = {(budget.kernel.split()[0], budget.arch) for budget in TABLE.budgets.values()}
    names = {name for name, _ in kernels}
    assert kernels == {(name, arch) for name in names for arch in SHARED_LIMIT}
    for width in (64, 128, 256):
        for variant in ("plain", "causal", "bool mask", "float mask", "dropout", "softcap", "everything"):
            for kernel in ("attention_fwd", "attention_dkdv", "attention_dq"):
                assert f"{kernel} E={width} {variant} sm_90" in TABLE.budgets
    assert {"attention_delta", "attention_weights", "attention_dmask", "mlp_fwd", "mlp_fused", "mlp_dhidden"} <= names
    assert {"column_sums", "normalize_rows", "row_gradients", "transform_heads", "transform_heads_bwd"} <= names


@needs_this_triton
def test_every_kernel_of_the_package_has_a_budget():
    defined = {
        line.split("(")[0].removeprefix("def ").removesuffix("_kernel")
        for path in (TESTS.parent / "fused_remat" / "triton").glob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def ") and line.split("(")[0].endswith("_kernel")
    }
    assert defined == {budget.kernel.split()[0] for budget in TABLE.budgets.values()}


def test_the_table_keeps_the_law_and_gives_its_reasons():
    assert [line for budget in TABLE.budgets.values() for line in unlawful(budget, TABLE.reasons)] == []
    with_stack = {key for key, budget in TABLE.budgets.items() if budget.stack_bytes}
    assert set(TABLE.reasons) == with_stack
    assert all(len(reason) > 20 for reason in TABLE.reasons.values())


def test_the_docs_show_the_table():
    assert docs.section(command.DOCS, "budgets") == table.markdown(TABLE)


# Judging


@pytest.mark.parametrize(
    "change, message",
    [
        ({"stack_bytes": 8}, "8 bytes of stack, allowed 0"),
        ({"variant": "dropout", "stack_bytes": 8}, "8 bytes of stack, allowed 0"),
        ({"variant": "everything", "stack_bytes": 40}, "40 bytes of stack, allowed 32"),
        ({"variant": "everything", "stack_bytes": 8}, "8 bytes of stack without a reason in kernel_budgets.json"),
        ({"registers": 256}, "256 registers, allowed 255"),
        ({"shared_bytes": 232449}, "232449 bytes of shared memory, allowed 232448"),
        ({"arch": 80, "shared_bytes": 166913}, "166913 bytes of shared memory, allowed 166912"),
        ({"arch": 100, "tensor_memory": 513}, "513 columns of tensor memory, allowed 512"),
        ({"tensor_core": {}}, "0 tensor-core instructions, expected at least 1"),
        ({"warnings": ["C7515"]}, "1 ptxas warnings of serialised wgmma (C7515), allowed 0"),
        ({"variant": "causal", "warnings": ["C7510"]}, "1 ptxas warnings of serialised wgmma (C7510), allowed 0"),
    ],
)
def test_what_is_unlawful_names_kernel_architecture_got_and_allowed(change, message):
    budget = replace(FITS, **change)
    lines = unlawful(budget, {})
    assert f"attention_fwd E=64 plain sm_{budget.arch} (M=128 N=128): {message}" in lines


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"registers": 255, "shared_bytes": 232448},
        {"variant": "bool mask", "warnings": ["C7515"]},
        {"dots": False, "tensor_core": {}},
    ],
)
def test_what_is_lawful(change):
    assert unlawful(replace(FITS, **change), {}) == []


def test_stack_with_a_reason_is_lawful_where_everything_is_on():
    assert unlawful(replace(FITS, variant="everything", stack_bytes=32), {FITS.key: "because"}) == []


@pytest.mark.parametrize(
    "change, message",
    [
        ({"registers": 209}, "209 registers, allowed 208 by the table"),
        ({"shared_bytes": 81921}, "81921 shared bytes, allowed 81920 by the table"),
        ({"tiles": "M=64 N=64"}, "tiles M=64 N=64, the table has M=128 N=128"),
        ({"warps": 4}, "warps 4, the table has 8"),
        ({"tensor_core": {"mma": 12}}, "tensor-core instructions mma, the table has wgmma"),
        ({"warnings": ["C7515"]}, "ptxas warns C7515, the table has none"),
    ],
)
def test_what_differs_from_the_table(change, message):
    (line,) = drifted(replace(FITS, **change), FITS)
    assert line.endswith(message) and line.startswith("attention_fwd E=64 plain sm_90 (")


def test_fewer_registers_and_more_instructions_are_no_drift():
    assert drifted(replace(FITS, registers=120, tensor_core={"wgmma": 24}), FITS) == []


# The command


def test_the_command_writes_what_it_compiled(monkeypatch, tmp_path, capsys):
    page = tmp_path / "kernels.md"
    page.write_text("before\n" + "\n".join(docs.markers("budgets")) + "\nafter\n")
    monkeypatch.setattr(table, "PATH", tmp_path / "table.json")
    monkeypatch.setattr(command, "DOCS", page)
    rows = [vars(FITS), {**vars(FITS), "arch": 80, "stack_bytes": 4}]
    monkeypatch.setattr(command, "measure", lambda jobs, parts: rows)
    assert command.main([]) == 1
    assert not table.PATH.exists()
    assert "sm_80 (M=128 N=128): 4 bytes of stack, allowed 0" in capsys.readouterr().err
    monkeypatch.setattr(command, "measure", lambda jobs, parts: rows[:1])
    assert command.main([]) == 0
    assert table.load().budgets == {FITS.key: FITS}
    assert docs.section(page, "budgets") == table.markdown(table.load())
    assert page.read_text().startswith("before\n") and page.read_text().endswith("after\n")
    assert command.main(["sm_90"]) == 0  # a part of the kernels replaces nothing
