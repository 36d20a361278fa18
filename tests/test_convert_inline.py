"""fused_remat.convert on MLPs that a block's forward calls part by part: Whisper, BART, OPT, ...."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from convert_cases import (
    assert_same,
    fused_calls,
    kept_bytes,
    kept_shapes,
    randomize,
    step,
    twins,
)
from test_convert_models import BART_LIKE, COMMON, TOKENS, transformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fused_remat import ops
from fused_remat.convert import convert, revert

pytestmark = pytest.mark.usefixtures("one_thread")
X = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(3))


class Mixer(nn.Module):
    """Something between which the MLP stands, with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.q(x))


class Call(nn.Module):
    """Calls a function, without hiding anything from it."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h)


class Block(nn.Module):
    """BART's names, and a place for whatever comes between."""

    def __init__(self, act: object = None, p: float = 0.0) -> None:
        super().__init__()
        self.mixer, self.norm = Mixer(), nn.LayerNorm(6)
        self.activation_fn = nn.GELU() if act is None else act
        self.fc1, self.fc2 = nn.Linear(6, 24), nn.Linear(24, 6)
        self.activation_dropout, self.between = p, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(x)
        residual = x
        h = self.norm(x)
        h = self.activation_fn(self.fc1(h))
        h = self.between(h)
        h = F.dropout(h, p=self.activation_dropout, training=self.training)
        h = self.fc2(h)
        return residual + h


class Steps(Block):
    """OPT's way, with a dropout module."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__(nn.ReLU(inplace=True))
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(x)
        hidden = self.fc1(x)
        hidden = self.activation_fn(hidden)
        hidden = self.drop(hidden)
        if x.dim() == 3:
            hidden = self.fc2(hidden)
        return x + hidden


class Quick(nn.Module):
    """An activation that is several functions."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


def pair(make=Block, **settings) -> tuple[nn.Module, nn.Module]:
    """A converted block and a stock twin."""
    model, stock = twins(randomize(make(**settings)))
    assert [entry.kind for entry in convert(model).converted if entry.name == ""] == ["mlp"]
    return model, stock


def same(model: nn.Module, stock: nn.Module, calls: int, x: Tensor = X, tolerance: float = 1e-5) -> None:
    """Outputs and gradients of one step, of which so many MLPs are fused."""
    with fused_calls() as seen:
        actual = step(model, x)
    assert len(seen) == calls
    assert_same(actual, step(stock, x), tolerance)


# Fused ----------------------------------------------------------------------------------------------------------------

WHISPER = {"num_mel_bins": 4, "decoder_start_token_id": 0, "max_source_positions": 7}
SOUND = torch.randn(2, 4, 14, generator=torch.Generator().manual_seed(0))
MODELS = {
    "Whisper": (lambda: transformer("Whisper", **(BART_LIKE | WHISPER)), {"input_features": SOUND}, "gelu"),
    "BART": (lambda: transformer("Bart", **BART_LIKE), {"input_ids": TOKENS}, "gelu"),
    "BART, gelu_new": (
        lambda: transformer("Bart", **BART_LIKE, activation_function="gelu_new"), {"input_ids": TOKENS}, "gelu_tanh",
    ),
    "MBart": (lambda: transformer("MBart", **BART_LIKE), {"input_ids": TOKENS}, "gelu"),
    "Pegasus": (lambda: transformer("Pegasus", **BART_LIKE), {"input_ids": TOKENS}, "gelu"),
    "M2M100": (lambda: transformer("M2M100", **BART_LIKE), {"input_ids": TOKENS}, "relu"),
    "OPT": (
        lambda: transformer("OPT", **COMMON, ffn_dim=24, word_embed_proj_dim=16, dropout=0.0), {"input_ids": TOKENS},
        "relu",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models_equal_stock(name):
    make, inputs, activation = MODELS[name]
    torch.manual_seed(0)
    model = make()
    # no dropout but that of the hidden features
    for module in model.modules():
        for p in ("dropout", "activation_dropout", "attention_dropout"):
            if isinstance(getattr(module, p, None), float):
                setattr(module, p, 0.0)
    model, stock = twins(model)
    report = convert(model)
    blocks = [entry for entry in report.converted if entry.kind == "mlp"]
    assert {entry.became for entry in blocks} == {f"mlp, {activation}, keep=(), written in its block"}
    assert report.skipped == [] and len(blocks) == 2
    if name != "OPT":
        inputs = inputs | {"decoder_input_ids": TOKENS}
    for mode in (True, False):
        results = []
        for converted, one in ((True, model), (False, stock)):
            one.train(mode).zero_grad()
            with fused_calls() as seen:
                out = one(**inputs, use_cache=False)[0]
            assert seen == [activation] * 2 * converted
            out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))
            gradients = {key: p.grad for key, p in one.named_parameters() if p.grad is not None}
            results.append({"output": out.detach()} | gradients)
        largest = max(gradient.abs().max().item() for gradient in results[1].values())
        assert results[0].keys() == results[1].keys()
        for key, want in results[1].items():
            scale = max(want.abs().max().item(), 1e-2 * largest)  # a key's bias has a gradient of 0 in theory
            assert (results[0][key] - want).abs().max().item() <= 1e-5 * scale, key
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs, use_cache=False)[0], stock(**inputs, use_cache=False)[0])


@pytest.mark.parametrize("act", [nn.GELU(), nn.GELU("tanh"), nn.ReLU(inplace=True), nn.SiLU(), Quick(), F.gelu, F.silu])
def test_activations(act):
    model, stock = pair(act=act)
    same(model, stock, calls=1)
    same(model.eval(), stock.eval(), calls=1)


def test_step_by_step_with_a_dropout_module():
    model, stock = pair(Steps)
    same(model, stock, calls=1)
    model, stock = pair(Steps, p=0.5)
    same(model.eval(), stock.eval(), calls=1)


def test_without_gradients_the_own_code_runs():
    model, stock = pair()
    with torch.no_grad(), fused_calls() as seen:
        assert torch.equal(model(X), stock(X))
    with torch.inference_mode():
        assert torch.equal(model(X), stock(X))
    assert seen == []
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with fused_calls() as seen:
        assert torch.equal(model(X), stock(X))
    assert seen == []
    model.fc2.weight.requires_grad_()  # then stock keeps the hidden features
    stock.requires_grad_(False).fc2.weight.requires_grad_()
    with fused_calls() as seen:
        model(X).sum().backward()
    stock(X).sum().backward()
    assert len(seen) == 1
    torch.testing.assert_close(model.fc2.weight.grad, stock.fc2.weight.grad)


def test_dropout_is_reproducible_and_scaled():
    torch.manual_seed(0)
    model, _ = pair(p=0.5)
    with torch.no_grad():
        model.mixer.q.weight.zero_()
        model.fc1.weight.zero_(), model.fc1.bias.fill_(100.0), model.fc2.weight.fill_(1 / 24), model.fc2.bias.zero_()
        model.mixer.q.bias.zero_()
    x = torch.randn(64, 65, 6)
    with fused_calls() as seen:
        torch.manual_seed(1)
        first = model(x) - x
        torch.manual_seed(1)
        again = model(x) - x
        other = model(x) - x
    assert len(seen) == 3
    assert torch.equal(first, again) and not torch.equal(first, other)
    # each hidden feature of 100 is 0 or 200; 24 of them are averaged
    assert abs(first.mean().item() - 100) < 1.5
    assert abs(first[..., 0].std().item() - 100 / 24**0.5) < 1.0
    grad = torch.autograd.grad(first.sum(), model.fc2.weight)[0]
    assert abs(grad.mean().item() / (64 * 65 * 100) - 1) < 0.02


@pytest.mark.skipif(ops.ready() is not None, reason="only compiled operators save memory")
def test_bytes():
    model, stock = pair()
    stream, hidden = X.numel() * 4, X.numel() * 4 * 4
    kept, before = kept_bytes(model, X), kept_bytes(stock, X)
    # up and hidden are gone, and what the norm made and kept of its input: [M, D] and two numbers per row
    assert before - kept >= 2 * hidden + stream
    convert(keep := copy.deepcopy(stock), keep=("up",))
    assert kept_bytes(keep, X) == kept + hidden
    hidden_shapes = [shape for shape, _ in kept_shapes(model, X) if shape[-1] == 24]
    assert hidden_shapes == []


# Around the block -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_checkpoint(reentrant, p):
    model, stock = pair(p=p)

    class Around(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=reentrant)

    with fused_calls() as seen:
        torch.manual_seed(2)
        actual = step(Around(model), X)
    assert len(seen) == (1 if reentrant else 2)  # the forward of a reentrant one records no gradients
    if p == 0.0:
        assert_same(actual, step(Around(stock), X), 1e-5)
    elif not reentrant:
        torch.manual_seed(2)
        assert_same(actual, {f"dblock.{key[1:]}" if key[1:] in dict(model.named_parameters()) else key: value
                             for key, value in step(model, X).items()}, 1e-6)  # fmt: skip


def test_saved_tensors_hooks():
    model, stock = pair()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy(), torch.from_numpy):
        with fused_calls() as seen:
            actual = model(X)
        expected = stock(X)
    assert len(seen) == 1
    for out, block in ((actual, model), (expected, stock)):
        out.square().sum().backward()
        assert block.fc1.weight.grad is not None
    torch.testing.assert_close(model.fc1.weight.grad, stock.fc1.weight.grad)
    torch.testing.assert_close(model.mixer.q.weight.grad, stock.mixer.q.weight.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model, stock = pair()

    def run(block: nn.Module) -> tuple[Tensor, Tensor]:
        seen = []
        block.between = Call(lambda h: seen.append(h.dtype) or h)
        with torch.autocast("cpu", dtype):
            out = block(X)
        (gradient,) = torch.autograd.grad(out.square().sum(), block.fc1.weight)
        assert seen == [dtype]
        return out.float(), gradient

    with fused_calls() as calls:
        actual = run(model)
    assert len(calls) == 1
    for got, want in zip(actual, run(stock), strict=True):
        assert (got - want).abs().max() <= 3e-2 * want.abs().max()

    def leaves(h: Tensor) -> Tensor:  # values are made as fc1's own call would have made them
        with torch.autocast("cpu", enabled=False):
            return (h + 0).float()

    model.between = stock.between = Call(leaves)
    with torch.autocast("cpu", dtype):
        assert torch.equal(model(X), stock(X))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compile():
    model, stock = pair()
    torch.compiler.reset()
    with fused_calls() as calls:
        actual = step(torch.compile(model, backend="eager", fullgraph=True), X)
    assert calls == []
    assert_same({key.replace("_orig_mod.", ""): value for key, value in actual.items()}, step(stock, X), 1e-5)
    model.fc1.compile(backend="eager")
    same(model, stock, calls=0)


def test_functorch_and_traces_see_the_own_code():
    model, stock = pair()
    gradient = torch.func.grad(lambda x: model(x).sum())(X)
    torch.testing.assert_close(gradient, torch.func.grad(lambda x: stock(x).sum())(X))
    parameters = dict(stock.named_parameters())
    with fused_calls() as calls:
        torch.testing.assert_close(torch.func.functional_call(model, parameters, (X,)), stock(X))
        exported = torch.export.export(model, (X,))
    torch.testing.assert_close(exported.module()(X), stock(X))
    assert len(calls) <= 1


# The conversion itself ------------------------------------------------------------------------------------------------


def test_copies_and_pickles_stay_fused():
    model, stock = pair()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same(copied, stock, calls=1)
        assert list(copied.state_dict()) == list(stock.state_dict())


def test_convert_twice_revert_and_report():
    model, stock = pair()
    assert repr(model) != repr(stock)
    again = convert(model)
    assert again.converted == [] and [entry.name for entry in again.skipped] == ["", "norm"]
    assert revert(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]
    assert all("_fused_remat" not in vars(m) for m in model.modules()) and repr(model) == repr(stock)
    same(model, stock, calls=0)
    report = convert(model)
    assert sorted(report.revert()) == ["", "norm"] and report.revert() == []
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]


def test_dry_run_strict_include_exclude():
    model, stock = twins(nn.Sequential(Block(), Block()))
    assert convert(model, dry_run=True).count("mlp") == 2
    assert repr(model) == repr(stock)
    report = convert(model, exclude="1", strict=True)
    assert [entry.name for entry in report.converted if entry.kind == "mlp"] == ["0"]
    with fused_calls() as calls:
        model(X)
    assert len(calls) == 1
    model[1].fc2.register_forward_hook(lambda m, args, out: None)
    with pytest.raises(ValueError, match=r"\n  1 \(Block\): fc2 has forward hooks"):
        convert(model, include="1", strict=True)


class Normed(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.activation_fn(self.fc1(x + self.mixer(x)))
        return self.fc2(h - h.mean(-1, keepdim=True))


class Deferred(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(x)
        return checkpoint(lambda x: self.fc2(self.activation_fn(self.fc1(x))), x, use_reentrant=False)


@pytest.mark.parametrize("cls", [Normed, Deferred])
def test_blocks_whose_source_says_otherwise_are_left_alone(cls):
    model, stock = twins(randomize(cls()))
    report = convert(model)
    assert report.count("mlp") == 0
    reason = next(entry.reason for entry in report.skipped if entry.name == "")
    assert reason.startswith("its forward calls fc1 and fc2")
    same(model, stock, calls=0)


def test_blocks_that_share_their_linears():
    model, stock = twins(randomize(nn.Sequential(Block(), Block())))
    for net in (model, stock):
        net[1].fc1, net[1].fc2 = net[0].fc1, net[0].fc2
    convert(model)
    same(model, stock, calls=2)
