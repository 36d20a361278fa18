"""The search itself, on simulated memory: which sizes are tried, and that the winner always ran."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fused_remat.batch.inputs import Rows, arguments
from fused_remat.batch.search import Accumulation, Trial, search, split_target


class Simulated:
    """Trials whose memory is a function of the size (and of how often it was tried)."""

    def __init__(self, memory, limit, rows=None):
        self.memory, self.limit, self.rows, self.tried = memory, limit, rows, []

    def __call__(self, size, stage):
        self.tried.append((size, stage))
        if self.rows is not None and size > self.rows:
            return Trial(size, stage, "data ended", rows=self.rows)
        peak = self.memory(size)
        return Trial(size, stage, "ran" if peak <= self.limit else "out of memory", peak)


@pytest.mark.parametrize(
    "memory, limit, best",
    [
        (lambda n: n, 100, 100),
        (lambda n: 70 + n, 100, 30),
        (lambda n: 10 + n * n, 110, 10),
        (lambda n: 16 * -(-n // 16), 100, 96),  # in steps
        (lambda n: n, 1, 1),
        (lambda n: n, 1023, 1023),
    ],
    ids=["linear", "constant and linear", "quadratic", "steps", "only the smallest", "just below a power of two"],
)
def test_the_largest_size_is_found_where_memory_grows(memory, limit, best):
    simulated = Simulated(memory, limit)
    found = search(simulated, 1, None)
    assert found.winner.size == best
    assert found.reason == "memory"
    assert found.smallest_failed.size == best + 1
    assert simulated.tried[-1] == (best, "confirm")
    assert len(simulated.tried) <= 2 * best.bit_length() + 2


def test_a_largest_size_ends_the_search_without_a_failure():
    simulated = Simulated(lambda n: n, 1000)
    found = search(simulated, 1, 100)
    assert (found.winner.size, found.reason) == (100, "largest")
    assert [size for size, _ in simulated.tried] == [1, 2, 4, 8, 16, 32, 64, 100, 100]


def test_nothing_larger_than_largest_is_tried_when_it_fails():
    simulated = Simulated(lambda n: n, 90)
    assert search(simulated, 1, 100).winner.size == 90
    assert max(size for size, _ in simulated.tried) == 100


def test_data_that_end_are_tried_up_to_their_end():
    simulated = Simulated(lambda n: n, 1000, rows=20)
    found = search(simulated, 1, None)
    assert (found.winner.size, found.reason) == (20, "data")
    assert [size for size, _ in simulated.tried] == [1, 2, 4, 8, 16, 32, 20, 20]


def test_data_that_end_where_memory_does_not_reach():
    found = search(Simulated(lambda n: n, 18, rows=20), 1, None)
    assert (found.winner.size, found.reason) == (18, "memory")


def test_a_first_size_that_fails_is_said_plainly():
    found = search(Simulated(lambda n: 101, 100), 4, None)
    assert (found.winner, found.reason) == (None, "nothing fits")
    assert [trial.size for trial in found.trials] == [4]


def test_a_winner_that_fails_from_clean_makes_way_for_the_largest_below_that_runs_twice():
    calls = {}

    def jitter(size):
        calls[size] = calls.get(size, 0) + 1
        return 1000 if (size > 12 and calls[size] > 1) else size

    found = search(Simulated(jitter, 19), 1, None)
    confirmed = [(trial.size, trial.fits) for trial in found.trials if trial.stage == "confirm"]
    # 1, 2, 4, 8, 16, 18 and 19 ran the first time; 16 failed then, so that 9 to 15 are looked through
    assert confirmed == [(19, False), (18, False), (16, False), (8, True), (12, True), (14, False), (13, False)]
    assert found.winner is next(trial for trial in found.trials if (trial.size, trial.stage) == (12, "confirm"))
    assert found.reason == "memory"


def test_everything_failing_the_second_time_is_no_result():
    calls = []
    found = search(Simulated(lambda n: calls.append(n) or (1 if calls.count(n) == 1 and n < 4 else 9), 5), 1, None)
    assert (found.winner, found.reason) == (None, "nothing fits")


@given(st.dictionaries(st.integers(1, 70), st.lists(st.booleans(), min_size=1, max_size=3)), st.integers(1, 64))
def test_whatever_memory_does_the_winner_ran_twice_and_every_size_is_tried_as_asked(outcomes, largest):
    """Non-monotone, and different from run to run."""
    calls = {}

    def memory(size):
        calls[size] = calls.get(size, -1) + 1
        outcome = outcomes.get(size, [True])
        return 0 if outcome[calls[size] % len(outcome)] else 2

    simulated = Simulated(memory, 1)
    found = search(simulated, 1, largest)
    assert all(1 <= size <= largest for size, _ in simulated.tried)
    assert len(simulated.tried) < 40
    if found.winner is None:
        assert not found.trials[0].fits or all(not t.fits for t in found.trials if t.stage == "confirm")
    else:
        ran = [trial for trial in found.trials if trial.size == found.winner.size and trial.fits]
        assert len(ran) >= 2
        assert ran[-1] is found.winner and found.winner.stage == "confirm"
        failed = [trial.size for trial in found.trials if not trial.fits]
        assert min((size for size in failed if size > found.winner.size), default=largest + 1) == found.winner.size + 1


@pytest.mark.parametrize(
    "target, most, split",
    [
        (256, 24, Accumulation(16, 16)),
        (256, 300, Accumulation(256, 1)),
        (100, 23, Accumulation(20, 5)),
        (257, 24, Accumulation(24, 10, 17)),
        (1, 1, Accumulation(1, 1)),
        (7, 4, Accumulation(4, 1, 3)),
        (6, 4, Accumulation(3, 2)),
    ],
    ids=str,
)
def test_a_target_is_split_exactly_or_with_a_remainder(target, most, split):
    assert split_target(target, most) == split
    assert split.total == target


@given(st.integers(1, 2000), st.integers(1, 300))
def test_a_split_has_the_target_and_never_more_rows_than_allowed(target, most):
    split = split_target(target, most)
    assert split.total == target
    assert max(split.batch, split.remainder) <= most
    assert split.steps + bool(split.remainder) <= 2 * -(-target // most)


def test_rows_tell_data_that_end_from_data_that_vary():
    rows = Rows()
    assert rows.missing(8, ((8, 64), (8,))) is None
    assert rows.missing(16, ((16, 64), (16,))) is None
    assert not rows.varying
    assert rows.missing(32, ((20, 64), (20,))) == 20
    assert rows.missing(32, ((16, 64), (16,))) == 16
    assert not rows.varying
    assert rows.missing(32, ((32, 70), (32,))) is None
    assert rows.varying


def test_rows_of_one_size_that_change_are_seen():
    rows = Rows()
    assert rows.missing(8, ((8, 64),)) is None
    assert rows.missing(8, ((8, 61),)) is None
    assert rows.varying


def test_packed_rows_follow_the_size_too():
    rows = Rows()
    assert rows.missing(2, ((128, 16),)) is None
    assert rows.missing(4, ((256, 16),)) is None
    assert rows.missing(8, ((384, 16),)) == 6


def test_a_batch_without_tensors_is_refused():
    with pytest.raises(TypeError, match=r"make_batch\(4\) returned a dict without tensors"):
        arguments({"x": [1, 2]}, 4)
