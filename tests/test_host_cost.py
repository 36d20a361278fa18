"""The Python before a launch: which kernels a call starts, and that a repeated call decides nothing again."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from benchmarks import host_cost
from benchmarks.budgets.launches import cases, record
from fused_remat.triton import configs, launch, targets


def case_of(kernel: str, name: str):
    return next(
        case
        for case in cases()
        if case.name == name and kernel in [launched.kernel.__name__ for launched in record(case, 90)]
    )


@pytest.mark.parametrize(
    "kernel, name, kernels",
    [
        ("attention_fwd_kernel", "E=64 plain", ["attention_fwd"]),
        ("attention_dq_kernel", "E=64 causal", ["attention_dkdv", "attention_dq"]),
        ("mlp_fused_kernel", "D=768 gelu plain", ["mlp_fused", "column_sums"]),
    ],
)
def test_a_call_starts_few_kernels_and_is_timed(monkeypatch, kernel, name, kernels):
    monkeypatch.setattr(host_cost, "_CALLS", 2)
    found, seconds = host_cost.cost(case_of(kernel, name))
    assert found == kernels
    assert seconds > 0


def test_a_repeated_call_chooses_no_tiles_again(monkeypatch):
    """What depends on shapes, strides, dtype and architecture alone is looked up whole."""
    chosen = []

    def spied(*arguments):
        chosen.append(arguments)
        return choose(*arguments)

    some = [case for case in cases() if "64" in case.name or "768" in case.name]
    with targets.pretending(90), launch.replaced(lambda *_: None):
        for case in some:
            case.call()
        choose = configs.choose_row
        monkeypatch.setattr(configs, "choose_row", spied)
        for case in some:
            case.call()
    assert chosen == []


def test_the_command_prints_every_call(monkeypatch, capsys):
    monkeypatch.setattr(host_cost, "_CALLS", 1)
    monkeypatch.setattr(host_cost, "_REPEATS", 1)
    assert host_cost.main() == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(list(cases()))
