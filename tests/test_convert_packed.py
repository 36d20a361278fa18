"""fused_remat.convert: gated MLPs whose gate and up are the halves of one linear."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from convert_cases import Layer, LowRank, assert_same, fused_calls, kept_shapes, randomize, step, twins
from torch import nn

from fused_remat.convert import convert, revert

WIDTH, HIDDEN = 6, 11  # an odd half


def linears(bias: bool = True) -> dict[str, nn.Linear]:
    return {"both": nn.Linear(WIDTH, 2 * HIDDEN, bias=bias), "down": nn.Linear(HIDDEN, WIDTH, bias=bias)}


def gate_first(s, x):
    gate, up = s.both(x).chunk(2, dim=-1)
    return s.down(F.silu(gate) * up)


def up_first(s, x):
    up, gate = s.both(x).chunk(2, dim=-1)
    return s.down(up * F.silu(gate))


def interleaved(s, x):
    both = s.both(x)
    return s.down(F.silu(both[..., ::2]) * both[..., 1::2])


class Halves(nn.Module):
    """A GLU as a layer of its own, as lucidrains and diffusers write it."""

    def forward(self, x):
        x, gate = x.chunk(2, dim=-1)
        return x * F.gelu(gate)


class HalvesWithChild(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.act = act

    def forward(self, x):
        gate, x = x.chunk(2, dim=-1)
        return self.act(gate) * x


class Phi3Like(nn.Module):
    """Picklable, with transformers' names."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(WIDTH, 2 * HIDDEN, bias=bias)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.activation_fn = nn.SiLU()

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


def timm_glu(**settings) -> nn.Module:
    return pytest.importorskip("timm.layers").GluMlp(WIDTH, 2 * HIDDEN, **settings)


def conv1d() -> nn.Module:
    linear = pytest.importorskip("transformers.pytorch_utils").Conv1D
    return Layer(gate_first, both=linear(2 * HIDDEN, WIDTH), down=linear(WIDTH, HIDDEN))


def split_by(width: int) -> nn.Module:
    """Code that needs a number which conversion cannot change in its tiny copy without knowing what it means."""

    def forward(s, x):
        gate, up = s.both(x).split(s.width, dim=-1)
        return s.down(F.silu(gate) * up)

    layer = Layer(forward, **linears())
    layer.width = width
    return layer


PACKED = {
    "gate first": (lambda: Layer(gate_first, **linears()), "silu"),
    "up first": (lambda: Layer(up_first, **linears()), "silu"),
    "no bias": (lambda: Layer(gate_first, **linears(bias=False)), "silu"),
    "bias of one": (lambda: Layer(up_first, both=linears(bias=False)["both"], down=linears()["down"]), "silu"),
    "linears in another order": (lambda: Layer(up_first, **dict(reversed(linears().items()))), "silu"),
    "Conv1D": (conv1d, "silu"),
    "split by its own width": (lambda: split_by(HIDDEN), "silu"),
    "timm GluMlp": (timm_glu, "sigmoid"),
    "timm GluMlp, gate first": (lambda: timm_glu(gate_last=False), "sigmoid"),
    "timm SwiGLUPacked": (lambda: pytest.importorskip("timm.layers").SwiGLUPacked(WIDTH, 2 * HIDDEN), "silu"),
    "Phi-3": (Phi3Like, "silu"),
    "nn.GLU": (lambda: nn.Sequential(linears()["both"], nn.GLU(), nn.Dropout(0.0), linears()["down"]), "sigmoid"),
    "GEGLU": (lambda: nn.Sequential(nn.LayerNorm(WIDTH), linears()["both"], Halves(), linears()["down"]), "gelu"),
    "GLU with a child": (
        lambda: Layer(lambda s, x: s.down(s.glu(s.both(x))), glu=HalvesWithChild(nn.ReLU()), **linears()),
        "relu",
    ),
    "bilinear": (
        lambda: Layer(lambda s, x: s.down(s.glu(s.both(x))), glu=HalvesWithChild(nn.Identity()), **linears()),
        "identity",
    ),
}


@pytest.fixture(params=PACKED, ids=lambda name: name.replace(" ", "-"))
def case(request):
    make, activation = PACKED[request.param]
    return randomize(make()), activation


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_equal_to_stock(case, dtype, tolerance):
    model, stock = twins(case[0].to(dtype))
    keys = list(model.state_dict())
    report = convert(model, strict=True)
    became = [entry.became for entry in report.converted if "norm, applied" not in entry.became]
    assert became == [f"gated mlp, {case[1]}, keep=()"]
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(4)).to(dtype)
    for mode in (True, False):
        with fused_calls() as calls:
            actual = step(model.train(mode), x)
        assert calls == [case[1]]
        assert_same(actual, step(stock.train(mode), x), tolerance)
    assert list(model.state_dict()) == keys
    stock.load_state_dict(model.state_dict(), strict=True)
    reverted = [path for path in revert(model) if not isinstance(model.get_submodule(path), nn.LayerNorm)]
    assert reverted == [""] and type(model) is type(stock)


def test_only_the_input_is_kept(case):
    """Neither [*, F] nor [*, 2F] tensors, nor copies of the halves of a weight."""
    model, x = case[0], torch.randn(64, WIDTH, requires_grad=True)
    convert(model, strict=True)
    kept = kept_shapes(model, x)
    assert kept and all(shape in ((64, WIDTH), (64, 1), (64,)) for shape, _ in kept), kept
    assert [kept_bytes for _, kept_bytes in kept if kept_bytes == 64 * WIDTH * 4], kept


def test_the_gradient_of_a_packed_weight_is_put_together_once():
    """From two halves by one node, not from two zero-padded tensors of its size."""
    model = Layer(gate_first, **linears())
    convert(model, strict=True)
    nodes, queue = [], [model(torch.randn(3, WIDTH)).grad_fn]
    while queue:
        node = queue.pop()
        nodes.append(node.name())
        queue += [parent for parent, _ in node.next_functions if parent is not None and parent not in queue]
    assert {name for name in nodes if "Slice" in name} == set()
    assert any("Split" in name for name in nodes), nodes


def test_which_half_is_the_gate():
    first, up = randomize(Layer(gate_first, **linears())), randomize(Layer(up_first, **linears()))
    up.load_state_dict(first.state_dict())
    x = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(0))
    w, b, w_down, b_down = (
        first.state_dict()[name] for name in ("both.weight", "both.bias", "down.weight", "down.bias")
    )
    one, other = F.linear(x, w[:HIDDEN], b[:HIDDEN]), F.linear(x, w[HIDDEN:], b[HIDDEN:])
    for model, expected in ((first, F.silu(one) * other), (up, one * F.silu(other))):
        convert(model, strict=True)
        with fused_calls() as calls:
            torch.testing.assert_close(model(x), F.linear(expected, w_down, b_down), rtol=1e-6, atol=1e-6)
        assert calls == ["silu"]
    assert (first(x) - up(x)).abs().max() > 1e-2


@pytest.mark.parametrize("make", [PACKED["gate first"][0], PACKED["up first"][0], PACKED["timm SwiGLUPacked"][0]])
@pytest.mark.parametrize("shape", [(3, 5, WIDTH), (WIDTH,), (1, WIDTH), (0, WIDTH)], ids=str)
def test_rows_of_every_gradient(make, shape):
    """Rows of very different sizes: a row written into another's place, or left out, cannot hide."""
    model, stock = twins(randomize(make()).double())
    convert(model, strict=True)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    rows = x.view(-1, WIDTH)
    rows *= 10.0 ** (torch.arange(len(rows)) % 4).unsqueeze(-1)
    actual, expected = step(model, x), step(stock, x)
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        got, want = (t.reshape(-1, t.shape[-1]) if t.dim() > 1 else t.view(1, -1) for t in (actual[name], want))
        scale = want.abs().amax(-1, keepdim=True)
        assert bool(((got - want).abs() <= 1e-10 * scale).all()), name
        assert len(rows) == 0 or bool((got.abs().amax(-1) > 0).all()), name


def test_rows_of_the_gradient_of_each_half():
    """dW of gate and up as two plain linears have them."""
    model = randomize(Layer(gate_first, **linears())).double()
    gate, up = nn.Linear(WIDTH, HIDDEN).double(), nn.Linear(WIDTH, HIDDEN).double()
    separate = Layer(lambda s, x: s.down(F.silu(s.gate(x)) * s.up(x)), gate=gate, up=up, down=copy.deepcopy(model.down))
    with torch.no_grad():
        for half, linear in zip((slice(HIDDEN), slice(HIDDEN, None)), (gate, up), strict=True):
            linear.weight.copy_(model.both.weight[half])
            linear.bias.copy_(model.both.bias[half])
    x = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    convert(model, strict=True)
    convert(separate, strict=True)
    packed, apart = step(model, x), step(separate, x)
    for name in ("weight", "bias"):
        together = torch.cat([apart[f"dgate.{name}"], apart[f"dup.{name}"]])
        torch.testing.assert_close(packed[f"dboth.{name}"], together, rtol=1e-10, atol=1e-12)
        assert bool((together.view(2 * HIDDEN, -1).abs().amax(-1) > 0).all())


def test_training_dropout_and_kept_residuals():
    model = randomize(timm_glu(drop=(0.5, 0.0))).double()
    plain, x = copy.deepcopy(model), torch.randn(50, WIDTH, dtype=torch.float64)
    convert(model, strict=True, keep=("up", "gate"))
    convert(plain, strict=True)
    results = []
    for layer in (model, plain):
        torch.manual_seed(3)
        results.append(step(layer.train(), x))
    assert_same(*results, 1e-12)  # the same mask
    assert (50, HIDDEN) in [shape for shape, _ in kept_shapes(model, x.requires_grad_())]
    with torch.no_grad():
        assert not torch.allclose(results[0]["output"], plain.eval()(x))


@pytest.mark.parametrize("frozen", ["gate_up_proj", "down_proj", "both"])
def test_frozen_linears_get_no_gradient(frozen):
    model = randomize(Phi3Like(bias=True))
    names = ("gate_up_proj", "down_proj") if frozen == "both" else (frozen,)
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    model, stock = twins(model)
    convert(model, strict=True)
    x = torch.randn(3, WIDTH)
    actual = step(model, x)
    assert not [key for key in actual if key.startswith(tuple(f"d{name}" for name in names))]
    assert_same(actual, step(stock, x), 1e-5)


def test_copies_and_pickles():
    model, x = randomize(Phi3Like()), torch.randn(4, WIDTH)
    convert(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        with fused_calls() as calls:
            torch.testing.assert_close(copied(x), model(x))
        assert calls == ["silu"] * 2
        with torch.no_grad():  # the copy runs on its own weights
            copied.gate_up_proj.weight.zero_()
        assert not torch.allclose(copied(x), model(x))
        assert revert(copied) == [""] and type(copied) is Phi3Like


def test_optimizer_step_between_calls():
    """The halves are views of the weight as it is now, not of the one that conversion saw."""
    model, stock = twins(randomize(Phi3Like()))
    convert(model, strict=True)
    x = torch.randn(4, WIDTH)
    for layer in (model, stock):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(3):
            step(layer, x)
            optimizer.step()
    assert_same(step(model, x), step(stock, x), 1e-5)


def test_compiles_without_a_graph_break():
    model, stock = twins(randomize(Phi3Like(bias=True)))
    convert(model, strict=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, WIDTH)
    actual = {name.replace("_orig_mod.", ""): value for name, value in step(compiled, x).items()}
    assert_same(actual, step(stock, x), 1e-5)


def test_an_adapter_on_the_packed_linear_runs_the_stock_code():
    model = randomize(Phi3Like())
    convert(model, strict=True)
    model.gate_up_proj = LowRank(model.gate_up_proj)
    with fused_calls() as calls:
        model(torch.randn(4, WIDTH))
    assert calls == []
    revert(model)
    assert "gate_up_proj is a convert_cases.LowRank" in convert(model).skipped[0].reason


@pytest.mark.parametrize("change", ["activation", "gate_last"])
def test_a_setting_changed_later_runs_the_stock_code(change):
    model, stock = twins(randomize(timm_glu()))
    convert(model, strict=True)
    for layer in (model, stock):
        if change == "activation":
            layer.act = nn.SiLU()
        else:
            layer.gate_last = False
    x = torch.randn(4, WIDTH)
    with fused_calls() as calls:
        actual = step(model, x)
    assert calls == []
    assert_same(actual, step(stock, x), 1e-6)


LEFT = {
    "interleaved": (
        lambda: Layer(interleaved, **linears()),
        "both holds gate and up in even and odd rows; only halves",
    ),
    "interleaved, up first": (
        lambda: Layer(
            lambda s, x: s.down(s.both(x)[..., ::2] * s.act(s.both(x)[..., 1::2])), act=nn.SiLU(), **linears()
        ),
        "both holds gate and up in even and odd rows; only halves",
    ),
    "clamped": (
        lambda: Layer(lambda s, x: s.down(s.glu(s.both(x).clamp(max=500.0))), glu=nn.GLU(), **linears()),
        "its forward computes something else in evaluation: outputs differ",
    ),
    "both halves activated": (
        lambda: Layer(
            lambda s, x: s.down(s.act(s.both(x)[..., :7]) * s.act(s.both(x)[..., 7:])), act=nn.SiLU(), **linears()
        ),
        "outputs differ",
    ),
    "norm between": (lambda: timm_glu(norm_layer=nn.LayerNorm), r"it has norm \(nn.LayerNorm\), which is no part"),
    "unknown activation": (lambda: timm_glu(act_layer=nn.Mish), "activation nn.Mish is not one of"),
    "unknown activation in a GLU": (
        lambda: nn.Sequential(linears()["both"], HalvesWithChild(nn.Mish()), linears()["down"]),
        "activation nn.Mish is not one of",
    ),
    "a GLU over another dim": (
        lambda: nn.Sequential(linears()["both"], nn.GLU(dim=0), nn.Linear(2 * HIDDEN, WIDTH)),
        r"do not chain \(0 6 -> 22, 2 22 -> 6\)",
    ),
    "two GLUs": (
        lambda: nn.Sequential(nn.Linear(WIDTH, 4 * HIDDEN), nn.GLU(), nn.GLU(), linears()["down"]),
        "it has 2 activations: 1, 2",
    ),
    "a third": (
        lambda: Layer(lambda s, x: s.b(s.act(s.a(x))), a=nn.Linear(6, 30), b=nn.Linear(10, 6), act=nn.SiLU()),
        r"its linears do not chain \(a 6 -> 30, b 10 -> 6\)",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone_with_a_reason(name):
    make, reason = LEFT[name]
    model = make()
    with pytest.raises(ValueError, match=reason):
        convert(model, strict=True)
    report = convert(model)
    assert report.converted == [] and len(report.skipped) == 1
