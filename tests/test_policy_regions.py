"""Regions of one module and segments of several: what they compute, keep, and refuse."""

from __future__ import annotations

import warnings

import pytest
import torch
from convert_cases import assert_same, fused_attentions, fused_calls
from policy_cases import (
    STREAM,
    AttentionBlock,
    Looped,
    MLPBlock,
    arranged,
    attention_chain,
    conv_chain,
    image,
    llama,
    measured,
    mlp_chain,
    paths,
    rows,
    seeded,
    stepped,
    tokens,
    vit,
)
from torch import Tensor, nn

from fused_remat import convert
from fused_remat.policy import Arrangement, SegmentError


class Talkative(nn.Module):
    """Takes and returns all kinds of things; drops values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x, extra, scale=1.0, more=None):
        hidden = torch.dropout(torch.tanh(self.linear(x) + extra["add"][0]), 0.5, self.training) * scale
        return {"y": hidden * more[0], "parts": (hidden.sum(), [hidden.exp(), 3, None])}


def test_a_region_takes_nested_arguments_and_returns_nested_results():
    model = seeded(Talkative)
    inputs = [rows(i).requires_grad_() for i in range(3)]

    def run() -> list[Tensor]:
        torch.manual_seed(3)
        out = model(inputs[0], extra={"add": [inputs[1], "text"]}, scale=0.5, more=(inputs[2],))
        assert out["parts"][1][1:] == [3, None]
        loss = out["y"].sum() + out["parts"][0] * 2 + out["parts"][1][0].sum()
        return [loss, *torch.autograd.grad(loss, [*inputs, *model.parameters()])]

    expected = run()
    arranged(nn.ModuleDict({"it": model}), ("it",))
    for got, want in zip(run(), expected, strict=True):
        assert torch.equal(got, want)


def test_a_region_is_a_plain_call_without_gradients_and_recomputes_in_evaluation():
    model = seeded(lambda: nn.Sequential(MLPBlock(), nn.Linear(32, 32)))
    runs = []
    model[0].norm.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    arranged(model, ("0",))
    with torch.no_grad():
        model(rows())
    assert runs == [False]
    for mode in (True, False):
        runs.clear()
        model.train(mode)(rows()).sum().backward()
        assert runs == [True, True]


def test_the_hooks_of_a_region_run_once_and_see_what_they_would():
    model, seen = nn.Sequential(MLPBlock(), MLPBlock()), []
    model[1].register_forward_pre_hook(lambda m, args: seen.append(("in", args[0].shape)))
    model[1].register_forward_hook(lambda m, args, out: seen.append(("out", out.shape)))
    model[1].register_full_backward_hook(lambda m, dx, dy: seen.append(("back", dx[0].shape)))
    arranged(model, ("1",))
    model(rows().requires_grad_()).sum().backward()
    assert [word for word, _ in seen] == ["in", "out", "back"]


@pytest.mark.parametrize("make", [mlp_chain, attention_chain, lambda: Looped(*mlp_chain())])
@pytest.mark.parametrize("cut", [((0, 1, 2, 3),), ((0, 1), (2, 3)), ((1, 2, 3),)])
def test_segments_compute_what_the_blocks_do_and_keep_their_inputs(make, cut):
    stock, model = make(), make()
    prefix = "layers." if isinstance(model, Looped) else ""
    arranged(model, *(paths(prefix, *indices) for indices in cut))
    assert_same(stepped(model, rows()), stepped(stock, rows()), 0.0)
    if len(cut) == 2:  # the input of the second, as the caller has that of the first
        assert measured(model, rows()).kept_bytes == STREAM


def test_uniform_blocks_in_segments_peak_where_chen_says():
    """Of 16 blocks in k segments: the inputs of k, and a segment of 16 / k rebuilt, in units of a stream."""
    x, peaks = torch.randn(256, 256, requires_grad=True), {}
    unit = x.numel() * 4
    for k in (1, 4, 16):
        model = nn.Sequential(*(nn.Tanh() for _ in range(16)))
        size = 16 // k
        arranged(model, *(paths("", *range(i, i + size)) for i in range(0, 16, size)))
        peaks[k] = measured(model, x).backward_peak_bytes / unit
    assert peaks == pytest.approx({k: peaks[4] - 8 + k + 16 / k for k in peaks}, abs=0.1)


def test_segments_of_a_vision_transformer_and_of_llama():
    pytest.importorskip("timm")
    pytest.importorskip("transformers")
    for make, prefix, x in ((vit, "blocks.", image()), (llama, "model.layers.", tokens())):
        model, stock = make(), make()
        arranged(model, paths(prefix, 0, 1))
        assert_same(stepped(model, x), stepped(stock, x), 0.0)
        assert measured(model, x).kept_bytes < measured(stock, x).kept_bytes / 2


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_segments_of_encoders_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    small = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64)
    if kind == "bert":
        make = lambda: transformers.BertModel(transformers.BertConfig(vocab_size=64, **small))
        x = tokens()
    else:
        make = lambda: transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **small))
        x = image()[:, :, :32, :32]
    stock, model = seeded(make), seeded(make)
    chain = max(Arrangement(model).chains, key=len)
    assert len(chain) == 3
    arranged(model, chain)
    assert_same(stepped(model, x), stepped(stock, x), 0.0)


def test_hidden_states_of_transformers_stay_right():
    pytest.importorskip("transformers")
    stock, model, x = llama(), llama(), tokens()
    arranged(model, paths("model.layers.", 0, 1))
    kept = measured(model, x).kept_bytes
    expected = stock(x, output_hidden_states=True).hidden_states
    found = model(x, output_hidden_states=True).hidden_states
    assert len(found) == 3
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)
    assert measured(model, x).kept_bytes == kept  # the hooks that transformers leaves behind collect nothing now


def test_hidden_states_that_a_loop_collects_are_refused():
    class Collecting(Looped):
        def forward(self, x):
            states = []
            for layer in self.layers:
                x = layer(x)
                states.append(x)
            return states

    model, stock = seeded(lambda: Collecting(*mlp_chain())), seeded(lambda: Collecting(*mlp_chain()))
    arranged(model, paths("layers.", 0, 1, 2))
    states = model(rows())
    assert torch.equal(states[2], stock(rows())[2]) and states[1].shape == rows().shape
    with pytest.raises(
        SegmentError, match=r"the output of layers\.1 was read, but layers\.0 \.\.\. layers\.2 run as one"
    ):
        (states[1] * 2).sum()
    with pytest.raises(SegmentError, match=r"layers\.0 was read"):
        torch.cat([states[0], states[2]])
    assert "layers.0" in repr(states[0])
    # With a hook on a block the blocks are seen one by one.
    model.layers[1].register_forward_hook(lambda *_: None)
    for got, want in zip(model(rows()), stock(rows()), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("case", ["forward hook", "pre-hook", "backward hook", "own forward", "hook on all"])
def test_blocks_that_are_looked_at_run_one_by_one(case):
    model, stock, seen = mlp_chain(), mlp_chain(), []
    for it in (model, stock):
        block = it[1]
        if case == "forward hook":
            block.register_forward_hook(lambda m, args, out: seen.append(out.detach().clone()))
        elif case == "pre-hook":
            block.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach().clone()))
        elif case == "backward hook":
            block.register_full_backward_hook(lambda m, dx, dy: seen.append(dx[0].clone()))
        elif case == "own forward":
            own = block.forward
            block.forward = lambda x, own=own: seen.append(x.detach().clone()) or own(x)
    handle = None
    if case == "hook on all":
        handle = nn.modules.module.register_module_forward_hook(
            lambda m, args, out: seen.append(out.detach().clone()) if isinstance(m, MLPBlock) else None
        )
    try:
        if case == "own forward":
            with pytest.raises(ValueError, match=r"regions has '1', which has a forward of its own on the instance"):
                arranged(model, ("0", "1"))
            own = vars(model[1]).pop("forward")
            arranged(model, ("0", "1"), ("2", "3"))
            model[1].forward = own
        else:
            arranged(model, ("0", "1"), ("2", "3"))
        seen.clear()  # the examination tries copies of it
        assert_same(stepped(model, rows()), stepped(stock, rows()), 0.0)
    finally:
        if handle is not None:
            handle.remove()
    half = len(seen) // 2
    assert half and all(torch.equal(a, b) for a, b in zip(seen[:half], seen[half:], strict=True))


class Scaled(MLPBlock):
    def forward(self, x, scale=None, flag=True):
        return super().forward(x) * (1.0 if scale is None else scale)


def scaled_chain() -> Looped:
    return seeded(lambda: Looped(*(Scaled() for _ in range(3))))


def test_arguments_beside_the_stream_are_those_of_every_block():
    model, stock, scale = scaled_chain(), scaled_chain(), torch.tensor(0.5, requires_grad=True)
    arranged(model, paths("layers.", 0, 1, 2))
    results = []
    for it in (model, stock):
        scale.grad = None
        results.append(stepped(it, rows(), scale=scale, flag=True) | {"scale": scale.grad})
    assert_same(*results, 0.0)


def test_other_arguments_in_between_are_refused():
    class Changing(Looped):
        def forward(self, x, change):
            scale = torch.tensor(0.5)
            x = self.layers[0](x, scale)
            return self.layers[1](x, *change(scale))

    model = Changing(*(Scaled() for _ in range(2)))
    arranged(model, paths("layers.", 0, 1))
    model(rows(), lambda scale: (scale,)).sum().backward()
    for change, words in (
        (lambda scale: (scale.clone(),), "argument 1 is another"),
        (lambda scale: (), "other arguments are given"),
        (lambda scale: (scale.add_(1.0),), "argument 1 was changed in place"),
    ):
        with pytest.raises(SegmentError, match=f"on the arguments of layers.0; for layers.1 {words}"):
            model(rows(), change)


def test_skipped_repeated_and_replaced_blocks_are_refused_or_right():
    model, stock = Looped(*mlp_chain()), Looped(*mlp_chain())
    arranged(model, paths("layers.", 0, 1, 2))
    first = model.layers[0](rows())
    with pytest.raises(SegmentError, match=r"layers\.2 was handed the output of layers\.0"):
        model.layers[2](first)
    with pytest.raises(SegmentError, match=r"layers\.0 was read"):
        model.layers[3](first)
    # From the middle on, blocks run by themselves.
    assert torch.equal(model.layers[2](model.layers[1](rows())), stock.layers[2](stock.layers[1](rows())))
    model.layers[1] = seeded(MLPBlock, 9)
    with pytest.raises(SegmentError, match=r"layers\.0 was read"):
        model(rows())
    # A block of another segment at its place, as pruning does: no segment of this order, so one by one.
    del model.layers[1]
    with pytest.raises(SegmentError, match=r"layers\.2 was handed the output of layers\.0"):
        model(rows())


def test_tuples_that_begin_with_the_stream():
    class Pair(MLPBlock):
        def forward(self, x):
            y = super().forward(x)
            return y, None, y.mean()

    class Loop(Looped):
        def forward(self, x):
            means = []
            for layer in self.layers:
                x, nothing, mean = layer(x)
                assert nothing is None
                means.append(mean)
            return x + torch.stack(means).sum()

    model, stock = (seeded(lambda: Loop(*(Pair() for _ in range(3)))) for _ in range(2))
    arranged(model, paths("layers.", 0, 1, 2))
    assert_same(stepped(model, rows()), stepped(stock, rows()), 0.0)


def test_a_block_without_a_stream_is_named():
    class Listed(MLPBlock):
        def forward(self, x):
            return [x]

    model = Looped(Listed(), Listed())
    arranged(model, paths("layers.", 0, 1))
    with pytest.raises(SegmentError, match=r"layers\.0 returned a list; blocks of one region return"):
        model(rows())


def test_with_a_cache_blocks_run_by_themselves():
    pytest.importorskip("transformers")
    model, stock, x = llama(), llama(), tokens()
    arranged(model, paths("model.layers.", 0, 1))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        found, expected = model(x, use_cache=True), stock(x, use_cache=True)
        assert torch.equal(found.logits, expected.logits)
    with pytest.warns(UserWarning, match="a recomputed region got a cache"):
        found = model(x, use_cache=True)
    assert torch.equal(found.logits, expected.logits)
    found.logits.sum().backward()


def test_dropout_is_the_same_in_the_replay():
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Tanh()) for _ in range(4)))

    model, stock = seeded(make), seeded(make)
    arranged(model, ("0", "1", "2", "3"))
    assert_same(stepped(model, rows()), stepped(stock, rows()), 0.0)


def test_running_statistics_in_segments_move_once():
    model, stock, x = conv_chain(), conv_chain(), image()[:, :, :16, :16]
    arranged(model, ("1", "2"), ("3", "4"))
    assert_same(stepped(model, x), stepped(stock, x), 0.0)


def test_a_fused_layer_in_a_region_is_named_with_its_cost():
    model, stock = mlp_chain(), mlp_chain()
    arrangement = arranged(model, ("0", "1"), **{"0.mlp": (), "2.mlp": ()})
    notes = {entry.name: entry.note for entry in arrangement.report.converted}
    assert "inside a region: mlp is rebuilt twice" in notes["0.mlp"] and notes["2.mlp"] == ""
    assert "1 fused layers inside" in notes.get("0", "") or "1 fused" in arrangement.report.converted[-1].became
    with fused_calls() as calls:
        assert_same(stepped(model, rows()), stepped(stock, rows()), 2e-5)
    assert len(calls) == 3  # of one twice, once in the replay


@pytest.mark.parametrize("inner", [(), ("up",)])
def test_a_region_around_a_fused_module_itself(inner):
    """The norm before it stays outside, and is not folded: it may be gone when the region is replayed."""
    model, stock = mlp_chain(), mlp_chain()
    arranged(model, ("0.mlp",), ("2.mlp",), **{"0.mlp": inner, "2.mlp": inner})
    assert_same(stepped(model, rows()), stepped(stock, rows()), 2e-5)
    attentions = attention_chain()
    arranged(attentions, ("0.attention",), **{"0.attention": (), "1.attention": ()})
    with fused_attentions() as norms:
        attentions(rows()).sum().backward()
    assert norms == ["", "layer_norm", ""]


@pytest.mark.filterwarnings("ignore:a fused_remat region under torch.compile")
def test_regions_and_segments_compile():
    model, stock = mlp_chain(), mlp_chain()
    arranged(model, ("0", "1"), ("2",))
    compiled = torch.compile(model, backend="aot_eager")
    found = {name.replace("_orig_mod.", ""): value for name, value in stepped(compiled, rows()).items()}
    assert_same(found, stepped(stock, rows()), 1e-5)


def test_the_policy_of_a_region_in_a_loop_with_an_attention():
    model, stock = (seeded(lambda: Looped(AttentionBlock(), AttentionBlock())) for _ in range(2))
    convert(model, policy={"layers.*": "region"})
    assert_same(stepped(model, rows()), stepped(stock, rows()), 0.0)
