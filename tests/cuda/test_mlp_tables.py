"""What Python tells of the kernels of CUDA C++ from shapes alone: what the backend does with the tensors."""

from __future__ import annotations

import sys
from dataclasses import replace

import cuda_routes
import mlp_cases as cases
import mlp_chunks as chunks
import pytest
import torch
from cuda_routes import CUTLASS, ELEMENTWISE, LIBRARY, TILES
from mlp_chunks import Chunk
from torch.autograd.profiler import profile

import fused_remat
from fused_remat import _cuda, attention_routes, dispatch, doctor, mlp_routes

pytestmark = pytest.mark.usefixtures("one_thread")
EVEN = Chunk(rows=19, width=16, features=40, out=24, dtype=torch.bfloat16, activation="gelu_tanh")
NARROW = {"D = 64": "one kernel", "D = 64 behind a norm": CUTLASS}
WAYS = {**NARROW, "D = 768": CUTLASS, "D = 4096": CUTLASS, "D = 4096, gelu_tanh": LIBRARY, "D = 4096, gated": CUTLASS}


@pytest.fixture
def kinds(monkeypatch) -> None:
    """The library has the GEMMs that the stand-in has."""
    monkeypatch.setattr(_cuda, "has_gemm", lambda arch: arch is not None and 80 <= arch <= 90)


@pytest.fixture
def on_hopper(capability, kinds, monkeypatch) -> None:
    """Calls say that they run on compute capability 9.0, and so does what runs them."""
    capability(90)
    for op in ("mlp", "multi_head_attention"):
        monkeypatch.setattr(sys.modules[f"fused_remat.functional.{op}"], "arch_of", lambda device: 90)


CHANGES = (
    {}, {"bias": False}, {"gated": True}, {"activation": "gelu"}, {"activation": "relu"}, {"dropout_p": 0.1},
    {"dtype": torch.float64}, {"dtype": torch.float32}, {"dtype": torch.float16}, {"features": 36}, {"features": 39},
    {"features": 36, "activation": "silu"}, {"width": 12}, {"width": 12, "activation": "silu"}, {"out": 12},
    {"out": 12, "activation": "silu"}, {"features": 36, "dtype": torch.float32}, {"width": 1}, {"kept": (40, 0)},
    {"features": 44, "dtype": torch.float32}, {"rows": 1},
)  # fmt: skip


@pytest.mark.parametrize("arch", (80, 90, 100))
def test_the_table_says_what_a_tile_does(arch, capability, kinds, monkeypatch):
    capability(arch)
    for changes in CHANGES:
        chunk = EVEN.but(**changes)
        given = chunks.operands(chunk)
        assert _told(given, chunk, arch, monkeypatch) == cuda_routes.route(chunk, given), changes
        columns = given | {"w_down": given["w_down"].t().contiguous().t()}
        _assert_same_ways(_told(columns, chunk, arch, monkeypatch), cuda_routes.route(chunk, columns))
    for chunk, _ in TILES.values():
        if chunk.kept[1] in (0, chunk.kept[0]):  # a call can keep that
            given = chunks.operands(chunk)
            _assert_same_ways(_told(given, chunk, arch, monkeypatch), cuda_routes.route(chunk, given))


def _assert_same_ways(told: list[str], done: list[str]) -> None:
    """Where several things speak against a way, either side may name another one."""
    assert [row.partition(":")[0] for row in told] == [row.partition(":")[0] for row in done], (told, done)


def _told(given: dict[str, torch.Tensor], chunk: Chunk, arch: int, monkeypatch) -> list[str]:
    """As `mlp_route_cuda` tells it: the way, then why it is none of those before."""
    rows = mlp_routes.stage1(replace(_call(given, chunk, monkeypatch), arch=arch))
    way = attention_routes.chosen(rows)
    return [way, *(f"{other}: {rows[other][0]}" for other in list(rows)[: list(rows).index(way)])]


def _call(given: dict[str, torch.Tensor], chunk: Chunk, monkeypatch) -> dispatch.Call:
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "resolve", lambda call: seen.append(call) or "reference")
        layer = {name: t for name, t in given.items() if name != "dy"}
        keep = ("up", "gate")[: 1 + chunk.gated] if chunk.kept[0] else ()
        fused_remat.mlp(**layer, activation=chunk.activation, dropout_p=chunk.dropout_p, keep=keep)
    return seen[0]


@pytest.mark.parametrize(
    ("given", "settings", "way"),
    (
        ({}, {"activation": "gelu"}, CUTLASS),
        ({"gated": True}, {"activation": "silu"}, CUTLASS),
        ({}, {"activation": "gelu_tanh"}, LIBRARY),
        ({"dtype": torch.float32}, {"activation": "gelu"}, ELEMENTWISE),
    ),
)
def test_explain_tells_the_way_of_stage_1(given, settings, way, on_hopper):
    operands = cases.operands(40, 136, 1024, **{"dtype": torch.bfloat16, **given})
    settings = {**settings, "workspace": 2**20}
    with fused_remat.backend("cuda"):
        told = fused_remat.explain(fused_remat.mlp, **operands, **settings)
    assert told.backward.kernels == way and told.forward.kernels is None
    assert f"stage 1 by {way!r} kernels" in str(told)
    ways = [LIBRARY, CUTLASS, ELEMENTWISE]
    assert list(told.backward.why_not) == ways[: ways.index(way)]

    def step() -> None:
        y = cases.run(operands, backend="cuda", **settings)
        y.backward(torch.ones_like(y))

    products = cuda_routes.tile_products(step)
    assert set(products) == {cuda_routes.products_of(way, 1 + ("w_gate" in operands))}


def test_explain_looks_at_the_width_of_a_tile(on_hopper):
    operands = cases.operands(40, 136, 1024, dtype=torch.bfloat16)
    with fused_remat.backend("cuda"):
        told = fused_remat.explain(fused_remat.mlp, **operands, workspace=1)
    assert told.backward.features == 1 and told.backward.kernels == ELEMENTWISE
    assert told.backward.why_not[CUTLASS] == ["the number of features is no multiple of 8"]


@pytest.mark.parametrize("changes", ({}, {"bias_kv": True, "zero": True}), ids=("plain", "extra keys"))
def test_explain_tells_the_kernels_of_a_block(changes, on_hopper, capability, monkeypatch):
    """It asks about the heads that a group has."""
    heads, kv_heads, width = 4, 2, 16
    x = torch.randn(2, 24, 40, dtype=torch.bfloat16)
    rows = (heads + 2 * kv_heads) * width
    weights = (torch.randn(rows, 40).bfloat16(), None, torch.randn(40, heads * width).bfloat16(), None)
    call = {"num_kv_heads": kv_heads, "workspace": 2**14, "is_causal": True}
    if changes:
        extra = torch.randn(kv_heads * width, dtype=torch.bfloat16)
        call |= {"bias_k": extra, "bias_v": extra, "add_zero_attn": True}
    asked = []
    table = attention_routes.table
    monkeypatch.setattr(
        attention_routes, "table", lambda question, arch: asked.append(question) or table(question, arch)
    )
    with fused_remat.backend("cuda"):
        told = fused_remat.explain(fused_remat.multi_head_attention, x, None, None, *weights, heads, **call)
        capability(0)  # torch's kernels run on no CPU
        with profile(record_shapes=True) as trace:
            fused_remat.multi_head_attention(x, None, None, *weights, heads, **call)
    q, k, v = next(
        event.input_shapes[:3] for event in trace.function_events if event.name == "fused_remat::attention_fwd_cuda"
    )
    assert [question.sizes for question in asked] == [(q[0], q[1], k[1], q[2], k[2], q[3], v[3])] * 2
    assert [question.backward for question in asked] == [False, True]
    assert {(question.causal, question.extra_keys) for question in asked} == {(1, 2 if changes else 0)}
    assert told.forward.kernels == ("own" if changes else "cudnn") and told.backward.kernels == "own"
    assert f"scores by {told.forward.kernels!r} kernels" in str(told)
    assert "cudnn" in told.backward.why_not


def test_the_doctor_tells_the_ways_of_mlps(kinds, monkeypatch):
    monkeypatch.setattr(doctor, "_arch", lambda gpus: 90)
    facts = doctor.examine()
    lines = dict(doctor.describe(facts))
    for layer, way in WAYS.items():
        assert facts["mlp_kernels"][f"bf16, {layer}"]["backend"] == way
        assert lines[f"mlp backward in CUDA C++, bf16, {layer}"].split(" (")[0] == way
    assert "not one kernel: a norm is folded in" in lines["mlp backward in CUDA C++, bf16, D = 64 behind a norm"]
    assert "not cutlass: the dtype is neither" in lines["mlp backward in CUDA C++, fp32, D = 4096"]
    monkeypatch.setattr(doctor, "_arch", lambda gpus: 100)
    assert doctor.examine()["mlp_kernels"]["bf16, D = 4096"]["backend"] == ELEMENTWISE
    monkeypatch.setattr(doctor, "_arch", lambda gpus: None)
    facts = doctor.examine()
    assert facts["mlp_kernels"] is None and "no GPU is here" in facts["mlp_kernels_error"]
    assert dict(doctor.describe(facts))["mlp backward in CUDA C++"].startswith("unknown: no GPU is here")
