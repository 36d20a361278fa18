"""Predicted bytes of single operators, kept and at their own peak, against the allocator's events."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from recording_operators import CONVOLUTIONS, KINDS, Part, Parts, kept, own_peak
from torch import nn

from fused_remat.ops import memory
from fused_remat.recording import one_dnn, record_step
from fused_remat.training_step import make_step

SLACK = 1024  # bytes: numbers that kernels wrap in tensors
ZEROS = ("cumprod of elements with zeros among them", "prod of elements with zeros among them")


def check(parts, within=0.05, blind=()):
    """Every part's own peak and kept bytes."""
    model = Parts(parts)
    step = make_step(model, (), loss=lambda y: y)
    predicted, measured = record_step(step, fake=True), record_step(step)
    wrong = []
    for position, name in enumerate(model.names):
        path = f"parts.{position}"
        for what, of in (("peak", own_peak), ("kept", kept)):
            a, b = of(predicted, path), of(measured, path)
            if abs(a - b) > within * b + SLACK:
                wrong.append(f"{name}: {what} {a} predicted, {b} measured")
    assert not wrong, "\n".join(wrong)
    assert predicted.blind == blind


def both(cases, **settings):
    """Every case with a gradient that is dense, and with one that is one number."""
    return {
        f"{name}, {'dense' if dense else 'expanded'}": Part(*case, dense=dense, **settings)
        for name, case in cases.items()
        for dense in (True, False)
    }


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("kind", KINDS)
def test_operators(kind):
    check(both(KINDS[kind]), blind=ZEROS if kind == "sums" else ())


OF_HALF = (
    "gelu", "silu", "prelu", "batch", "group", "layer, transposed", "rms", "max_pool2d", "interpolated, bilinear",
    "cross entropy, mean", "gather", "index", "linear", "bmm", "attention", "softmax of 0", "padded, reflect",
)  # fmt: skip
MULTIPLYING = ("linear", "bmm", "attention")


def test_operators_in_half_precision():
    every = {name: case for cases in KINDS.values() for name, case in cases.items()}
    known = [name for name in OF_HALF if name not in MULTIPLYING or not one_dnn.computes(torch.bfloat16)]
    check(both({name: every[name] for name in known}, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_half_precision_are_named_where_one_dnn_computes_them(dtype, monkeypatch):
    def predicted():
        step = make_step(nn.Linear(16, 16, dtype=dtype), (torch.ones(8, 16, dtype=dtype),), loss=lambda y: y.sum())
        return record_step(step, fake=True).blind

    monkeypatch.setattr(one_dnn, "computes", lambda asked: asked == dtype)
    assert predicted() == ("aten::addmm", "aten::mm")
    with memory.not_on_the_cpu():
        assert predicted() == ()
    monkeypatch.setattr(one_dnn, "computes", lambda asked: asked == torch.float32)
    assert predicted() == ()


@pytest.mark.skipif(not one_dnn.is_on() or one_dnn.kernels() is None, reason="what oneDNN chooses here is not known")
def test_convolutions():
    check(both(CONVOLUTIONS), within=0.1)


@pytest.mark.skipif(not one_dnn.is_on() or one_dnn.kernels() is not one_dnn.AVX512, reason="no AVX-512, or no oneDNN")
def test_convolutions_by_the_other_list():
    """oneDNN reads its limit once in a process."""
    program = "import conftest; from test_recording_operators import test_convolutions as test; test()"
    here = Path(__file__).parent
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (here, here.parent)))
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=600)


@pytest.fixture
def without_one_dnn():
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(enabled)


OF_ATEN = ("many", "strided", "by channel", "pointwise in groups", "lines", "transposed", "volumes, pointwise")


def test_convolutions_of_aten(without_one_dnn):
    check(both({name: CONVOLUTIONS[name] for name in OF_ATEN}), within=0.1)


@pytest.mark.skipif(not one_dnn.is_on(), reason="no oneDNN here")
def test_convolutions_on_other_processors_are_named(monkeypatch):
    step = make_step(Parts({"many": Part(*CONVOLUTIONS["many"], dense=False)}), (), loss=lambda y: y)
    monkeypatch.setattr(one_dnn, "processor_knows", lambda instructions: False)
    assert record_step(step, fake=True).blind == ("aten::convolution", "aten::convolution_backward")


def test_convolutions_of_aten_are_known_everywhere(monkeypatch, without_one_dnn):
    step = make_step(Parts({"many": Part(*CONVOLUTIONS["many"], dense=False)}), (), loss=lambda y: y)
    monkeypatch.setattr(one_dnn, "processor_knows", lambda instructions: False)
    assert record_step(step, fake=True).blind == ()


def _sequences(cls, steps=4, batch=4, features=24, hidden=40, **settings):
    layer = cls(features, hidden, **settings)
    shape = (batch, steps, features) if settings.get("batch_first") else (steps, batch, features)
    return lambda x: layer(x)[0], shape, layer


class Sequences(Part):
    """A recurrent layer."""

    def __init__(self, fn, shape, layer, *, dense):
        super().__init__(fn, shape, dense=dense)
        self.layer = layer


RECURRENT = {
    "lstm": (nn.LSTM, {}),
    "lstm, two ways": (nn.LSTM, dict(bidirectional=True, bias=False)),
    "lstm, layers": (nn.LSTM, dict(num_layers=3, dropout=0.1, batch_first=True)),
    "lstm, long rows": (nn.LSTM, dict(features=256, hidden=64, steps=3)),
    "lstm, many sequences": (nn.LSTM, dict(batch=130, steps=3)),
    "lstm, one step": (nn.LSTM, dict(steps=1, batch=32)),
    "lstm, projected": (nn.LSTM, dict(proj_size=16)),
    "gru": (nn.GRU, dict(num_layers=2, bidirectional=True)),
    "rnn": (nn.RNN, dict(batch_first=True)),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_recurrent_layers():
    check(
        {
            f"{name}, {dense}": Sequences(*_sequences(cls, **settings), dense=dense)
            for name, (cls, settings) in RECURRENT.items()
            for dense in (True, False)
        },
        within=0.02,
    )


def test_recurrent_layers_without_a_graph(monkeypatch):
    """Nothing is kept, and scratch alone is taken: by AVX-512's kernels more than is known."""
    layer = nn.LSTM(24, 40)

    def run(x):
        with torch.no_grad():
            y = layer(x)[0]
        return x * y.sum()

    model = {"lstm": Sequences(run, (4, 4, 24), layer, dense=True)}
    if one_dnn.kernels() is not one_dnn.AVX512:
        check(model, within=0.02)
    monkeypatch.setattr(one_dnn, "kernels", lambda: one_dnn.AVX512)
    step = make_step(Parts(model), (), loss=lambda y: y)
    assert record_step(step, fake=True).blind == ("aten::mkldnn_rnn_layer",)


def test_gradients_of_tables_that_are_sparse_are_named():
    layer = nn.EmbeddingBag(64, 32, sparse=True)
    step = make_step(layer, (torch.zeros(8, 4, dtype=torch.long),), loss=lambda y: y.sum())
    assert record_step(step, fake=True).blind == ("aten::_embedding_bag_backward",)
