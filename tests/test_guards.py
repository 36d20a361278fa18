"""Every guard of a region: what it watches makes the gradient right, or raises one plain sentence."""

from __future__ import annotations

import random
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fused_remat
from fused_remat.guards import (
    RematDevice,
    RematMutation,
    randomness,
)
from fused_remat.guards import call as call_module

region = fused_remat.region


def plainly(fn, *args, **kwargs):
    return fn(*args, **kwargs)


def gradient(run, fn, *args, **kwargs) -> Tensor:
    """Of the first argument, of the sum of what `fn` gives."""
    x = torch.linspace(-1, 2, 6).requires_grad_()
    run(fn, x, *args, **kwargs).sum().backward()
    return x.grad


# Randomness


def own_generator(x: Tensor, generator: torch.Generator) -> Tensor:
    return (x * torch.rand(x.shape, generator=generator)).exp().sin()


class Noisy(nn.Module):
    """A module with generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.torch_generator = torch.Generator().manual_seed(1)
        self.others = [random.Random(1), np.random.default_rng(1), np.random.RandomState(1)]

    def forward(self, x: Tensor) -> Tensor:
        python, generator, state = self.others
        x = (x * torch.rand(x.shape, generator=self.torch_generator)).exp()
        return (x * python.random()).exp() * (x * float(generator.random()) * float(state.rand())).exp()


hidden = {"generator": None}  # not named in the code of `use_hidden`


def use_hidden(x: Tensor) -> Tensor:
    return own_generator(x, __import__("sys").modules[__name__].hidden["generator"])


GLOBAL_GENERATOR = torch.Generator()


def use_global(x: Tensor) -> Tensor:
    return own_generator(x, GLOBAL_GENERATOR)


@pytest.mark.parametrize("where", ["argument", "keyword", "nested", "closure", "default", "global", "unreachable"])
def test_own_generator_is_replayed(where: str) -> None:
    g = torch.Generator()
    hidden["generator"] = g
    fn, args, kwargs = {
        "argument": (own_generator, (g,), {}),
        "keyword": (own_generator, (), {"generator": g}),
        "nested": (lambda x, config: own_generator(x, config["g"][0]), ({"g": [g]},), {}),
        "closure": (lambda x: own_generator(x, g), (), {}),
        "default": (lambda x, g=g: own_generator(x, g), (), {}),
        "global": (use_global, (), {}),
        "unreachable": (use_hidden, (), {}),
    }[where]
    source = GLOBAL_GENERATOR if where == "global" else g
    found = []
    for run in (plainly, region):
        source.manual_seed(7)
        found.append([gradient(run, fn, *args, **kwargs) for _ in range(3)] + [source.get_state()])
    for plain, ours in zip(*found, strict=True):
        assert torch.equal(plain, ours)


def test_generators_of_modules_are_replayed() -> None:
    found = []
    for run in (plainly, region):
        noisy = Noisy()
        found.append(torch.stack([gradient(run, noisy) for _ in range(2)]))
    assert torch.equal(*found)


@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: np.random.rand()], ids=["python", "numpy"])
def test_global_generators_are_replayed_and_go_on(draw) -> None:
    found = []
    for run in (plainly, region):
        random.seed(5), np.random.seed(5)
        grads = [gradient(run, lambda x: (x * float(draw())).exp()) for _ in range(2)]
        found.append(torch.stack([*grads, torch.full((6,), float(draw()))]))
    assert torch.equal(*found)


def test_generator_drawn_from_between_forward_and_backward() -> None:
    g = torch.Generator()
    found = []
    for run in (plainly, region):
        g.manual_seed(1)
        x = torch.ones(6, requires_grad=True)
        y = run(own_generator, x, g)
        between = torch.rand(2, generator=g)
        y.sum().backward()
        found.append(torch.cat([x.grad, between, torch.rand(2, generator=g)]))
    assert torch.equal(*found)


def test_generators_of_other_devices_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator stands in for the one of a second device, which no argument shows."""
    second = torch.Generator()
    monkeypatch.setattr(randomness, "device_generators", lambda: [second])
    hidden["generator"] = second
    monkeypatch.setattr(call_module, "Watch", NoWatch)
    found = []
    for run in (plainly, region):
        second.manual_seed(3)
        found.append(gradient(run, use_hidden))
    assert torch.equal(*found)


class NoWatch:
    """Sees nothing."""

    generators: ClassVar[dict] = {}
    moves: ClassVar[list] = []
    saves_noise = False

    def __init__(self, found) -> None:
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_device_that_a_region_uses_first_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    in_use: list[torch.Generator] = []
    monkeypatch.setattr(randomness, "device_generators", lambda: in_use)

    class Start:
        __module__ = "torch"  # not looked into

        def run(self) -> None:
            in_use.append(torch.Generator())

    start = Start()

    def first_use(x: Tensor) -> Tensor:
        start.run()
        return x.exp()

    with pytest.raises(RematDevice, match=r"region '.*first_use' was the first to use a device, so torch's of cpu"):
        gradient(region, first_use)


# Inputs


def scaled(x: Tensor, *rest, w: Tensor | None = None, more=()) -> Tensor:
    for item in (*rest, w, *more):
        x = x * item if isinstance(item, Tensor) else x
    return x.exp()


@pytest.mark.parametrize(
    ("args", "kwargs", "path"),
    [
        (lambda w: (w,), lambda w: {}, r"args\[1\]"),
        (lambda w: (), lambda w: {"w": w}, r"kwargs\['w'\]"),
        (lambda w: (), lambda w: {"more": [w]}, r"kwargs\['more'\]\[0\]"),
        (lambda w: (), lambda w: {"more": {w: 1}.keys() and (w, 1)}, r"kwargs\['more'\]\[0\]"),
    ],
    ids=["positional", "keyword", "list", "tuple"],
)
def test_input_changed_before_backward_is_refused(args, kwargs, path: str) -> None:
    x, w = torch.ones(6, requires_grad=True), torch.ones(6)
    y = region(scaled, x, *args(w), name="stage 1", **kwargs(w))
    w.mul_(3)
    with pytest.raises(
        RematMutation,
        match=rf"^region 'stage 1': its input {path} \(float32 \[6\]\) was changed in place between forward and "
        "backward; change it after backward, or pass a clone to the region$",
    ):
        y.sum().backward()
    assert x.grad is None


def test_containers_may_change_before_backward() -> None:
    x, weights, more = torch.ones(6, requires_grad=True), torch.full((6,), 2.0), [torch.full((6,), 2.0)]
    y = region(lambda x, d, l: scaled(x, d["w"], more=l), x, table := {"w": weights}, more)
    table["w"], more[0] = torch.zeros(6), None
    more.append(torch.zeros(6))
    y.sum().backward()
    assert torch.equal(x.grad, 4 * torch.full((6,), 4.0).exp())


def test_list_argument_that_grows_inside_grows_once() -> None:
    found: list[Tensor] = []

    def collect(x: Tensor, into: list[Tensor]) -> Tensor:
        into.append(x * 2)
        return x.exp()

    gradient(region, collect, found)
    assert len(found) == 1


def test_input_changed_inside_is_refused() -> None:
    def change(x: Tensor, *, mask: Tensor) -> Tensor:
        mask.mul_(0.5)
        return (x * mask).exp()

    with pytest.raises(
        RematMutation, match=r"^region '.*change' changes its input kwargs\['mask'\] \(float32 \[6\]\) in pl"
    ):
        gradient(region, change, mask=torch.ones(6))
    mask = torch.ones(6)
    assert not region(change, torch.ones(6), mask=mask).requires_grad  # nothing is kept, so nothing is replayed
    assert torch.equal(mask, torch.full((6,), 0.5))


@pytest.mark.parametrize("how", ["closure", "default", "global list", "partial"])
def test_captured_tensor_changed_before_backward_is_refused(how: str) -> None:
    import functools

    w = torch.ones(6)
    CAPTURED[:] = [w]
    fn = {
        "closure": lambda x: (x * w).exp(),
        "default": lambda x, w=w: (x * w).exp(),
        "global list": lambda x: (x * CAPTURED[0]).exp(),
        "partial": functools.partial(scaled, w=w),
    }[how]
    x = torch.ones(6, requires_grad=True)
    y = region(fn, x, name="f")
    w.mul_(3)
    with pytest.raises(
        RematMutation, match=r"region 'f': .* was changed in place between forward and backward; .*pass it"
    ):
        y.sum().backward()


CAPTURED: list[Tensor] = []


def test_captured_name_that_names_another_value_is_refused() -> None:
    w, power = torch.ones(6), 2
    x = torch.ones(6, requires_grad=True)
    y = region(lambda x: (x * w) ** power, x, name="f")
    power = 3
    with pytest.raises(RematMutation, match="region 'f': power was changed from 2 to 3 between forward and backward"):
        y.sum().backward()
    power = 2
    y = region(lambda x: (x * w) ** power, x, name="f")
    w = torch.zeros(6)
    with pytest.raises(RematMutation, match="region 'f': w was replaced between forward and backward"):
        y.sum().backward()


def test_captured_number_that_a_region_counts_up_is_refused() -> None:
    count = 0

    def counted(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return (x * count).exp()

    with pytest.raises(
        RematMutation, match=r"count, which it reaches without being passed it, was changed from 0 to 1"
    ):
        gradient(region, counted)
