"""Profiling takes everything back, and refuses where its numbers would be wrong."""

import copy

import pytest
import torch
from profile_cases import Chain, Tower, state_of
from torch import nn
from torch.profiler import profile as torch_profile
from torch.utils.flop_counter import FlopCounterMode

import fused_remat
from fused_remat.profile import kept, profile


class Stateful(nn.Module):
    """Running statistics, dropout, and a fusable MLP."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.tower = nn.BatchNorm1d(5), nn.Dropout(0.2), Tower(depth=2)

    def forward(self, x):
        return self.tower(self.drop(self.norm(x)))


def trained(optimizer_class=torch.optim.AdamW):
    model, x = Stateful(), torch.randn(4, 5, 16, requires_grad=True)
    model.tower.eval()  # flags of its own
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    model(x).square().sum().backward()
    optimizer.step()
    return model, x, optimizer


@pytest.mark.parametrize("fake", [False, True])
def test_everything_is_as_it_was(fake):
    model, x, optimizer = trained()
    before, grad = state_of(model, optimizer, x), x.grad
    found = profile(model, x, optimizer=optimizer, fake=fake, sweep={"batch": [2, 4, 6]})
    assert found.recompute.converted_layers >= 2  # it was converted for a moment
    assert state_of(model, optimizer, x) == before
    assert x.grad is grad
    assert all(type(m) in (Stateful, Tower) or type(m).__module__.startswith("torch.nn") for m in model.modules())


@pytest.mark.parametrize("fake", [False, True])
def test_everything_is_as_it_was_after_an_error(fake):
    model, x, optimizer = trained()
    before = state_of(model, optimizer, x)

    def loss(y):
        if y.shape[0] > 4:
            raise ArithmeticError("too large")
        return y.square().mean()

    with pytest.raises(ValueError, match=r"sweep\['batch'\] at 6, .*\[\[6, 5, 16\]\].*ArithmeticError: too large"):
        profile(model, x, loss=loss, optimizer=optimizer, fake=fake, sweep={"batch": [2, 4, 6]})
    assert state_of(model, optimizer, x) == before


def test_training_goes_on_as_if_nothing_had_happened():
    model, x, optimizer = trained()
    twin = copy.deepcopy(model)
    twins = torch.optim.AdamW(twin.parameters(), lr=0.1)
    twins.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for profiled, own, its in ((True, model, optimizer), (False, twin, twins)):
        if profiled:
            profile(own, x, optimizer=its)
        torch.manual_seed(3)
        its.zero_grad()
        own(x).square().sum().backward()
        its.step()
    for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_a_model_that_cannot_run_on_fake_tensors_is_still_profiled():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = Tower(depth=1)

        def forward(self, x):
            return self.tower(x) * float(x.sum())  # a value, which a fake tensor does not have

    model = Reads()
    found = profile(model, torch.randn(2, 5, 16))
    assert found.recompute.converted_peak_bytes is None
    assert any(note.startswith("Not predicted: the converted model could not be run on fake") for note in found.notes)
    assert not fused_remat.revert(model)  # nothing was left converted


def test_refuses_under_a_dispatch_mode():
    with FlopCounterMode(display=False), pytest.raises(RuntimeError, match="under a dispatch mode"):
        profile(Chain(), torch.randn(2, 16))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.raises(RuntimeError, match="fake=True makes fake tensors itself"):
        profile(Chain(), torch.randn(2, 16))


def test_refuses_under_a_profiler():
    with torch_profile(), pytest.raises(RuntimeError, match="one is already running"):
        profile(Chain(), torch.randn(2, 16))


def test_refuses_without_gradients():
    with torch.no_grad(), pytest.raises(RuntimeError, match="gradients off"):
        profile(Chain(), torch.randn(2, 16))


def test_refuses_under_saved_tensor_hooks():
    with torch.autograd.graph.save_on_cpu(), pytest.raises(RuntimeError, match="saved_tensors_hooks"):
        profile(Chain(), torch.randn(2, 16))


def test_refuses_inside_compiled_code():
    model, x = Chain(), torch.randn(2, 16)

    @torch.compile(backend="eager")
    def compiled(y):
        profile(model, y)
        return y

    with pytest.raises(RuntimeError, match=r"inside code that torch\.compile compiles"):
        compiled(x)

    @torch.compile(backend="eager")
    def escapes(y):
        torch.compiler.disable(profile)(model, y)  # outside of compiled code again
        return y + 1

    assert torch.equal(escapes(x), x + 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model_says_what_cannot_be_told():
    model = nn.Sequential(nn.Linear(16, 16), torch.compile(Chain(), backend="aot_eager"))
    x = torch.randn(8, 16)
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"cannot run compiled code \(1\)"):
        profile(model, x, fake=True)
    found = profile(model, x)
    assert any(note.startswith("Compiled: 1.") for note in found.notes)
    assert found.recording.kept_bytes == sum(t.nbytes for t in found.kept) + found.unseen_bytes
    assert "CompiledFunctionBackward" in {t.op for t in found.kept}


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"fake": 1}, TypeError, "fake must be a bool"),
        ({"sweep": 3}, TypeError, "sweep must be a name"),
        ({"sweep": "width"}, ValueError, "does not say which dimension"),
        ({"loss": 3}, TypeError, "loss must be a function"),
        ({"optimizer": "adam"}, TypeError, "optimizer must be"),
        ({"kwargs": [1]}, TypeError, "kwargs must map names"),
    ],
)
def test_arguments_are_checked_before_anything_runs(arguments, error, says):
    class Counts(Chain):
        calls = 0

        def forward(self, x):
            Counts.calls += 1
            return super().forward(x)

    with pytest.raises(error, match=says):
        profile(Counts(), torch.randn(2, 16), **arguments)
    assert Counts.calls == 0
    with pytest.raises(TypeError, match=r"model must be an nn\.Module"):
        profile(torch.relu, torch.randn(2, 16))


def test_tensors_made_of_other_things_than_tensors():
    """A DTensor names its mesh among its parts; one that lives anywhere in the process is looked at."""

    class Spread(torch.Tensor):
        def __tensor_flatten__(self):
            return ["part", "mesh"], None

    part = torch.ones(8)
    spread = torch.empty(8).as_subclass(Spread)
    spread.part, spread.mesh = part, object()
    assert kept.storages(spread) == kept.storages(part) == [(part.untyped_storage()._cdata, 32)]
    assert profile(Tower(depth=1), torch.randn(4, 16)).recording.kept_bytes > 0
