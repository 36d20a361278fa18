"""One optimizer step: its checks, its course, and taking it back."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from recording_cases import mlp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, Adam, AdamW

from fused_remat.plan import plan
from fused_remat.profile import profile
from fused_remat.recording import record_step
from fused_remat.training_step import find_loss, left_untouched, make_step

X = torch.linspace(-1, 1, 4 * 32).view(4, 32)


def test_run_is_one_step_of_a_training_loop():
    model = mlp()
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    step = make_step(model, (X,), loss=lambda y: y.square().mean(), optimizer=SGD)
    model[0].weight.grad = torch.ones_like(model[0].weight)  # dropped, not added to
    loss = step.run()
    expected = twin(X).square().mean()
    expected.backward()
    SGD(twin.parameters()).step()
    assert torch.equal(loss, expected)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q) and torch.equal(p.grad, q.grad)


def test_run_names_its_phases():
    seen = []

    class Phase:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            seen.append(self.name)

        def __exit__(self, *error):
            seen.append(f"/{self.name}")

    make_step(mlp(), (X,), optimizer=SGD).run(Phase)
    assert seen == ["forward", "/forward", "backward", "/backward", "optimizer", "/optimizer"]
    seen.clear()
    make_step(mlp(), (X,)).run(Phase)
    assert seen == ["forward", "/forward", "backward", "/backward"]


@pytest.mark.parametrize(
    ("output", "value", "words"),
    [
        (torch.tensor(3.0), 3.0, "the model's scalar output"),
        (torch.tensor([1.0, 3.0]), 5.0, "the mean square of the model's first output [2]"),
        ({"loss": torch.tensor([1.0, 3.0])}, 2.0, "the output's own .loss"),
        ((torch.tensor([1]), [torch.tensor([2.0])]), 2.0, "the model's scalar output"),
        ({"ids": torch.tensor([1])}, None, ""),
    ],
)
def test_find_loss(output, value, words):
    loss, source = find_loss(output)
    assert source == words
    assert loss is None if value is None else loss.item() == value


W = torch.ones((), requires_grad=True)


def broken(parameters):
    raise RuntimeError("no such thing")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(model=lambda x: x), TypeError, "model must be an nn.Module, got a function"),
        (dict(model=mlp().requires_grad_(False)), ValueError, "nothing to train"),
        (dict(model=nn.Sequential(nn.LazyLinear(3))), ValueError, "0.weight of the model has no shape yet"),
        (dict(args=X), TypeError, r"args must be a tuple of the model's inputs, got a Tensor; pass \(x,\)"),
        (dict(kwargs=[X]), TypeError, "kwargs must map names to inputs"),
        (
            dict(args=(X.clone().requires_grad_() * 2,)),
            ValueError,
            r"input 0 was computed .*\(MulBackward0\).* detach\(\)",
        ),
        (dict(args=(), kwargs={"x": [(X * W,)]}), ValueError, r"input 'x'\[0\]\[0\] was computed with gradients"),
        (dict(loss=3), TypeError, "loss must be a function of the model's output, got a int"),
        (dict(optimizer="adam"), TypeError, "optimizer must be an Optimizer, a class or a function"),
        (dict(optimizer=broken), TypeError, "optimizer broken cannot be built .* RuntimeError: no such thing"),
        (dict(optimizer=lambda p: None), TypeError, "must return a torch.optim.Optimizer, got a NoneType"),
        (dict(optimizer=torch.optim.LBFGS), TypeError, "LBFGS needs a closure"),
        (dict(optimizer=SGD([torch.zeros(1, requires_grad=True)])), ValueError, "none of the model's trainable"),
    ],
)
def test_make_step_refuses(change, error, message):
    with pytest.raises(error, match=message):
        make_step(**(dict(model=mlp(), args=(X,)) | change))


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda y: 3.0, TypeError, "loss must return a tensor, got a float"),
        (lambda y: y, ValueError, r"loss must be a scalar, got shape \[4, 32\]"),
        (lambda y: y.detach().sum(), ValueError, "has no graph"),
    ],
)
def test_forward_refuses_what_is_no_loss(loss, error, message):
    with pytest.raises(error, match=message):
        make_step(mlp(), (X,), loss=loss).run()


def test_forward_refuses_an_output_without_loss():
    class Ids(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))

        def forward(self):
            return torch.tensor([1])

    with pytest.raises(ValueError, match=r"output \(Tensor\) has no \.loss, no scalar"):
        make_step(Ids(), ()).run()


class Changing(nn.Module):
    """Changes everything that a forward can change."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.inner = mlp()
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("written", torch.zeros(3))
        self.cache, self.seen, self.calls = {}, [], 0
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x, fail):
        self.replaced = self.replaced + 1
        self.written += 1
        self.cache["x"] = x
        self.seen.append(x)
        self.calls += 1
        self.inner.eval()
        torch.rand(3, generator=self.generator)
        random.random()
        np.random.rand()
        with torch.no_grad():
            x.mul_(2)
        y = self.inner(self.norm(x)) + torch.rand(())
        self.extra = nn.Parameter(torch.zeros(3))
        if fail:
            raise KeyError("in the middle")
        return y


def everything(step):
    """Identities and values of all that a step may touch."""
    model, optimizer = step.model, step.optimizer
    tensors = [*model.parameters(), *model.buffers(), *step.inputs()]
    state = {id(p): dict(s) for p, s in optimizer.state.items()}
    groups = [dict(g) for g in optimizer.param_groups]
    return (
        [(id(t), t.data_ptr(), t.tolist(), id(t.grad), None if t.grad is None else t.grad.tolist()) for t in tensors],
        {k: {n: (id(v), v.tolist()) for n, v in s.items()} for k, s in state.items()},
        [{n: [id(p) for p in v] if n == "params" else v for n, v in g.items()} for g in groups],
        [(name, m.training, sorted(vars(m))) for name, m in model.named_modules()],
        (dict(model.cache), list(model.seen), model.calls, model.generator.get_state().tolist()),
        (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
    )


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_left_untouched_takes_everything_back(fail, started):
    model = Changing()
    step = make_step(model, (torch.randn(4, 32),), {"fail": False}, optimizer=AdamW)
    if started:
        step.run()
    kept = model.inner[0].weight.grad = torch.ones_like(model.inner[0].weight)
    before = everything(step)
    step.kwargs["fail"] = fail

    def run():
        with left_untouched(step):
            assert model.inner[0].weight.grad is None
            step.run()
            assert model.calls == 1 + started

    if fail:
        with pytest.raises(KeyError, match="in the middle"):
            run()
    else:
        run()
    assert everything(step) == before
    assert model.inner[0].weight.grad is kept
    assert len(step.optimizer.state) == (6 if started else 0)


def test_left_untouched_gives_storages_back():
    """What swaps a parameter's memory, changes its flag or adds entries to a state is taken back too."""
    model = mlp()
    step = make_step(model, (X,), optimizer=Adam)
    step.run()
    weight, state = model[0].weight, step.optimizer.state[model[0].weight]
    address, values, keys = weight.data_ptr(), weight.tolist(), list(state)
    group = step.optimizer.param_groups[0]
    with left_untouched(step):
        weight.data = torch.zeros(1)
        weight.requires_grad_(False)
        state["more"] = 1
        del state["exp_avg"]
        group["lr"] = 7.0
        step.optimizer.param_groups.append(group)
        model.add_module("3", nn.Tanh())
    assert (weight.data_ptr(), weight.tolist(), list(state)) == (address, values, keys)
    assert weight.requires_grad and group["lr"] == 1e-3 and len(step.optimizer.param_groups) == 1 and len(model) == 3


def test_left_untouched_takes_expanded_inputs():
    x = torch.ones(1, 32).expand(4, 32)
    step = make_step(mlp(), (x,))
    with left_untouched(step), torch.no_grad():
        x[:1].mul_(3)
    assert torch.equal(x, torch.ones(4, 32)) and x.stride(0) == 0


def test_leaves_are_cleared_once_each():
    x = X.clone().requires_grad_()
    model = mlp()
    model[2].bias = model[2].bias
    step = make_step(model, (x, {"deep": [x]}))
    assert [id(t) for t in step.inputs()] == [id(x)]
    x.grad = torch.ones_like(x)
    step.zero_grad()
    assert x.grad is None and len(step.leaves()) == 5


@pytest.mark.parametrize("how", ["meta", "fake"])
@pytest.mark.parametrize("where", ["parameters", "buffers", "input 0", "input 'x'"])
def test_real_steps_need_memory(where, how):
    def without(x: torch.Tensor) -> torch.Tensor:
        return x.detach().to("meta") if how == "meta" else FakeTensorMode().from_tensor(x)

    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(3, 4)
    args, kwargs = ((), {"x": without(x)}) if where == "input 'x'" else ((x,), {})
    if where == "parameters":
        model[0].weight = nn.Parameter(without(model[0].weight))
    elif where == "buffers":
        model[1].running_mean = without(model[1].running_mean)
    elif where == "input 0":
        args = (without(x),)
    says = f"{where} ha(s|ve) no memory .* pass fake=True"
    with pytest.raises(ValueError, match=says):
        record_step(make_step(model, args, kwargs))
    with pytest.raises(ValueError, match=says):
        plan(model, *args, kwargs=kwargs, budget="min")
    with pytest.raises(ValueError, match=says):
        profile(model, *args, kwargs=kwargs)
