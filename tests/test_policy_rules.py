"""Policies by the names of modules: what a rule means, and that a misspelt one never means something else."""

from __future__ import annotations

import pytest
from convert_cases import assert_same
from policy_cases import conv_chain, image, llama, measured, mlp_chain, rows, state_of, stepped, tokens

from fused_remat import convert
from fused_remat.policy import Arrangement, Assignment, assignment_of


def assigned(model, policy, **options) -> Assignment:
    return assignment_of(Arrangement(model), policy, **options)


def test_the_first_rule_that_matches_counts():
    rules = {"0": "everything", "1.*": ("up",), "2.mlp": 0.5, "*": "full"}
    found = assigned(mlp_chain(), rules)
    assert found.layers == {"0.mlp": None, "1.mlp": ("up",), "2.mlp": 0.5, "3.mlp": ()} and found.regions == ()


def test_what_no_rule_matches_runs_its_own_code():
    assert assigned(mlp_chain(), {"[12].mlp": "selective"}).layers == {
        "0.mlp": None, "1.mlp": ("up",), "2.mlp": ("up",), "3.mlp": None,
    }  # fmt: skip


def test_a_rule_for_an_outer_module_goes_for_all_within_it():
    pytest.importorskip("transformers")
    rules = {"model.layers.1": "everything", "*self_attn": ("q", "out"), "model.layers": {"mlp": ("gate",)}}
    layers = assigned(llama(), rules).layers
    assert layers == {
        "model.layers.0.self_attn": ("q", "out"), "model.layers.0.mlp": ("gate",),
        "model.layers.1.self_attn": None, "model.layers.1.mlp": None,
    }  # fmt: skip


def test_region_recomputes_any_module_the_outermost_of_those_named():
    model, stock, x = conv_chain(), conv_chain(), image()[:, :, :16, :16]
    assert assigned(model, {"[12]*": "region"}).regions == (("1",), ("2",))
    convert(model, policy={"2": "region", "*": "full"}, every=1)
    assert_same(stepped(model, x), stepped(stock, x), 0.0)
    assert measured(model, x).kept_bytes < measured(stock, x).kept_bytes


def test_every_goes_with_rules():
    assert assigned(mlp_chain(), {"*": "region"}, every=2).regions == (("0",), ("2",))
    layers = assigned(mlp_chain(), {"*": "full"}, every=2).layers
    assert [name for name, keep in layers.items() if keep is not None] == ["0.mlp", "2.mlp"]


def test_a_plan_is_a_policy():
    class Plan:
        assignment = Assignment({"1.mlp": ("up",)}, (("2", "3"),))

    for policy in (Plan(), Plan.assignment):
        model, stock = mlp_chain(), mlp_chain()
        report = convert(model, policy=policy)
        assert [entry.name for entry in report.converted if entry.kind != "norm"] == ["1.mlp", "2"]
        assert_same(stepped(model, rows()), stepped(stock, rows()), 2e-5)
        with pytest.raises(ValueError, match="every=2 goes with a policy by name"):
            convert(model, policy=policy, every=2)


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"*.mpl": "full"}, ValueError, r"policy names '\*.mpl', but the model has no such module; it has '0', "),
        ({"*": "full", "0": "everything"}, ValueError, r"names '0' after '\*', which matches all the same .* before"),
        ({"*.norm": "full"}, ValueError, r"names '\*.norm', where there is nothing to decide.*'0.norm'"),
        ({"*": "ful"}, ValueError, r"policy\['\*'\] must be one of .* or 'region'; got 'ful'"),
        ({"*": ("upp",)}, ValueError, r"policy\['\*'\]: keep names \['upp'\]"),
        ({"*": None}, TypeError, r"policy\['\*'\]"),
        ({"*": 1.5}, ValueError, r"policy\['\*'\]: keep as a fraction must be in \[0, 1\]"),
        ({3: "full"}, TypeError, "policy must map module names to what is done there, got 3"),
        ({}, ValueError, "policy holds no rules"),
    ],
)
def test_a_rule_that_decides_nothing_is_an_error(rules, error, message):
    model = mlp_chain()
    before = state_of(model)
    with pytest.raises(error, match=message):
        convert(model, policy=rules)
    assert state_of(model) == before


def test_rules_keep_their_promise_on_a_model():
    pytest.importorskip("transformers")
    model, stock, x = llama(), llama(), tokens()
    convert(model, policy={"*.layers.0": "full", "*.layers.1": "region"})
    halves = []
    for index in range(2):
        single = llama()
        convert(single, policy={f"*.layers.{index}": "full" if index == 0 else "region"})
        halves.append(measured(single, x).kept_bytes)
    assert measured(model, x).kept_bytes == sum(halves) - measured(stock, x).kept_bytes
    assert_same(stepped(model, x), stepped(stock, x), 2e-5)
