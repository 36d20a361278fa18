"""Every number of `measure` against values worked out by hand, to the byte."""

import gc
import math
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fused_remat import _step, reference
from fused_remat._ledger import blocks_of, levels, peak, total
from fused_remat._trace import Change
from fused_remat.measure import Spread, compare_time, measure, memory_timeline

M, D, F = 96, 32, 80
FP32 = 4
RNG_STATE = torch.get_rng_state().nbytes  # checkpointing keeps a copy of it

# Python holds the tensors made here, so they are "the caller's".
X = torch.randn(M, D, requires_grad=True)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small layers on several threads take forever on a machine that is busy otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def block(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, D)).to(dtype)


class Stash(torch.autograd.Function):
    """Forward: 1000 bytes transient, 500 saved, 200 hidden on ctx. Backward: 3000 bytes transient."""

    @staticmethod
    def forward(ctx, x):
        transient = block(1000)
        ctx.save_for_backward(x, block(500))
        del transient
        ctx.hidden = block(200)
        return x.clone()

    @staticmethod
    def backward(ctx, dout):
        block(3000)
        return dout.clone()


# Bookkeeping


def test_chain_of_blocks():
    def fn():
        a = block(1000)
        b = block(300)
        del a
        c = block(500)
        del b, c
        return block(70)

    measured = measure(fn, backward=False, repeats=0)
    assert measured.device == "cpu"
    assert (measured.output_bytes, measured.kept_bytes, measured.retained_bytes) == (70, 0, 0)
    assert (measured.forward_peak_bytes, measured.forward_peak_above_output_bytes) == (1300, 1300)
    assert (measured.gemms, measured.gemm_flop, measured.seconds) == (0, 0, None)
    assert measured.backward_peak_bytes is measured.gradient_bytes is measured.backward_gemms is None


def test_output_counts_in_the_raw_peak_only():
    def fn():
        result = block(70)
        block(1000)
        return result

    measured = measure(fn, backward=False, repeats=0)
    assert (measured.forward_peak_bytes, measured.forward_peak_above_output_bytes) == (1070, 1000)


def test_a_view_is_its_whole_storage_once():
    def fn():
        whole = block(640)
        fn.views = [whole[i:] for i in range(5)]
        del fn.views
        return whole[600:]

    measured = measure(fn, backward=False, repeats=0)
    assert (measured.output_bytes, measured.forward_peak_bytes) == (640, 640)


def test_an_output_that_existed_before_is_not_counted():
    assert measure(lambda: X, backward=False, repeats=0).output_bytes == 0


def test_kept_transient_hidden_and_gradient_bytes():
    x = torch.randn(10, requires_grad=True)  # 40 bytes, and as many of output and gradient
    measured = measure(lambda: Stash.apply(x), repeats=0)
    assert (measured.kept_bytes, measured.kept_hook_bytes) == (700, 500)
    assert (measured.output_bytes, measured.gradient_bytes, measured.retained_bytes) == (40, 40, 0)
    assert (measured.forward_peak_bytes, measured.forward_peak_above_output_bytes) == (1500, 1500)
    assert measured.backward_peak_above_gradients_bytes == 700 + 3000
    assert measured.backward_peak_bytes == 700 + 3000 + 40


def test_saved_views_of_one_storage_count_once():
    class Views(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            saved = block(500)
            ctx.save_for_backward(saved, saved[100:], saved.view(5, 100), x, x.t())
            return x.sum()

        @staticmethod
        def backward(ctx, dout):
            return dout.expand(M, D)

    measured = measure(lambda: Views.apply(X), repeats=0)
    assert (measured.kept_bytes, measured.kept_hook_bytes) == (500, 500)


def test_a_graph_dropped_in_forward_keeps_nothing():
    def fn():
        (X * X.exp()).sum().detach()
        return X.sum()

    measured = measure(fn, repeats=0)
    assert (measured.kept_bytes, measured.kept_hook_bytes) == (0, 0)


def test_a_cache_that_each_call_replaces_is_retained_and_its_old_block_released():
    cache = [block(1)]

    def fn():
        cache.clear()
        transient = block(1200)
        cache.append(block(1000))
        del transient
        return block(10)

    measured = measure(fn, backward=False, repeats=0)
    assert (measured.retained_bytes, measured.kept_bytes) == (1000, 0)
    # The old 1000 bytes go first: -1000 + 1200 + 1000.
    assert measured.forward_peak_bytes == 1200


def test_releasing_the_callers_tensors_is_neither_kept_nor_a_lower_peak():
    batches = [block(1000) for _ in range(3)]

    def fn():
        del batches[-1:]
        return block(10)

    measured = measure(fn, backward=False, repeats=0)
    assert not batches
    assert (measured.kept_bytes, measured.retained_bytes, measured.forward_peak_bytes) == (0, 0, 10)


def test_garbage_in_cycles_is_alive_until_collected():
    def fn():
        cycle = [block(1000)]
        cycle.append(cycle)
        return block(10)

    measured = measure(fn, backward=False, repeats=0)
    assert (measured.forward_peak_bytes, measured.kept_bytes, measured.retained_bytes) == (1010, 1000, 0)


# Layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eager_mlp_to_the_byte(dtype):
    net, x = mlp(dtype), X.detach().to(dtype).requires_grad_()
    size = dtype.itemsize
    measured = measure(lambda: net(x), repeats=0)
    hidden, out, weight = M * F * size, M * D * size, D * F * size
    assert measured.kept_bytes == measured.kept_hook_bytes == 2 * hidden  # up and gelu(up)
    assert measured.output_bytes == out
    assert measured.forward_peak_above_output_bytes == 2 * hidden
    assert measured.forward_peak_bytes == 2 * hidden + out
    assert measured.gradient_bytes == out + 2 * weight + (F + D) * size
    # up, hidden and dhidden; then up, dhidden and dup.
    assert measured.backward_peak_above_gradients_bytes == 3 * hidden
    assert measured.backward_peak_bytes == 3 * hidden + out + weight + D * size
    assert measured.retained_bytes == 0
    assert measured.peak_bytes == measured.backward_peak_bytes
    assert (measured.forward_gemms, measured.backward_gemms, measured.gemms) == (2, 4, 6)
    assert measured.gemm_flop == 6 * 2 * M * D * F


@pytest.mark.parametrize("reentrant, gemms", [(False, 7), (True, 8)])
def test_checkpointed_mlp(reentrant, gemms):
    net = mlp()
    measured = measure(lambda: checkpoint(net, X, use_reentrant=reentrant), repeats=0)
    hidden = M * F * FP32
    assert measured.kept_bytes == RNG_STATE
    assert measured.kept_hook_bytes == 0
    assert measured.gemms == gemms
    assert measured.gemm_flop == gemms * 2 * M * D * F
    replayed_output = M * D * FP32 if reentrant else 0
    assert measured.backward_peak_above_gradients_bytes == 3 * hidden + RNG_STATE + replayed_output


@pytest.mark.parametrize("reentrant, gemms", [(None, 9), (False, 11), (True, 12)])
def test_gated_mlp_products(reentrant, gemms):
    w_gate, w_up, w_down = (torch.randn(shape, requires_grad=True) for shape in [(F, D), (F, D), (D, F)])

    def gated(x):
        return reference.mlp(x, w_up, w_down, w_gate=w_gate, activation="silu")

    fn = (lambda: gated(X)) if reentrant is None else (lambda: checkpoint(gated, X, use_reentrant=reentrant))
    measured = measure(fn, repeats=0)
    assert measured.gemms == gemms
    assert measured.gemm_flop == gemms * 2 * M * D * F
    if reentrant is None:
        assert measured.kept_bytes == 4 * M * F * FP32  # gate, silu(gate), up, hidden


def test_frozen_weights_cost_no_gradient_and_no_product():
    net = mlp().requires_grad_(False)
    measured = measure(lambda: net(X), repeats=0)
    assert measured.gemms == 4
    assert measured.gradient_bytes == M * D * FP32
    assert measured.kept_bytes == M * F * FP32


def test_scalar_loss():
    net = mlp()
    measured = measure(lambda: net(X).square().mean(), repeats=0)
    assert measured.output_bytes == FP32
    assert measured.kept_bytes == 2 * M * F * FP32 + M * D * FP32  # square() saves the output of the MLP
    assert measured.gemms == 6


@pytest.mark.parametrize(
    "product, flop",
    [
        (lambda a, b: a @ b, 2 * 3 * 4 * 5),
        (lambda a, b: torch.mm(a, b, out=torch.empty(3, 5)), 2 * 3 * 4 * 5),
        (lambda a, b: torch.addmm(torch.zeros(5), a, b), 2 * 3 * 4 * 5),
        (lambda a, b: torch.zeros(3, 5).addmm_(a, b), 2 * 3 * 4 * 5),
        (lambda a, b: torch.addmm(torch.zeros(5), a, b, out=torch.empty(3, 5)), 2 * 3 * 4 * 5),
        (lambda a, b: a @ b[:, 0], 2 * 3 * 4),
        (lambda a, b: torch.addmv(torch.zeros(3), a, b[:, 0]), 2 * 3 * 4),
        (lambda a, b: torch.bmm(a.expand(2, 3, 4), b.expand(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
        (lambda a, b: torch.baddbmm(torch.zeros(1), a.expand(2, 3, 4), b.expand(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
        (lambda a, b: nn.functional.linear(a, b.t(), torch.zeros(5)), 2 * 3 * 4 * 5),
    ],
)
def test_every_spelling_of_a_product_counts_once(product, flop):
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    measured = measure(lambda: product(a, b), backward=False, repeats=0)
    assert (measured.gemms, measured.gemm_flop) == (1, flop)


# The timeline


def test_timeline_of_the_eager_mlp():
    net = mlp()
    timeline = memory_timeline(lambda: net(X))
    measured = measure(lambda: net(X), repeats=0)
    assert list(timeline.phases) == ["forward", "backward"]
    assert list(timeline.seconds) == sorted(timeline.seconds)
    assert timeline.nbytes[0] == timeline.nbytes[-1] == 0
    assert timeline.phases["forward"][1] <= timeline.phases["backward"][0]

    def highest(phase):
        start, end = timeline.phases[phase]
        return max(n for s, n in zip(timeline.seconds, timeline.nbytes, strict=True) if start <= s <= end)

    assert highest("forward") == measured.forward_peak_bytes
    assert highest("backward") == measured.backward_peak_bytes


@st.composite
def allocator_events(draw):
    """A legal history: addresses reused, some blocks made before the record, some never freed."""
    free_addresses, alive, changes = list(range(1, 5)), {100: 7, 101: 9}, []
    for time_ns in range(1, draw(st.integers(1, 24))):
        if alive and (not free_addresses or draw(st.booleans())):
            address = draw(st.sampled_from(sorted(alive)))
            changes.append(Change(time_ns, address, -alive.pop(address)))
            if address < 100:
                free_addresses.append(address)
        else:
            address = free_addresses.pop()
            alive[address] = draw(st.integers(1, 1000))
            changes.append(Change(time_ns, address, alive[address]))
    return changes


@settings(max_examples=50, deadline=None)
@given(allocator_events(), st.integers(0, 12), st.integers(0, 12))
def test_ledger_agrees_with_adding_up(changes, start, length):
    blocks = blocks_of(changes)
    own = [change for change in changes if change.address < 100]
    seen = [change for change in own if change.time_ns >= start]
    running = [sum(c.nbytes for c in seen[: i + 1]) for i in range(len(seen))]
    assert levels(blocks, start) == [(c.time_ns, n) for c, n in zip(seen, running, strict=True)]
    inside = [n for c, n in zip(seen, running, strict=True) if c.time_ns <= start + length]
    assert peak(blocks, start, (start, start + length)) == max([0, *inside])
    assert total(block for block in blocks if block.died == math.inf) == sum(c.nbytes for c in own)


def test_ledger_dates_an_unseen_release_by_the_next_use_of_its_address():
    blocks = blocks_of([Change(1, 5, 10), Change(4, 5, 30), Change(6, 5, -30)])
    assert [(b.nbytes, b.born, b.died) for b in blocks] == [(10, 1, 4), (30, 4, 6)]
    assert peak(blocks, 0, (2, 9)) == 30


# Time


class Clock:
    """Stands in for `time` in `_step`; functions under test move it by hand."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_step, "time", clock)
    return clock


def test_seconds_is_the_median_of_forward_plus_backward(clock):
    durations = iter([9.0] * 4 + [5.0, 1.0, 3.0])  # warm-up, two recorded, one under hooks; then the timed ones

    def fn():
        clock.now += next(durations)
        return X.sum()

    assert measure(fn, repeats=3).seconds == 3.0
    assert next(durations, None) is None


def test_compare_time_takes_ratios_within_a_round_and_rotates_the_order(clock):
    calls, load = [], {}

    def variant(name, cost):
        def fn():
            calls.append(name)
            turn = calls.count(name)
            load.setdefault(turn, 1.0 + turn)  # the machine slows down from round to round
            clock.now += cost * load[turn]
            return block(1)

        return fn

    variants = {"a": variant("a", 1.0), "b": variant("b", 2.0), "c": variant("c", 0.5)}
    timings = compare_time(variants, backward=False, rounds=3, warmup=1)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"
    assert list(timings) == ["a", "b", "c"]
    ratios = {name: timing.ratio_to(timings["a"]) for name, timing in timings.items()}
    assert ratios == {"a": Spread(1.0, 1.0, 1.0), "b": Spread(2.0, 2.0, 2.0), "c": Spread(0.5, 0.5, 0.5)}
    assert astuple(timings["a"].seconds) == pytest.approx((4.0, 3.4, 4.6))


# Leaves the process as it was


def test_gradients_and_random_generators_come_back():
    net, x = mlp(), torch.randn(M, D, requires_grad=True)
    net[0].weight.grad = torch.ones(F, D)
    before, rng = net[0].weight.grad, torch.get_rng_state()
    measure(lambda: nn.functional.dropout(net(x)), repeats=1)
    assert net[0].weight.grad is before
    assert torch.equal(before, torch.ones(F, D))
    assert x.grad is None and net[2].weight.grad is None
    assert torch.equal(torch.get_rng_state(), rng)


def test_tensors_without_storage_may_be_around():
    with FakeTensorMode():
        fake = torch.empty(3, requires_grad=True)
    around = [fake, torch.eye(3).to_sparse().requires_grad_(), nn.LazyLinear(3), torch.empty(3, device="meta")]
    around.append(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged, requires_grad=True))
    net = mlp()
    assert measure(lambda: net(X), repeats=0).kept_hook_bytes == 2 * M * F * FP32
    assert len(around) == 5


@pytest.mark.parametrize("fails_in", ["warm-up", "profile", "hooks", "repeat", "backward"])
def test_a_function_that_raises_leaves_nothing_behind(fails_in):
    net, calls = mlp(), []
    net[0].weight.grad = before = torch.ones(F, D)
    rng = torch.get_rng_state()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dout):
            raise ArithmeticError("on purpose")

    def fn():
        calls.append(None)
        if len(calls) == {"warm-up": 1, "profile": 3, "hooks": 4, "repeat": 5}.get(fails_in):
            raise ArithmeticError("on purpose")
        return Fails.apply(net(X)) if fails_in == "backward" else net(X)

    with pytest.raises(ArithmeticError, match="on purpose"):
        measure(fn)
    assert net[0].weight.grad is before
    assert torch.equal(torch.get_rng_state(), rng)
    assert not torch.autograd._profiler_enabled()
    assert gc.isenabled()
    packed = measure(lambda: mlp()(X), repeats=0)
    assert packed.gemms == 6


def test_measuring_prints_nothing():
    code = (
        "import torch; from fused_remat.measure import measure\n"
        "w = torch.randn(4, 4, requires_grad=True); w.grad = torch.ones(4, 4)\n"
        "measure(lambda: (w @ w).sum())"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


# Bad input


@pytest.mark.parametrize(
    "kwargs, error, message",
    [
        (dict(fn=3), TypeError, "fn must be a function without arguments, got int"),
        (dict(fn=lambda: (X, X)), TypeError, "fn must return one tensor, got tuple"),
        (dict(fn=lambda: X.detach()), ValueError, "pass backward=False"),
        (dict(fn=lambda: X, warmup=0), ValueError, "warmup must be at least 1, got 0"),
        (dict(fn=lambda: X, repeats=-1), ValueError, "repeats must be at least 0, got -1"),
        (dict(fn=lambda: X, repeats=1.5), TypeError, "repeats must be an integer, got 1.5"),
        (dict(fn=lambda: X, repeats=True), TypeError, "repeats must be an integer, got True"),
    ],
)
def test_bad_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        measure(**kwargs)


def test_bad_arguments_of_compare_time():
    with pytest.raises(ValueError, match="variants is empty"):
        compare_time({})
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        compare_time({"a": lambda: X.sum()}, rounds=0)
    with pytest.raises(TypeError, match="fn must be a function"):
        compare_time({"a": X})


def test_inside_another_profiler():
    with torch.autograd.profiler.profile(), pytest.raises(RuntimeError, match="one is already running"):
        measure(lambda: X.sum())
    assert measure(lambda: X.sum(), repeats=0).output_bytes == FP32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_peaks_equal_the_allocators_own_statistics():
    net, x = mlp().cuda(), X.detach().cuda().requires_grad_()
    measured = measure(lambda: net(x), repeats=2)
    dout = torch.randn_like(net(x))
    net.zero_grad()
    x.grad = None
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = net(x)
    assert measured.forward_peak_bytes == torch.cuda.max_memory_allocated() - start
    assert measured.kept_bytes + measured.output_bytes == torch.cuda.memory_allocated() - start
    torch.cuda.reset_peak_memory_stats()
    out.backward(dout)
    assert measured.backward_peak_bytes == torch.cuda.max_memory_allocated() - start
    assert measured.device == f"cuda:{torch.cuda.current_device()}"
    assert measured.gemms == 6
