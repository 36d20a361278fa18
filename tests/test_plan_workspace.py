"""The workspace of fused layers is a plan's to choose, and the layers keep it whatever is in force around them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from plan_cases import drawn, square
from policy_cases import seeded
from torch import Tensor, nn

import fused_remat
from fused_remat.budget import MIB
from fused_remat.plan import InfeasibleBudget, Plan, make, plan
from fused_remat.policy import Arrangement, Assignment
from fused_remat.recording import record_step
from fused_remat.sizes import format_bytes
from fused_remat.training_step import make_step

KIB = 1024
IN_FORCE, LEAST = MIB, 128 * KIB
X = drawn(512, 32)


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    """The models are small: everything is some 32nd of what it is on a CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch, fused_remat.workspace(IN_FORCE):
        patch.setattr(make, "_LEAST_WORKSPACE", LEAST)
        yield
    torch.set_num_threads(threads)


def mlps(count: int = 4, width: int = 32, hidden: int = 256) -> nn.Module:
    """Whose hidden features are 512 KiB each."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    return seeded(lambda: nn.Sequential(*(block() for _ in range(count))))


def peak_of(model: nn.Module, x: Tensor = X, *, fake: bool = False, loss: Callable[..., Tensor] | None = None) -> int:
    return record_step(make_step(model, (x,), loss=loss), fake=fake).peak_bytes


@pytest.fixture(scope="module")
def smallest() -> Plan:
    return plan(mlps(), X, budget="min")


# What is chosen -------------------------------------------------------------------------------------------------------


def test_the_smallest_peak_does_not_depend_on_the_workspace_in_force(smallest):
    with fused_remat.workspace(LEAST):
        other = plan(mlps(), X, budget="min")
    assert smallest.assignment.workspace < IN_FORCE and other.assignment.workspace == LEAST
    assert smallest.measured.peak <= other.measured.peak
    model = mlps()
    fused_remat.convert(model, keep=())
    assert smallest.measured.peak < 0.7 * peak_of(model)  # all that the workspace in force allows


def test_four_mlps_under_the_default_workspace_of_a_cpu(monkeypatch):
    """2048 rows, 128 to 2048 features and back: 16 MiB of hidden features each. Under 32 MiB of workspace no choice of
    what is kept gets below 29 MiB."""
    monkeypatch.setattr(make, "_LEAST_WORKSPACE", 4 * MIB)
    model, x, peaks = mlps(width=128, hidden=2048), drawn(2048, 128), []
    for in_force in (32 * MIB, 4 * MIB):
        with fused_remat.workspace(in_force):
            found = plan(model, x, budget="min", fake=True)
        assert found.assignment.workspace == 4 * MIB
        peaks.append(found.predicted.peak)
    assert peaks[0] <= peaks[1] < 25 * MIB


def test_a_budget_below_what_the_workspace_in_force_allows_is_met():
    model = mlps()
    found = plan(model, X, budget="840KiB")
    assert found.assignment.workspace < IN_FORCE
    found.apply()
    assert peak_of(model) == found.measured.peak <= 840 * KIB


def test_of_equal_costs_the_larger_workspace_is_chosen():
    """A smaller one never costs FLOP, so all plans but those that need it for their peak have the larger."""
    model = mlps()
    everything = plan(model, X, budget=1.0, fake=True)
    assert everything.assignment == Assignment()
    found = plan(model, X, budget=0.95, fake=True)
    assert found.assignment.layers and found.assignment.workspace == IN_FORCE
    with fused_remat.workspace(LEAST):
        small = plan(model, X, budget=found.budget_bytes, fake=True)
    assert small.front[small.chosen].cost == found.front[found.chosen].cost


def test_workspaces_that_change_nothing_cost_one_reading(monkeypatch):
    """The hidden features of a few rows fit in the smallest: it is read once, and no other is."""
    seen, read = [], make.read_numbers
    monkeypatch.setattr(make, "read_numbers", lambda *a, **k: seen.append(read(*a, **k)) or seen[-1])
    plan(mlps(), drawn(8, 32), budget="min", fake=True)
    with fused_remat.workspace(LEAST):
        plan(mlps(), drawn(8, 32), budget="min", fake=True)
    assert [len(every) for every in seen] == [1, 1]
    assert seen[0][0].recordings - seen[1][0].recordings <= 1


@pytest.mark.parametrize(
    ("in_force", "tried"),
    [(32 * MIB, [32 * MIB, 4 * MIB, MIB]), (4 * MIB, [4 * MIB, MIB]), (MIB, [MIB]), (64 * KIB, [64 * KIB])],
)
def test_what_is_tried(monkeypatch, in_force, tried):
    seen, read = [], make.read_numbers
    monkeypatch.setattr(make, "_LEAST_WORKSPACE", MIB)
    monkeypatch.setattr(make, "read_numbers", lambda *a, **k: seen.append(a[-1]) or read(*a, **k))
    with fused_remat.workspace(in_force):
        plan(mlps(2), drawn(4, 32), budget="min", fake=True)
    assert seen == [tried]


def test_a_workspace_of_very_many_tiles_is_not_read(smallest):
    """A smaller one would be below a 128th of the peak as it is: the error names the one in force alone."""
    assert smallest.everything_kept > 128 * KIB
    with pytest.MonkeyPatch.context() as patch, fused_remat.workspace(8 * KIB):
        patch.setattr(make, "_LEAST_WORKSPACE", KIB)
        with pytest.raises(InfeasibleBudget, match=r"with a workspace of 8\.0 KiB for fused layers, lowers"):
            plan(mlps(), X, budget=1000, fake=True)


def test_infeasible_budgets_name_the_workspaces_that_were_tried(smallest):
    with pytest.raises(InfeasibleBudget) as raised:
        plan(mlps(), X, budget="300KiB")
    assert raised.value.smallest == smallest.measured.peak
    assert "with a workspace of 1.0 MiB or 128.0 KiB for fused layers, lowers the rest" in str(raised.value)
    with pytest.raises(InfeasibleBudget) as raised:
        plan(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), drawn(2, 8), budget=10, fake=True)
    assert "workspace" not in str(raised.value)


def test_modules_of_fused_remat_get_one_as_they_are_too():
    def own() -> nn.Module:
        return seeded(lambda: nn.Sequential(*(fused_remat.MLP(32, 256) for _ in range(3))))

    model = own()
    found = plan(model, X, budget="min")
    assert found.assignment.workspace < IN_FORCE
    found.apply()
    with fused_remat.workspace(256 * MIB):
        assert peak_of(model) == found.measured.peak
    kept = Assignment(dict.fromkeys("012"), workspace=LEAST)
    peaks = []
    for layers in (kept, Assignment({}, workspace=LEAST), Assignment({})):
        arrangement = Arrangement(model)
        arrangement.set(layers)
        peaks.append(peak_of(model))
    assert peaks[0] > peaks[2] > peaks[1]  # everything kept; as they were made; and in the workspace in force


# Where it holds -------------------------------------------------------------------------------------------------------


def test_a_plan_holds_under_any_workspace(smallest):
    """Applied, converted, loaded, copied: the peak is that of the plan, forward and backward."""
    loaded = Plan.from_json(smallest.to_json())
    assert loaded == smallest and loaded.assignment.workspace == smallest.assignment.workspace
    assert f'"workspace_bytes": {loaded.assignment.workspace}' in smallest.to_json()
    models = [mlps() for _ in range(2)]
    loaded.apply(models[0])
    report = fused_remat.convert(models[1], policy=smallest)
    assert all(f"workspace {format_bytes(loaded.assignment.workspace)}" in entry.became for entry in report.converted)
    models += [copy.deepcopy(models[0]), pickle.loads(pickle.dumps(models[0]))]
    for model in models:
        assert peak_of(model) == smallest.measured.peak
    with fused_remat.workspace(256 * MIB):
        assert peak_of(models[0]) == smallest.measured.peak
    with fused_remat.workspace(1000):  # smaller tiles would take less: the plan's own wins
        assert peak_of(models[0]) == smallest.measured.peak
    assert (
        f"fused layers have a workspace of {format_bytes(loaded.assignment.workspace)}, whatever" in smallest.explain()
    )


def test_results_are_those_of_the_stock_model(smallest):
    stock, model = mlps(), mlps()
    smallest.apply(model)
    for one in (stock, model):
        one(X).square().mean().backward()
    for a, b in zip(stock.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_batch_size_follows_the_plan(smallest):
    found = fused_remat.find_batch_size(
        mlps(), lambda rows: X[:rows], policies=[smallest], limit=smallest.measured.peak, margin=0.0, largest=512
    )
    assert [result.batch for result in found.results] == [512]


def test_plans_of_a_file_without_a_workspace_load(smallest):
    data = smallest.to_dict()
    del data["assignment"]["workspace_bytes"]
    assert Plan.from_dict(data).assignment.workspace is None
    data["assignment"]["workspace_bytes"] = "4MiB"
    with pytest.raises(ValueError, match=r"damaged: workspace must be an int \(bytes\)"):
        Plan.from_dict(data)


class Attends(nn.Module):
    def __init__(self, attention: Callable[..., nn.MultiheadAttention]) -> None:
        super().__init__()
        self.attention = attention(64, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


ROWS = drawn(2, 256, 64)
KINDS: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "Fused": (lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), ROWS, ""),
    "FusedAttention": (lambda: Attends(nn.MultiheadAttention), ROWS, "attention"),
    "OwnMLP": (lambda: fused_remat.MLP(64, 256), ROWS, ""),
    "OwnMLP, gated": (lambda: fused_remat.GatedMLP(64, 256), ROWS, ""),
    "OwnAttention": (lambda: Attends(fused_remat.MultiheadAttention), ROWS, "attention"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_layers_have_it_from_the_assignment(kind):
    make_model, x, path = KINDS[kind]
    model = seeded(make_model)
    arrangement = Arrangement(model)

    def peak(workspace: int | None) -> int:
        arrangement.set(Assignment({path: ()}, workspace=workspace))
        record = next(iter(arrangement._found[path][1].__dict__["_fused_remat"].values()))
        assert type(record).__name__ == kind.partition(",")[0]
        return peak_of(model, x, loss=square, fake=True)

    few, many = 64 * KIB, 64 * MIB
    own = peak(few), peak(many)
    assert own[0] < own[1]
    for around in (few, many):
        with fused_remat.workspace(around):
            assert (peak(few), peak(many)) == own
            assert peak(None) == own[around == many]


def test_layers_may_have_one_each():
    model = mlps(2)
    arrangement = Arrangement(model)
    layers = dict.fromkeys(arrangement.layers, ())
    assert list(layers) == ["0", "1"]
    arrangement.set(Assignment(layers, workspace={"0": MIB}))
    assert [entry.became.partition("workspace ")[2] for entry in arrangement.report.converted] == ["1.0 MiB", ""]
    arrangement.set(Assignment(layers, workspace={"0": MIB, "1": MIB}))
    both = peak_of(model)
    arrangement.set(Assignment(layers, workspace=MIB))
    assert peak_of(model) == both


@pytest.mark.parametrize(
    ("workspace", "kind", "says"),
    [
        (0, ValueError, "workspace must be at least 1 byte"),
        ("4MiB", TypeError, r"workspace must be an int \(bytes\), got '4MiB'"),
        ({"0": 0}, ValueError, r"workspace\['0'\] must be at least 1 byte"),
        ({"7": MIB}, ValueError, "workspace names '7', but it is no layer that can run fused"),
    ],
)
def test_what_is_no_workspace(workspace, kind, says):
    arrangement = Arrangement(mlps(1))
    with pytest.raises(kind, match=says):
        arrangement.set(Assignment({"0": ()}, workspace=workspace))
    assert arrangement.assignment is None
