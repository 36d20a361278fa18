"""Policies and plans on modules of `fused_remat.nn`: they keep what the same layer keeps that was converted."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from convert_cases import assert_same
from policy_cases import (
    HEADS,
    LSE,
    STREAM,
    WIDTH,
    AttentionBlock,
    Looped,
    MLPBlock,
    measured,
    rows,
    seeded,
    state_of,
    stepped,
)
from torch import nn

import fused_remat
from fused_remat import convert, revert
from fused_remat.convert.rebind import records_of
from fused_remat.plan import Plan, plan
from fused_remat.plan.peak import Peak
from fused_remat.policy import Arrangement, Assignment
from fused_remat.recording import record_step
from fused_remat.training_step import make_step


class GatedStock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 48, bias=False), nn.Linear(WIDTH, 48, bias=False)
        self.down_proj = nn.Linear(48, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class GatedBlock(MLPBlock):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = GatedStock()


def own_mlp(keep=(), **options) -> MLPBlock:
    """`MLPBlock` whose MLP is ours, of equal weights."""
    block = MLPBlock()
    stock, block.mlp = block.mlp, fused_remat.MLP(WIDTH, 4 * WIDTH, keep=keep, device="meta", **options)
    block.mlp.fc1, block.mlp.fc2 = stock[0], stock[2]
    return block


def own_gated() -> GatedBlock:
    block = GatedBlock()
    stock, block.mlp = block.mlp, fused_remat.GatedMLP(WIDTH, 48, device="meta")
    block.mlp.load_state_dict(stock.state_dict(), assign=True)
    return block


def own_attention(**options) -> AttentionBlock:
    block = AttentionBlock()
    ours = fused_remat.MultiheadAttention(WIDTH, HEADS, batch_first=True, device="meta", **options)
    ours.load_state_dict(block.attention.state_dict(), assign=True)
    block.attention = ours
    return block


def chain(block, length=4) -> nn.Module:
    return seeded(lambda: nn.Sequential(*(block() for _ in range(length))))


PAIRS = {
    "mlp": (own_mlp, MLPBlock),
    "gated": (own_gated, GatedBlock),
    "attention": (own_attention, AttentionBlock),
}
BY_KIND = pytest.mark.parametrize(("own", "stock"), PAIRS.values(), ids=PAIRS)
RESIDUALS = {"mlp": ("up",), "gated": ("up", "gate"), "attention": ("q", "k", "v", "out")}


@BY_KIND
@pytest.mark.parametrize("policy", ("selective", "full", {"*": 0.25}), ids=str)
def test_a_policy_keeps_what_it_keeps_of_the_same_layer_converted(own, stock, policy):
    model, twin = chain(own), chain(stock)
    before = state_of(model)
    report = convert(model, policy=policy)
    convert(twin, policy=policy)
    assert measured(model, rows()).kept_bytes == measured(twin, rows()).kept_bytes
    of_stock = {"mlp.fc1": "mlp.0", "mlp.fc2": "mlp.2"}
    ours = {re.sub("mlp.fc[12]", lambda m: of_stock[m[0]], name): t for name, t in stepped(model, rows()).items()}
    assert_same(ours, stepped(twin, rows()), 0.0)
    assert report.revert() and state_of(model) == before


@pytest.mark.parametrize("name", PAIRS)
def test_everything_keeps_all_residuals_and_revert_gives_the_own_keep_back(name):
    model = chain(PAIRS[name][0])
    kept, before, names = measured(model, rows()).kept_bytes, state_of(model), list(model.state_dict())
    expected = stepped(model, rows())
    report = convert(model, policy="everything")
    layers = [layer for layer in model.modules() if records_of(layer)]
    assert len(layers) == 4 and all(records_of(m)["forward"].keep == RESIDUALS[name] for m in layers)
    assert {entry.note for entry in report.converted} == {f"made with keep={layers[0].keep}"}
    assert measured(model, rows()).kept_bytes > kept
    assert_same(stepped(model, rows()), expected, 2e-5)
    assert list(model.state_dict()) == names
    assert len(revert(model)) == 4
    assert state_of(model) == before and measured(model, rows()).kept_bytes == kept


def test_what_the_layers_keep_in_bytes():
    model = chain(lambda: own_mlp(keep=("up",)))
    convert(model, policy="full")
    norms = 4 * 2 * STREAM // WIDTH  # of these at most the statistics
    assert 3 * STREAM <= measured(model, rows()).kept_bytes <= 3 * STREAM + norms
    attentions = chain(own_attention)
    convert(attentions, policy={"*": ("out",)})
    least = 3 * STREAM + 4 * (STREAM + LSE)
    assert least <= measured(attentions, rows()).kept_bytes <= least + norms


def test_what_is_known_of_own_layers():
    model = nn.Sequential(own_mlp(keep=0.5), MLPBlock(), own_attention())
    layers = Arrangement(model).layers
    assert [(i.kind, i.made_with, i.residuals, i.fractions) for i in layers.values()] == [
        ("mlp", 0.5, ("up",), True),
        ("mlp", None, ("up",), True),
        ("attention", ("out",), ("q", "k", "v", "out"), False),
    ]
    assert layers["0.mlp"].norms == ("0.norm",) and layers["0.mlp"].class_name == "MLP"
    assert Arrangement(nn.Sequential(own_mlp(), own_mlp())).layers["1.mlp"].like == "0.mlp"


def test_named_none_and_not_named():
    model = chain(lambda: own_mlp(keep=0.5))
    arrangement = Arrangement(model)
    arrangement.set(Assignment({"0.mlp": (), "1.mlp": None}))
    assert [records_of(block.mlp).get("forward") and records_of(block.mlp)["forward"].keep for block in model] == [
        (), ("up",), None, None,
    ]  # fmt: skip
    assert "norm" not in {entry.kind for entry in arrangement.report.converted if entry.name.startswith("1")}
    arrangement.set(Assignment({"1.mlp": 0.25}))
    reasons = {entry.name: entry.reason for entry in arrangement.report.skipped}
    assert reasons == {"0.norm": "runs its own code again", "0.mlp": "keeps 0.5, as it was made, again"}
    assert [entry.note for entry in arrangement.report.converted if entry.kind == "mlp"] == [
        "was mlp, gelu, keep=('up',)"
    ]
    with pytest.raises(ValueError, match=r"2\.mlp: keep names \['gate'\], but a plain MLP can keep 'up'"):
        arrangement.set(Assignment({"2.mlp": ("gate",)}))


def test_rules_leave_alone_what_they_do_not_match_and_every_lets_the_others_keep_everything():
    model = chain(own_mlp)
    report = convert(model, policy={"1": 0.5})
    assert [entry.name for entry in report.converted] == ["1.norm", "1.mlp"]
    convert(model, policy={"2": "everything"})
    assert [bool(records_of(block.mlp)) for block in model] == [False, False, True, False]
    convert(model, policy="full", every=2)
    assert [records_of(block.mlp)["forward"].keep for block in model] == [(), ("up",), (), ("up",)]


def test_copies_and_pickles_carry_the_choice_and_revert_alone():
    model = chain(own_mlp)
    convert(model, policy={"*": 0.5})
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model[0].mlp))
    for layer in (copied[0].mlp, loaded):
        assert isinstance(layer, fused_remat.MLP) and records_of(layer)["forward"].keep == 0.5
    revert(copied)
    assert type(copied[0].mlp) is fused_remat.MLP and records_of(model[0].mlp)
    assert "fused_remat: mlp, gelu, keep=0.5" in repr(model[0].mlp)


def test_a_forward_of_their_own_is_told_and_made_a_region_by_full():
    class Doubled(fused_remat.MLP):
        def forward(self, x):
            return 2 * super().forward(x)

    class Renamed(fused_remat.MLP):
        pass

    model = nn.Sequential(Doubled(WIDTH, 64), Renamed(WIDTH, 64))
    arrangement = Arrangement(model)
    assert list(arrangement.layers) == ["1"]
    reason = "Doubled, a subclass of fused_remat.MLP with a forward of its own"
    assert reason in arrangement.skipped[0].reason
    with pytest.raises(ValueError, match=reason):
        convert(model, policy="full", strict=True)
    assert [(entry.name, entry.kind) for entry in convert(model, policy="full").converted] == [
        ("1", "mlp"), ("0", "region"),
    ]  # fmt: skip
    bound = nn.Sequential(fused_remat.MLP(WIDTH, 64))
    bound[0].forward = bound[0].forward
    assert Arrangement(bound).skipped[0].reason == "has a forward of its own on the instance"


def test_inside_a_region_the_layer_keeps_everything_without_advice():
    model = chain(own_mlp)
    report = convert(model, policy={"*": "region"})
    assert {entry.note for entry in report.converted if entry.kind == "mlp"} == {"made with keep=()"}
    assert measured(model, rows()).kept_bytes == 3 * STREAM  # the first is the caller's
    advised = Arrangement(model)
    advised.set(Assignment({"0.mlp": ()}, (("0",),)))
    assert any("mlp is rebuilt twice" in entry.note for entry in advised.report.converted)


def test_attentions_answer_as_before():
    """Weights, masks, a strict layer, an output projection that is called: arguments by position and by name."""
    layer = seeded(lambda: fused_remat.MultiheadAttention(WIDTH, HEADS, batch_first=True, strict=True))
    layer.out_proj.register_forward_hook(lambda *_: None)
    x, mask = rows(), torch.ones(64, 64, dtype=torch.bool).triu(1)
    hidden = mask.clone()
    hidden[3] = True  # stock answers NaN
    calls = [
        ((x, x, x), dict(attn_mask=mask)),
        ((x, x, x, None, True, hidden), {}),
        ((x, x, x), dict(need_weights=False)),
    ]
    expected = [layer(*args, **kwargs) for args, kwargs in calls]
    convert(layer, policy="full")
    for (args, kwargs), (output, weights) in zip(calls, expected, strict=True):
        got = layer(*args, **kwargs)
        torch.testing.assert_close(got[0], output, equal_nan=True)
        assert (got[1] is None) == (weights is None)
    assert layer(*calls[1][0])[0].isnan().any()


def test_audits_promise_what_the_policy_says():
    model = nn.Sequential(*(own_mlp(keep=("up",)) for _ in range(2)), own_attention())
    convert(model, policy="full")
    with fused_remat.auditing(model) as found:
        model(rows()).sum().backward()
    assert found.ok, found
    promised = {row.layer: row.promised for row in found.rows}
    assert promised["0.mlp"] == promised["2.attention"] == "its input"
    rows_of = {row.layer: row for row in found.rows}
    assert rows_of["0.mlp"].expected_bytes == rows_of["0.mlp"].observed_bytes == STREAM
    assert [row.layer for row in found.rows] == ["0.norm", "0.mlp", "1.norm", "1.mlp", "2.norm", "2.attention"]


@pytest.mark.slow
def test_under_a_compiler():
    model = seeded(lambda: nn.Sequential(own_mlp(), own_attention()))
    expected = stepped(model, rows())
    convert(model, policy="full")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same({"output": compiled(rows()).detach()}, {"output": expected["output"]}, 2e-5)


def test_the_batch_finder_measures_everything_with_all_residuals():
    from fused_remat.batch.arrange import arranged

    model = chain(own_mlp)
    convert(model, policy={"0": 0.5})
    before = state_of(model)
    with arranged(model, "everything"):
        assert [records_of(block.mlp)["forward"].keep for block in model] == [("up",)] * 4
    assert state_of(model) == before


# Plans


def planned(model, budget, **options):
    with fused_remat.workspace(64 * 1024):
        return plan(model, rows(), budget=budget, fake=True, **options)


class Bare(nn.Module):
    """A residual block around an MLP, without a norm."""

    def __init__(self, mlp) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return x + self.mlp(x)


@pytest.mark.slow
def test_a_plan_is_that_of_the_converted_model():
    """In peak and cost. Where there are norms it has one choice more, to keep everything and leave the norm alone."""
    own, stock = (chain(lambda make=make: Bare(make().mlp), 3) for make in PAIRS["mlp"])
    convert(stock)
    least, everything = planned(stock, "min").peak, planned(own, 1 << 40).everything_kept
    for budget in ("min", (least + everything) // 2):
        ours, theirs = planned(own, budget), planned(stock, budget)
        assert ours.peak == theirs.peak
        assert sum(unit.redone for unit in ours.units) == sum(unit.redone for unit in theirs.units)
    own, stock = (chain(make, 3) for make in PAIRS["mlp"])
    budget = (planned(stock, "min").peak + planned(own, 1 << 40).everything_kept) // 2
    ours, theirs = planned(own, budget), planned(stock, budget)
    assert ours.peak <= budget and ours.front[ours.chosen].cost <= theirs.front[theirs.chosen].cost


@pytest.mark.slow
def test_a_plan_says_keeps_and_restores(tmp_path):
    model = Looped(*(seeded(lambda: own_mlp(keep=0.5)) for _ in range(2)), MLPBlock(), MLPBlock())
    before, kept = state_of(model), measured(model, rows()).kept_bytes
    rich, least = planned(model, 1 << 40), planned(model, "min")
    assert state_of(model) == before
    assert {unit.does for unit in rich.units[:2]} == {"as it is, fused_remat's layers keep everything"}
    assert {unit.letter for unit in rich.units} == {"K"}
    assert rich.assignment.layers["layers.0.mlp"] is rich.assignment.layers["layers.1.mlp"] is None
    least.save(tmp_path / "plan.json")
    report = Plan.load(tmp_path / "plan.json").apply(model)
    assert measured(model, rows()).kept_bytes < kept
    report.revert()
    assert state_of(model) == before and measured(model, rows()).kept_bytes == kept


@pytest.mark.slow
def test_an_own_layer_that_is_called_twice_stays_as_it_was_made():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.blocks = own_mlp(keep=()), nn.Sequential(own_mlp(), own_mlp())

        def forward(self, x):
            return self.blocks(self.shared(self.shared(x)))

    model = seeded(Twice)
    found = planned(model, "min")
    assert not any(path.startswith("shared") for path in found.assignment.layers)
    assert any("shared is not called exactly once" in note for note in found.notes)
    Arrangement(model).set(Assignment({"blocks.0.mlp": None, "blocks.1.mlp": None}))
    with fused_remat.workspace(64 * 1024):
        recording = record_step(make_step(model, (rows(),)), fake=True)
    assert found.everything_kept == Peak.of(recording, 1).peak
