"""`profile`: bytes to the byte, lines to the line."""

import json

import pytest
import torch
import torch.nn.functional as F
from profile_cases import Attention, Chain, Tower, line_that_keeps
from torch import nn
from torch.utils.checkpoint import checkpoint

import fused_remat
from fused_remat.profile import profile

F32 = 4


def test_the_program_of_the_quick_start_to_the_byte():
    """1024 -> 4096 -> 1024, AdamW, MSE: the Japanese seed's example."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    inputs = torch.randn(8, 1024, requires_grad=True)
    targets = torch.zeros_like(inputs)
    found = profile(block, inputs, loss=lambda y: F.mse_loss(y, targets), optimizer=torch.optim.AdamW)

    parameters = F32 * (1024 * 4096 + 4096 + 4096 * 1024 + 1024)
    plain = found.to_dict()
    assert plain["static"] == {
        "parameters": parameters,
        "buffers": 0,
        "optimizer": 2 * parameters + 4 * F32,  # two moments, and a step count for each of four parameters
        "inputs": F32 * 8 * 1024,
        "gradients": 0,
    }
    assert plain["gradient_bytes"] == parameters + F32 * 8 * 1024
    hidden, output = F32 * 8 * 4096, F32 * 8 * 1024
    assert found.recording.kept_bytes == hidden + output
    assert [(t.nbytes, t.module, t.op, t.shape, t.dtype, t.shared_with) for t in found.kept] == [
        (hidden, "1", "ReluBackward0", (8, 4096), "float32", ("2",)),
        (output, "(the loss)", "MseLossBackward0", (8, 1024), "float32", ()),
    ]
    assert found.unseen_bytes == 0
    assert found.kept_by_module == {"1": hidden, "(the loss)": output}
    assert found.recording.peak_phase == "optimizer"
    assert found.verdict.startswith("Optimizer state dominates")
    assert "recompute cannot help" in found.verdict
    assert found.recompute.saving < 0.02
    assert found.advice[0] == (
        "The peak is in the optimizer's step: pass fused=True, which makes no temporary buffers, to AdamW."
    )
    assert sum(found.shares.values()) == pytest.approx(1)


def test_every_kept_tensor_has_the_line_that_keeps_it():
    batch = F32 * 32 * 64
    found = profile(Chain(), torch.randn(32, 16))
    assert {(t.source, t.op, t.nbytes) for t in found.kept if t.module == ""} == {
        (line_that_keeps(Chain, "up"), "GeluBackward0", batch),
        (line_that_keeps(Chain, "hidden"), "MulBackward0", batch),
        (line_that_keeps(Chain, "active"), "ReluBackward0", batch),
    }
    up, hidden, active = sorted((t for t in found.kept if t.nbytes == batch), key=lambda t: t.source)
    assert [s.op for s in up.savers] == ["GeluBackward0", "MulBackward0"]  # counted once
    assert up.shared_with == ()  # both times the model's own code
    assert active.shared_with == ("down",)
    assert up.to_dict()["code"] == "hidden = nn.functional.gelu(up)  # keeps: up"
    assert sum(t.nbytes for t in found.kept) == found.recording.kept_bytes
    assert hidden.module == ""


@pytest.mark.parametrize("seed", range(3))
def test_hooks_and_allocator_agree_on_stock_models(seed):
    torch.manual_seed(seed)
    model = [Tower(), Attention(), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)][seed]
    found = profile(model, torch.randn(3, 10, 16))
    assert found.unseen_bytes == 0
    assert sum(t.nbytes for t in found.kept) == found.recording.kept_bytes > 0


def test_modules_hold_what_is_below_them():
    found = profile(Tower(depth=3), torch.randn(2, 5, 16), optimizer=torch.optim.SGD)
    by_path = {m.path: m for m in found.modules}
    assert by_path[""].kept_bytes + by_path["(the loss)"].kept_bytes == found.recording.kept_bytes
    assert by_path["blocks"].kept_bytes == sum(by_path[f"blocks.{i}"].kept_bytes for i in range(3))
    inner = by_path["blocks.1"]
    rows = 2 * 5
    # The norm: x, mean, 1/std. Linear: the norm's output. GELU: its input. Linear: its input.
    assert inner.kept_bytes == F32 * rows * (16 + 2 + 16 + 64 + 64)
    assert inner.parameter_bytes == F32 * (16 * 2 + 16 * 64 + 64 + 64 * 16 + 16)
    assert by_path["blocks.1.2"].kept_bytes == F32 * rows * 64
    assert by_path["blocks.1"].backward_transient_bytes >= F32 * rows * 64


def test_a_checkpointed_region_keeps_its_input_alone():
    class Region(nn.Module):
        def __init__(self, use_reentrant):
            super().__init__()
            self.first, self.inner, self.use_reentrant = nn.Linear(16, 16), Chain(), use_reentrant

        def forward(self, x):
            return checkpoint(self.inner, self.first(x), use_reentrant=self.use_reentrant)

    for use_reentrant in (False, True):
        found = profile(Region(use_reentrant), torch.randn(32, 16))
        kept = [t for t in found.kept if t.module != "(the loss)"]
        assert [(t.nbytes, t.op, t.module) for t in kept] == [(F32 * 32 * 16, "checkpoint input", "")]
        assert kept[0].to_dict()["code"].startswith("return checkpoint(")
        assert found.recording.kept_bytes >= sum(t.nbytes for t in found.kept)


class _Stash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.value = x.exp()  # out of sight of the hooks
        return ctx.value + 1

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.value


def test_what_hooks_cannot_see_is_named():
    class Hides(nn.Module):
        def forward(self, x):
            return _Stash.apply(x)

    found = profile(nn.Sequential(nn.Linear(16, 48), Hides()), torch.randn(32, 16))
    assert found.unseen_bytes == F32 * 32 * 48
    assert found.unseen_modules == ("1",)
    assert sum(t.nbytes for t in found.kept) + found.unseen_bytes == found.recording.kept_bytes
    assert any("out of sight" in note and "Made in: 1." in note for note in found.notes)
    assert "out of sight" in str(found)


def test_a_converted_model_shows_the_line_of_the_model_that_calls_the_layer():
    model = Tower(depth=2)
    assert len(fused_remat.convert(model).converted) >= 2
    found = profile(model, torch.randn(4, 10, 16, requires_grad=True))
    fused = [t for t in found.kept if t.op == "MlpBackward"]
    assert fused and {t.savers[0].code for t in fused} == {"x = x + block(x)"}
    assert all(t.source.startswith("profile_cases.py:") for t in fused)
    assert F32 * 4 * 10 * 64 not in {t.nbytes for t in found.kept}  # no hidden activation
    assert found.recompute.converted_layers == 0  # nothing is left to convert


def test_sizes_of_the_sweep_give_the_laws():
    found = profile(Attention(), torch.randn(2, 8, 16), sweep=["batch", "sequence"])
    batch, sequence = found.growth["batch"], found.growth["sequence"]
    assert [p.size for p in batch.points] == [1, 2, 3, 4]
    assert [p.size for p in sequence.points] == [4, 8, 12, 16]
    assert {p.source for p in sequence.points} == {"measured"}
    assert (batch.laws["kept"].kind, sequence.laws["kept"].kind) == ("linear", "quadratic")
    assert batch.laws["parameters"].kind == sequence.laws["parameters"].kind == "constant"
    (scores,) = [t for t in sequence.tensors if t.op == "SoftmaxBackward0"]
    assert scores.law.kind == "quadratic"
    assert scores.law.coefficients == (0, 0, F32 * 2 * 4)
    assert scores.law.exponent == pytest.approx(2)
    assert scores.source == line_that_keeps(Attention, "weights")
    assert scores.nbytes == F32 * 2 * 4 * 8 * 8
    assert batch.modules[""].coefficients[1] == batch.modules[""].at(1)
    text = str(found)
    assert "SoftmaxBackward0 in the model" in text and "grows with the square of sequence" in text
    assert found.recording.kept_bytes == next(p for p in sequence.points if p.size == 8).kept_bytes


def test_the_largest_size_is_a_prediction_that_a_run_confirms():
    model, x = Attention(), torch.randn(2, 8, 16)
    found = profile(model, x, sweep="sequence")
    budget = profile(model, torch.randn(2, 40, 16)).recording.peak_bytes
    assert found.largest_size("sequence", budget) in (39, 40)
    assert found.largest_size("sequence", budget - 1) == 39
    assert found.largest_size("sequence", found.growth["sequence"].points[1].peak_bytes) == 8
    assert found.largest_size("sequence", 1) == 0
    with pytest.raises(ValueError, match="axis must be one that was swept"):
        found.largest_size("batch", budget)
    with pytest.raises(ValueError, match="budget must be"):
        found.largest_size("sequence", "much")


def test_activations_dominate_and_recompute_can_help():
    found = profile(Tower(depth=6), torch.randn(64, 20, 16), optimizer=torch.optim.AdamW)
    assert found.verdict.startswith("Activations dominate: they are ")
    assert "recompute can help" in found.verdict
    assert 0.3 < found.recompute.saving < 1
    assert found.recompute.bound_bytes < found.recording.peak_bytes
    assert found.advice[0].startswith("100 % of what is kept is float32: train under torch.autocast('cpu'")
    with torch.autocast("cpu", torch.bfloat16):
        under = profile(Tower(depth=6), torch.randn(64, 20, 16))
    assert under.about["autocast"] == "bfloat16"
    assert not any("autocast" in line for line in under.advice)


def test_a_smaller_batch_is_advised_where_there_is_one():
    line = "A smaller batch (now 64) keeps less in proportion; accumulate gradients over several to train as before."
    assert line in profile(Tower(depth=6), torch.randn(64, 20, 16), fake=True).advice
    assert not any("batch" in line for line in profile(Tower(depth=6), torch.randn(1, 2000, 16), fake=True).advice)


def test_logits_dominate_and_recompute_cannot_help():
    model = nn.Sequential(nn.Embedding(2000, 4), nn.Linear(4, 2000))
    tokens = torch.randint(2000, (4, 50))
    found = profile(model, tokens, loss=lambda y: F.cross_entropy(y.flatten(0, 1), tokens.flatten()))
    assert "of what is kept belongs to the loss" in found.verdict
    assert "recompute cannot help" in found.verdict or "would hardly help" in found.verdict
    assert any("The loss keeps" in line for line in found.advice)
    assert found.kept[0].op == "LogSoftmaxBackward0" and found.kept[0].nbytes == F32 * 4 * 50 * 2000


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"foreach": True}, ["fused=True", "foreach=False"]), ({"foreach": False}, ["fused=True"]), ({"fused": True}, [])],
)
def test_advice_about_the_optimizers_step(settings, said):
    model = nn.Linear(512, 512)
    found = profile(model, torch.randn(2, 512), optimizer=lambda p: torch.optim.AdamW(p, **settings))
    line = next((line for line in found.advice if line.startswith("The peak is in the optimizer")), "")
    assert [way for way in ("fused=True", "foreach=False") if way in line] == said
    assert (found.recording.peak_phase == "optimizer") == bool(said)


def test_gradients_that_were_not_cleared_are_named():
    model = nn.Linear(64, 64)
    model(torch.randn(1, 64)).sum().backward()
    before = model.weight.grad
    found = profile(model, torch.randn(4, 64))
    assert any("zero_grad(set_to_none=True)" in line and "16.2 KiB" in line for line in found.advice)
    assert model.weight.grad is before


def test_to_dict_is_json_and_says_where_the_numbers_are_from():
    found = profile(Tower(), torch.randn(2, 6, 16), optimizer=torch.optim.SGD, sweep="batch")
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (plain["schema"], plain["kind"], plain["source"], plain["device"]) == (1, "profile", "measured", "cpu")
    assert plain["versions"]["torch"] == torch.__version__
    assert plain["inputs"] == [{"name": "0", "shape": [2, 6, 16], "dtype": "float32"}]
    assert plain["parameters"] == {"float32": sum(p.numel() for p in Tower().parameters())}
    assert plain["peak_bytes"] == sum(plain["at_peak"].values())
    assert plain["kept_bytes"] == sum(t["nbytes"] for t in plain["kept"])
    assert [p["source"] for p in plain["growth"]["batch"]["points"]] == ["measured"] * 4
    assert plain["recompute"]["bound_bytes"] <= plain["peak_bytes"]
