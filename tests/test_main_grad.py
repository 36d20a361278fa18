"""Gradients summed over micro-batches in fp32: `Tensor.grad_dtype` in backward, and `accumulate_in_fp32`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mha_cases
import mlp_cases as cases
import pytest
import spy
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fused_remat
from fused_remat.measure import measure

pytestmark = pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension))
BF16 = torch.bfloat16
MICRO_BATCHES = 8
# A library product that writes bf16 has rounded already; one tile of one term is then all there is to a gradient.
rounds_products = torch.cpu._is_avx512_bf16_supported()


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    tokens: tuple[int, int]
    width: int = 16

    def layer(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().to(BF16).train()

    def batches(self, dtype: torch.dtype = BF16) -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(1)
        shape = (MICRO_BATCHES, 2, *self.tokens, self.width)
        return [(x.to(dtype), dy.to(dtype)) for x, dy in torch.randn(shape).to(BF16)]


class Attention(nn.Module):
    """Self-attention with packed projections, or attention to some features of x with separate ones."""

    def __init__(self, features: int = 16, **settings) -> None:
        super().__init__()
        self.features = features
        self.attention = fused_remat.MultiheadAttention(
            16, 2, batch_first=True, kdim=features, vdim=features, **settings
        )
        for p in self.parameters():  # biases start as zeros
            nn.init.normal_(p, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        key = x[..., : self.features] if self.features < 16 else x
        return self.attention(x, key, key, need_weights=False)[0]


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, norm_first=True, batch_first=True)
    assert len(fused_remat.convert(layer).converted) >= 2
    return layer


CASES = {
    "mlp-features": Case(lambda: fused_remat.MLP(16, 48), (2, 7)),
    "mlp-tokens": Case(lambda: fused_remat.MLP(16, 24, 16, activation="relu"), (5, 31)),
    "gated-features": Case(lambda: fused_remat.GatedMLP(16, 40, bias=True), (2, 9)),
    "gated-tokens": Case(lambda: fused_remat.GatedMLP(16, 24, bias=True), (5, 33)),
    "attention-packed": Case(Attention, (3, 11)),
    "attention-separate": Case(lambda: Attention(12, add_bias_kv=True), (3, 11)),
    "converted-block": Case(_encoder, (3, 11)),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
# The op takes views of these parameters, and torch rounds the gradient of a view.
VIEWED = {"attention-separate": ("attention.bias_k", "attention.bias_v", "attention.in_proj_bias")}


def _gradients(layer: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*layer.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(layer(x), parameters, dy), strict=True))


def _sums(case: Case, **settings) -> dict[str, Tensor]:
    """What eight backward passes leave, by the name of the parameter."""
    layer = case.layer()
    if settings:
        fused_remat.accumulate_in_fp32(layer, **settings)
    for x, dy in case.batches():
        layer(x).backward(dy)
    attribute = settings.get("into", "grad")
    return {name: getattr(p, attribute) for name, p in layer.named_parameters()}


def _is_rounded(t: Tensor) -> bool:
    return torch.equal(t, t.to(BF16).to(t.dtype))


# In backward ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_rounding_is_all_that_differs(name):
    """The gradient that a parameter gets by default is the wide one, rounded once."""
    layer, (x, dy) = CASES[name].layer(), CASES[name].batches()[0]
    rounded = _gradients(layer, x, dy)
    fused_remat.accumulate_in_fp32(layer)
    for parameter, wide in _gradients(layer, x, dy).items():
        assert rounded[parameter].dtype == BF16 and wide.dtype == torch.float32
        assert torch.equal(wide.to(BF16), rounded[parameter]), parameter
        assert rounds_products or _is_rounded(wide) == (parameter in VIEWED.get(name, ())), parameter


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
@pytest.mark.parametrize("rows", (40, 200), ids=("features", "tokens"))
def test_both_chunk_axes_in_many_chunks(rows, gated, backend):
    given = cases.operands(rows, 16, 48, gated=gated, dtype=BF16)
    budget = 8192
    axis, tile_rows, tile_features, _ = cases.plan(given, budget, backend)
    assert axis == ("features" if rows == 40 else "tokens")
    assert (tile_features < 48) if rows == 40 else (tile_rows < 200)
    dy = torch.randn(rows, 16).to(BF16)
    step = lambda: cases.gradients(cases.run(given, backend=backend, workspace=budget), given, dy)
    rounded = step()
    for t in given.values():
        t.grad_dtype = torch.float32
    for name, wide in step().items():
        assert wide.dtype == torch.float32 and torch.equal(wide.to(BF16), rounded[name]), name
        assert name == "x" or backend == "aten" or rounds_products or not _is_rounded(wide), name
        assert name != "x" or _is_rounded(wide), "the gradient of the input is rounded as always"


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize(
    "block",
    (
        mha_cases.Block(norm="layer_norm", qk_norm=True, bias_kv=True),
        mha_cases.Block(norm="rms_norm", mask="float-padding"),
        mha_cases.Block(packed=False, model_k=4, model_v=3, length_k=7, out=5, kv_heads=1),
    ),
    ids=("packed", "learned-mask", "separate"),
)
@pytest.mark.parametrize("budget", (None, 1), ids=("one-group", "least"))
def test_every_operand_of_an_attention_block(budget, block, backend):
    given = block.operands(BF16)
    dy = torch.randn(2, 5, block.out or 6).to(BF16)
    step = lambda: cases.gradients(block.call(given, backend=backend, workspace=budget), given, dy)
    rounded = step()
    for t in given.values():
        t.grad_dtype = torch.float32
    for name, wide in step().items():
        assert wide.dtype == torch.float32 and torch.equal(wide.to(BF16), rounded[name]), name
        if name in ("query", "key", "value"):
            assert _is_rounded(wide), name
        elif backend == "cpp" and not rounds_products and wide.numel() > 8:
            assert not _is_rounded(wide), name


def test_only_what_asks_for_it_is_wide():
    layer, (x, dy) = CASES["gated-features"].layer(), CASES["gated-features"].batches()[0]
    layer.up_proj.weight.grad_dtype = torch.float32
    layer.down_proj.weight.grad_dtype = None  # any dtype: stays as it is
    layer(x).backward(dy)
    dtypes = {name: p.grad.dtype for name, p in layer.named_parameters()}
    assert dtypes.pop("up_proj.weight") == torch.float32 and set(dtypes.values()) == {BF16}


def test_half_precision_and_autocast():
    layer = fused_remat.MLP(16, 48).half()
    fused_remat.accumulate_in_fp32(layer)
    layer(torch.randn(5, 16).half()).sum().backward()
    assert layer.fc1.weight.grad.dtype == torch.float32
    assert not torch.equal(layer.fc1.weight.grad, layer.fc1.weight.grad.half().float())
    layer = fused_remat.MLP(16, 48)
    with torch.autocast("cpu", dtype=BF16):
        y = layer(torch.randn(5, 16))
    expected = torch.autograd.grad(y, list(layer.parameters()), torch.ones_like(y), retain_graph=True)
    fused_remat.accumulate_in_fp32(layer)
    y.backward(torch.ones_like(y))
    assert all(torch.equal(p.grad, g) for p, g in zip(layer.parameters(), expected, strict=True))


@pytest.mark.parametrize("reentrant", (False, True), ids=("non-reentrant", "reentrant"))
def test_inside_a_checkpoint(reentrant):
    layer, (x, dy) = CASES["mlp-tokens"].layer(), CASES["mlp-tokens"].batches()[0]
    fused_remat.accumulate_in_fp32(layer)
    expected = _gradients(layer, x, dy)
    checkpoint(layer, x.requires_grad_(), use_reentrant=reentrant).backward(dy)
    assert all(torch.equal(p.grad, expected[name]) for name, p in layer.named_parameters())


def test_create_graph_takes_the_reference_and_casts():
    layer, (x, dy) = CASES["mlp-features"].layer(), CASES["mlp-features"].batches()[0]
    fused_remat.accumulate_in_fp32(layer)
    (gradient,) = torch.autograd.grad(layer(x), [layer.fc1.weight], dy, create_graph=True)
    assert gradient.dtype == torch.float32 and gradient.requires_grad and _is_rounded(gradient)


@pytest.mark.parametrize("name", ("mlp-features", "attention-packed"))
def test_a_compiled_layer_hands_over_rounded_gradients(name):
    """AOTAutograd traces backward without seeing grad_dtype: the sums are fp32, each term is rounded."""
    case = CASES[name]
    layer, (x, dy) = case.layer(), case.batches()[0]
    rounded = _gradients(layer, x, dy)
    fused_remat.accumulate_in_fp32(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for times in (1, 2):
        compiled(x).backward(dy)
        for parameter, p in layer.named_parameters():
            assert p.grad.dtype == torch.float32
            assert torch.equal(p.grad, times * rounded[parameter].float()), parameter


@pytest.mark.parametrize("make", (lambda: fused_remat.MLP(16, 48), lambda: nn.Linear(16, 16)), ids=("ours", "stock"))
def test_compiled_autograd_refuses_loudly(make):
    """torch's compiled autograd assigns gradients of the parameter's dtype, to stock layers too."""
    layer = make().to(BF16)
    fused_remat.accumulate_in_fp32(layer)
    y = layer(torch.randn(5, 16).to(BF16))
    with (
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)),
        pytest.raises(RuntimeError, match="gradient with dtype 'c10::BFloat16' to a tensor with grad_dtype 'Float'"),
    ):
        y.sum().backward()


# Sums ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("into", ("grad", "main_grad"))
@EVERY_CASE
def test_sums_are_those_of_fp64(case, into):
    layer, truth = case.layer(), {}
    fused_remat.accumulate_in_fp32(layer)
    for x, dy in case.batches():
        for name, gradient in _gradients(layer, x, dy).items():
            truth[name] = truth.get(name, 0) + gradient.double()
    wide, narrow = _sums(case, into=into), _sums(case)
    for name, expected in truth.items():
        assert wide[name].dtype == torch.float32 and narrow[name].dtype == BF16
        error, usual = (cases.relative_error(sums[name], expected) for sums in (wide, narrow))
        assert error < 1e-6 and usual > 1e-3 and usual > 1e4 * error, (name, error, usual)


@pytest.mark.parametrize("name", CASES)
def test_sums_are_closer_to_the_true_gradient(name):
    case = CASES[name]
    exact, truth = case.layer().double(), {}
    for x, dy in case.batches(torch.float64):
        for parameter, gradient in _gradients(exact, x, dy).items():
            truth[parameter] = truth.get(parameter, 0) + gradient
    wide, narrow = _sums(case, into="main_grad"), _sums(case)
    total = lambda sums: sum(cases.relative_error(sums[p], truth[p]) for p in truth) / len(truth)
    # What the stock parts of a block round on the way is in both.
    factor = 1.0 if name == "converted-block" else 0.75
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
    assert _is_rounded(parts[2]) and (rounds_products or not _is_rounded(parts[0]))


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
    assert wide.backward_peak_above_gradients_bytes <= 1.01 * workspace
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
    before = _gradients(layer, x, dy)
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
    second = _gradients(layer, x, dy)
    layer(x).backward(dy)
    for name, p in layer.named_parameters():
        assert cases.relative_error(p.main_grad, first[name] + second[name].double()) < 1e-6


def test_state_dict_and_copies_do_not_know():
    import copy

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
    expected = _sums(case, into="main_grad")
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


# The ops -------------------------------------------------------------------------------------------------------------


def _mlp_backward(wide: list[bool]) -> tuple:
    given = cases.operands(3, 4, 6, 5, gated=True, dtype=BF16, requires_grad=False)
    ones = torch.ones(4, dtype=BF16)
    layer = cases.op_layer(given, fused_remat.Norm("layer_norm", ones, ones))
    nothing = torch.empty(0, dtype=torch.int64)
    residual = torch.empty(3, 0, dtype=BF16)
    call = (given["x"], *layer, "silu", 0.0, 0, 0, 2000, "cpp", BF16, nothing, None, residual, residual)
    return (torch.randn(3, 5).to(BF16), *call, [True] * 9, wide)


def test_opcheck_with_a_wide_mask():
    for wide in ([True] * 9, [False, True, False] * 3, [False] * 9):
        results = torch.library.opcheck(torch.ops.fused_remat.mlp_bwd.default, _mlp_backward(wide))
        assert set(results.values()) == {"SUCCESS"}
        gradients = torch.ops.fused_remat.mlp_bwd(*_mlp_backward(wide))
        wanted = [torch.float32 if w and i else BF16 for i, w in enumerate(wide)]
        assert [g.dtype for g in gradients] == wanted


def test_opcheck_of_attention_with_a_wide_mask():
    block = mha_cases.Block(norm="layer_norm", qk_norm=True, bias_kv=True, mask="float")
    given = block.operands(BF16)
    with spy.watching() as calls:
        mha_cases.gradients(block.call(given), given, torch.randn(2, 5, 6).to(BF16))
    (arguments,) = (arguments for name, arguments in calls if name == "multi_head_attention_bwd")
    *rest, wanted, wide = arguments
    assert not any(wide) and wanted[19], "a mask has a gradient"
    op = torch.ops.fused_remat.multi_head_attention_bwd
    results = torch.library.opcheck(op.default, (*rest, wanted, wanted))
    assert set(results.values()) == {"SUCCESS"}
    for i, (gradient, wide) in enumerate(zip(op(*rest, wanted), op(*rest, wanted, wanted), strict=True)):
        assert gradient.dtype == BF16 and wide.dtype == (torch.float32 if wanted[i] and i > 2 else BF16)
        assert torch.equal(wide.to(BF16), gradient)


def test_a_wide_mask_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="wide_mask must have 9 entries, got 2"):
        torch.ops.fused_remat.mlp_bwd(*_mlp_backward([True, True]))
