"""`verify` of policies and plans: regions compare what they rebuild."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from policy_cases import Looped, conv_chain, image, mlp_chain, rows
from test_guards_verify import Unseen
from test_policy import Clamped
from torch import Tensor, nn

import fused_remat
from fused_remat import RematError, convert
from fused_remat.convert.rebind import records_of
from fused_remat.plan import Plan
from fused_remat.policy import Assignment


class Drifting(nn.Module):
    """Computes with another number each time, out of the guards' sight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.source = Unseen()

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.weight).exp() * self.source.factor()).sin()


def drifting() -> nn.Module:
    return Looped(*(Drifting() for _ in range(4)))


@pytest.mark.parametrize("policy", ["sqrt", {"layers.*": "region"}, Assignment({}, (("layers.0",), ("layers.2",)))])
@pytest.mark.parametrize("verify", ["once", "always"])
def test_what_a_policys_regions_rebuild_is_compared(policy, verify):
    model = drifting()
    convert(model, policy=policy, verify=verify)
    with pytest.raises(RematError, match=r"layers.*the replay rebuilt other values"):
        model(rows()).sum().backward()
    for own in (None, "off"):
        model = drifting()
        convert(model, policy=policy, verify=own)
        model(rows()).sum().backward()  # wrong, and silent: why there is verify


def test_an_assignments_own_verify_stays_unless_another_is_given():
    given = Assignment({}, (("1",),), "always")

    def verify(**options: object) -> str:
        model = conv_chain()
        convert(model, policy=given, **options)
        return records_of(model[1])["forward"].verify

    assert (verify(), verify(verify="off"), verify(verify="once")) == ("always", "off", "once")


def test_a_plan_is_applied_with_verify(tmp_path: Path):
    model, x = conv_chain(), image()[:, :, :16, :16]
    found = fused_remat.plan(model, x, budget="min", fake=True)
    assert found.assignment.regions and found.assignment.verify == "off"
    found.save(tmp_path / "plan.json")
    path = found.assignment.regions[0][0]

    def verify() -> str:
        return records_of(model.get_submodule(path))["forward"].verify

    with pytest.raises(ValueError, match="verify must be one of 'off', 'once', 'always'; got 'never'"):
        found.apply(verify="never")
    assert not records_of(model.get_submodule(path))
    report = found.apply(verify="once")
    assert verify() == "once"
    report.revert()
    Plan.load(tmp_path / "plan.json").apply(model, verify="always")
    assert verify() == "always"
    model(x).sum().backward()
    convert(model, policy=found, verify="once")
    assert verify() == "once"
    found.apply()
    assert verify() == "off"


def test_where_nothing_is_a_region_the_report_says_that_nothing_is_compared():
    report = convert(mlp_chain(), policy="full", verify="once")
    assert "verify='once' compares nothing: no module is recomputed as a region" in report.notes
    assert "compares nothing" in str(report) and report.to_dict()["notes"] == report.notes
    assert not [note for note in convert(mlp_chain(), policy="sqrt", verify="once").notes if "verify" in note]


def test_a_region_that_looked_like_a_layer_is_named_once():
    report = convert(conv_chain(), policy={"*": "region"})
    assert len(report.converted) == 5 and not report.skipped
    model = nn.Sequential(Clamped(), Clamped())  # looks like an MLP, and is none
    refused = convert(model, policy="everything").skipped
    report = convert(model, policy={"?": "region"})
    assert [entry.name for entry in refused] == ["0", "1"] and not report.skipped
    assert [entry.note for entry in report.converted] == [f"not fused: {entry.reason}" for entry in refused]
