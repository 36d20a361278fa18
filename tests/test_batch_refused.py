"""What `find_batch_size` refuses, and when."""

from __future__ import annotations

import pytest
import torch
from batch_cases import Holds, rows
from torch import nn

import fused_remat
from fused_remat.batch import TrialError, find_batch_size


@pytest.mark.parametrize(
    "settings, error, message",
    [
        (dict(make_batch=3), TypeError, "make_batch must be a function"),
        (dict(smallest=0), ValueError, "smallest must be at least 1"),
        (dict(largest=2, smallest=4), ValueError, r"largest must be at least smallest \(4\), got 2"),
        (dict(target=True), TypeError, "target must be an integer"),
        (dict(margin=1.0), ValueError, "margin must be a fraction"),
        (dict(steps=1), ValueError, "steps must be at least 2"),
        (dict(worst="x"), TypeError, "worst must be a bool"),
        (dict(progress=3), TypeError, "progress must be a function"),
        (dict(policies="full"), TypeError, r"policies must be a list of policies .*\[\"full\"\]"),
        (dict(policies=[]), ValueError, "policies is empty"),
        (dict(policies=[None, None]), ValueError, "'as it is' twice"),
        (dict(limit="six"), ValueError, "limit must be"),
        (dict(limit=0.5), ValueError, "limit is the fraction 0.5"),
        (dict(optimizer=3), TypeError, "optimizer must be"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_meant_is_refused_before_anything_runs(settings, error, message):
    model = Holds()
    given = dict(make_batch=rows, limit="1GiB", policies=[None]) | settings
    with pytest.raises(error, match=message):
        find_batch_size(model, given.pop("make_batch"), **given)
    assert model.rows_seen == []


def test_every_policy_is_checked_before_the_first_is_searched():
    other = fused_remat.plan(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.ones(2, 3), budget="min", fake=True)
    for wrong, error, says in (
        ("nope", ValueError, "policy must be one of .*got 'nope'"),
        ({"layers.*": "full"}, ValueError, "'layers.*'"),
        ({"*": None}, TypeError, "got None"),
        (other, ValueError, "plan"),
    ):
        sizes = []
        with pytest.raises(error, match=says):
            policies = {"as it is": None, "wrong": wrong}
            find_batch_size(Holds(raises=sizes.append), rows, limit="20MiB", largest=4, policies=policies)
        assert sizes == [], wrong


def test_a_function_that_is_a_policy_runs_once():
    calls = []
    find_batch_size(Holds(), rows, limit="20MiB", largest=2, policies={"own": calls.append})
    assert len(calls) == 1


def test_batch_norm_of_one_row_is_told_what_to_pass():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    options = dict(limit="20MiB", largest=4, policies=[None])
    with pytest.raises(TrialError, match=r"Expected more than 1 value per channel .*; pass smallest=2$"):
        find_batch_size(model, lambda size: torch.ones(size, 3), **options)
    assert find_batch_size(model, lambda size: torch.ones(size, 3), smallest=2, **options)["as it is"].batch == 4
