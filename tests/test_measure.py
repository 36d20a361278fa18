"""Every number of `measure` against values worked out by hand, to the byte."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fused_remat
from fused_remat import ops, reference
from fused_remat.measure import measure, memory_timeline

M, D, F = 96, 32, 80
FP32 = 4
RNG_STATE = torch.get_rng_state().nbytes  # checkpointing keeps a copy of it


@pytest.fixture(autouse=True, scope="module")
def callers(nothing_old_is_looked_through) -> None:
    """Python holds the tensor made here, so it is "the caller's"."""
    global X
    X = torch.randn(M, D, requires_grad=True)


pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.mark.skipif(ops.ready() is not None, reason="the reference path is made of library products")
def test_products_inside_attention_kernels_are_not_counted():
    module, x = fused_remat.MultiheadAttention(16, 2), torch.randn(6, 2, 16, requires_grad=True)
    measured = measure(lambda: module(x, x, x, need_weights=False)[0].sum(), repeats=0)
    projection = 2 * 12 * 16 * 16
    assert measured.forward_gemm_flop == 4 * projection  # q, k, v and the output
    assert measured.backward_gemm_flop == (3 + 2 * 4) * projection  # q, k and v again, and two for each
