"""`explain` predicts what runs: the backend, the tiles and their bytes."""

from __future__ import annotations

import mlp_cases as cases
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fused_remat

pytestmark = pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension))


def test_explain_predicts_tiles_and_backend():
    given = cases.operands(40, 8, 16, dtype=torch.float32)
    told = fused_remat.explain(fused_remat.mlp, **given, workspace=4000)
    assert told.backend == "cpp" and told.reasons["cpp"] == [] and told.reasons["cuda"]
    assert told.backward.axis == "tokens" and told.backward.excess == 0
    dy = torch.randn(40, 8)  # dense; an expanded one would be packed into the workspace too
    ran = cases.kernels_of(lambda: cases.run(given, workspace=4000).backward(dy))
    assert ran.count("mlp_fwd_chunk_cpp") == -(-40 // told.forward.rows)
    assert ran.count("mlp_bwd_chunk_cpp") == -(-40 // told.backward.rows)
    assert "tokens chunks" in str(told) and "not 'cuda'" in str(told)


def test_explain_reports_a_budget_below_the_smallest_tile():
    told = fused_remat.explain(fused_remat.mlp, **cases.operands(40, 8, 16), workspace=1)
    assert (told.backward.rows, told.backward.features) == (1, 1)
    assert told.backward.excess == told.backward.nbytes - 1 > 0
    assert f"{told.backward.excess} bytes over the budget" in str(told)


def test_explain_says_why_the_reference_runs():
    given = {name: value.to(torch.complex64) for name, value in cases.operands(4, 8, 16, requires_grad=False).items()}
    told = fused_remat.explain(fused_remat.mlp, **given, activation="tanh")
    assert told.backend == "reference" and told.forward is None
    assert "complex64" in " ".join(told.reasons["cpp"]) and "not streamed" in str(told)


def test_explain_refuses_what_the_call_refuses():
    with pytest.raises(ValueError, match="activation must be one of"):
        fused_remat.explain(fused_remat.mlp, **cases.operands(4, 8, 16), activation="swish")


def test_explain_tells_the_groups_of_heads():
    import attention_cases

    x, heads = torch.randn(2, 24, 16), 4
    weights = (torch.randn(48, 16), torch.randn(48), torch.randn(16, 16), torch.randn(16), heads)
    call = lambda workspace: fused_remat.multi_head_attention(x, None, None, *weights, workspace=workspace)
    for workspace in (1, 30_000, 2**20):
        told = fused_remat.explain(fused_remat.multi_head_attention, x, None, None, *weights, workspace=workspace)
        ran = attention_cases.kernels_of(lambda workspace=workspace: call(workspace))
        assert told.backend == "cpp" and ran.count("attention_fwd_cpp") == -(-heads // told.backward.kv_heads)
        assert (told.backward.excess > 0) == (workspace == 1)
    assert "key-value heads" in str(told)


def test_explain_covers_the_attention_core():
    q = torch.randn(1, 2, 5, 4)
    told = fused_remat.explain(fused_remat.attention, q, q, q, is_causal=True)
    assert (told.op, told.backend) == ("attention", "cpp") and "scores in tiles" in str(told)


def test_explain_names_what_it_can_explain():
    with pytest.raises(TypeError, match="multi_head_attention"):
        fused_remat.explain(torch.nn.functional.linear, 1)


def test_a_counter_made_before_the_formulas_still_counts(monkeypatch):
    from fused_remat import ops

    monkeypatch.setattr(ops, "_has_flops", False)
    from torch.utils import flop_counter

    for op in [op for op in flop_counter.flop_registry if str(op).startswith("fused_remat.")]:
        monkeypatch.delitem(flop_counter.flop_registry, op)
    layer = fused_remat.MLP(8, 32)
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(6, 8, requires_grad=True)).sum().backward()
    assert counter.get_total_flops() == 7 * 2 * 6 * 8 * 32
