"""What low-rank adapters cost: no byte kept, narrow tensors alone, no products for frozen weights."""

from __future__ import annotations

from dataclasses import replace

import mha_cases as cases
import pytest
import torch
from mha_cases import ADAPTED, RESIDUALS, Block

from fused_remat.measure import measure

pytestmark = pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension))
RANK = 16
# U, the unit, is the bytes of one [B, L, D] tensor: 2 MiB; N those of one [B, L, r] tensor.
BLOCK = Block(packed=False, batch=2, length=512, model=512, heads=8, kv_heads=8, width=64, ranks=(RANK,) * 4)
UNIT, NARROW = 4 * 2 * 512 * 512, 4 * 2 * 512 * RANK
FACTORS = 4 * 4 * 2 * RANK * 512
BARE = replace(BLOCK, ranks=(0, 0, 0, 0))


def _operands(block, *, frozen=False):
    given = block.operands(torch.float32)
    for name, t in given.items():
        t.requires_grad_(not frozen or name == "query" or name.endswith(("_a", "_b")))
    return given


def _measure(block, given, **settings):
    return measure(lambda: block.call(given, **settings), repeats=1)


@pytest.mark.parametrize("keep", ((), ("out",), RESIDUALS), ids=str)
def test_nothing_more_is_kept(keep):
    small = {"length": 128, "model": 64, "width": 8}
    measured = [
        _measure(block, _operands(block), keep=keep) for block in (replace(BLOCK, **small), replace(BARE, **small))
    ]
    assert measured[0].kept_bytes == measured[1].kept_bytes == measured[0].kept_hook_bytes


def test_peaks_grow_by_narrow_tensors_alone():
    adapted, bare = (_measure(block, _operands(block), workspace=UNIT) for block in (BLOCK, BARE))
    forward = adapted.forward_peak_above_output_bytes - bare.forward_peak_above_output_bytes
    assert forward <= 4 * NARROW
    # low and its gradient for each of four, and what sums of the factors' gradients add to them.
    backward = adapted.backward_peak_above_gradients_bytes - bare.backward_peak_above_gradients_bytes
    assert backward <= 8 * NARROW + FACTORS
    assert adapted.backward_peak_above_gradients_bytes <= 3.1 * UNIT + 8 * NARROW + FACTORS


def test_frozen_weights_get_no_gradient_tensor():
    block = replace(BLOCK, length=64)
    given = _operands(block, frozen=True)
    measured = _measure(block, given, workspace=2**20)
    assert measured.gradient_bytes == given["query"].nbytes + FACTORS
    narrow = 8 * NARROW // 8
    query = given["query"].nbytes
    # One group's buffers, and what of those is copied or summed: never one of four weights of 1 MiB more.
    assert measured.backward_peak_above_gradients_bytes <= 2**20 + 2 * query + narrow + FACTORS


SMALL = Block(packed=False, batch=2, length=32, model=256, heads=4, kv_heads=4, width=64, ranks=(RANK,) * 4)
WIDE_PRODUCT, NARROW_PRODUCT = 2 * 2 * 32 * 256 * 256, 2 * 2 * 32 * 256 * RANK


@pytest.mark.parametrize(("keep", "rebuilt"), (((), 3), (("out",), 3), (RESIDUALS, 0), (("k", "v"), 1)), ids=str)
@pytest.mark.parametrize("frozen", (False, True), ids=("all train", "frozen base"))
def test_products(frozen, keep, rebuilt):
    """Wide: 4 forward, 4 gradients of rows, 4 of weights unless frozen; narrow: 8 forward and 16 gradients."""
    measured = _measure(SMALL, _operands(SMALL, frozen=frozen), keep=keep)
    wide = 8 + rebuilt + (0 if frozen else 4)
    # Rebuilt: low of those rebuilt with their products, low alone of those kept, and low of out.
    narrow = 24 + 2 * rebuilt + (3 - rebuilt) + 1
    total = measured.forward_gemm_flop + measured.backward_gemm_flop
    assert total == wide * WIDE_PRODUCT + narrow * NARROW_PRODUCT


@pytest.mark.parametrize("wanted", ("query", "q_a", "k_b", "v_a", "out_a", "out_b"))
def test_products_of_one_gradient(wanted):
    """Backward computes for the one operand that asks, beside what it rebuilds; FLOP formulas agree."""
    given = _operands(SMALL)
    for name, t in given.items():
        t.requires_grad_(name == wanted)
    measured = _measure(SMALL, given, keep=())
    rebuilt = 3 * WIDE_PRODUCT + 6 * NARROW_PRODUCT + WIDE_PRODUCT + 2 * NARROW_PRODUCT  # q, k, v and dout
    gradients = {
        "query": 3 * WIDE_PRODUCT + 6 * NARROW_PRODUCT, "q_a": 2 * NARROW_PRODUCT, "k_b": NARROW_PRODUCT,
        "v_a": 2 * NARROW_PRODUCT, "out_a": NARROW_PRODUCT, "out_b": 2 * NARROW_PRODUCT,
    }[wanted]  # fmt: skip
    assert measured.backward_gemm_flop == rebuilt + gradients
    bare = replace(SMALL, ranks=(0, 0, 0, 0))
    x = {"query": given["query"].detach().requires_grad_()}
    formulas = _counted(SMALL, given) - _counted(bare, given | x)
    library = measured.forward_gemm_flop + measured.backward_gemm_flop
    stock = _measure(bare, given | x, keep=())
    stock = stock.forward_gemm_flop + stock.backward_gemm_flop
    assert wanted.startswith("out") or formulas == library - stock


def _counted(block, given):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        block.call(given, keep=()).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("keep", ((), RESIDUALS, ("k",)), ids=str)
@pytest.mark.parametrize("frozen", (False, True), ids=("all train", "frozen base"))
def test_flop_formulas_count_what_runs(frozen, keep):
    from torch.utils.flop_counter import FlopCounterMode

    bare = replace(SMALL, ranks=(0, 0, 0, 0))
    counted, measured = [], []
    for block in (SMALL, bare):
        given = _operands(block, frozen=frozen)
        with FlopCounterMode(display=False) as counter:
            block.call(given, keep=keep).sum().backward()
        counted.append(counter.get_total_flops())
        found = _measure(block, given, keep=keep)
        measured.append(found.forward_gemm_flop + found.backward_gemm_flop)
    assert counted[0] - counted[1] == measured[0] - measured[1] > 0


def test_every_adapter_is_measured():
    assert all(BLOCK.ranks) and len(BLOCK.ranks) == len(ADAPTED)
