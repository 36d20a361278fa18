"""The attention op among others: their tensors, second backwards, subsets of gradients, checkpoints, what is kept."""

from __future__ import annotations

from functools import partial
from itertools import product

import attention_cases as cases
import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fused_remat
from fused_remat.measure import measure

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
]
BACKEND = pytest.mark.parametrize("backend", cases.BACKENDS)


@BACKEND
def test_backward_writes_to_nobody_elses_tensor(backend):
    p = torch.randn(1, 2, 7, 5, dtype=torch.float64, requires_grad=True)
    results = []
    for attention in (partial(cases.run, backend=backend), cases.run_reference):
        a = p.exp()  # exp saves its output, which is our q, k and v
        loss = attention({"q": a, "k": a, "v": a}).sum() + 2 * a.sum()
        results.append(torch.autograd.grad(loss, p)[0])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


@BACKEND
@pytest.mark.parametrize("mask", ("float+float-padding", "bool+padding"))
def test_every_operand_and_the_incoming_gradients_stay_as_they_were(mask, backend):
    given = cases.operands(2, 4, 9, 40, 5, kv_heads=2)
    masks = cases.masks(mask, given)
    everything = given | masks
    before = {name: value.detach().clone() for name, value in everything.items()}
    leaves = given | cases.learned(masks)
    out, lse = cases.run(given, backend=backend, return_lse=True, dropout_p=0.2, workspace=1, **masks)
    douts = torch.randn_like(out), torch.randn_like(lse)
    douts_before = [d.clone() for d in douts]
    outputs_before = out.detach().clone(), lse.detach().clone()
    first = cases.gradients((out, lse), leaves, douts, retain_graph=True)
    second = cases.gradients((out, lse), leaves, douts)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(before[name], everything[name]) for name in before)
    assert all(torch.equal(a, b) for a, b in zip((*douts, out, lse), (*douts_before, *outputs_before), strict=True))


@BACKEND
@pytest.mark.parametrize("name", ("q", "k", "v", "attn_mask", "key_padding_mask", "out"))
def test_changing_an_operand_after_forward_is_an_error(name, backend):
    given = cases.operands(2, 2, 4, 5, 3)
    masks = cases.masks("float+padding", given)
    out = cases.run(given, backend=backend, **masks)
    with torch.no_grad():
        tensor = ({"out": out} | given | masks)[name]
        tensor.logical_not_() if tensor.dtype == torch.bool else tensor.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, given["q"], torch.ones_like(out))


@BACKEND
def test_second_backward_through_the_same_graph(backend):
    given = cases.operands(2, 4, 9, 40, 5, kv_heads=2)
    run = partial(cases.run, given, backend=backend, dropout_p=0.3)
    out = run()
    out.sum().backward(retain_graph=True)
    once = {name: value.grad.clone() for name, value in given.items()}
    out.sum().backward()
    for name, value in given.items():
        assert torch.equal(value.grad, 2 * once[name])
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    out = run()
    (dq,) = torch.autograd.grad(out.sum(), given["q"], retain_graph=True)
    dk, dv = torch.autograd.grad(out.sum(), [given["k"], given["v"]])
    assert all(torch.equal(a, b) for a, b in zip((dq, dk, dv), once.values(), strict=True))
    out = run()
    halves = [
        torch.autograd.grad(out[..., part].sum(), given["v"], retain_graph=True)[0] for part in ((0, 1), (2, 3, 4))
    ]
    torch.testing.assert_close(sum(halves), once["v"])


@BACKEND
def test_gradients_exist_for_what_requires_them_alone(backend):
    given = cases.operands(2, 4, 5, 7, 3, kv_heads=2)
    everything = given | cases.masks("float+float-padding", given)
    dout = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    for value in everything.values():
        value.requires_grad_()
    masks = {name: everything[name] for name in ("attn_mask", "key_padding_mask")}
    truth = cases.gradients(cases.run_reference(given, **masks), everything, dout)
    for subset in product((False, True), repeat=len(everything)):
        for value, wanted in zip(everything.values(), subset, strict=True):
            value.requires_grad_(wanted)
        out = cases.run(given, backend=backend, **masks)
        assert out.requires_grad == any(subset)
        if any(subset):
            ours = cases.gradients(out, everything, dout)
            cases.assert_same(ours, {name: truth[name] for name in ours}, 1e-10, subset)


# What is kept ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout_p", (0.0, 0.1))
@pytest.mark.parametrize("mask", ("none", "bool-keys", "padding"))
def test_out_and_lse_are_all_that_is_kept(mask, dropout_p):
    # As a projection makes them, [B, L, H, E] in memory: gradients come in that layout, and autograd copies others.
    laid_out = lambda t: t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    given = {name: laid_out(t) for name, t in cases.operands(2, 4, 256, 256, 32, dtype=torch.float32).items()}
    masks = cases.masks(mask, given)
    measured = measure(
        lambda: cases.run(given, workspace=2**18, dropout_p=dropout_p, return_lse=True, **masks)[0], repeats=1
    )
    # The output itself is not counted as kept.
    assert measured.kept_bytes == 4 * 2 * 4 * 256 + (8 if dropout_p else 0)
    assert measured.kept_hook_bytes == measured.kept_bytes, "everything kept is visible to saved_tensors_hooks"
    scores = 4 * 2 * 4 * 256 * 256
    assert measured.forward_peak_above_output_bytes - measured.kept_bytes <= 1.01 * 2**18 < scores / 4
    # Beside the workspace, one number per query: delta.
    assert measured.backward_peak_above_gradients_bytes - measured.kept_bytes <= 1.01 * 2**18 + measured.kept_bytes


def test_nothing_is_saved_without_gradients():
    given = cases.operands(requires_grad=False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        assert not cases.run(given).requires_grad
        given["q"].requires_grad_()
        with torch.no_grad():
            assert not cases.run(given).requires_grad
    assert saved == []


def test_flop_counter_sees_inside_the_op():
    from torch.utils.flop_counter import FlopCounterMode

    given = cases.operands(2, 4, 16, 24, 8, kv_heads=2, value_width=6)
    product_of_e, product_of_ev = (2 * 2 * 4 * 16 * 24 * width for width in (8, 6))
    with FlopCounterMode(display=False) as counter:
        out = cases.run(given)
    assert counter.get_total_flops() == product_of_e + product_of_ev
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    # Scores and dP once for each of two passes or once for both; dq, dk, dv.
    assert counter.get_total_flops() in (3 * product_of_e + 2 * product_of_ev, 4 * product_of_e + 3 * product_of_ev)


# Inside checkpoints and autocast --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout_p", (0.0, 0.3))
def test_gradients_are_those_without_checkpoint(dropout_p):
    given = cases.operands(2, 2, 9, 9, 4, dtype=torch.float32)

    def region(q, k, v):
        return fused_remat.attention(q.sin(), k, v, dropout_p=dropout_p, is_causal=True).cos()

    def selective(policy):
        def choose(ctx, op, *args, **kwargs):
            return policy if op == torch.ops.fused_remat.attention_fwd.default else CheckpointPolicy.PREFER_RECOMPUTE

        return partial(create_selective_checkpoint_contexts, choose)

    def offloaded(*values):
        with torch.autograd.graph.save_on_cpu():
            return region(*values)

    wrapped = {
        "plain": region,
        "non-reentrant": lambda *values: checkpoint(region, *values, use_reentrant=False),
        "reentrant": lambda *values: checkpoint(region, *values, use_reentrant=True),
        "save_on_cpu": offloaded,
        "selective, saved": lambda *values: checkpoint(
            region, *values, use_reentrant=False, context_fn=selective(CheckpointPolicy.MUST_SAVE)
        ),
        "selective, recomputed": lambda *values: checkpoint(
            region, *values, use_reentrant=False, context_fn=selective(CheckpointPolicy.MUST_RECOMPUTE)
        ),
    }
    results = {}
    for name, function in wrapped.items():
        for value in given.values():
            value.grad = None
        torch.manual_seed(5)
        out = function(*given.values())
        out.square().sum().backward()
        results[name] = [out.detach(), *(value.grad for value in given.values())]
    for name, tensors in results.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, results["plain"], strict=True)), name


@BACKEND
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_autocast_around_forward_only(dtype, backend):
    given = cases.operands(2, 3, 20, 33, 8, dtype=torch.float32)
    given["k"] = given["k"].detach().to(dtype).requires_grad_()  # dtypes may differ
    dout = torch.randn(2, 3, 20, 8).to(dtype)
    with torch.autocast("cpu", dtype):
        out = cases.run(given, backend=backend)
    assert out.dtype == dtype
    ours = cases.gradients(out, given, dout)
    exact = {name: value.detach().to(dtype).double().requires_grad_() for name, value in given.items()}
    truth_out = cases.run_reference(exact)
    truth = cases.gradients(truth_out, exact, dout.double())
    assert cases.relative_error(out, truth_out) <= 2e-2
    for name in truth:
        assert ours[name].dtype == given[name].dtype
        assert cases.relative_error(ours[name], truth[name]) <= 2e-2, name


@BACKEND
def test_autocast_around_backward_only_changes_nothing(backend):
    given = cases.operands(dtype=torch.float32)
    dout = torch.randn(2, 4, 5, 3)
    plain = cases.gradients(cases.run(given, backend=backend), given, dout)
    out = cases.run(given, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        inside = cases.gradients(out, given, dout)
    assert all(torch.equal(plain[name], inside[name]) for name in plain)


def test_fp64_stays_out_of_autocast():
    given = cases.operands()
    with torch.autocast("cpu", torch.bfloat16):
        assert cases.run(given).dtype == torch.float64
