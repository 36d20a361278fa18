"""Which layers are converted: recognised activations, layouts found by behaviour, near misses and impostors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from convert_cases import Layer, TwoLinear, assert_same, down, fused_calls, randomize, step, twins, up
from torch import nn

from fused_remat.activations import ACTIVATIONS
from fused_remat.convert import convert
from fused_remat.convert.behaviour import activation_name

# The two GELUs differ by up to 4.7e-4 here; 1e-10 tells them apart.
LINE = torch.linspace(-4, 4, 1001, dtype=torch.float64)


class Gelu(nn.Module):
    def forward(self, x):
        return F.gelu(x)


class SquaredRelu(nn.Module):
    def forward(self, x):
        return F.relu(x) ** 2


class Clipped(nn.Module):
    def forward(self, x):
        return F.gelu(x).clamp(-10, 10)


class StraightThrough(nn.Module):
    """The values of relu, the slopes of the identity."""

    def forward(self, x):
        return x + (F.relu(x) - x).detach()


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (nn.ReLU(), "relu"),
        (nn.ReLU(inplace=True), "relu"),
        (nn.SiLU(), "silu"),
        (nn.Sigmoid(), "sigmoid"),
        (nn.Tanh(), "tanh"),
        (nn.LeakyReLU(0.01), "leaky_relu"),
        (nn.Identity(), "identity"),
        (Gelu(), "gelu"),
        (SquaredRelu(), "relu2"),
        (F.gelu, "gelu"),
        (torch.relu, "relu"),
        (lambda x: x * torch.sigmoid(1.702 * x), "quick_gelu"),
        (nn.LeakyReLU(0.2), None),
        (nn.ReLU6(), None),
        (nn.Hardtanh(-20, 20), None),
        (nn.Mish(), None),
        (nn.RReLU(), None),
        (nn.PReLU(init=0.01), None),
        (nn.Softmax(dim=-1), None),
        (nn.Dropout(0.5), None),
        (nn.LayerNorm(6), None),
        (Clipped(), None),
        (StraightThrough(), None),
    ],
)
def test_activations_are_told_apart_by_value_and_slope(act, name):
    assert activation_name(act) == name


def test_transformers_activations():
    activations = pytest.importorskip("transformers.activations")
    found = {key: activation_name(activations.ACT2FN[key]) for key in activations.ACT2FN if key != "xielu"}
    assert {key: name for key, name in found.items() if name is not None} == {
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_accurate": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_python_tanh": "gelu_tanh",
        "leaky_relu": "leaky_relu",
        "linear": "identity",
        "quick_gelu": "quick_gelu",
        "relu": "relu",
        "relu2": "relu2",
        "sigmoid": "sigmoid",
        "silu": "silu",
        "swish": "silu",
        "tanh": "tanh",
    }


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (F.gelu, "gelu"),
        (F.relu, "relu"),
        (F.silu, "silu"),
        (SquaredRelu(), "relu2"),
        (torch.sigmoid, "sigmoid"),
    ],
)
def test_converted_layer_equals_its_twin_to_1e_10(act, name):
    layer = randomize(TwoLinear(act, width=1, hidden=3))
    with torch.no_grad():
        layer.first.weight.fill_(1.0)
        layer.first.bias.zero_()
    model, stock = twins(layer)
    assert convert(model).converted[0].became.startswith(f"mlp, {name},")
    with fused_calls() as calls:
        actual = step(model, LINE.unsqueeze(-1))
    assert calls == [name]
    assert_same(actual, step(stock, LINE.unsqueeze(-1)), 1e-10)


def sized(layer: nn.Module, **widths: int) -> nn.Module:
    vars(layer).update(widths)
    return layer


GELU = nn.GELU()
FITTING = {
    "wrong order": lambda: Layer(lambda s, x: s.z(F.gelu(s.y(x))), z=down(), y=up()),
    "one dropout for both": lambda: Layer(
        lambda s, x: s.d(s.b(s.d(s.act(s.a(x))))), a=up(), b=down(), act=GELU, d=nn.Dropout(0.0)
    ),
    "dropout after": lambda: Layer(lambda s, x: s.d(s.b(F.relu(s.a(x)))), a=up(), b=down(), d=nn.Dropout(0.0)),
    "w1 w2 w3": lambda: Layer(lambda s, x: s.w2(F.silu(s.w1(x)) * s.w3(x)), w1=up(), w2=down(), w3=up()),
    "up before gate": lambda: Layer(lambda s, x: s.c(s.a(x) * torch.sigmoid(s.b(x))), a=up(), b=up(), c=down()),
    "square": lambda: Layer(lambda s, x: s.b(F.gelu(s.a(x))), a=nn.Linear(6, 6), b=nn.Linear(6, 6)),
    "bilinear": lambda: Layer(lambda s, x: s.c(s.i(s.a(x)) * s.b(x)), a=up(), b=up(), c=down(), i=nn.Identity()),
    "other width out": lambda: Layer(lambda s, x: s.b(torch.tanh(s.a(x))), a=up(), b=nn.Linear(10, 4)),
    "mixed bias": lambda: Layer(lambda s, x: s.b(F.gelu(s.a(x))), a=nn.Linear(6, 10, bias=False), b=down()),
    "Sequential": lambda: nn.Sequential(up(), nn.Tanh(), down()),
    "Sequential with norm first": lambda: nn.Sequential(nn.LayerNorm(6), up(), nn.GELU(), nn.Dropout(0.0), down()),
    "long Sequential": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 6)),
    "own width": lambda: sized(
        Layer(lambda s, x: s.b(F.gelu(s.a(x.reshape(-1, s.width))).reshape(*x.shape[:-1], s.hidden)), a=up(), b=down()),
        width=6,
        hidden=10,
    ),
    "encoder layer": lambda: nn.TransformerEncoderLayer(6, 2, 10, dropout=0.0, batch_first=True),
    "pre-norm encoder layer": lambda: nn.TransformerEncoderLayer(6, 2, 10, 0.0, nn.GELU(), norm_first=True),
}


@pytest.mark.parametrize("name", FITTING)
def test_layouts_are_found_by_behaviour(name):
    model, stock = twins(randomize(FITTING[name]()).double())
    assert convert(model, strict=True).count("mlp") == 1
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    for mode in (True, False):
        with fused_calls() as calls:
            actual = step(model.train(mode), x)
        assert len(calls) == 1
        assert_same(actual, step(stock.train(mode), x), 1e-9)


def test_decoder_layer():
    model, stock = twins(randomize(nn.TransformerDecoderLayer(6, 2, 10, dropout=0.0)).double())
    convert(model, strict=True)
    x, memory = torch.randn(3, 2, 6, dtype=torch.float64), torch.randn(4, 2, 6, dtype=torch.float64)
    with fused_calls() as calls:
        actual = step(model, x, memory)
    assert len(calls) == 1
    assert_same(actual, step(stock, x, memory), 1e-9)


def scaled(layer: nn.Module) -> nn.Module:
    layer.scale = nn.Parameter(torch.ones(()))
    return layer


LEFT = {
    "unknown activation": (lambda: nn.Sequential(up(), nn.Mish(), down()), "activation nn.Mish is not one of gelu"),
    "unknown activation child": (
        lambda: Layer(lambda s, x: s.b(s.act(s.a(x))), a=up(), b=down(), act=nn.PReLU(10)),
        "activation nn.PReLU is not one of",
    ),
    "norm between": (
        lambda: Layer(lambda s, x: s.b(s.n(s.act(s.a(x)))), a=up(), b=down(), act=GELU, n=nn.LayerNorm(10)),
        r"it has n \(nn.LayerNorm\), which is no part of a fused MLP",
    ),
    "norm in Sequential": (
        lambda: nn.Sequential(up(), nn.BatchNorm1d(10), nn.ReLU(), down()),
        r"it has 1 \(nn.BatchNorm1d\)",
    ),
    "own parameter": (
        lambda: scaled(Layer(lambda s, x: s.b(s.act(s.a(x))) * s.scale, a=up(), b=down(), act=GELU)),
        "it owns scale",
    ),
    "two activations": (
        lambda: Layer(lambda s, x: s.r(s.b(s.act(s.a(x)))), a=up(), b=down(), act=GELU, r=nn.ReLU()),
        "2 activations: act, r",
    ),
    "residual inside": (
        lambda: Layer(lambda s, x: x + s.b(s.act(s.a(x))), a=up(), b=down(), act=GELU),
        "computes something else in evaluation: outputs differ",
    ),
    "clamp": (
        lambda: Layer(lambda s, x: s.b(s.act(s.a(x)).clamp(max=500.0)), a=up(), b=down(), act=GELU),
        "outputs differ",
    ),
    "detached gate": (
        lambda: Layer(lambda s, x: s.c(s.act(s.a(x).detach()) * s.b(x)), a=up(), b=up(), c=down(), act=nn.SiLU()),
        "gradients differ",
    ),
    "other in training": (
        lambda: Layer(lambda s, x: s.b(s.act(s.a(x))) * (2 if s.training else 1), a=up(), b=down(), act=GELU),
        "something else in training: outputs differ",
    ),
    "functional dropout": (
        lambda: Layer(lambda s, x: s.b(F.dropout(s.act(s.a(x)), 0.4, s.training)), a=up(), b=down(), act=GELU),
        "something else in training",
    ),
    "functional dropout and activation": (
        lambda: Layer(lambda s, x: s.b(F.dropout(F.gelu(s.a(x)), 0.4, s.training)), a=up(), b=down()),
        "something else in training: outputs differ",
    ),
    "scale that is a width": (
        lambda: sized(
            Layer(lambda s, x: s.b(F.gelu(s.a(x)).view(*x.shape[:-1], s.hidden)) * s.hidden, a=up(), b=down()),
            hidden=10,
        ),
        "outputs differ",
    ),
    "inline in a block": (
        lambda: Layer(
            lambda s, x: x + s.b(s.act(s.a(s.norm(x + s.attn(x))))),
            attn=Layer(lambda s, x: s.q(x), q=nn.Linear(6, 6)),
            norm=nn.LayerNorm(6),
            a=up(),
            b=down(),
            act=F.gelu,
        ),
        r"its forward calls a and b between other steps \(attn, norm\); an MLP has to be a layer or a method",
    ),
    "tuple": (
        lambda: Layer(lambda s, x: (s.b(s.act(s.a(x))), None), a=up(), b=down(), act=GELU),
        "returns a tuple instead of a tensor",
    ),
    "two inputs": (
        lambda: Layer(lambda s, x, y: s.b(s.act(s.a(x))) + y, a=up(), b=down(), act=GELU),
        "its forward fails in evaluation on a small copy",
    ),
    "complex weights": (
        lambda: nn.Sequential(up(), nn.ReLU(), down()).requires_grad_(False).to(torch.complex64),
        "the weights are torch.complex64",
    ),
    "two dtypes": (lambda: nn.Sequential(up(), nn.ReLU(), down().half()), "different dtypes"),
    "two devices": (lambda: nn.Sequential(up(), nn.ReLU(), down().to("meta")), "different devices"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(10), nn.ReLU(), down()), "0 is a nn.LazyLinear"),
}


def gates() -> nn.Module:
    """Stacks of matrices among other parameters: block-diagonal gates, not experts."""
    layer = Layer(lambda s, x: x)
    layer.a, layer.b = (nn.Parameter(torch.zeros(2, 3, 3)) for _ in range(2))
    layer.decay = nn.Parameter(torch.zeros(6))
    return layer


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature:UserWarning")
def test_left_alone_with_a_reason(name):
    make, reason = LEFT[name]
    model = make()
    cls, attributes = type(model), sorted(vars(model))
    report = convert(model)
    assert report.converted == [] and [entry.name for entry in report.skipped] == [""]
    assert type(model) is cls and sorted(vars(model)) == attributes
    with pytest.raises(ValueError, match=reason):
        convert(model, strict=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 6)),
        lambda: nn.Sequential(nn.Linear(6, 2), nn.ReLU()),
        lambda: nn.ModuleList([up(), nn.GELU(), down()]),
        lambda: Layer(lambda s, x: s.q(x) @ s.k(x).mT, q=nn.Linear(6, 6), k=nn.Linear(6, 6)),
        lambda: Layer(lambda s, x: s.b(s.a(x)), a=up(), b=down()),  # low rank, but linear
        lambda: Layer(lambda s, x: s.b(F.relu(s.a(x)).mean(-2, keepdim=True).expand(2, 3, -1)), a=up(), b=down()),
        lambda: scaled(  # attention: its softmax is no activation
            Layer(
                lambda s, x: s.o(s.soft(s.qkv(x)) * s.scale), qkv=nn.Linear(6, 18), o=nn.Linear(6, 6), soft=nn.Softmax()
            )
        ),
        lambda: Layer(  # a block: two children with linears inside, and a drop path that looks like an activation
            lambda s, x: s.mlp(s.norm(s.attn(x))),
            attn=Layer(lambda s, x: s.q(x), q=nn.Linear(6, 6)),
            mlp=Layer(lambda s, x: s.q(x), q=nn.Linear(6, 6)),
            norm=nn.LayerNorm(6),
            drop=Gelu(),
        ),
        lambda: gates(),
    ],
)
def test_what_does_not_look_like_an_mlp_gets_no_line(make):
    report = convert(make())
    assert report.converted == report.skipped == []


def test_conversion_runs_and_changes_nothing_of_the_real_layer():
    ran = []

    def forward(s, x):
        ran.append(tuple(s.a.weight.shape))
        s.counter = getattr(s, "counter", 0) + 1
        s.log.append(x)
        return s.b(s.act(s.a(x)))

    layer = Layer(forward, a=up(), b=down(), act=GELU, log=[])
    assert len(convert(layer).converted) == 1
    assert ran and (10, 6) not in ran and not hasattr(layer, "counter") and layer.log == []


def test_every_activation_can_be_found_inside_a_forward():
    for name, act in ACTIVATIONS.items():
        layer = Layer(lambda s, x, act=act: s.b(act(s.a(x))), a=up(), b=down())
        found = [entry.became.split(", ")[1] for entry in convert(layer).converted]
        assert found == ([] if name == "identity" else [name])
