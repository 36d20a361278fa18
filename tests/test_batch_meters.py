"""Limits of memory that are real: an address space, and how its margin is held."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from fused_remat.batch import meters as meters_module

MIB = 2**20


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is enforced on Linux")
def test_a_real_out_of_memory_in_a_limited_address_space():
    """Weights are stock torch, so that nothing is compiled in the other process."""
    program = """
        import json, resource, torch
        from torch import nn
        from fused_remat.batch import find_batch_size

        torch.set_num_threads(1)
        class Scale(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(2**18))

            def forward(self, x):
                return (x * self.weight).tanh()

        model = nn.Sequential(*[Scale() for _ in range(6)])  # 1 MiB of weights each, and 2 MiB kept per row
        make = lambda n: torch.zeros(n, 2**18)
        warm = torch.optim.AdamW(nn.Linear(2, 2).parameters())
        model(make(1)).sum().backward()
        warm.step()
        torch.zeros(2, requires_grad=True).sum().backward()
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        limit = used + 300 * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        found = find_batch_size(model, make, optimizer=torch.optim.AdamW, margin=0, policies=[None], worst=True)
        print(json.dumps(found.to_dict()))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=300, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    (result,) = found["results"]
    assert found["limit_source"] == "address space of this process (RLIMIT_AS)"
    assert 4 <= result["batch"] <= 50  # of rows of 7 to 12 MiB
    failed = [trial for trial in result["trials"] if trial["outcome"] == "out of memory"]
    assert failed and all("can't allocate memory" in trial["detail"] for trial in failed)
    assert min(trial["size"] for trial in failed) == result["batch"] + 1
    assert result["winner"]["peak_bytes"] < 300 * MIB
    assert result["winner"]["seconds"] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is enforced on Linux")
def test_the_margin_of_an_address_space_is_held_while_a_trial_runs():
    meter = meters_module.AddressSpace(torch.device("cpu"), 1000 * MIB, 0.25, "")

    def pages():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0])

    before = pages()
    with meter.capped():
        assert pages() - before >= 250 * MIB // mmap.PAGESIZE
    assert pages() - before < 10 * MIB // mmap.PAGESIZE
    with meter.capped(copies=100 * MIB):  # which the trial holds besides, and training would not
        held = pages() - before
    assert 150 * MIB // mmap.PAGESIZE <= held < 160 * MIB // mmap.PAGESIZE


def test_copies_beyond_the_margin_raise_the_limit_while_a_trial_runs(monkeypatch):
    limits = [(1000, 5000)]
    resource = SimpleNamespace(
        RLIMIT_AS=0, RLIM_INFINITY=-1, getrlimit=lambda _: limits[-1], setrlimit=lambda _, pair: limits.append(pair)
    )
    monkeypatch.setitem(sys.modules, "resource", resource)
    meter = meters_module.AddressSpace(torch.device("cpu"), 1000, 0.1, "")
    with meter.capped(copies=700):
        assert limits[-1] == (1600, 5000)
    assert limits[-1] == (1000, 5000)
    with meter.capped(copies=7000):
        assert limits[-1] == (5000, 5000)


def test_a_finite_address_space_is_a_limit(monkeypatch):
    monkeypatch.setattr(meters_module, "_address_space", lambda: 123 * MIB)
    meter = meters_module.meter_for(torch.device("cpu"), None, 0.1)
    assert isinstance(meter, meters_module.AddressSpace)
    assert (meter.limit, meter.allowed) == (123 * MIB, int(123 * MIB * 0.9))
