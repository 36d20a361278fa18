"""The model of the kernels: its FLOP are those of the ops' formulas, its bytes those of the tensors."""

from __future__ import annotations

import pytest
import torch

from benchmarks import docs, roofline
from benchmarks.attention_cases import BlockCase, CoreCase
from benchmarks.cases import MLPCase
from benchmarks.gpu_cases import FULL, TINY
from benchmarks.roofline import H200, Work


def flop(works) -> float:
    return sum(work.flop for work in works)


@pytest.mark.parametrize("width", [768, 4096])
@pytest.mark.parametrize("gated, products", [(False, 7), (True, 11)])
def test_an_mlp_makes_the_products_of_the_promise(width, gated, products):
    case = MLPCase(8192, width, 4 * width, gated=gated, dtype=torch.bfloat16)
    assert flop(roofline.mlp(case)) == products * case.gemm_flop


@pytest.mark.parametrize("causal, part", [(False, 1.0), (True, (2048 + 1) / (2 * 2048))])
def test_attention_makes_two_products_forward_and_seven_backward(causal, part):
    case = CoreCase(2, 4, 2048, 64, causal, dtype=torch.bfloat16)
    assert flop(roofline.attention(case)) == pytest.approx(9 * part * case.gemm_flop)
    assert roofline.rebuild(case).flop == pytest.approx(2 * part * case.gemm_flop)


def test_a_block_adds_its_projections():
    case = BlockCase(2, 512, 256, 4, dtype=torch.bfloat16)
    core = CoreCase(2, 4, 512, 64, dtype=torch.bfloat16)
    assert flop(roofline.mha(case)) - flop(roofline.attention(core)) == (4 + 8 + 3) * case.gemm_flop


def test_bytes_are_those_of_operands_and_results():
    case = CoreCase(2, 4, 128, 64, dtype=torch.bfloat16)
    q = torch.empty(2, 4, 128, 64, dtype=torch.bfloat16)
    row, wide = torch.empty(2, 4, 128), torch.empty(q.shape)
    expected = {
        "attention_fwd": 4 * q.nbytes + row.nbytes,
        "attention_delta": 2 * q.nbytes + 2 * row.nbytes,
        "attention_dkdv": 4 * q.nbytes + 2 * wide.nbytes + 2 * row.nbytes,
        "attention_dq": 4 * q.nbytes + wide.nbytes + 2 * row.nbytes,
    }
    assert {work.kernel: work.nbytes for work in roofline.attention(case)} == expected


def test_the_floor_is_the_slowest_unit():
    assert Work("products", flop=H200.flop, nbytes=1.0).floor() == (1.0, "tensor cores")
    assert Work("copy", flop=1.0, nbytes=2 * H200.nbytes).floor() == (2.0, "memory")
    assert Work("exponentials", exponentials=3 * H200.exponentials).floor() == (3.0, "special functions")
    case = FULL.attention[0]
    assert roofline.floor_seconds("attention", case) == sum(work.floor()[0] for work in roofline.attention(case))


def test_every_benchmark_case_has_a_floor():
    for cases in (FULL, TINY):
        for operation in roofline.MODELS:
            assert all(roofline.floor_seconds(operation, case) > 0 for case in getattr(cases, operation))


def test_the_docs_show_what_the_command_prints(capsys):
    assert roofline.main([]) == 0
    assert capsys.readouterr().out.strip() == docs.section(roofline.DOCS, "roofline").strip() == roofline.markdown()
    assert "MODELLED" in roofline.markdown()


def test_a_section_is_replaced_between_its_markers(tmp_path):
    page = tmp_path / "page.md"
    first, last = docs.markers("numbers")
    page.write_text(f"before\n{first}\nold\n{last}\nafter\n")
    docs.replace_section(page, "numbers", "new\nlines")
    assert page.read_text() == f"before\n{first}\nnew\nlines\n{last}\nafter\n"
    assert docs.section(page, "numbers") == "new\nlines"
    page.write_text(f"{last}\n{first}")
    with pytest.raises(ValueError, match="once each"):
        docs.section(page, "numbers")
