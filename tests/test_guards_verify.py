"""`verify` compares the values that a replay rebuilds with those that the forward saved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fused_remat
from fused_remat.guards import RematMismatch, _torch, region
from fused_remat.guards import saved as saved_module
from fused_remat.guards.checksum import can_sum, checksum


class Unseen:
    """Gives another number each time, out of the guards' sight."""

    __module__ = "torch"

    def __init__(self) -> None:
        self.calls = 0

    def factor(self) -> float:
        self.calls += 1
        return float(self.calls)


def drift(source: Unseen):
    def fn(x: Tensor) -> Tensor:
        y = x.exp()
        return (y * source.factor()).sin()

    return fn


def test_values_that_differ_are_silent_without_verify() -> None:
    x = torch.ones(6, requires_grad=True)
    region(drift(Unseen()), x).sum().backward()
    e = torch.ones(1).exp()
    assert not torch.allclose(x.grad, (e * 1).cos() * e * 1)  # wrong: why there is verify


LINE = drift(Unseen()).__code__.co_firstlineno + 2  # of the sine


@pytest.mark.parametrize("verify", ["once", "always"])
def test_values_that_differ_are_named(verify: str) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    y = region(drift(Unseen()), x, verify=verify, name="stage 2")
    with pytest.raises(
        RematMismatch,
        match=r"^region 'stage 2': the replay rebuilt other values for tensor 1 \(float32 \[2, 3\], made by "
        rf"MulBackward0, saved at test_guards_verify.py:{LINE}\) than the forward saved; what a region computes",
    ):
        y.sum().backward()
    assert x.grad is None


def test_writes_past_the_version_counters_are_found() -> None:
    """Through `.data` a tensor changes without counting it."""
    stage = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    for change in (lambda: stage[2].weight.data.add_(1), lambda: stage[0].bias.data.add_(1)):
        y = region(stage, torch.randn(2, 6, requires_grad=True), verify="always")
        change()
        with pytest.raises(RematMismatch, match="other values for tensor"):
            y.sum().backward()


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts checksums."""
    made: list[int] = []
    monkeypatch.setattr(saved_module, "checksum", lambda x: made.append(x.numel()) or checksum(x))
    return made


def test_verify_once_costs_nothing_after_the_first_backward(sums: list[int]) -> None:
    stage = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    other = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def step(module: nn.Module, verify: str, name: str | None = None) -> int:
        before = len(sums)
        region(lambda x: module(x), torch.randn(2, 6), verify=verify, name=name).sum().backward()
        return len(sums) - before

    assert step(stage, "off") == 0
    first = step(stage, "once")
    assert first >= 6  # input, two weights, result of tanh; those rebuilt again
    assert step(stage, "once") == 0
    assert step(other, "once") == first  # one after the other: each region is looked at
    assert step(stage, "once", "named") == first
    assert step(stage, "always") == first and step(stage, "always") == first


def test_verify_once_goes_on_after_a_difference(sums: list[int]) -> None:
    fn = drift(Unseen())
    for _ in range(2):
        y = region(fn, torch.ones(6, requires_grad=True), verify="once")
        with pytest.raises(RematMismatch):
            y.sum().backward()


def test_verify_on_a_device_compares_when_backward_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the checksums stay tensors and nothing waits for them before the end."""
    monkeypatch.setattr(saved_module, "_on_host", lambda x: False)
    waits: list[int] = []
    equal = saved_module._equal
    monkeypatch.setattr(saved_module, "_equal", lambda pairs: waits.append(len(pairs)) or equal(pairs))
    stage = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    region(stage, torch.randn(2, 6), verify="always").sum().backward()
    assert len(waits) == 1 and waits[0] >= 3
    y = region(drift(Unseen()), torch.ones(6, requires_grad=True), verify="always", name="f")
    with pytest.raises(RematMismatch, match="region 'f': the replay rebuilt other values for tensor 1"):
        y.sum().backward()


def test_what_verify_keeps_is_tiny() -> None:
    stage = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    x = torch.randn(32, 64)

    def kept(verify: str) -> int:
        return fused_remat.measure(lambda: region(stage, x * 1, verify=verify), repeats=0).kept_bytes

    assert kept("always") == kept("off") == x.nbytes


class Norm(nn.Module):
    """A batch norm of one's own, with torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(8))
        self.register_buffer("running_var", torch.ones(8))
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, training=True)


class Labels(nn.Module):
    """A loss of targets of several lengths."""

    def forward(self, x: Tensor) -> Tensor:
        targets = torch.tensor([[1, 2, 3, 4], [1, 2, 0, 0], [1, 0, 0, 0]])
        lengths = torch.tensor([12, 6, 9]), torch.tensor([4, 2, 1])
        return nn.functional.ctc_loss(x.log_softmax(-1), targets, *lengths, reduction="none")


OWN_MEMORY = {  # and how many elements its kernel saves for itself
    "lstm of two layers": (lambda: nn.LSTM(16, 8, 2), (3, 5, 16), 28672),
    "bidirectional": (lambda: nn.LSTM(16, 8, bidirectional=True), (3, 5, 16), 28672),
    "instance norm": (lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True), (4, 8, 6, 6), None),
    "instance norm twice": (
        lambda: nn.Sequential(*[nn.InstanceNorm1d(8, track_running_stats=True)] * 2),
        (4, 8, 6),
        None,
    ),
    "batch norm": (Norm, (4, 8, 6), None),
    "ctc": (Labels, (12, 3, 5), 3 * 12 * 9),
    "rrelu": (lambda: nn.RReLU().eval(), (40,), 40),
}


@pytest.mark.parametrize("name", OWN_MEMORY)
def test_what_kernels_save_for_themselves_is_not_compared(name: str, sums: list[int]) -> None:
    """Memory that nobody wrote may hold anything; running statistics are written after they are saved."""
    make, shape, scratch = OWN_MEMORY[name]
    stock, model = make(), make()
    model.load_state_dict(stock.state_dict())
    x = torch.linspace(-2, 2, torch.Size(shape).numel()).view(shape).sin()
    gradients, counts = [], []
    for run in (lambda x: stock(x), lambda x: region(model, x, verify="always")):
        for _ in range(2):
            inputs = x.clone().requires_grad_()
            output = run(inputs)
            counts.append(sums.count(scratch))
            (output[0] if isinstance(output, tuple) else output).square().sum().backward()
            gradients.append(inputs.grad)
    assert all(torch.equal(a, b) for a, b in zip(gradients[:2], gradients[2:], strict=True))
    for mine, its in zip(model.buffers(), stock.buffers(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0)
    assert len(sums) > 4
    assert counts[2] == (name == "rrelu")  # in its forward; the input of rrelu is as large as its noise


def test_values_in_front_of_a_kernel_with_memory_of_its_own_are_compared() -> None:
    source, lstm = Unseen(), nn.LSTM(16, 8, 2)
    x = torch.randn(3, 5, 16, requires_grad=True)
    y = region(lambda x: lstm(x * source.factor())[0], x, verify="always")
    with pytest.raises(RematMismatch, match="other values for tensor"):
        y.sum().backward()


def test_bytes_that_a_model_makes_are_compared() -> None:
    class Compressed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.save_for_backward((x * factor).to(torch.uint8))
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            return dy * ctx.saved_tensors[0], None

    def masked(x: Tensor, factor: float) -> Tensor:
        return x * (x.detach() * factor).to(torch.uint8)

    for fn in (Compressed.apply, masked):
        source = Unseen()
        x = torch.full((6,), 3.0, requires_grad=True)
        y = region(lambda x, fn=fn, source=source: fn(x, source.factor()), x, verify="always")
        with pytest.raises(RematMismatch, match=r"other values for tensor \d \(uint8 \[6\]"):
            y.sum().backward()


def test_verify_of_nan_and_infinity() -> None:
    x = torch.tensor([float("nan"), float("inf"), -0.0, 1.0], requires_grad=True)
    region(lambda x: (x * 0).exp().log(), x, verify="always").sum().backward()


def test_in_place_operations_inside_pass() -> None:
    stage = nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU(inplace=True), nn.Hardtanh(inplace=True), nn.Conv2d(2, 2, 1))
    region(stage, torch.randn(1, 2, 4, 4), verify="always").sum().backward()


# The checksum


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 3), (1030, 9), (2, 3, 4, 5)])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn],
)
def test_checksum_sees_each_element(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (
        torch.randn(shape).to(dtype)
        if dtype.is_complex or dtype.is_floating_point
        else torch.randint(0, 2, shape).to(dtype)
    )
    assert can_sum(x)
    first = checksum(x)
    assert torch.equal(first, checksum(x.clone()))
    octets = x.clone().view(-1) if x.dim() else x.clone().reshape(1)
    raw = octets.view(torch.uint8)
    for position in {0, raw.numel() // 2, raw.numel() - 1}:
        changed = raw.clone()
        changed[position] ^= 1
        assert not torch.equal(first, checksum(changed.view(dtype).view(shape))), position


def test_checksum_sees_the_order() -> None:
    x = torch.randperm(5000).float()
    first = checksum(x)
    for a, b in ((0, 1), (2, 2050), (3, 3 + 2048), (4998, 4999), (10, 4999)):
        other = x.clone()
        other[[a, b]] = other[[b, a]]
        assert not torch.equal(first, checksum(other)), (a, b)
    assert not torch.equal(checksum(torch.zeros(4)), checksum(-torch.zeros(4)))  # bits, not numbers


@pytest.mark.parametrize(
    "make", ["transposed", "channels last", "expanded", "sliced", "empty", "misaligned", "one batch"]
)
def test_checksum_of_strided_tensors(make: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fused_remat.guards import checksum as module

    monkeypatch.setattr(module, "_SLICE", 64)
    x = {
        "transposed": lambda: torch.randn(40, 30).t(),
        "channels last": lambda: torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
        "one batch": lambda: torch.randn(1, 4, 5, 6).to(memory_format=torch.channels_last),
        "expanded": lambda: torch.randn(7, 1).expand(7, 9),
        "sliced": lambda: torch.randn(9, 9)[::2, 1::3],
        "empty": lambda: torch.randn(0, 4),
        "misaligned": lambda: torch.randn(33)[1:],
    }[make]()
    first = checksum(x)
    assert torch.equal(first, checksum(x))
    if x.numel():
        changed = x.clone()
        changed[-1] += 1
        assert not torch.equal(first, checksum(changed.as_strided(x.size(), changed.stride())))
    # A tensor sliced by its first dimension is the sum of its slices, so only equal layouts need to agree.
    monkeypatch.setattr(module, "_SLICE", 1 << 30)
    assert torch.equal(checksum(x.contiguous()), checksum(x))


def test_after_backward_outside_of_backward() -> None:
    assert not _torch.after_backward(lambda: None)
