"""Tiles: the same for the same call, the same results whichever are taken, and found by `tune` alone."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import mlp_cases as cases
import pytest
import torch

import fused_remat
from fused_remat.triton import attention_configs, configs, mlp_configs, tuning
from fused_remat.triton.configs import Config

needs_ops = pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension))
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FUSED_REMAT_CACHE", str(tmp_path))
    configs.reload()
    yield tmp_path
    monkeypatch.undo()
    configs.reload()


def test_every_kernel_has_tiles_for_every_architecture(cache):
    ops = {op for op, *_ in configs.rows()}
    assert ops == {op for op, *_ in attention_configs.TABLE} | {op for op, *_ in mlp_configs.TABLE}
    for arch in (0, 80, 86, 89, 90, 100, 103, 120):
        for key in list(configs.rows()):
            op, width, _, _, variant = key
            for dtype in DTYPES:
                chosen = configs.choose(op, width, dtype, arch, variant)
                assert chosen == configs.choose(op, width, dtype, arch, variant)


@pytest.mark.parametrize(
    "arch, row", {80: 80, 86: 86, 87: 80, 89: 86, 90: 90, 100: 100, 103: 100, 120: 86, 121: 86}.items()
)
def test_architectures_share_rows(arch, row):
    assert configs.architecture_row(arch) == row


def test_a_width_takes_the_least_bucket_that_holds_it():
    chosen = partial(configs.choose, "attention_fwd", dtype=torch.float16, arch=80, variant="plain")
    assert chosen(width=1) == chosen(width=64)
    assert chosen(width=65) == chosen(width=128)


def _attention():
    q, k, v = (torch.randn(1, 1, 40, 16, requires_grad=True) for _ in range(3))
    return partial(fused_remat.attention, q, k, v, is_causal=True), (q, k, v)


def _mlp():
    given = cases.operands(40, 24, 33, gated=True, dtype=torch.float32)
    return partial(fused_remat.mlp, **given, workspace=20_000), tuple(given.values())


CALLS = {"attention": _attention, "mlp": _mlp}
CANDIDATES = (Config(32, 32, 16, num_warps=4), Config(64, 16, 32, num_warps=4))


def _results(call, inputs):
    with fused_remat.backend("triton"):
        out = call()
    return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]


@needs_ops
@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_forced_and_tuned_tiles_give_the_same_results(make, cache, monkeypatch):
    call, inputs = make()
    expected = _results(call, inputs)
    with configs.asked() as keys:
        _results(call, inputs)
    one_by_one = []
    for config in CANDIDATES:
        with configs.forced(dict.fromkeys(keys, config)):
            one_by_one.append(_results(call, inputs))

    monkeypatch.setattr(tuning, "candidates", lambda key: list(CANDIDATES))
    clock = iter(range(10**6, 0, -1))  # whatever is tried last is the fastest
    file = fused_remat.tune(call, *inputs[:0], seconds=lambda run: (run(), next(clock))[1])
    assert {row["op"] for row in json.loads(file.read_text())["rows"]} == {key[0] for key in keys}
    assert all(configs.choose_row(key) == CANDIDATES[-1] for key in keys)
    first, second = _results(call, inputs), _results(call, inputs)
    for again, tuned, forced in zip(second, first, one_by_one[-1], strict=True):
        assert torch.equal(again, tuned) and torch.equal(tuned, forced)
    for result in (*one_by_one, first):
        for actual, right in zip(result, expected, strict=True):
            torch.testing.assert_close(actual, right, rtol=1e-5, atol=1e-5)


@needs_ops
def test_what_runs_no_kernel_cannot_be_tuned(cache):
    with pytest.raises(ValueError, match="started none; pass a fused_remat call or module"):
        fused_remat.tune(lambda: None)


def test_a_spoilt_file_is_named(cache):
    tuning.path().parent.mkdir(parents=True)
    tuning.path().write_text('{"rows": [{"op": "attention_fwd"}]}')
    configs.rows.cache_clear()
    with pytest.raises(ValueError, match=r"is not a file of tuned tiles .*delete it"):
        configs.rows()


def test_rows_are_kept_beside_those_of_before(cache):
    keys = [key for key in configs.rows() if key[3] == 90][:2]
    tuning.save({keys[0]: CANDIDATES[0]})
    tuning.save({keys[1]: CANDIDATES[1]})
    configs.reload()
    assert [configs.rows()[key] for key in keys] == list(CANDIDATES)


def test_candidates_fit_the_kernel():
    key = ("attention_dq", 128, "half", 90, "plain")
    tried = tuning.candidates(key)
    assert configs.choose_row(key) in tried and len(set(tried)) == len(tried)
    assert not any(config.warp_specialize for config in tried)
    specialized = [row for row in tuning.candidates(("attention_fwd", 64, "half", 100, "plain")) if row.warp_specialize]
    assert specialized and all(row.block_m >= 64 for row in specialized)
