"""The memory promise of multi-head attention in bytes: measured from allocator events and saved-tensor hooks."""

from __future__ import annotations

import mha_cases as cases
import pytest
import torch
from mha_cases import RESIDUALS, Block
from torch import nn

from fused_remat.measure import measure

pytestmark = pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension))
# U, the unit, is the bytes of one [B, L, D] tensor of this block: 4 MiB.
BLOCK = Block(batch=2, length=1024, model=512, heads=8, kv_heads=8, width=64)
UNIT = 4 * 2 * 1024 * 512
LSE = 4 * 2 * 8 * 1024
SEED = 8


def _measure(block, given, **settings):
    return measure(lambda: block.call(given, **settings), repeats=1)


@pytest.mark.parametrize("norm", (None, "layer_norm", "rms_norm"))
@pytest.mark.parametrize("keep", ((), ("out",), ("k", "v"), RESIDUALS), ids=str)
def test_kept_bytes_follow_keep(keep, norm):
    """x, out and lse by default: 2.02 U, also where the norm before is folded in; x and lse at the least: 1.02 U."""
    block = Block(batch=2, length=1024, model=512, heads=8, kv_heads=8, width=64, norm=norm)
    given = block.operands(torch.float32)
    measured = _measure(block, given, keep=keep, dropout_p=0.1 if norm is None else 0.0)
    kept = len(keep) * UNIT + LSE + (SEED if norm is None else 0)
    # A norm's statistics, two numbers per token at most, may be kept or rebuilt.
    assert kept <= measured.kept_bytes <= kept + (8 * 2 * 1024 if norm else 0)
    assert measured.kept_hook_bytes == measured.kept_bytes, "everything kept is visible to saved_tensors_hooks"
    with_x = measured.kept_bytes + given["query"].nbytes
    assert keep != ("out",) or with_x <= 2.02 * UNIT
    assert keep != () or with_x <= 1.02 * UNIT


@pytest.mark.parametrize(
    "settings",
    ({}, {"dropout_p": 0.1}, {"is_causal": True}, {"keep": ()}, {"keep": RESIDUALS}),
    ids=("full", "dropout", "causal", "keep nothing", "keep all"),
)
def test_backward_peak_with_a_workspace_of_one_unit(settings):
    given = BLOCK.operands(torch.float32)
    measured = _measure(BLOCK, given, workspace=UNIT, **settings)
    extra = UNIT * (len(settings.get("keep", ("out",))) - 1)
    assert measured.backward_peak_above_gradients_bytes <= 3.1 * UNIT + extra
    # Forward: the workspace, and the attention's output, which is not that of the block.
    assert measured.forward_peak_above_output_bytes - measured.kept_bytes <= 2.1 * UNIT


def test_backward_peak_with_a_mask_norm_rotation_and_shared_heads():
    block = Block(
        batch=2, length=1024, model=512, heads=8, kv_heads=4, width=64, norm="rms_norm", qk_norm=True, rotary=64,
        mask="float-keys",
    )  # fmt: skip
    given = block.operands(torch.float32)
    measured = _measure(block, given, workspace=UNIT, is_causal=True)
    assert measured.backward_peak_above_gradients_bytes <= 3.1 * UNIT


def test_averaged_weights_need_no_tensor_per_head():
    block = Block(batch=2, length=512, model=128, heads=8, kv_heads=8, width=16)
    given = block.operands(torch.float32)
    unit, weights = 4 * 2 * 512 * 128, 4 * 2 * 512 * 512
    measured = measure(
        lambda: sum(output.sum() for output in block.call(given, need_weights=True, workspace=unit)), repeats=1
    )
    per_head = 8 * weights
    assert measured.forward_peak_above_output_bytes <= 2 * weights + 4 * unit < per_head / 2
    assert measured.backward_peak_above_gradients_bytes <= 2 * weights + 4 * unit


def test_stock_needs_what_we_do_not():
    """The baselines that the bounds above are worth comparing with."""
    given = BLOCK.operands(torch.float32)
    x, parameters = given["query"], list(given.values())[1:]
    stock = nn.MultiheadAttention(512, 8, batch_first=True, dropout=0.1)
    with_weights = measure(lambda: stock(x, x, x)[0], repeats=1)
    assert with_weights.kept_bytes > 5 * UNIT + 4 * 2 * 8 * 1024 * 1024

    def linear_and_sdpa():
        packed = nn.functional.linear(x, parameters[0], parameters[1])
        q, k, v = packed.unflatten(-1, (3, 8, 64)).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return nn.functional.linear(out.transpose(1, 2).flatten(-2), parameters[2], parameters[3])

    without = measure(linear_and_sdpa, repeats=1)
    assert without.kept_bytes + x.nbytes > 5 * UNIT
    assert without.backward_peak_above_gradients_bytes > 7 * UNIT


# Saved storages -------------------------------------------------------------------------------------------------------


def _saved(block, given, **settings):
    """Bytes of the distinct storages that a forward saves, parameters apart."""
    parameters = {t.untyped_storage().data_ptr() for name, t in given.items() if name != "query"}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block.call(given, **settings)
    return sum(storages.values())


@pytest.mark.parametrize("training", (True, False), ids=("train", "eval"))
def test_saved_storages(training):
    block = Block(batch=4, length=128, model=64, heads=4, kv_heads=4, width=16)
    given = block.operands(torch.float32)
    assert given["query"].nbytes == 131_072
    settings = {"training": training, "dropout_p": 0.1}
    assert _saved(block, given, **settings) <= 327_680
    assert _saved(block, given, keep=(), **settings) <= 131_072 + 4 * 4 * 4 * 128 + 64
    with_weights = _saved(block, given, need_weights=True, **settings)
    assert with_weights <= 327_680, "the weights are rebuilt too"
    frozen = given | {"query": given["query"].detach()}
    assert _saved(block, frozen, **settings) <= 327_680


def test_nothing_is_saved_without_gradients():
    block = Block()
    given = block.operands()
    with torch.no_grad():
        assert _saved(block, given) == 0
    assert _saved(block, {name: value.detach() for name, value in given.items()}) == 0


def test_frozen_weights_get_no_gradient_tensor():
    block = Block(batch=1, length=8, model=300, heads=2, kv_heads=2, width=150)
    given = block.operands(torch.float32)
    for name, value in given.items():
        value.requires_grad_(name == "query")
    measured = _measure(block, given, workspace=64 * 1024)
    assert measured.gradient_bytes == given["query"].nbytes
    assert measured.backward_peak_above_gradients_bytes <= 300_000 < given["in_proj_weight"].nbytes


@pytest.mark.parametrize(
    ("keep", "rebuilt"), (((), 3), (("out",), 3), (("q", "k", "v", "out"), 0), (("k", "v"), 1)), ids=str
)
def test_products_of_the_projections(keep, rebuilt):
    """Library FLOP of one step in units of 2 B L D D: forward 4, gradients 8, and the projections that are rebuilt."""
    block = Block(batch=2, length=32, model=256, heads=4, kv_heads=4, width=64)
    given = block.operands(torch.float32)
    measured = _measure(block, given, keep=keep)
    # The products of the scores are none of the library's, or 2 forward and up to 8 backward of 2 B L L D.
    scores = 10 * 2 * 2 * 32 * 32 * 256
    unit = 2 * 2 * 32 * 256 * 256
    assert 0 <= measured.forward_gemm_flop + measured.backward_gemm_flop - (12 + rebuilt) * unit <= scores


def test_flop_counter_sees_inside_the_op():
    from torch.utils.flop_counter import FlopCounterMode

    block = Block(batch=2, length=16, model=24, heads=4, kv_heads=4, width=6)
    given = block.operands()
    unit, scores = 2 * 2 * 16 * 24 * 24, 2 * 2 * 16 * 16 * 24
    with FlopCounterMode(display=False) as counter:
        y = block.call(given)
    assert counter.get_total_flops() == 4 * unit + 2 * scores
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() in (11 * unit + 5 * scores, 11 * unit + 7 * scores)
