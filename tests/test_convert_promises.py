"""Promises of fused_remat.convert: whatever else is done to one makes its values, by the block's own code."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from convert_cases import LowRank, assert_same, fused_calls, randomize
from test_convert_inline import Call, Steps, X, pair, same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fused_remat.convert.promises import Promise

pytestmark = pytest.mark.usefixtures("one_thread")


def hooked(kind: str, name: str):
    def change(block: nn.Module) -> None:
        getattr(block.get_submodule(name), f"register_{kind}")(
            (lambda m, args: (args[0] * 2,)) if kind == "forward_pre_hook" else lambda m, args, out: out * 2
        )

    return change


class Custom(torch.autograd.Function):
    """Asks for no `__torch_function__`."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        return dy * 3


def without_torch_function(h: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return h * 3


def added_later(block: nn.Module) -> None:
    block.fc1 = LowRank(block.fc1)


def seen_and_left(h: Tensor) -> Tensor:
    assert h.abs().max() > 0
    return h


def written_over(h: Tensor) -> Tensor:
    h[..., 0] = 0
    return h


def own_forward(block: nn.Module) -> None:
    code = block.fc1.forward
    block.fc1.forward = lambda x: code(x) * 2


CHANGES = {
    **{f"{kind} on {name}": hooked(kind, name)
       for kind in ("forward_hook", "forward_pre_hook") for name in ("fc1", "activation_fn", "fc2")},
    "adapter around fc1": added_later,
    "own forward of fc1": own_forward,
    "another activation": lambda block: setattr(block, "activation_fn", nn.Mish()),
    "frozen batch of hooks": lambda block: block.fc1.register_full_backward_hook(lambda m, dx, dy: (dx[0] * 2,)),
    "spectral norm": lambda block: nn.utils.parametrizations.weight_norm(block.fc1),
    **{name: lambda block, between=between: setattr(block, "between", Call(between)) for name, between in {
        "arithmetic": lambda h: h * 2 + 1,
        "a view": lambda h: h.flatten(0, 1).view(h.shape),
        "an index": lambda h: h[:2].repeat(2, 1, 1),
        "a second activation": F.gelu,
        "a second activation module": nn.GELU(),
        "a module": randomize(nn.LayerNorm(24)),
        "values looked at": seen_and_left,
        "a write": written_over,
        "an autograd function": Custom.apply,
        "no torch function": without_torch_function,
        "a list": lambda h: torch.stack([h, h]).sum(0),
        "a detached half": lambda h: h.detach() + h,
        "a gradient hook": lambda h: h.register_hook(lambda dh: dh * 2) and h,
        "a call through checkpoint": lambda h: checkpoint(torch.tanh, h, use_reentrant=False),
        "a call through reentrant checkpoint": lambda h: checkpoint(torch.tanh, h, use_reentrant=True),
    }.items()},
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_whatever_comes_between_runs_the_own_code(name):
    model, stock = pair()
    for block in (model, stock):
        torch.manual_seed(0)
        CHANGES[name](block)
    same(model, stock, calls=0)


def test_values_that_nobody_asks_for_leave_it_fused():
    shapes = []

    def look(h: Tensor) -> Tensor:
        shapes.append((h.shape, h.dtype, h.device.type, h.dim(), h.size(-1), h.numel(), h.requires_grad, len(h)))
        assert torch.is_floating_point(h) and isinstance(h, Tensor) and not h.is_leaf
        return h

    model, stock = pair()
    model.between = stock.between = Call(look)
    same(model, stock, calls=1)
    assert shapes[0] == shapes[1] == ((4, 5, 24), torch.float32, "cpu", 3, 24, 480, True, 4)


def test_hooks_on_the_block_and_its_dropout_stay():
    model, stock = pair(Steps)
    for block in (model, stock):
        block.register_forward_hook(lambda m, args, out: out * 2)
        block.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    same(model, stock, calls=1)
    for block in (model, stock):
        block.drop.register_forward_hook(lambda m, args, out: out * 2)
    same(model, stock, calls=0)


def test_hooks_on_all_modules_see_the_parts():
    model, _ = pair()
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append((m, type(out))))
    try:
        with fused_calls() as calls:
            model(X)
    finally:
        handle.remove()
    assert calls == [] and (model.fc1, Tensor) in seen and Promise not in dict(seen).values()


def test_parts_called_elsewhere_run_their_own_code():
    model, stock = pair()
    assert type(model.fc1(X)) is Tensor and torch.equal(model.fc1(X), stock.fc1(X))
    x = X.clone().requires_grad_()
    out = model.fc2(model.activation_fn(model.fc1(x)))
    assert type(out) is Tensor and torch.equal(out, stock.fc2(stock.activation_fn(stock.fc1(x))))


def test_a_promise_used_twice():
    """As hidden features that go on beside the MLP; both ways have their gradient."""
    model, stock = pair()
    both = []
    for block in (model, stock):
        used = []
        block.between = Call(lambda h, used=used: used.append(h) or h)
        out = block(X)
        (out.sum() + used[0].square().sum()).backward()
        both.append({name: p.grad for name, p in block.named_parameters()})
    assert_same(*both, 1e-5)


def test_dropped_features_are_not_dropped_twice():
    model, _ = pair(Steps, p=0.5)
    used = []
    model.drop.register_forward_hook(lambda m, args, out: used.append(out))
    model(X)
    with pytest.raises(RuntimeError, match="were used again after its last linear"):
        used[0].sum()


def test_writes_in_place_are_refused():
    class Writes(Steps):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.mixer(x)
            hidden = self.fc1(x)
            hidden = self.activation_fn(hidden)
            x.mul_(2)
            hidden = self.fc2(hidden)
            return hidden

    model, _ = pair(Writes)
    with pytest.raises(RuntimeError, match="writes in place between the linears"):
        model(X)
