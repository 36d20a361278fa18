"""find_batch_size on real models: real bytes against a limit, injected errors, and everything put back."""

from __future__ import annotations

import gc
import json
import random
import weakref

import pytest
import torch
from batch_cases import MIB, Holds, rows
from torch import nn

import fused_remat
from fused_remat.batch import TrialError, find_batch_size
from fused_remat.batch import trials as trials_module
from fused_remat.convert.rebind import records_of


def test_the_largest_batch_below_the_limit_is_found():
    found = find_batch_size(
        Holds(lambda n: 6 * MIB + n * MIB), rows, limit="20MiB", margin=0.1, policies=[None]
    )  # 18 MiB are allowed
    result = found["as it is"]
    assert result.batch == 11
    assert 17 * MIB <= result.winner.peak_bytes < 17.1 * MIB
    assert result.winner.stage == "confirm" and result.trials[-1] is result.winner
    assert result.winner.seconds > 0
    assert result.stopped.startswith("12 is the smallest size that failed (over the limit: 18.0 MiB at the peak")
    assert found.ok


def test_the_margin_is_left_free():
    sizes = [
        find_batch_size(Holds(lambda n: n * MIB), rows, limit="20MiB", margin=m, policies=[None])["as it is"].batch
        for m in (0.0, 0.5)
    ]
    assert sizes == [19, 9]  # the rest of the last MiB are the inputs


@pytest.mark.parametrize("largest", [1, 7, 8])
def test_the_largest_that_the_data_have_is_respected(largest):
    model = Holds()
    seen = []
    found = find_batch_size(
        model, lambda n: seen.append(n) or rows(n), limit="1GiB", largest=largest, policies=[None], worst=True
    )
    assert found["as it is"].batch == largest == max(seen)
    assert found["as it is"].stopped == f"{largest} is the largest, and it fits: a larger batch was not asked for"


def test_a_dataset_that_ends_is_noticed():
    found = find_batch_size(Holds(), lambda n: rows(min(n, 20)), limit="1GiB", policies=[None])["as it is"]
    assert found.batch == 20
    assert found.stopped == "the data end there: make_batch(32) returned 20 rows"


def test_a_first_size_that_does_not_fit_is_said():
    found = find_batch_size(Holds(lambda n: 99 * MIB), rows, limit="20MiB", smallest=4, policies=[None])
    assert found["as it is"].batch is None and not found.ok
    assert found["as it is"].stopped.startswith("nothing fits: not even 4 (over the limit: 99.0 MiB at the peak")
    assert "nothing fits" in str(found)
    assert found["as it is"].samples_per_second is None


def test_the_state_of_the_optimizer_counts():
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))  # 0.5 MiB of weights, as much of gradients

    def largest(optimizer):
        found = find_batch_size(
            model,
            lambda n: torch.zeros(n, 256),
            optimizer=optimizer,
            limit="1.5MiB",
            margin=0,
            largest=64,
            policies=[None],
        )
        return found["as it is"].batch

    assert largest(torch.optim.SGD) == 64
    assert largest(torch.optim.AdamW) is None  # two more times the weights, from the first step on


def test_policies_stand_side_by_side_and_leave_the_model_as_found():
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 128, batch_first=True), 2, enable_nested_tensor=False
    )
    fused_remat.convert(model, include="layers.0")
    before = {name: (type(m), records_of(m)) for name, m in model.named_modules()}
    found = find_batch_size(
        model,
        lambda n: torch.zeros(n, 64, 32),
        optimizer=torch.optim.AdamW,
        limit="2MiB",
        policies={"stock": "everything", "as found": None, "converted": fused_remat.convert},
        worst=True,
    )
    stock, as_found, converted = (result.batch for result in found.results)
    assert stock < as_found < converted
    assert {name: (type(m), records_of(m)) for name, m in model.named_modules()} == before
    assert [line.split()[0] for line in str(found).splitlines()[3:6]] == ["stock", "as", "converted"]


def test_policies_by_name_and_plans_are_followed():
    class Plan:
        applied = 0

        def apply(self, model):
            self.applied += 1
            fused_remat.convert(model, policy="full")

    model = nn.TransformerEncoderLayer(16, 2, 64, batch_first=True)
    plan = Plan()
    found = find_batch_size(
        model,
        lambda n: torch.zeros(n, 32, 16),
        limit="256KiB",
        largest=16,
        policies={"everything": "everything", "full": "full", "a plan": plan},
    )
    everything, full, planned = found.results
    assert everything.batch < full.batch == planned.batch
    assert full.winner.peak_bytes == planned.winner.peak_bytes and plan.applied == 1
    assert not any(records_of(module) for module in model.modules())
    default = find_batch_size(model, lambda n: torch.zeros(n, 32, 16), limit="1MiB", largest=2)
    assert [result.policy for result in default.results] == ["everything", "full"]


@pytest.mark.parametrize("raises", ["error", "interrupt"])
def test_the_model_is_given_back_also_when_a_policy_fails(raises):
    model = nn.Sequential(fused_remat.MLP(8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    fused_remat.convert(model)
    before = {name: (type(m), records_of(m)) for name, m in model.named_modules()}
    error = RuntimeError("no") if raises == "error" else KeyboardInterrupt()

    def fail(model):
        raise error

    with pytest.raises(type(error)):
        find_batch_size(model, lambda n: torch.zeros(n, 4, 8), limit="1GiB", policies=[fail])
    assert {name: (type(m), records_of(m)) for name, m in model.named_modules()} == before


def test_everything_is_as_it_was():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    momenta = [s["exp_avg"].clone() for s in optimizer.state.values()]
    gradients = [p.grad for p in model.parameters()]
    torch.manual_seed(3)
    random.seed(3)
    drawn = []

    def make(n):
        drawn.append((random.random(), torch.rand(()).item()))
        return torch.randn(n, 8)

    found = find_batch_size(model, make, optimizer=optimizer, limit="1GiB", smallest=2, largest=8, policies=[None])
    assert found["as it is"].batch == 8
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(a, s["exp_avg"]) for a, s in zip(momenta, optimizer.state.values(), strict=True))
    assert [p.grad for p in model.parameters()] == gradients
    assert len(set(drawn)) == 1  # every trial draws the same
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    random.seed(3)
    find_batch_size(model, make, limit="1GiB", smallest=2, largest=2, policies=[None])
    assert torch.equal(torch.rand(()), expected)
    assert random.random() == random.Random(3).random()


def out_of_memory_above(most, error):
    def raises(n):
        if n > most:
            raise error

    return raises


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), MemoryError(),
     RuntimeError("DefaultCPUAllocator: can't allocate memory", 12), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")],
    ids=["type", "MemoryError", "two arguments", "cuBLAS"],
)  # fmt: skip
def test_real_out_of_memory_errors_end_the_growth(error):
    found = find_batch_size(Holds(raises=out_of_memory_above(13, error)), rows, limit="1GiB", policies=[None])
    assert found["as it is"].batch == 13
    assert "14 is the smallest size that failed (out of memory: " in found["as it is"].stopped


def test_other_errors_are_raised_at_once_and_name_the_size():
    model = Holds(raises=out_of_memory_above(3, ValueError("shapes differ")))
    with pytest.raises(TrialError, match=r"batch size 4 \(policy: as it is\).*ValueError: shapes differ") as caught:
        find_batch_size(model, rows, limit="1GiB", policies=[None])
    assert (caught.value.size, caught.value.policy) == (4, "as it is")
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_error_of_make_batch_names_the_size():
    def make(n):
        if n == 8:
            raise IndexError("no such row")
        return rows(n)

    with pytest.raises(TrialError, match=r"batch size 8 .*IndexError: no such row"):
        find_batch_size(Holds(), make, limit="1GiB", policies=[None])


def test_no_error_keeps_tensors_of_its_trial():
    held = []

    def raises(n):
        assert all(ref() is None for ref in held), "an earlier trial's tensor is alive"
        big = torch.zeros(1000)
        if n > 2:
            held.append(weakref.ref(big))
            try:
                raise RuntimeError("out of memory")
            except RuntimeError as error:
                raise ValueError(big) from error

    gc.disable()  # a cycle may not be what frees it
    try:
        found = find_batch_size(Holds(raises=raises), rows, limit="1GiB", policies=[None])
    finally:
        gc.enable()
    assert found["as it is"].batch == 2
    assert len(held) == 2 and all(ref() is None for ref in held)


def test_memory_that_comes_and_goes_gives_a_size_that_ran():
    calls = {}

    def raises(n):
        calls[n] = calls.get(n, 0) + 1
        if (n == 16 and calls[n] <= 2) or n > 20:
            raise MemoryError

    found = find_batch_size(Holds(raises=raises), rows, limit="1GiB", policies=[None])["as it is"]
    assert found.batch in {trial.size for trial in found.trials if trial.fits and trial.stage == "confirm"}
    assert found.batch == 15


def test_a_target_is_reached_by_accumulation_of_sizes_that_ran():
    seen = Holds(lambda n: n * MIB)
    result = find_batch_size(seen, rows, limit="24.5MiB", margin=0, target=230, policies=[None])["as it is"]
    assert (result.batch, str(result.accumulation)) == (24, "230 = 10 x 23")
    assert result.micro_batch.size == 23 and result.micro_batch.stage == "target"
    assert result.micro_batch.fits and result.micro_batch.seconds > 0


def test_a_target_without_a_divisor_names_the_remainder():
    result = find_batch_size(Holds(lambda n: n * MIB), rows, limit="24.5MiB", margin=0, target=257, policies=[None])
    result = result["as it is"]
    assert str(result.accumulation) == "257 = 10 x 24 + 1 x 17"
    assert "remainder of 17 rows" in result.warnings[0]
    assert any(trial.size == 17 and trial.fits for trial in result.trials)


def test_a_target_that_fits_is_one_batch():
    found = find_batch_size(Holds(), rows, limit="1GiB", target=48, policies=[None])
    result = found["as it is"]
    assert (result.batch, str(result.accumulation)) == (48, "48 = 1 x 48")
    assert result.stopped.startswith("48 is the target")
    assert max(trial.size for trial in result.trials) == 48


def test_a_cpu_without_a_limit_is_no_guess():
    with pytest.raises(ValueError, match=r"limit is needed on device cpu.*limit=\"6GiB\""):
        find_batch_size(Holds(), rows, policies=[None])


def test_a_step_that_the_machine_could_not_survive_is_not_run(monkeypatch):
    monkeypatch.setattr(trials_module, "machine_bytes_free", lambda: 30 * MIB)
    model = Holds(lambda n: n * MIB)
    result = find_batch_size(model, rows, limit="1GiB", policies=[None])["as it is"]
    refused = [trial for trial in result.trials if trial.outcome == "not run"]
    assert 28 <= result.batch <= 30
    assert "predicted" in refused[0].detail and "30.0 MiB free" in refused[0].detail
    assert refused[0].peak_bytes is None


def test_progress_sees_every_trial_before_and_after():
    seen = []
    find_batch_size(Holds(), rows, limit="1GiB", largest=4, policies=[None], progress=lambda *event: seen.append(event))
    assert [(size, stage, trial is None) for _, stage, size, trial in seen[:4]] == [
        (1, "grow", True), (1, "grow", False), (2, "grow", True), (2, "grow", False),
    ]  # fmt: skip
    assert seen[-1][1] == "confirm" and seen[-1][3].fits


def test_the_same_search_finds_the_same():
    def once():
        found = find_batch_size(Holds(lambda n: n * MIB), rows, limit="9MiB", policies=[None])["as it is"]
        return [(t.size, t.stage, t.outcome, t.peak_bytes) for t in found.trials]

    assert once() == once()


def test_the_report_is_json_and_a_table():
    found = find_batch_size(Holds(lambda n: n * MIB), rows, limit="9MiB", margin=0, target=20, policies=[None])
    read = json.loads(json.dumps(found.to_dict()))
    assert read["results"][0]["batch"] == 8 and read["results"][0]["accumulation"]["total"] == 20
    assert read["limit_bytes"] == 9 * MIB and read["ok"] is True
    text = str(found)
    assert "peak (measured)" in text and "s/step (measured)" in text and "8.0 MiB" in text
    assert "Holds on cpu" in text and "9.0 MiB as given" in text


def test_warnings_name_what_the_numbers_leave_out():
    model = Holds().eval()
    varying = iter(range(5, 100))
    found = find_batch_size(model, lambda n: torch.ones(n, next(varying)), limit="1GiB", largest=4, policies=[None])
    text = " ".join(found.warnings)
    assert "differ in more than their size" in text and "no optimizer" in text and "evaluation mode" in text
    quiet = find_batch_size(
        Holds(), rows, optimizer=torch.optim.SGD, limit="1GiB", largest=4, policies=[None], worst=True
    )
    assert quiet.warnings == ()
    asked = find_batch_size(Holds(), rows, optimizer=torch.optim.SGD, limit="1GiB", largest=4, policies=[None])
    assert len(asked.warnings) == 1 and "worst=True" in asked.warnings[0]


def test_fragmentation_is_told():
    from fused_remat.batch.report import fragmentation
    from fused_remat.batch.search import Trial

    assert "2.0 MiB are lost" in fragmentation(Trial(1, "confirm", "ran", 8 * MIB, 10 * MIB))
    assert fragmentation(Trial(1, "confirm", "ran", 8 * MIB, 8 * MIB + 1000)) is None
    assert fragmentation(Trial(1, "confirm", "ran", 8 * MIB)) is None
