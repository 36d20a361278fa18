"""Dropout of the attention op: one mask everywhere, replayed in backward whatever happens between."""

from __future__ import annotations

import math

import attention_cases as cases
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fused_remat
from fused_remat import reference

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
]
BACKEND = pytest.mark.parametrize("backend", cases.BACKENDS)


def _mask(shape, p, seed, **settings):
    """The mask [B, H, Lq, Lk] as a forward applied it, read through v = identity."""
    batch, heads, length_q, length_k = shape
    given = {
        "q": torch.randn(batch, heads, length_q, 3, dtype=torch.float64),
        "k": torch.randn(batch, heads, length_k, 3, dtype=torch.float64),
        "v": torch.eye(length_k, dtype=torch.float64).expand(batch, heads, -1, -1),
    }
    return cases.run(given, seed=seed, dropout_p=p, **settings) != 0


@BACKEND
@pytest.mark.parametrize("shape", ((1, 1, 1, 1), (2, 3, 5, 7), (1, 2, 130, 130), (2, 2, 33, 65)), ids=str)
def test_dropout_masks_are_bit_equal_everywhere(shape, backend):
    for seed in (0, 12345):
        torch.manual_seed(seed)
        truth = reference.dropout_mask(reference.draw_seed(torch.device("cpu")), 0.3, shape)
        for workspace in (1, 20_000, 2**20):
            assert torch.equal(_mask(shape, 0.3, seed, backend=backend, workspace=workspace), truth)


@BACKEND
def test_dropout_masks_are_by_the_index_of_the_element(backend):
    torch.manual_seed(9)
    seed = reference.draw_seed(torch.device("cpu"))
    for p in (0.1, 0.9, 1e-9):
        kept = cases.dropout_kept(seed, p, (2, 3, 9, 34))
        assert torch.equal(_mask((2, 3, 9, 34), p, 9, backend=backend), kept)


@BACKEND
@pytest.mark.parametrize("position", ({}, {"is_causal": True}, {"window": (50, 20)}), ids=("full", "causal", "window"))
def test_gradients_are_those_of_the_explicit_mask(position, backend):
    given = cases.operands(1, 2, 130, 130, 8, dtype=torch.float32)
    dout = torch.randn(1, 2, 130, 8)
    torch.manual_seed(4)
    kept = reference.dropout_mask(reference.draw_seed(torch.device("cpu")), 0.3, (1, 2, 130, 130))
    truth, _, _ = cases.naive(**given, kept=kept, dropout_p=0.3, **position)
    expected = cases.gradients(truth, given, dout)
    for workspace in (1, 2**20):
        out = cases.run(given, backend=backend, seed=4, dropout_p=0.3, workspace=workspace, **position)
        cases.assert_same({"out": out} | cases.gradients(out, given, dout), {"out": truth} | expected, 1e-5)


@BACKEND
def test_dropout_replays_in_backward_whatever_happens_between(backend):
    given = cases.operands(1, 2, 130, 70, 8)
    dout = torch.randn(1, 2, 130, 8, dtype=torch.float64)
    out = cases.run(given, backend=backend, seed=11, dropout_p=0.3, workspace=10_000)
    after_forward = torch.get_rng_state()
    torch.randn(5)
    moved = torch.get_rng_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    with fused_remat.workspace(2**20):
        ours = cases.gradients(out, given, dout)
    torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), moved), "backward must not draw"
    truth = cases.run_reference(given, seed=11, dropout_p=0.3)
    assert torch.equal(torch.get_rng_state(), after_forward), "the op draws as much as the reference: one seed"
    cases.assert_same({"out": out} | ours, {"out": truth} | cases.gradients(truth, given, dout), 1e-10)


@BACKEND
@pytest.mark.parametrize("use_reentrant", (False, True), ids=("non-reentrant", "reentrant"))
def test_checkpoints_replay_the_mask(use_reentrant, backend):
    given = cases.operands(1, 2, 130, 130, 8, dtype=torch.float32)
    dout = torch.randn(1, 2, 130, 8)
    results = []
    for wrap in (False, True):
        for value in given.values():
            value.grad = None
        torch.manual_seed(3)
        region = lambda q, k, v: fused_remat.attention(q, k, v, dropout_p=0.3, is_causal=True).sin()
        with fused_remat.backend(backend):
            out = checkpoint(region, *given.values(), use_reentrant=use_reentrant) if wrap else region(*given.values())
            torch.randn(7)
            out.backward(dout)
        results.append([out.detach(), *(value.grad for value in given.values())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@BACKEND
def test_dropout_is_off_in_evaluation_and_averages_out_in_training(backend):
    given = cases.operands(1, 2, 6, 9, 4, requires_grad=False)
    plain = cases.run(given, backend=backend)
    state = torch.get_rng_state()
    with fused_remat.backend(backend):
        assert torch.equal(fused_remat.attention(**given, dropout_p=0.5, training=False), plain)
        assert torch.equal(torch.get_rng_state(), state), "nothing is drawn in evaluation"
        first, second = (fused_remat.attention(**given, dropout_p=0.5) for _ in range(2))
        assert not torch.equal(first, second)
        mean = torch.stack([fused_remat.attention(**given, dropout_p=0.5) for _ in range(2000)]).mean(0)
    assert (mean - plain).norm() <= 0.05 * plain.norm()


@BACKEND
def test_lse_knows_nothing_of_dropout(backend):
    given = cases.operands(1, 2, 6, 9, 4)
    _, plain = cases.run(given, backend=backend, return_lse=True)
    _, dropped = cases.run(given, backend=backend, return_lse=True, dropout_p=0.5)
    assert torch.equal(plain, dropped)
    dlse = torch.randn_like(plain)
    ours, truth = (cases.gradients(lse, {"q": given["q"], "k": given["k"]}, dlse) for lse in (dropped, plain))
    cases.assert_same(ours, truth, 1e-12)


def test_rows_without_keys_drop_nothing():
    given = cases.operands(1, 1, 3, 4, 2)
    out = cases.run(given, dropout_p=0.5, attn_mask=torch.zeros(3, 4, dtype=torch.bool))
    assert (out == 0).all()
    _, lse = cases.run(given, dropout_p=0.5, attn_mask=torch.zeros(3, 4, dtype=torch.bool), return_lse=True)
    assert (lse == -math.inf).all()
