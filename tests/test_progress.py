"""`progress=` of `profile` and `plan` counts up to its total; commands say it on stderr."""

from __future__ import annotations

import pytest
import torch
from policy_cases import conv_chain, image, mlp_chain, rows
from torch import nn

import fused_remat
from fused_remat._progress import Progress


class Heard(list):
    """What a `progress` was told."""

    def __call__(self, text: str, done: int, total: int) -> None:
        self.append((text, done, total))

    def check(self, pieces: int | None = None) -> None:
        """Counted up by one at a time, never past its total, and to it at the end."""
        done = [entry[1] for entry in self]
        assert done == list(range(len(self))) and all(d < total for _, d, total in self[:-1])
        assert self[-1][0] == "done" and self[-1][1] == self[-1][2]
        assert pieces is None or [total for *_, total in self] == [pieces] * (pieces + 1)


def test_profile_knows_its_total_from_the_beginning():
    heard = Heard()
    fused_remat.profile(mlp_chain(), rows(), fake=True, progress=heard)
    heard.check(3)
    heard = Heard()
    fused_remat.profile(
        mlp_chain(), rows(), fake=True, sweep={"batch": [1, 2, 3], "sequence": [16, 32, 64]}, progress=heard
    )
    heard.check(3 + 2 + 2)
    assert [text for text, *_ in heard[3:]] == ["batch 1", "batch 3", "sequence 16", "sequence 32", "done"]


@pytest.mark.parametrize("fake", [True, False])
def test_plan_counts_every_step_that_it_records(fake, monkeypatch):
    from fused_remat.plan import make

    recorded = []
    record_step = make.record_step
    monkeypatch.setattr(make, "record_step", lambda *a, **k: recorded.append(1) or record_step(*a, **k))
    heard = Heard()
    fused_remat.plan(conv_chain(), image()[:, :, :8, :8], budget="min", fake=fake, progress=heard)
    heard.check()
    assert len(heard) - 1 == len(recorded)
    # What the units take is known beforehand, so that the bar does not only crawl behind.
    assert heard[3][2] >= 5
    assert {text for text, *_ in heard[:-1]} == {"predicting a step", *([] if fake else ["measuring a step"])}


def test_plan_counts_the_steps_that_it_times():
    heard = Heard()
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    fused_remat.plan(model, torch.ones(4, 8), budget="min", minimise="time", progress=heard)
    heard.check()
    rounds = [text for text, *_ in heard if text.startswith("timing steps, round ")]
    each = [rounds.count(f"timing steps, round {i} of 6") for i in range(1, 7)]
    assert each == each[:1] * 6 and sum(each) == len(rounds) and each[0] >= 2  # as they are, and as regions


def test_a_total_grows_where_there_is_more_to_do():
    heard = Heard()
    work = Progress(heard, 1)
    for text in "ab":
        with work.piece(text):
            pass
    work.expect(4)
    with work.piece("c"):
        pass
    work.finish()
    assert heard == [("a", 0, 1), ("b", 1, 2), ("c", 2, 6), ("done", 3, 3)]


@pytest.mark.parametrize("call", [fused_remat.profile, lambda *a, **k: fused_remat.plan(*a, budget="min", **k)])
def test_what_is_no_function_is_refused(call):
    with pytest.raises(TypeError, match=r"progress must be a function of \(text, done, total\) or None, got int"):
        call(mlp_chain(), rows(), progress=3)


class Terminal:
    """A stderr that is one."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(monkeypatch):
    pytest.importorskip("typer")
    from fused_remat.commands.finish import working

    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with working("planning") as say:
        say("measuring a step", 3, 4)
        say("measuring another", 4, 4)
    assert "planning (4 of 4): measuring another" in stderr.text and "━" in stderr.text


def test_a_log_gets_a_line_now_and_then(monkeypatch, capsys):
    pytest.importorskip("typer")
    from fused_remat.commands import finish

    now = iter([0.0, 1.0, 11.0, 11.0, 12.0, 30.0, 30.0])
    monkeypatch.setattr(finish.time, "monotonic", lambda: next(now))
    with finish.working("planning") as say:
        for done in range(4):
            say("measuring a step", done, 9)
    said = capsys.readouterr()
    assert said.err.splitlines() == ["planning (1 of 9): measuring a step", "planning (3 of 9): measuring a step"]
    assert not said.out
