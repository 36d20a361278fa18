"""A region gives what the plain call gives, bit for bit, and keeps its inputs only."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fused_remat
from fused_remat.guards import as_region, run_region


def conv_stage() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Conv2d(8, 3, 3)
    )


def results(model: nn.Module, run, x: Tensor, steps: int = 1) -> list[Tensor]:
    """Output, gradients and state after some steps from one seed."""
    torch.manual_seed(1)
    out = []
    for _ in range(steps):
        x = x.detach().clone().requires_grad_()
        y = run(x)
        y.square().mean().backward()
        out += [y.detach().clone(), x.grad]
    out += [p.grad for p in model.parameters()]
    return out + [b.clone() for b in model.buffers()] + [torch.rand(3)]


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b)
    for number, (x, y) in enumerate(zip(a, b, strict=True)):
        assert torch.equal(x, y), number


def twins(make) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    one = make()
    torch.manual_seed(0)
    return one, make()


@pytest.mark.parametrize("verify", ["off", "once", "always"])
def test_region_module_equals_plain(verify: str) -> None:
    plain, ours = twins(conv_stage)
    x = torch.randn(2, 3, 9, 9)
    expected = results(plain, plain, x, steps=3)
    assert_same(results(ours, lambda x: fused_remat.region(ours, x, verify=verify), x, steps=3), expected)
    assert ours[1].num_batches_tracked == 3


class UNet(nn.Module):
    """Two levels down, two up, with skip connections."""

    def __init__(self, wrap=lambda fn, *args: fn(*args), channels: int = 8) -> None:
        super().__init__()
        c = channels
        self.down1, self.down2 = self.block(3, c), self.block(c, 2 * c)
        self.middle = self.block(2 * c, 2 * c)
        self.up2, self.up1 = self.block(4 * c, c), self.block(2 * c, c)
        self.head = nn.Conv2d(c, 1, 1)
        self.wrap = wrap

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True), nn.Dropout2d(0.1)
        )

    def up(self, block: nn.Module, x: Tensor, *, skip: Tensor) -> Tensor:
        return block(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1))

    def forward(self, x: Tensor) -> Tensor:
        one = self.wrap(self.down1, x)
        two = self.wrap(self.down2, F.max_pool2d(one, 2))
        x = self.wrap(self.middle, F.max_pool2d(two, 2))
        x = self.wrap(lambda x, skip: self.up(self.up2, x, skip=skip), x, two)
        return self.head(self.wrap(lambda x, skip: self.up(self.up1, x, skip=skip), x, one))


def recompute(fn, *args: Tensor) -> Tensor:
    return fused_remat.region(fn, *args)


def test_region_unet_equals_plain() -> None:
    plain, ours = twins(UNet)
    ours.wrap = recompute
    x = torch.randn(2, 3, 16, 16)
    assert_same(results(ours, ours, x, steps=2), results(plain, plain, x, steps=2))


def kept_bytes(fn) -> int:
    return fused_remat.measure(fn, repeats=0).kept_bytes


@pytest.mark.parametrize("verify", ["off", "always"])
def test_region_keeps_its_input_only(verify: str) -> None:
    stage = conv_stage()
    stage[3] = nn.Identity()  # no dropout
    x = torch.randn(2, 3, 16, 16)
    assert kept_bytes(lambda: stage(x * 1)) > 2 * 8 * 2 * 16 * 16 * 4
    assert kept_bytes(lambda: fused_remat.region(stage, x, verify=verify)) == 0  # the caller has x
    assert kept_bytes(lambda: fused_remat.region(stage, x * 1, verify=verify)) == x.nbytes
    stage[3] = nn.Dropout(0.3)
    drawn = kept_bytes(lambda: fused_remat.region(stage, x, verify=verify))
    assert drawn == torch.get_rng_state().nbytes  # what dropout drew from


def test_region_unet_keeps_the_borders_of_its_regions() -> None:
    unet = UNet(recompute)
    for module in unet.modules():
        if isinstance(module, nn.Dropout2d):
            module.p = 0.0
    x = torch.randn(2, 3, 16, 16)
    full = 2 * 16 * 16 * 4  # bytes of one channel
    # results of down1, down2, middle, up2, up1; of two pools, a quarter as large, with indices twice as large
    results = 8 * full + 16 * full // 4 + 16 * full // 16 + 8 * full // 4 + 8 * full
    pools = 3 * (8 * full // 4 + 16 * full // 16)
    assert kept_bytes(lambda: unet(x)) == results + pools
    unet.wrap = lambda fn, *args: fn(*args)
    assert kept_bytes(lambda: unet(x)) > 2 * (results + pools)


def test_region_frees_its_inputs_after_backward() -> None:
    stage = conv_stage()
    x = torch.randn(2, 3, 9, 9, requires_grad=True)
    inner = x * 1
    alive = weakref.ref(inner)
    y = fused_remat.region(stage, inner).mean()
    del inner
    y.backward()
    assert alive() is None  # without the garbage collector: no cycles


@dataclasses.dataclass
class Batch:
    image: Tensor
    extra: dict[str, list[Tensor]]
    name: str = "a"


def nested(batch: Batch, *more: Tensor | list, scale: Tensor | None = None, pair=None) -> dict:
    y = batch.image * batch.extra["w"][0] * more[0][1].exp()
    return {"y": y * scale, "z": (y + pair[0], None, batch.name)}


def test_region_nested_arguments_and_results() -> None:
    leaves = [torch.randn(4, requires_grad=True) for _ in range(5)]
    a, b, c, d, e = leaves

    def call(run) -> tuple[list[Tensor], dict]:
        out = run(nested, Batch(a, {"w": [b]}), [None, c], scale=d, pair=(e, 1))
        return list(torch.autograd.grad((out["y"] * out["z"][0]).sum(), leaves)), out

    expected, _ = call(lambda fn, *args, **kwargs: fn(*args, **kwargs))
    ours, out = call(fused_remat.region)
    assert_same(ours, expected)
    assert out["z"][1:] == (None, "a")


def test_region_keyword_tensors_are_kept_where_hooks_see_them() -> None:
    seen: list[int] = []
    x, w = torch.randn(4, requires_grad=True), torch.randn(4)
    address = w.data_ptr()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.data_ptr()) or t.clone(), lambda t: t):
        y = fused_remat.region(lambda x, *, w: (x * w).exp(), x, w=w)
    assert address in seen
    w.zero_()  # whoever offloads keeps values of its own, so this changes nothing
    y.sum().backward()
    assert x.grad.abs().max() > 0


def test_region_returns_none_and_tuples() -> None:
    assert fused_remat.region(lambda: None) is None
    x = torch.randn(3, requires_grad=True)
    a, b = fused_remat.region(lambda x: (x.exp(), x.sin().detach()), x)
    a.sum().backward()
    assert not b.requires_grad and torch.equal(x.grad, x.exp())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_region_without_gradients_is_the_plain_call(context) -> None:
    stage = conv_stage().eval()
    calls = []
    with context():
        y = fused_remat.region(lambda x: calls.append(torch.is_grad_enabled()) or stage(x), torch.randn(1, 3, 9, 9))
    assert calls == [False] and y.grad_fn is None


def test_region_trains_weights_behind_frozen_inputs() -> None:
    plain, ours = twins(conv_stage)
    x = torch.randn(2, 3, 9, 9)  # asks for no gradient
    grads = []
    for model, run in ((plain, plain), (ours, lambda x: fused_remat.region(ours, x))):
        torch.manual_seed(3)
        run(x).sum().backward()
        grads.append([p.grad for p in model.parameters()])
    assert_same(*grads)


def test_region_with_nothing_to_train() -> None:
    stage = conv_stage().requires_grad_(False)
    assert not fused_remat.region(stage, torch.randn(2, 3, 9, 9)).requires_grad


def test_region_twice_through_one_graph() -> None:
    plain, ours = twins(conv_stage)
    x = torch.randn(2, 3, 9, 9, requires_grad=True)
    grads = []
    for run in (plain, lambda x: fused_remat.region(ours, x, verify="always")):
        torch.manual_seed(3)
        y = run(x).square().sum()
        first = torch.autograd.grad(y, x, retain_graph=True)[0]
        grads.append([first, torch.autograd.grad(y, x)[0]])
    assert_same(*grads)
    assert torch.equal(*grads[1])
    assert ours[1].num_batches_tracked == 1


def test_region_double_backward() -> None:
    x = torch.randn(4, requires_grad=True, dtype=torch.float64)

    def gradient_of_gradient(run) -> Tensor:
        first = torch.autograd.grad(run(lambda x: x.exp().sin(), x).sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), x)[0]

    assert torch.equal(gradient_of_gradient(fused_remat.region), gradient_of_gradient(lambda fn, x: fn(x)))


@pytest.mark.parametrize("flip", [False, True])
def test_region_autocast(flip: bool) -> None:
    plain, ours = twins(conv_stage)
    x = torch.randn(2, 3, 9, 9)
    found = []
    for model, run in ((plain, plain), (ours, lambda x: fused_remat.region(ours, x, verify="once"))):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            y = run(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=flip):
            y.float().square().mean().backward()
        found.append([y, *(p.grad for p in model.parameters())])
    assert_same(*found)
    assert found[1][0].dtype == torch.bfloat16


def test_region_accumulates_over_micro_batches() -> None:
    plain, ours = twins(UNet)
    ours.wrap = recompute
    batches = torch.randn(3, 2, 3, 8, 8)
    found = []
    for model in (plain, ours):
        torch.manual_seed(0)
        losses = [model(batch).mean() for batch in batches]  # all forwards come first, as in a pipeline
        for loss in losses:
            loss.backward()
        found.append([*(p.grad for p in model.parameters()), *model.buffers()])
    assert_same(*found)


def test_region_inside_a_region() -> None:
    plain, ours = twins(lambda: nn.Sequential(conv_stage(), conv_stage()))

    def outer(x: Tensor) -> Tensor:
        return ours[1](fused_remat.region(ours[0], x.sin(), name="inner"))

    x = torch.randn(2, 3, 12, 12)
    expected = results(plain, lambda x: plain[1](plain[0](x.sin())), x, 2)
    assert_same(results(ours, lambda x: fused_remat.region(outer, x, verify="always"), x, 2), expected)


def test_region_inside_torch_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    plain, ours = twins(lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.Dropout(0.5), nn.Conv2d(3, 3, 1)))

    def outer(x: Tensor) -> Tensor:
        return ours[2](fused_remat.region(ours[:2], x.sin(), verify="always"))

    x = torch.randn(2, 3, 4, 4)
    expected = results(plain, lambda x: plain(x.sin()), x)
    assert_same(results(ours, lambda x: checkpoint(outer, x, use_reentrant=False), x), expected)


def test_region_around_fused_layers() -> None:
    plain, ours = twins(lambda: nn.Sequential(fused_remat.MLP(8, 16, dropout=0.2), nn.LayerNorm(8)))
    x = torch.randn(4, 8)
    expected = results(plain, plain, x)
    assert_same(results(ours, lambda x: fused_remat.region(ours, x, verify="always"), x), expected)


def test_region_save_on_cpu() -> None:
    plain, ours = twins(conv_stage)

    def run(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return fused_remat.region(ours, x, verify="always")

    x = torch.randn(2, 3, 9, 9)
    assert_same(results(ours, run, x), results(plain, plain, x))


def test_as_region_decorates_functions_and_methods() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stage = conv_stage()
            self.calls = 0

        @as_region(verify="once", name="net")
        def forward(self, x: Tensor) -> Tensor:
            """Told."""
            self.calls += 1
            return self.stage(x)

    ours = Net()
    assert Net.forward.__doc__ == "Told."
    x = torch.randn(2, 3, 9, 9)
    with pytest.raises(fused_remat.RematError, match=r"region 'net'.*stage.1.weight was replaced"):
        y = ours(x)
        ours.stage[1].weight = nn.Parameter(ours.stage[1].weight.detach().clone())
        y.sum().backward()
    assert ours.calls == 1

    @as_region
    def double(x: Tensor) -> Tensor:
        return (2 * x).exp()

    a = torch.randn(3, requires_grad=True)
    double(a).sum().backward()
    assert torch.equal(a.grad, (2 * a).exp() * 2)


def test_region_refuses_wrong_arguments_first() -> None:
    with pytest.raises(TypeError, match="fn must be a function or module, got int"):
        fused_remat.region(3)
    with pytest.raises(ValueError, match="verify must be one of 'off', 'once', 'always', got 'sometimes'"):
        fused_remat.region(print, verify="sometimes")
    with pytest.raises(TypeError, match="fn must be"):
        as_region(3)


def test_run_region_names_the_module_that_runs_inside() -> None:
    stage = conv_stage()
    hidden = {"call": stage}  # what fn reaches through a table is found; module= names it
    y = run_region("stages.2", lambda x: hidden["call"](x), (torch.randn(2, 3, 9, 9),), {}, module=stage)
    with torch.no_grad():
        stage[0].weight.add_(1)
    with pytest.raises(fused_remat.RematError, match=r"region 'stages.2': the parameter 0.weight was changed in place"):
        y.sum().backward()


def test_region_on_fake_and_meta_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        stage = conv_stage()
        x = torch.randn(2, 3, 9, 9, requires_grad=True)
        fused_remat.region(stage, x, verify="always").sum().backward()
        assert x.grad.shape == x.shape
    stage = conv_stage().to("meta")
    x = torch.randn(2, 3, 9, 9, device="meta", requires_grad=True)
    fused_remat.region(stage, x, verify="always").sum().backward()
    assert x.grad.is_meta


def test_region_of_lazy_modules() -> None:
    stage = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU())
    fused_remat.region(stage, torch.randn(2, 3, 9, 9)).sum().backward()
    assert stage[0].weight.grad.shape == (4, 3, 3, 3) and stage[1].num_batches_tracked == 1
