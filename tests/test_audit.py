"""audit and auditing: bytes that layers promised against bytes they kept, and every way in which they differ."""

from __future__ import annotations

import copy
import gc
import io
import json
import sys
import weakref

import mlp_cases
import pytest
import torch
from audit_cases import STREAM, B, D, F, H, L, encoder, step, verdicts, x
from torch import nn
from torch.utils.checkpoint import checkpoint

import fused_remat
from fused_remat import last_calls
from fused_remat.audit import audit, auditing

pytestmark = pytest.mark.skipif(mlp_cases.needs_extension is not None, reason=str(mlp_cases.needs_extension))


def test_a_step_that_keeps_its_promises():
    model = encoder()
    found = audit(model, step=lambda: step(model))
    assert found.ok and found.measured and found.warnings == []
    assert len(found.rows) == 8
    attention, mlp, norm = (found[f"layers.1{part}"] for part in (".self_attn", "", ".norm1"))
    lse = B * L * H * 4
    assert attention.promised == "its input, out" and attention.calls == 1
    assert attention.expected_bytes == attention.observed_bytes == 2 * STREAM + lse
    assert mlp.method == "_ff_block" and mlp.expected_bytes == mlp.observed_bytes == STREAM
    assert (norm.promised, norm.expected_bytes, norm.observed_bytes) == ("nothing", 0, 0)
    assert found.outside_bytes == STREAM  # what the loss squares


@pytest.mark.parametrize(
    "keep, mlp_bytes, attention_bytes",
    [
        ((), STREAM, STREAM),
        (("up",), STREAM + B * L * F * 4, STREAM),
        (0.5, STREAM + B * L * F * 2, 2 * STREAM),
        (("q", "k", "v", "out"), STREAM, 5 * STREAM),
    ],
    ids=str,
)
def test_formulas_predict_what_hooks_observe(keep, mlp_bytes, attention_bytes):
    model = encoder(keep=keep)
    found = audit(model, step=lambda: step(model))
    noted = audit(model)
    assert found.ok and noted.ok and not noted.measured
    for name, nbytes in (("layers.1", mlp_bytes), ("layers.1.self_attn", attention_bytes + B * L * H * 4)):
        assert found[name].observed_bytes == found[name].expected_bytes == nbytes
        assert (noted[name].expected_bytes, noted[name].observed_bytes) == (nbytes, None)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("keep, kept", [((), 0.0), (("up",), 1.0), (0.25, 0.25)], ids=str)
def test_modules_of_our_own_promise_too(gated, keep, kept):
    model = nn.Sequential(fused_remat.GatedMLP(D, F, keep=keep) if gated else fused_remat.MLP(D, F, keep=keep))
    found = audit(model, step=lambda: step(model))
    residuals = int(kept * F) * B * L * 4 * (2 if gated and isinstance(keep, float) else 1)
    row = found["0"]
    assert (row.kind, row.verdict) == ("gated mlp" if gated else "mlp", "ok")
    assert row.observed_bytes == row.expected_bytes == STREAM + residuals
    assert audit(model)["0"].expected_bytes == STREAM + residuals


def test_an_attention_module_with_masks_dropout_and_another_key():
    model = fused_remat.MultiheadAttention(D, H, dropout=0.1, batch_first=True, kdim=16, vdim=16)
    key, hidden = torch.randn(B, 5, 16), torch.zeros(B, 5, dtype=torch.bool)
    found = audit(
        model, step=lambda: model(x(), key, key, key_padding_mask=hidden, need_weights=False)[0].sum().backward()
    )
    row = found[""]
    # the query and its output, the key, the mask as it is handed on, one number per query and head, and the seed
    expected = 2 * STREAM + B * 5 * 16 * 4 + B * 5 + B * L * H * 4 + 8
    assert row.verdict == "ok" and row.observed_bytes == row.expected_bytes == expected


def test_a_stream_that_neighbours_share_counts_once():
    shared = x()
    first, second = fused_remat.MLP(D, F), fused_remat.MLP(D, F)
    model = nn.ModuleList([first, second])
    found = audit(model, step=lambda: (first(shared) + second(shared)).sum().backward())
    assert found.ok
    assert [row.observed_bytes for row in found.rows] == [STREAM, 0]
    assert [row.expected_bytes for row in found.rows] == [STREAM, 0]


def test_two_calls_of_a_shared_layer_add_up():
    shared = fused_remat.MLP(D, F)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    found = audit(model, step=lambda: step(model))
    (row,) = found.rows
    assert (row.layer, row.calls, row.verdict) == ("0", 2, "ok")
    # the second reads what tanh keeps anyway, and tanh had not saved it before: its output
    assert row.observed_bytes == row.expected_bytes
    assert row.observed_bytes + found.outside_bytes == 3 * STREAM


def test_the_reference_path_keeps_more():
    model = fused_remat.MLP(D, F)

    def unfused():
        with fused_remat.backend("reference"):
            step(model)

    found = audit(model, step=unfused)
    assert found[""].verdict == "more" and "reference path" in found[""].sentence
    assert found[""].observed_bytes > found[""].expected_bytes == STREAM
    assert audit(model)[""].verdict == "more"


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_an_outer_checkpoint_recomputes_twice(reentrant):
    model = encoder(1)
    given = x(requires_grad=True)
    found = audit(model, step=lambda: checkpoint(model, given, use_reentrant=reentrant).sum().backward())
    row = found["layers.0"]
    assert row.verdict == "less" and not found.ok
    assert ("inside backward only" if reentrant else "ran again inside backward") in row.sentence
    assert row.observed_bytes == 0
    noted = audit(model)["layers.0"]
    assert noted.verdict == "less" and "backward" in noted.sentence
    step(model)
    assert audit(model)["layers.0"].verdict == "ok"


def test_offloading_is_seen_to_take_what_was_kept():
    model = fused_remat.MLP(D, F)

    def offloaded():
        with torch.autograd.graph.save_on_cpu():
            step(model)

    row = audit(model, step=offloaded)[""]
    assert row.verdict == "less" and "offloading" in row.sentence


def test_a_result_that_the_loss_does_not_use_keeps_nothing():
    model = nn.ModuleList([fused_remat.MLP(D, F), fused_remat.MLP(D, F)])

    def dead_branch():
        given = x()
        model[0](given)
        model[1](x()).sum().backward()

    found = audit(model, step=dead_branch)
    assert verdicts(found) == {"0": "less", "1": "ok"}
    assert "not part of the loss" in found["0"].sentence


def test_an_input_that_is_a_view_keeps_all_of_its_storage():
    model = fused_remat.MLP(D, F)
    wide = torch.randn(B, L, 4 * D)
    row = audit(model, step=lambda: step(model, wide[..., :D]))[""]
    assert row.verdict == "more" and "view of a larger tensor" in row.sentence
    assert row.observed_bytes - row.expected_bytes == 3 * STREAM


def test_what_is_frozen_keeps_nothing_and_breaks_no_promise():
    frozen, trained = fused_remat.MLP(D, F), fused_remat.MLP(D, F)
    frozen.requires_grad_(False)
    model = nn.Sequential(frozen, trained)
    found = audit(model, step=lambda: step(model))
    assert found.ok
    assert [(row.expected_bytes, row.observed_bytes) for row in found.rows] == [(0, 0), (STREAM, STREAM)]


def test_calls_without_gradients_did_not_run():
    model = encoder(1)

    def evaluate():
        with torch.no_grad():
            model(x())

    found = audit(model, step=evaluate)
    assert set(verdicts(found).values()) == {"did not run"} and not found.ok
    step(model)
    with torch.no_grad():
        model(x())
    assert audit(model)["layers.0"].verdict == "ok"  # of the last call with gradients


def test_compiled_calls_are_not_seen_and_leave_no_notes():
    model = encoder(1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = audit(model, step=lambda: step(compiled))
    assert set(verdicts(found).values()) == {"did not run"}
    assert "torch.compile" in found["layers.0"].sentence and not found.ok
    assert last_calls.last_call(model.layers[0], "_ff_block") is None


def test_an_unconverted_model_promises_nothing():
    model = nn.Linear(2, 2)
    found = audit(model)
    assert not found.ok and "convert the model first" in str(found)


@pytest.mark.parametrize("step", [True, False])
def test_a_model_that_a_policy_lets_keep_everything_is_ok(step):
    model = nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 2))
    report = fused_remat.convert(model, policy="everything")
    run = (lambda: model(torch.ones(3, 2)).sum().backward()) if step else None
    found = audit(model, step=run)
    assert found.ok and found.to_dict()["ok"] and not found.rows
    assert "everything is kept, as its policy or plan says" in str(found)
    report.revert()
    assert not audit(model, step=run).ok
    assert not audit(copy.deepcopy(model)).ok
    fused_remat.convert(model, policy="everything", dry_run=True)
    assert not audit(model).ok
    fused_remat.convert(model, policy="everything")
    fused_remat.plan(model, torch.ones(3, 2), budget="min", fake=True)
    assert audit(model).ok  # a plan that is not applied leaves it so


def test_a_layer_that_keeps_other_than_it_promised_is_caught():
    """A conversion that hands the op another keep than its record says."""
    model = encoder(1)
    told = sys.modules["fused_remat.functional.mlp"]
    right = told.kept_features
    told.kept_features = lambda keep, features, gated: (features, 0)
    try:
        found = audit(model, step=lambda: step(model))["layers.0"]
    finally:
        told.kept_features = right
    assert found.observed_bytes == STREAM + B * L * F * 4 and found.expected_bytes == STREAM
    assert found.verdict == "more" and not found.sentence.startswith("it ran its own code")


def test_regions_keep_their_inputs_and_what_lies_inside_nothing():
    block = nn.Sequential(nn.Conv1d(L, L, 3, padding=1), nn.ReLU(), nn.Conv1d(L, L, 3, padding=1))
    model = nn.Sequential(block, copy.deepcopy(block))
    fused_remat.convert(model, policy={"*": "full"})
    found = audit(model, step=lambda: step(model))
    assert [(row.kind, row.verdict) for row in found.rows] == [("region", "ok")] * 2
    assert all(row.observed_bytes == row.expected_bytes <= STREAM for row in found.rows)
    assert found.outside_bytes + sum(row.observed_bytes for row in found.rows) <= 4 * STREAM
    assert audit(model).ok


def test_copies_and_pickles_know_nothing_of_calls():
    model = encoder(1)
    step(model)
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copied, loaded):
        assert audit(other)["layers.0"].verdict == "did not run"
        assert list(vars(other.layers[0])) == list(vars(model.layers[0]))
        step(other)
        assert audit(other)["layers.0"].verdict == "ok"


def test_notes_die_with_their_layer_and_hold_no_tensors():
    model, given = fused_remat.MLP(D, F), x()
    step(model, given)
    key, tensor = id(model), weakref.ref(given)
    assert last_calls.last_call(model, "forward").sizes == [(B * L * D, torch.float32)]
    del given
    assert tensor() is None
    assert key in last_calls._notes
    model.zero_grad()
    del model
    gc.collect()
    assert key not in last_calls._notes


def test_converting_anew_forgets_the_calls_before():
    model = encoder(1)
    step(model)
    fused_remat.revert(model)
    fused_remat.convert(model)
    assert audit(model)["layers.0"].verdict == "did not run"


def test_the_last_of_several_passes_is_told():
    model = fused_remat.MLP(D, F)
    with auditing(model) as found:
        step(model, x(4))
        step(model, x(1))
    assert found[""].observed_bytes == L * D * 4 and found[""].calls == 1


def test_gradients_are_the_same_while_audited():
    model = encoder(1, dropout=0.1)
    given = x()

    def gradients(run):
        model.zero_grad()
        torch.manual_seed(5)
        run()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients(lambda: step(model, given))
    audited = gradients(lambda: audit(model, step=lambda: step(model, given)))
    assert all(map(torch.equal, plain, audited))


def test_an_audit_ends_also_when_its_step_fails():
    model = fused_remat.MLP(D, F)

    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        audit(model, step=fail)
    assert last_calls.watcher is None
    with auditing(model), pytest.raises(RuntimeError, match="an audit is running already"):
        audit(model, step=fail)
    assert audit(model, step=lambda: step(model)).ok


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got int"):
        audit(3)
    with pytest.raises(TypeError, match="step must be a function"):
        audit(nn.Linear(2, 2), step=3)
    with pytest.raises(KeyError, match="no row of layer 'a'; there are none"):
        audit(nn.Linear(2, 2))["a"]


def test_the_audit_is_json_and_a_table_that_folds_equal_layers():
    model = encoder(3)
    found = audit(model, step=lambda: step(model))
    read = json.loads(json.dumps(found.to_dict()))
    assert read["ok"] and len(read["rows"]) == 12 and read["rows"][0]["observed_bytes"] is not None
    text = str(found)
    assert "expected (predicted)" in text and "observed (measured)" in text
    assert "layers.0-2._ff_block (x3)" in text
    assert "not measured" in str(audit(model))
