"""Adapters of the MLP op under opcheck, torch.compile and torch.func."""

from __future__ import annotations

import adapter_cases
import mlp_cases as cases
import pytest
import torch

import fused_remat

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
    # torch's own tracing does all of this.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]
ALL = {False: ("up", "down"), True: ("up", "gate", "down")}
GATED = pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@GATED
def test_opcheck(gated, dtype):
    values = adapter_cases.operands(
        (2, 3), 4, 6, 5, adapted=ALL[gated], gated=gated, dtype=dtype, factor_dtype=torch.float32
    )
    layer, seed = cases.op_layer(adapter_cases.layer(values)), torch.empty(0, dtype=torch.int64)
    kept = (3, 2 if gated else 0)
    samples = {"mlp": (values["x"], *layer, "gelu", 0.0, *kept, 2000, "cpp")}
    x, *layer = (t.detach() if isinstance(t, torch.Tensor) else t for t in (values["x"], *layer))
    call = (x, *layer, "silu", 0.0, *kept, 2000, "cpp", dtype, seed)
    samples["mlp_fwd"] = call
    y, up, gate = torch.ops.fused_remat.mlp_fwd(*call)
    factors = [gated if name == "gate" else True for name in ("up", "gate", "down") for _ in range(2)]
    mask = [*cases.output_mask(True, False, False, True, True)[:9], *factors]
    samples["mlp_bwd"] = (torch.randn_like(y), *call, None, up, gate, mask)
    for name, arguments in samples.items():
        results = torch.library.opcheck(getattr(torch.ops.fused_remat, name).default, arguments)
        assert set(results.values()) == {"SUCCESS"}, name


@GATED
def test_compiles_in_one_graph(gated):
    torch._dynamo.reset()
    values = adapter_cases.operands(6, 4, 10, adapted=ALL[gated], gated=gated, dtype=torch.float32, frozen=True)
    compiled = torch.compile(lambda **given: fused_remat.mlp(**given), fullgraph=True, backend="aot_eager")
    ours, truth = compiled(**adapter_cases.layer(values)), adapter_cases.run(values)
    assert torch.equal(ours, truth)
    dy = torch.randn_like(truth)
    right = adapter_cases.gradients(truth, values, dy)
    for name, gradient in adapter_cases.gradients(ours, values, dy).items():
        assert torch.equal(gradient, right[name]), name


def test_transforms_take_the_reference_path():
    values = adapter_cases.operands(4, 3, 5, adapted=ALL[True], gated=True, requires_grad=False)

    def loss(a, x):
        given = adapter_cases.layer(values | {"up_a": a, "x": x})
        return fused_remat.mlp(**given).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values["up_a"].detach(), values["x"])
    for gradient, x in zip(per_sample, values["x"], strict=True):
        a = values["up_a"].detach().requires_grad_()
        torch.testing.assert_close(gradient, torch.autograd.grad(loss(a, x), a)[0], rtol=1e-10, atol=1e-12)
