"""Calls on the GPU wait for nothing, may be captured in a graph, repeat their bits, and keep what they promise."""

from __future__ import annotations

import pytest
import torch
from gpu_device import captured, needs_gpu, step

import fused_remat
from fused_remat.check.cases import CASES, LARGE, Case
from fused_remat.check.run import placed
from fused_remat.measure import measure

pytestmark = [*needs_gpu, pytest.mark.usefixtures("each_gpu_backend")]
SOME = [case for case in CASES if case.name in ("gelu", "gated silu", "dropout", "causal, dropout", "padding")] + [
    case for case in CASES if case.op == "multi_head_attention"
]


@pytest.fixture(params=SOME, ids=lambda case: f"{case.op}: {case.name}")
def case(request) -> Case:
    return request.param


@pytest.fixture
def tensors(case) -> dict[str, torch.Tensor]:
    return placed(case.tensors(LARGE), "cuda", torch.bfloat16)


def test_nothing_waits_for_the_device(case, tensors):
    step(case, tensors, LARGE)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(case, tensors, LARGE)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_replays_the_call(case, tensors):
    step(case, tensors, LARGE)
    torch.manual_seed(0)
    expected = step(case, tensors, LARGE)
    graph, results = captured(lambda: step(case, tensors, LARGE))
    torch.manual_seed(0)
    graph.replay()
    torch.cuda.synchronize()
    if "dropout" not in case.name and case.name != "cross-attention":  # a graph draws its seeds otherwise
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    else:
        first = [r.clone() for r in results]
        graph.replay()
        torch.cuda.synchronize()
        assert not all(torch.equal(a, b) for a, b in zip(results, first, strict=True))  # another mask
    assert all(r.isfinite().all() for r in results)


def test_reruns_have_the_same_bits(case, tensors):
    torch.manual_seed(0)
    first = step(case, tensors, LARGE)
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(first, step(case, tensors, LARGE), strict=True))


def test_an_mlp_keeps_nothing_and_stays_within_its_workspace():
    rows, width, hidden, workspace = 4096, 1024, 4096, 16 * 2**20
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w_up, w_down = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for shape in ((hidden, width), (width, hidden))
    )
    found = measure(lambda: fused_remat.mlp(x, w_up, w_down, workspace=workspace), repeats=0)
    assert found.kept_bytes == 0
    # One fp32 sum of dx or of the weights' gradients beside the workspace.
    accumulator = 4 * max(rows * width, 2 * hidden * width)
    assert found.backward_peak_above_gradients_bytes <= workspace + accumulator + 2**20
