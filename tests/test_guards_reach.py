"""State that a region reaches without being passed it: compared, refused or put back, never silently another."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import types

import pytest
import torch
from torch import Tensor, nn

import fused_remat
from fused_remat.guards import RematCache, RematMutation

region = fused_remat.region


def leaf() -> Tensor:
    return torch.linspace(-1, 1, 6).requires_grad_()


class Scale:
    value = 2.0


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 2.0


@dataclasses.dataclass
class Config:
    value: float = 2.0


# What a function reads, and how its value is made 3.

READ = {
    "dict": ({"a": 2.0}, lambda o: o["a"], lambda o: o.update(a=3.0)),
    "nested dict": ({"a": {"b": [2.0]}}, lambda o: o["a"]["b"][0], lambda o: o["a"]["b"].__setitem__(0, 3.0)),
    "dict, new key": ({"a": 2.0}, lambda o: o.get("b", o["a"]), lambda o: o.update(b=3.0)),
    "dict, key gone": ({"a": 2.0, "b": 1.0}, lambda o: 2.0 if "b" in o else 3.0, lambda o: o.pop("b")),
    "list": ([2.0], lambda o: o[0], lambda o: o.__setitem__(0, 3.0)),
    "list, length": ([0, 0], lambda o: float(len(o)), lambda o: o.append(0)),
    "deque": (collections.deque([2.0]), lambda o: o[-1], lambda o: o.append(3.0)),
    "set": ({7}, lambda o: 2.0 if 8 not in o else 3.0, lambda o: o.add(8)),
    "namespace": (types.SimpleNamespace(value=2.0), lambda o: o.value, lambda o: setattr(o, "value", 3.0)),
    "arguments": (argparse.Namespace(value=2.0), lambda o: o.value, lambda o: setattr(o, "value", 3.0)),
    "dataclass": (Config(), lambda o: o.value, lambda o: setattr(o, "value", 3.0)),
    "class default": (Scale(), lambda o: o.value, lambda o: setattr(o, "value", 3.0)),
    "slots": (Slotted(), lambda o: o.value, lambda o: setattr(o, "value", 3.0)),
    "dtype": ({"a": torch.float64}, lambda o: 2.0 if o["a"] is torch.float64 else 3, lambda o: o.update(a=torch.half)),
    "function": ({"a": lambda: 2.0}, lambda o: o["a"](), lambda o: o.update(a=lambda: 3.0)),
}


@pytest.mark.parametrize("how", ["closure", "default", "attribute", "in the forward"])
@pytest.mark.parametrize("kind", READ)
def test_state_that_changes_is_refused_or_right(kind: str, how: str) -> None:
    import copy

    original, read, change = READ[kind]
    holder = copy.deepcopy(original)

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.holder, self.read = holder, read

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.read(self.holder)).sin()

    def changing(x: Tensor) -> Tensor:
        change(holder)
        return (x * read(holder)).sin()

    fn = {
        "closure": lambda x: (x * read(holder)).sin(),
        "default": lambda x, holder=holder: (x * read(holder)).sin(),
        "attribute": Module(),
        "in the forward": changing,
    }[how]
    x = leaf()
    if how == "in the forward":
        with pytest.raises(RematMutation, match="in the forward and would be so again in the replay"):
            region(fn, x)
        return
    y = region(fn, x)
    change(holder)
    put_back = how == "attribute" and isinstance(holder, (dict, list, set, collections.deque))
    if put_back:
        now = copy.copy(holder)
        y.sum().backward()
        assert torch.equal(x.grad, 2 * (2 * x).cos()) and holder == now
    else:
        with pytest.raises(RematMutation, match="between forward and backward"):
            y.sum().backward()


class Step(nn.Module):
    """Counts its calls somewhere, and scales by the count."""

    total = 0

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where = nn.Linear(6, 6), where
        self.nested, self.in_tuple, self.object = {"a": [0]}, ([0],), types.SimpleNamespace(n=0)
        self.listed = [types.SimpleNamespace(n=0)]
        self.method = Counter().next

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.count()).sin()

    def count(self) -> int:
        if self.where in ("nested", "in_tuple"):
            held = self.nested["a"] if self.where == "nested" else self.in_tuple[0]
            held[0] += 1
            return held[0]
        if self.where in ("object", "listed"):
            held = self.object if self.where == "object" else self.listed[0]
            held.n += 1
            return held.n
        if self.where == "method":
            return self.method()
        Step.total += 1
        return Step.total


class Counter:
    n = 0

    def next(self) -> int:
        self.n += 1
        return self.n


@pytest.mark.parametrize("where", ["nested", "in_tuple"])
def test_nested_containers_of_modules_move_once(where: str) -> None:
    results = []
    for run in (lambda fn, x: fn(x), region):
        torch.manual_seed(0)
        model = Step(where)
        ys = [run(model, torch.ones(6)).sum() for _ in range(2)]  # both forwards, then both backwards
        for y in ys:
            y.backward()
        results.append([model.linear.weight.grad, model.nested, model.in_tuple])
    assert torch.equal(results[0][0], results[1][0]) and results[0][1:] == results[1][1:]


@pytest.mark.parametrize(
    ("where", "name"),
    [("object", "0.object.n"), ("listed", r"0.listed\[0\].n"), ("method", "0.method.self.n"), ("class", "Step.total")],
)
def test_counters_in_objects_and_classes_of_modules_are_refused(where: str, name: str) -> None:
    Step.total = 0
    model = nn.Sequential(Step(where))
    with pytest.raises(RematMutation, match=rf"{name}, which it reaches .* was changed from 0 to 1 in the forward"):
        region(model, torch.ones(6))


class KVCache:
    """Holds keys in a list, or in tensors of a fixed size that it writes into or replaces."""

    def __init__(self, how: str) -> None:
        self.how, self.list, self.table = how, [], torch.zeros(3, 6)

    def update(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "list":
                self.list.append(x)
                return torch.stack(self.list).sum(0)
            if self.how == "in place":
                self.table += x
            else:
                self.table = self.table + x
        return self.table.sum(0)


@pytest.mark.parametrize(
    ("how", "name"),
    [("list", r"list\[0\] was added"), ("in place", "table was changed"), ("new", "table was replaced")],
)
def test_cache_that_a_module_holds_is_refused(how: str, name: str) -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.cache = nn.Linear(6, 6), KVCache(how)

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.cache.update(self.linear(x)) + self.linear(x)).exp()

    with pytest.raises(RematCache, match=f"region 'Decoder': cache.{name}"):
        region(Decoder(), torch.ones(6))


def test_objects_that_a_module_exchanges_are_put_back() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.act = Config(), torch.sin

        def forward(self, x: Tensor) -> Tensor:
            y = self.act(x * self.config.value)
            self.seen = Config(y.sum().item())
            return y

    model, x = Module(), leaf()
    y = region(model, x)
    seen = model.seen
    model.config, model.act = Config(9.0), torch.exp
    y.sum().backward()
    assert torch.equal(x.grad, 2 * (2 * x).cos())
    assert model.seen is seen and model.config == Config(9.0) and model.act is torch.exp
    region(Module(), leaf()).sum().backward()


def test_class_attribute_changed_before_backward_is_refused() -> None:
    class Local(Scale):
        pass

    for holder in (Scale, Local):
        x = leaf()
        y = region(lambda x, holder=holder: (x * Local.value * Scale.value).sin(), x)
        holder.value = 3.0
        with pytest.raises(RematMutation, match=r"(Scale|Local).value was changed from 2.0 to 3.0"):
            y.sum().backward()
        Scale.value = 2.0


@pytest.mark.parametrize(
    "make", [lambda: iter([2.0, 3.0]), lambda: (i for i in (2.0, 3.0)), lambda: itertools.count(2)]
)
@pytest.mark.parametrize("where", ["closure", "argument", "attribute", "in a list"])
def test_iterators_are_refused_before_they_move(make, where: str) -> None:
    iterator = make()
    held = [iterator]

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = iterator

        def forward(self, x: Tensor) -> Tensor:
            return (x * next(self.items)).sin()

    fn, args = {
        "closure": (lambda x: (x * next(iterator)).sin(), ()),
        "argument": (lambda x, it: (x * next(it)).sin(), (iterator,)),
        "attribute": (Module(), ()),
        "in a list": (lambda x: (x * next(held[0])).sin(), ()),
    }[where]
    with pytest.raises(RematMutation, match=r"reaches the iterator .* take the next item before the region"):
        region(fn, leaf(), *args)
    assert next(iterator) == 2
    with torch.no_grad():
        region(fn, leaf(), *args)


def test_memos_of_tensors_are_no_change() -> None:
    """A table that is made when it is first asked for."""
    tables: dict[int, Tensor] = {}

    def positions(x: Tensor) -> Tensor:
        if len(x) not in tables:
            tables[len(x)] = torch.arange(len(x), dtype=x.dtype)
        return (x * tables[len(x)]).sin()

    x = leaf()
    region(positions, x).sum().backward()
    assert torch.equal(x.grad, torch.arange(6.0) * (x * torch.arange(6.0)).cos())
