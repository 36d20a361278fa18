"""Plans against steps measured from outside: within the budget, no worse for a smaller one, the same results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from plan_cases import (
    CASES,
    Case,
    Scale,
    applied,
    assert_stock_results,
    drawn,
    peak_of,
    planned,
    results_of,
    step_of,
)
from policy_cases import state_of
from torch import nn

from fused_remat import convert
from fused_remat._step import found_once
from fused_remat.plan import InfeasibleBudget, Plan, make, plan
from fused_remat.policy import Arrangement, Assignment
from fused_remat.recording import record_step

pytestmark = pytest.mark.slow  # dozens of plans of whole models


FRACTIONS = (0.0, 0.2, 0.45, 0.7, 0.95)


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """The models are small."""


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of the units depend on no budget: plans of one test share them."""
    read, known = make.read_numbers, []

    def remembered(*args: Any, **options: Any) -> Any:
        if not known:
            known.append(read(*args, **options))
        return known[0]

    monkeypatch.setattr(make, "read_numbers", remembered)


def grid(case: Case, **options: Any) -> Iterator[tuple[int, Plan, int]]:
    """(budget, plan, the peak of a step under it), budgets rising from the smallest that there is."""
    smallest = planned(case, "min", **options)
    least, most = smallest.measured.peak, smallest.everything_kept
    for budget in (least + int(fraction * (most - least)) for fraction in FRACTIONS):
        found = planned(case, budget, **options)
        yield budget, found, peak_of(case, applied(case, found))


@pytest.mark.parametrize("name", CASES)
def test_peaks_stay_within_budgets_and_fall_with_them(name, read_once):
    case = CASES[name]
    rows = list(grid(case))
    for budget, found, peak in rows:
        assert peak <= budget == found.budget_bytes
        assert abs(found.measured.peak - peak) <= 0.001 * peak
        assert abs(found.predicted.peak - peak) <= 0.1 * peak
        point = found.front[found.chosen]
        assert point.measured == found.measured.peak and abs(point.peak - peak) <= 0.1 * peak
    peaks = [peak for _, _, peak in rows]
    costs = [found.front[found.chosen].cost for _, found, _ in rows]
    assert peaks == sorted(peaks) and costs == sorted(costs, reverse=True)
    assert peaks[0] < 0.8 * peaks[-1]


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_stock_model(name):
    case = CASES[name]
    for budget in ("min", "knee"):
        found = planned(case, budget)
        assert_stock_results(case, applied(case, found))


@pytest.mark.parametrize("name", CASES)
def test_nothing_simple_is_smaller_than_the_smallest_plan(name):
    """Neither everything fused that keeps nothing, nor every block recomputed, nor both, nor the model as it is."""
    case = CASES[name]
    smallest = planned(case, "min").measured.peak
    model = case.model()
    assert smallest <= peak_of(case, model)
    arrangement = Arrangement(model)
    nothing = dict.fromkeys(arrangement.layers, ())
    blocks = tuple((path,) for chain in arrangement.chains[:1] for path in chain)
    for assignment in (Assignment(nothing), Assignment({}, blocks), Assignment(nothing, blocks)):
        arrangement.set(assignment)
        assert smallest <= peak_of(case, model)


def test_a_budget_that_nothing_fits_names_the_smallest_that_something_does(read_once):
    case = CASES["sequential"]
    with pytest.raises(InfeasibleBudget) as raised:
        planned(case, 1000)
    error = raised.value
    assert (error.budget, error.source) == (1000, "measured")
    assert f"smallest possible peak is {error.smallest} bytes" in str(error) and "backward of" in str(error)
    found = planned(case, error.smallest)
    assert found.measured.peak == error.smallest == planned(case, "min").measured.peak
    assert peak_of(case, applied(case, found)) <= error.smallest
    with pytest.raises(InfeasibleBudget):
        planned(case, error.smallest - 1)


def test_only_activations_count():
    case = CASES["sequential"]
    own = planned(case, "min", count=())
    assert own.count == () and not own.measured.kinds.keys() & {"parameters", "inputs", "gradients"}
    recording = record_step(step_of(case, applied(case, own)))
    alive = sorted(
        [(a.born, 1, a.nbytes) for a in recording.allocations if a.kind != "gradients"]
        + [(a.died, 0, -a.nbytes) for a in recording.allocations if a.kind != "gradients"]
    )
    level = highest = 0
    for _, _, nbytes in alive:
        level += nbytes
        highest = max(highest, level)
    assert own.measured.peak == highest
    found = planned(case, highest, count=[])
    assert found.measured.peak <= highest


def test_an_optimizer_that_needs_more_than_the_rest_decides_the_smallest_peak():
    """Parameters of which few take part in many activations: state and gradients of AdamW, whatever is kept."""
    model = nn.Sequential(nn.EmbeddingBag(4000, 64), MLPBlockOf64(), MLPBlockOf64())
    found = plan(model, torch.zeros(1, 4, dtype=torch.int64), budget="min", optimizer=torch.optim.AdamW)
    assert found.measured.phase == "optimizer" and found.assignment == Assignment()


class MLPBlockOf64(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def test_a_pipeline_stage_holds_micro_batches():
    case = CASES["sequential"]
    one, two = planned(case, "min"), planned(case, "min", in_flight=2)
    recording = record_step(step_of(case, applied(case, two)))
    gradients = sum(a.nbytes for a in recording.allocations if a.kind == "gradients")
    others = recording.kept_bytes + recording.static["inputs"]
    assert two.in_flight == 2 and two.measured.kept <= one.measured.kept
    kept_peak = max(
        sum(n for kind, n in alive.items() if kind != "gradients")
        for moment, alive in recording.timeline()
        if moment <= recording.phases["backward"][1]
    )
    assert abs(two.measured.peak - (kept_peak + gradients + others)) <= 0.001 * two.measured.peak
    assert abs(two.predicted.peak - two.measured.peak) <= 0.1 * two.measured.peak
    found = planned(case, two.measured.peak, in_flight=2)
    assert found.measured.peak <= two.measured.peak
    with pytest.raises(InfeasibleBudget):
        planned(case, one.measured.peak, in_flight=2)


def test_time_may_decide():
    case = CASES["sequential"]
    model = case.model()
    found = planned(case, "min", model, minimise="time")
    assert found.minimise == "time" and peak_of(case, applied(case, found)) <= found.measured.peak
    assert (
        any(f" {unit} " in found.explain() for unit in ("s", "ms", "µs")) or found.chosen + 1 == len(found.front) == 1
    )
    half = (found.measured.peak + found.everything_kept) // 2
    assert planned(case, half, minimise="time").measured.peak <= half


@pytest.mark.parametrize("name", ["unet", "converted", "tied"])
@pytest.mark.parametrize("budget", ["min", 1000])
def test_planning_leaves_everything_as_it_was(name, budget, read_once):
    case = CASES[name]
    model, optimizer = case.model(), None
    if name == "tied":
        optimizer = torch.optim.AdamW(model.parameters())
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    inputs = tuple(x.clone() for x in case.inputs)
    torch.manual_seed(11)
    state, values = state_of(model), {k: v.clone() for k, v in model.state_dict().items()}
    seed = torch.get_rng_state()
    options = {**case.options, "optimizer": optimizer}
    try:
        plan(model, *inputs, budget=budget, loss=case.loss, **options)
    except InfeasibleBudget:
        assert budget == 1000
    assert state_of(model) == state and torch.equal(torch.get_rng_state(), seed)
    assert all(torch.equal(v, values[k]) for k, v in model.state_dict().items())
    assert torch.equal(first.grad, torch.ones_like(first))
    assert all(p.grad is None for p in model.parameters() if p is not first)
    assert optimizer is None or not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(inputs, case.inputs, strict=True))


# Known values ---------------------------------------------------------------------------------------------------------


def test_a_smaller_budget_never_takes_more_memory(read_once):
    """8 blocks (D 64, hidden 256, T 128, B 4), 100 to 20 % of what is kept as it is; gradients and parameters apart."""

    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    case = Case(lambda: nn.Sequential(*(block() for _ in range(8))), (drawn(4, 128, 64),))
    saved = record_step(step_of(case, case.model())).kept_bytes
    stock, before = results_of(case, case.model()), (saved, 2 * saved)
    for percent in (100, 80, 60, 40, 20):
        budget = saved * percent // 100
        found = planned(case, budget, count=())
        model = applied(case, found)
        recording = record_step(step_of(case, model))
        assert found.measured.peak <= budget
        now = recording.kept_bytes, found.measured.peak
        assert all(a <= 1.05 * b for a, b in zip(now, before, strict=True))
        before = now
        assert abs(found.predicted.peak - found.measured.peak) <= 0.1 * found.measured.peak
        for name, value in results_of(case, model).items():
            assert torch.allclose(value, stock[name], atol=1e-6, rtol=1e-5), name
    with pytest.raises(InfeasibleBudget, match="smallest possible peak") as raised:
        planned(case, saved // 100, count=())
    assert before[1] >= raised.value.smallest > saved // 100


def test_of_all_subsets_of_six_blocks_none_is_much_cheaper(read_once):
    """Blocks that may only run again or not: every subset is run."""
    blocks, width = 6, 16

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(width, 6 * width), nn.Linear(6 * width, width)

        def forward(self, x):
            return x + self.two(torch.sin(self.one(x)))

    case = Case(lambda: nn.Sequential(*(Block() for _ in range(blocks))), (drawn(64, width),))
    model = case.model()
    arrangement, every = Arrangement(model), []
    with found_once():
        for subset in range(1 << blocks):
            arrangement.set(Assignment({}, tuple((str(i),) for i in range(blocks) if subset >> i & 1)))
            recording = record_step(step_of(case, model), fake=True)
            every.append((recording.peak_bytes, recording.redone_flop))
    low, high = min(peak for peak, _ in every), max(peak for peak, _ in every)
    for fraction in (0.05, 0.3, 0.6, 0.9):
        budget = low + int(fraction * (high - low))
        found = planned(case, budget)
        assert found.predicted.redone <= 1.1 * min(redone for peak, redone in every if peak <= budget)


LAYERS, UNIT = 64, 1 << 20


def tanh_chain() -> nn.Module:
    return nn.Sequential(Scale(), *(nn.Tanh() for _ in range(LAYERS)))


TANH = Case(tanh_chain, (drawn(UNIT // 4),), torch.sum)


def units_of(model: nn.Module) -> float:
    """The peak of a step in units of one activation, above the input of the chain."""
    recording = record_step(step_of(TANH, model))
    return (recording.peak_bytes - recording.static_bytes) / UNIT - 1


@pytest.mark.parametrize(("count", "units"), [(1, 65), (2, 34), (4, 20), (8, 16), (16, 20), (32, 34), (64, 65)])
def test_equal_segments_of_a_uniform_chain_peak_as_the_formula_says(count, units):
    model = TANH.model()
    length = LAYERS // count
    paths = [str(i) for i in range(1, LAYERS + 1)]
    Arrangement(model).set(Assignment({}, tuple(tuple(paths[i : i + length]) for i in range(0, LAYERS, length))))
    assert abs(units_of(model) - units) <= 0.2


def test_the_policy_sqrt_takes_twice_the_square_root_of_a_uniform_chain():
    model = TANH.model()
    report = convert(model, policy="sqrt")
    assert report.count("region") == 8 and abs(units_of(model) - 16) <= 0.2


def test_the_smallest_plan_of_a_uniform_chain_is_no_larger_than_square_root_segments():
    found = planned(TANH, "min")
    model = applied(TANH, found)
    assert units_of(model) <= 16.2
    assert sum(map(len, found.assignment.regions)) > LAYERS // 2
    stock = results_of(TANH, TANH.model())
    assert all(torch.equal(value, stock[name]) for name, value in results_of(TANH, model).items())
