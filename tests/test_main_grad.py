"""`accumulate_in_fp32`: gradients of micro-batches summed in fp32, in `.grad` or `main_grad`."""

from __future__ import annotations

import copy

import mlp_cases as cases
import pytest
import torch
from main_grad_cases import BF16, CASES, EVERY_CASE, MICRO_BATCHES, gradients, is_rounded, rounds_products, sums
from torch import nn

import fused_remat
from fused_remat.measure import measure

pytestmark = pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension))


# Sums ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("into", ("grad", "main_grad"))
@EVERY_CASE
def test_sums_are_those_of_fp64(case, into):
    layer, truth = case.layer(), {}
    fused_remat.accumulate_in_fp32(layer)
    for x, dy in case.batches():
        for name, gradient in gradients(layer, x, dy).items():
            truth[name] = truth.get(name, 0) + gradient.double()
    wide, narrow = sums(case, into=into), sums(case)
    for name, expected in truth.items():
        assert wide[name].dtype == torch.float32 and narrow[name].dtype == BF16
        error, usual = (cases.relative_error(found[name], expected) for found in (wide, narrow))
        assert error < 1e-6 and usual > 1e-3 and usual > 1e4 * error, (name, error, usual)


@pytest.mark.parametrize("name", CASES)
def test_sums_are_closer_to_the_true_gradient(name):
    case = CASES[name]
    exact, truth = case.layer().double(), {}
    for x, dy in case.batches(torch.float64):
        for parameter, gradient in gradients(exact, x, dy).items():
            truth[parameter] = truth.get(parameter, 0) + gradient
    wide, narrow = sums(case, into="main_grad"), sums(case)
    total = lambda found: sum(cases.relative_error(found[p], truth[p]) for p in truth) / len(truth)
    # What the stock parts of a block round on the way is in both, and what the library's products round.
    factor = 1.0 if name == "converted-block" or rounds_products else 0.75
    assert total(wide) < factor * total(narrow), (total(wide), total(narrow))


@pytest.mark.parametrize("into", ("grad", "main_grad"))
def test_tied_weights_add_both_uses(into):
    layer = fused_remat.MLP(16, 48).to(BF16)
    stock = nn.Linear(16, 48).to(BF16)
    stock.weight = layer.fc1.weight
    x = torch.randn(5, 16).to(BF16)
    terms = [layer(x).square().sum(), layer(x.neg()).sum(), stock(x).square().sum()]
    handle = fused_remat.accumulate_in_fp32([*layer.parameters(), *stock.parameters()], into=into)
    assert len(handle.parameters) == 5
    parts = [torch.autograd.grad(term, layer.fc1.weight, retain_graph=True)[0] for term in terms]
    sum(terms).backward()
    found = getattr(layer.fc1.weight, into)
    assert cases.relative_error(found, sum(part.double() for part in parts)) < 1e-6
    assert is_rounded(parts[2]) and (rounds_products or not is_rounded(parts[0]))


def test_hooks_run_once_and_see_fp32():
    layer, (x, dy) = CASES["mlp-features"].layer(), CASES["mlp-features"].batches()[0]
    seen = []
    for p in layer.parameters():
        p.register_hook(lambda gradient: seen.append(gradient.dtype))
    handle = fused_remat.accumulate_in_fp32(layer, into="main_grad")
    layer(x).backward(dy)
    assert seen == [torch.float32] * 4
    sums = [p.main_grad.clone() for p in handle.parameters]
    layer(x).backward(dy)
    assert len(seen) == 8
    assert all(torch.equal(p.main_grad, 2 * once) for p, once in zip(handle.parameters, sums, strict=True))
    assert all(p.grad is None for p in handle.parameters)


def test_a_parameter_that_is_not_used_stays_at_zero():
    layer, unused = fused_remat.MLP(16, 48).to(BF16), nn.Linear(3, 3).to(BF16)
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    handle = fused_remat.accumulate_in_fp32([*layer.parameters(), *unused.parameters(), frozen], into="main_grad")
    layer(torch.randn(5, 16).to(BF16)).sum().backward()
    assert not unused.weight.main_grad.any() and unused.weight.grad is None
    assert not hasattr(frozen, "main_grad") and len(handle.parameters) == 6


def test_sparse_and_full_precision_gradients():
    table, linear = nn.Embedding(9, 4, sparse=True).to(BF16), nn.Linear(4, 4)
    handle = fused_remat.accumulate_in_fp32([*table.parameters(), *linear.parameters()], into="main_grad")
    for _ in range(2):
        linear(table(torch.tensor([1, 1, 3])).float()).sum().backward()
    truth = 2 * linear.weight.detach().sum(0).to(BF16).double()
    torch.testing.assert_close(table.weight.main_grad[3].double(), truth)
    torch.testing.assert_close(table.weight.main_grad[1].double(), 2 * truth)
    assert linear.weight.main_grad.dtype == torch.float32 and linear.bias.main_grad.tolist() == [6.0] * 4
    handle.zero_grad()
    assert not any(p.main_grad.any() for p in handle.parameters)


def test_an_optimizer_on_fp32_masters():
    case = CASES["gated-tokens"]
    layer = case.layer()
    handle = fused_remat.accumulate_in_fp32(layer, into="main_grad")
    masters = [p.detach().float() for p in handle.parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    expected = [master.clone() for master in masters]
    exact = torch.optim.AdamW(expected, lr=1e-2)
    for _ in range(2):
        truth = dict.fromkeys(range(len(masters)), 0)
        for x, dy in case.batches():
            y = layer(x)
            for i, g in enumerate(torch.autograd.grad(y, handle.parameters, dy, retain_graph=True)):
                truth[i] = truth[i] + g.double()
            y.backward(dy)
        for i, (master, p) in enumerate(zip(masters, handle.parameters, strict=True)):
            master.grad, expected[i].grad = p.main_grad, truth[i].float()
        optimizer.step()
        exact.step()
        with torch.no_grad():
            torch._foreach_copy_(list(handle.parameters), masters)
        handle.zero_grad()
        for master, p, other in zip(masters, handle.parameters, expected, strict=True):
            torch.testing.assert_close(master, other, rtol=1e-4, atol=1e-6)
            assert torch.equal(p, master.to(BF16))


# Memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", (1024, 256), ids=("tokens", "features"))
def test_bytes_with_and_without(rows):
    """fp32 gradients are written once, where they are summed: the accumulator of half-precision ones is gone."""
    width, hidden, workspace = 64, 256, 2**19
    given = cases.operands(rows, width, hidden, bias=False, dtype=BF16)
    given["x"].requires_grad_(False)
    weights = 2 * width * hidden
    step = lambda: cases.run(given, workspace=workspace)
    narrow = measure(step, repeats=1)
    assert narrow.gradient_bytes == 2 * weights
    handle = fused_remat.accumulate_in_fp32([given["w_up"], given["w_down"]])
    wide = measure(step, repeats=1)
    assert wide.gradient_bytes == 4 * weights
    assert wide.backward_peak_above_gradients_bytes <= 1.01 * workspace + cases.packed_by_the_library(BF16)
    assert wide.kept_bytes == narrow.kept_bytes
    accumulator = 4 * weights if rows == 1024 else 0
    assert narrow.backward_peak_above_gradients_bytes >= accumulator
    assert wide.backward_peak_bytes <= narrow.backward_peak_bytes + 2 * weights - accumulator
    handle.remove()
    handle = fused_remat.accumulate_in_fp32([given["w_up"], given["w_down"]], into="main_grad")
    freed = measure(step, repeats=1)
    assert freed.gradient_bytes == 0 and freed.backward_peak_bytes <= wide.backward_peak_bytes


def test_bytes_of_attention():
    x = torch.randn(2, 64, 64).to(BF16)
    layer = fused_remat.MultiheadAttention(64, 4, batch_first=True, bias=False).to(BF16)
    layer.workspace = 2**17
    step = lambda: layer(x, x, x, need_weights=False)[0]
    narrow = measure(step, repeats=1)
    fused_remat.accumulate_in_fp32(layer)
    wide = measure(step, repeats=1)
    assert (narrow.gradient_bytes, wide.gradient_bytes) == (2 * 4 * 64 * 64, 4 * 4 * 64 * 64)
    assert wide.backward_peak_above_gradients_bytes <= narrow.backward_peak_above_gradients_bytes


# The handle ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("into", ("grad", "main_grad"))
def test_remove_restores(into):
    layer, (x, dy) = CASES["mlp-features"].layer(), CASES["mlp-features"].batches()[0]
    before = gradients(layer, x, dy)
    theirs = layer.fc2.weight.main_grad = torch.zeros(16, 48)
    handle = fused_remat.accumulate_in_fp32(layer, into=into)
    layer(x).backward(dy)
    assert layer.fc2.weight.main_grad is theirs and bool(theirs.any()) == (into == "main_grad")
    handle.remove()
    handle.remove()
    for name, p in layer.named_parameters():
        assert p.grad_dtype == BF16 and hasattr(p, "main_grad") == (name == "fc2.weight")
        assert p.grad is None if into == "main_grad" else torch.equal(p.grad, before[name])
        p.grad = None
    layer(x).backward(dy)
    assert all(torch.equal(p.grad, before[name]) for name, p in layer.named_parameters())
    fused_remat.accumulate_in_fp32(layer, into=into).remove()


def test_gradients_that_exist_are_taken_along():
    layer, (x, dy) = CASES["mlp-features"].layer(), CASES["mlp-features"].batches()[0]
    layer(x).backward(dy)
    first = {name: p.grad.double() for name, p in layer.named_parameters()}
    fused_remat.accumulate_in_fp32(layer, into="main_grad")
    second = gradients(layer, x, dy)
    layer(x).backward(dy)
    for name, p in layer.named_parameters():
        assert cases.relative_error(p.main_grad, first[name] + second[name].double()) < 1e-6


def test_state_dict_and_copies_do_not_know():
    layer = CASES["mlp-features"].layer()
    keys = list(layer.state_dict())
    fused_remat.accumulate_in_fp32(layer, into="main_grad")
    other = copy.deepcopy(layer)
    assert list(layer.state_dict()) == keys
    other(torch.randn(3, 16).to(BF16)).sum().backward()
    assert other.fc1.weight.grad.dtype == BF16 and not hasattr(other.fc1.weight, "main_grad")


class _Megatron:
    """What Megatron-Core's DistributedDataParallel does to its parameters, in its words."""

    def __init__(self, parameters, *, overlap_grad_reduce: bool) -> None:
        self.overlap, self.ready, self.accumulators = overlap_grad_reduce, [], []
        for p in parameters:
            p.grad_added_to_main_grad = False
            p.main_grad = torch.zeros_like(p, dtype=torch.float32, requires_grad=False)
            accumulator = p.expand_as(p).grad_fn.next_functions[0][0]
            accumulator.register_hook(lambda *_, p=p: self._ready(p))
            self.accumulators.append(accumulator)

    def _ready(self, p) -> None:
        if self.overlap:
            assert p.grad is not None
        if p.grad is not None and (not p.grad_added_to_main_grad or getattr(p, "zero_out_wgrad", False)):
            p.main_grad.add_(p.grad.data)
        p.grad = None
        self.ready.append(p)


@pytest.mark.parametrize("overlap", (False, True), ids=("", "overlap"))
@pytest.mark.parametrize("order", ("megatron-first", "handle-first", "grad"))
def test_megatron_adds_once_and_finds_grad(order, overlap):
    case = CASES["mlp-features"]
    layer = case.layer()
    into = "grad" if order == "grad" else "main_grad"
    if order == "handle-first":
        fused_remat.accumulate_in_fp32(layer, into=into)
    megatron = _Megatron(layer.parameters(), overlap_grad_reduce=overlap)
    if order != "handle-first":
        fused_remat.accumulate_in_fp32(layer, into=into)
    for x, dy in case.batches():
        layer(x).backward(dy)
    expected = sums(case, into="main_grad")
    assert len(megatron.ready) == 4 * MICRO_BATCHES
    for name, p in layer.named_parameters():
        assert torch.equal(p.main_grad, expected[name]), name
        assert p.grad is None


@pytest.mark.parametrize(
    ("parameters", "settings", "error", "message"),
    (
        (lambda m: m, {"into": "weight"}, ValueError, "into must be one of 'grad', 'main_grad', got 'weight'"),
        (lambda m: "fc1", {}, TypeError, r"parameters\[0\] must be a tensor, got str"),
        (lambda m: m.fc1.weight, {}, TypeError, "must be a module or an iterable of tensors, got Parameter"),
        (lambda m: [m.fc1.weight, 3], {}, TypeError, r"parameters\[1\] must be a tensor, got int"),
        (lambda m: [m.fc1.weight * 2], {}, ValueError, r"parameters\[0\] is the result of an operation"),
        (lambda m: [], {}, ValueError, "nothing that requires a gradient"),
        (lambda m: m.requires_grad_(False), {}, ValueError, "nothing that requires a gradient"),
    ),
)
def test_what_cannot_be_meant_is_refused(parameters, settings, error, message):
    layer = fused_remat.MLP(4, 8).to(BF16)
    with pytest.raises(error, match=message):
        fused_remat.accumulate_in_fp32(parameters(layer), **settings)
    assert layer.fc2.weight.grad_dtype == BF16 and not hasattr(layer.fc2.weight, "main_grad")


def test_a_main_grad_that_does_not_fit_is_refused():
    layer = fused_remat.MLP(4, 8).to(BF16)
    for wrong in (torch.zeros(4, 8, dtype=BF16), torch.zeros(8, 4), torch.zeros(4, 8, device="meta")):
        layer.fc2.weight.main_grad = wrong
        with pytest.raises(ValueError, match=r"fc2.weight.main_grad is .* expected torch.float32 \[4, 8\] on cpu"):
            fused_remat.accumulate_in_fp32(layer, into="main_grad")
        assert not hasattr(layer.fc1.weight, "main_grad")


def test_a_second_handle_is_refused():
    layer = fused_remat.MLP(4, 8).to(BF16)
    handle = fused_remat.accumulate_in_fp32(layer.fc2, into="main_grad")
    with pytest.raises(ValueError, match=r"fc2.weight is summed into main_grad already; remove\(\)"):
        fused_remat.accumulate_in_fp32(layer, into="main_grad")
    handle.remove()
    fused_remat.accumulate_in_fp32(layer, into="main_grad")


def test_sharded_parameters_and_data_parallel_modules_are_refused(tmp_path):
    import torch.distributed as dist
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded = nn.Parameter(distribute_tensor(torch.zeros(4, 4), init_device_mesh("cpu", (1,))))
        with pytest.raises(TypeError, match=r"parameters\[0\] is a DTensor"):
            fused_remat.accumulate_in_fp32([sharded])
        wrapped = nn.Sequential(nn.parallel.DistributedDataParallel(fused_remat.MLP(4, 8)))
        with pytest.raises(ValueError, match=r"0 is a DistributedDataParallel, which reduces .grad"):
            fused_remat.accumulate_in_fp32(wrapped)
    finally:
        dist.destroy_process_group()
