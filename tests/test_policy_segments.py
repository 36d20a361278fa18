"""Blocks of one region whose loop passes more than tensors, and what is remembered of a segment."""

from __future__ import annotations

import copy
import gc
import types
import weakref

import pytest
import torch
from torch import Tensor, nn

from fused_remat.guards import RematMutation, saved
from fused_remat.policy import Arrangement, Assignment
from fused_remat.policy.segment import SegmentError


class Block(nn.Module):
    """Reads, and with `writes` also changes, a context that it is passed."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(6, 6), writes

    def forward(self, x: Tensor, context) -> Tensor:
        factor = context["i"] if isinstance(context, dict) else context[0] if isinstance(context, list) else context.i
        if self.writes:
            context["seen"] = factor
        return x + (self.linear(x) * (1 + factor)).sin()


class Model(nn.Module):
    def __init__(self, make, change=None, writes: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(writes) for _ in range(3))
        self.make, self.change = make, change

    def forward(self, x: Tensor) -> Tensor:
        context = self.make()
        for i, block in enumerate(self.blocks):
            if self.change is not None:
                context = self.change(context, i) or context
            x = block(x, context)
        return x


def pair(*args, **kwargs) -> tuple[nn.Module, nn.Module]:
    """A model whose blocks are one region, and the same one in stock."""
    torch.manual_seed(0)
    stock = Model(*args, **kwargs)
    model = copy.deepcopy(stock)
    Arrangement(model).set(Assignment({}, (tuple(f"blocks.{i}" for i in range(3)),)))
    return model, stock


def results(model: nn.Module) -> list[Tensor]:
    x = torch.linspace(-1, 1, 12).reshape(2, 6)
    y = model(x)
    y.square().sum().backward()
    return [y, *(p.grad for p in model.parameters())]


def set_item(context, i):
    context["i"] = i


def set_nested(context, i):
    context["in"][0] = i


def set_first(context, i):
    context[0] = i


@pytest.mark.parametrize(
    ("make", "change", "words"),
    [
        (lambda: {"i": 0}, set_item, r"argument 1\['i'\] is another"),
        (lambda: {"i": 0, "in": [0]}, set_nested, r"argument 1\['in'\]\[0\] is another"),
        (lambda: [0], set_first, r"argument 1\[0\] is another"),
        (lambda: {"i": 0}, lambda context, i: context.setdefault(str(i), None), "argument 1 holds more"),
        (lambda: {"i": 0}, lambda context, i: dict(context), "argument 1 is another"),
    ],
)
def test_context_that_the_loop_changes_is_refused(make, change, words: str) -> None:
    model, _ = pair(make, change)
    with pytest.raises(SegmentError, match=f"for blocks.1 {words}"):
        model(torch.ones(2, 6))


def test_context_that_a_block_changes_is_refused() -> None:
    model, _ = pair(lambda: {"i": 0}, writes=True)
    with pytest.raises(SegmentError, match=r"for blocks\.1 argument 1 holds more, less or something else"):
        model(torch.ones(2, 6))


@pytest.mark.parametrize("make", [lambda: {"i": 2}, lambda: [2, torch.ones(1)], lambda: types.SimpleNamespace(i=2)])
def test_context_that_stays_is_right(make) -> None:
    model, stock = pair(make)
    assert all(map(torch.equal, results(model), results(stock)))


def test_object_that_the_loop_changes_is_refused_by_backward() -> None:
    def set_attribute(context, i):
        context.i = i

    model, stock = pair(types.SimpleNamespace, set_attribute)
    x = torch.linspace(-1, 1, 12).reshape(2, 6)
    y = model(x)
    assert torch.equal(y, stock(x))
    with pytest.raises(RematMutation, match=r"region 'blocks.1': args\[1\].i was changed from 1 to 2 between"):
        y.sum().backward()


def chain() -> nn.Sequential:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)))
    Arrangement(model).set(Assignment({}, (("0", "1", "2"),), verify="once"))
    return model


def test_values_are_verified_once_for_each_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    made, checksum = [], saved.checksum
    monkeypatch.setattr(saved, "checksum", lambda x: made.append(1) or checksum(x))
    model, counts = chain(), []
    for training in (True, True, False, False, True):
        made.clear()
        model.train(training)(torch.randn(2, 6)).sum().backward()
        counts.append(len(made))
    assert counts[0] and counts[2] and counts[1] == counts[3] == counts[4] == 0


def test_a_segment_is_let_go_and_copied() -> None:
    model = chain()
    model(torch.randn(2, 6)).sum().backward()
    twin = copy.deepcopy(model)
    gone = weakref.ref(model[0])
    del model
    gc.collect()
    assert gone() is None
    twin(torch.randn(2, 6)).sum().backward()
    assert all(p.grad is not None for p in twin.parameters())


def test_the_stream_is_the_first_argument_of_the_forward() -> None:
    class Named(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for block in self:
                x = block(context={"i": 2}, x=x) if self.fresh else block(context=self.context, x=x)
            return x

    model = Named(*(Block() for _ in range(3)))
    model.fresh, model.context = False, {"i": 2}
    stock = copy.deepcopy(model)
    Arrangement(model).set(Assignment({}, (("0", "1", "2"),)))
    assert all(map(torch.equal, results(model), results(stock)))
    model.fresh = True
    with pytest.raises(SegmentError, match="for 1 argument 'context' is another"):
        model(torch.ones(2, 6))


def test_a_stream_tells_whether_it_has_a_graph() -> None:
    class Looking(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            self.found = []
            for block in self:
                x = block(x)
                self.found.append(x.requires_grad)
            if self.asks:
                x = self[0](x)
                x.grad_fn  # noqa: B018
            return x

    model = Looking(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
    model.asks = False
    model[0].requires_grad_(False)
    Arrangement(model).set(Assignment({}, (("0", "1", "2"),)))
    model(torch.ones(2, 6)).sum().backward()
    assert model.found == [False, True, True]
    model.asks = True
    with pytest.raises(SegmentError, match="the output of 0 was read"):
        model(torch.ones(2, 6))
