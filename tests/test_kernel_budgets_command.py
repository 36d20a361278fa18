"""`python -m benchmarks.budgets`: what it writes, and what the docs show of it."""

from __future__ import annotations

from dataclasses import replace

from budget_cases import FITS

from benchmarks import docs
from benchmarks.budgets import __main__ as command
from benchmarks.budgets import cubins, table


def test_the_command_writes_what_it_compiled(monkeypatch, tmp_path, capsys):
    page = tmp_path / "kernels.md"
    page.write_text("before\n" + "\n".join(docs.markers("budgets")) + "\nafter\n")
    monkeypatch.setattr(table, "PATH", tmp_path / "table.json")
    monkeypatch.setattr(command, "DOCS", page)
    rows = [vars(FITS), {**vars(FITS), "arch": 80, "stack_bytes": 4}]
    monkeypatch.setattr(command, "measure", lambda jobs, parts: rows)
    monkeypatch.setattr(cubins, "why_not", lambda: "no nvcc")
    assert command.main([]) == 1
    assert not table.PATH.exists()
    assert "sm_80 (M=128 N=128): 4 bytes of stack, allowed 0" in capsys.readouterr().err
    monkeypatch.setattr(command, "measure", lambda jobs, parts: rows[:1])
    assert command.main([]) == 0
    assert table.load().budgets == {FITS.key: FITS}
    assert docs.section(page, "budgets") == table.markdown(table.load())
    assert page.read_text().startswith("before\n") and page.read_text().endswith("after\n")
    assert command.main(["sm_90"]) == 0  # a part of the kernels replaces nothing


def test_the_command_renews_the_rows_of_cuda_alone(monkeypatch, tmp_path):
    page = tmp_path / "kernels.md"
    page.write_text("\n".join(docs.markers("budgets")) + "\n")
    own = replace(FITS, kernel="CUDA C++ mlp_small_fwd", tiles="", source="cuda")
    monkeypatch.setattr(table, "PATH", tmp_path / "table.json")
    monkeypatch.setattr(command, "DOCS", page)
    monkeypatch.setattr(cubins, "why_not", lambda: None)
    monkeypatch.setattr(cubins, "nvcc_version", lambda: "13.1")
    monkeypatch.setattr(cubins, "measure", lambda: [own])
    table.save(table.Table("3.8.0", "13.0", {FITS.key: FITS, "gone": replace(own, arch=80)}, {}))
    assert command.main(["--cuda"]) == 0
    assert table.load() == table.Table("3.8.0", "13.1", {FITS.key: FITS, own.key: own}, {})
    assert f"| {own.kernel}, 1 instances | - | w8 / 200 / 80 / 0 / wgmma 12 | - |" in page.read_text()


def test_the_docs_show_the_range_of_what_instances_use():
    one, other = (
        replace(FITS, kernel=f"CUDA C++ act<{dtype}>", tiles="", source="cuda") for dtype in ("Half", "float")
    )
    other = replace(other, registers=255, stack_bytes=8, tensor_core={}, warps=4, shared_bytes=0)
    unbound = replace(one, arch=80, warps=0)
    rows = {budget.key: budget for budget in (one, other, unbound)}
    assert table.markdown(table.Table("", "", rows, {})).splitlines()[2:] == [
        "| CUDA C++ act, 2 instances | - / 200 / 80 / 0 / wgmma 12 "
        "| w4-8 / 200-255 / 0-80 / 0 / wgmma 12, **8 B stack** | - |"
    ]
