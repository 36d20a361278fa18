"""What a norm's result may go through before a fused layer reads it, and which norms are taken for norms."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from convert_cases import assert_same, fused_attentions, randomize, step, twins
from torch import nn

from fused_remat.audit import auditing
from fused_remat.convert import convert, revert
from fused_remat.convert.norm_examine import examine_norm

pytestmark = pytest.mark.usefixtures("one_thread")


def tensors(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(3, 5, 8, generator=generator, dtype=torch.float64) for _ in range(count)]


class Careless(nn.Module):
    """A block that changes something between the norm and the attention that reads it."""

    def __init__(self, change) -> None:
        super().__init__()
        self.norm, self.attention, self.change = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        n = self.norm(x)
        n = self.change(x, n)
        return self.attention(n, n, n, need_weights=False)[0]


def written(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return n.mul_(2)


def reread(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x.add_(1)
    return n


def hooked(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    n.register_hook(lambda gradient: gradient * 2)
    return n


def retained(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    n.retain_grad()
    return n


def viewed(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return n[:, :3]


@pytest.mark.parametrize("change", [written, hooked, retained, viewed])
def test_what_comes_between_norm_and_attention_counts(change):
    model, stock = twins(randomize(Careless(change)).double())
    convert(model)
    with fused_attentions() as folded:
        actual = step(model, *tensors(1))
    assert folded == [""]
    assert_same(actual, step(stock, *tensors(1)), 1e-9)


def test_an_input_that_was_written_after_the_norm_is_not_read_again():
    model, stock = twins(randomize(Careless(reread)).double())
    convert(model)
    (x,) = tensors(1)
    with fused_attentions() as folded:
        torch.testing.assert_close(model(x), stock(x), rtol=1e-9, atol=1e-9)
    assert folded == [""]


def test_compiled_code_that_writes_in_place_does_not_fold():
    class Writing(Careless):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = self.norm(x)
            n *= 2
            return self.attention(n, n, n, need_weights=False)[0]

    model, stock = twins(randomize(Writing(None)).double())
    convert(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual = {key.replace("_orig_mod.", ""): value for key, value in step(compiled, *tensors(1)).items()}
    assert_same(actual, step(stock, *tensors(1)), 1e-9)


def test_a_value_that_is_the_query_and_a_key_that_is_not():
    class Mixed(Careless):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = self.norm(x)
            return self.attention(n, x, n, need_weights=False)[0] + self.attention(n, n, x, need_weights=False)[0]

    model, stock = twins(randomize(Mixed(None)).double())
    convert(model)
    with fused_attentions() as folded:
        actual = step(model, *tensors(1))
    assert folded == ["", ""]
    assert_same(actual, step(stock, *tensors(1)), 1e-9)


def test_helpers_that_write_in_place_count():
    class Helped(Careless):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = self.doubled(self.norm(x))
            return self.attention(n, n, n, need_weights=False)[0]

        def doubled(self, n: torch.Tensor) -> torch.Tensor:
            return nn.functional.relu(n, inplace=True)

    assert [entry.kind for entry in convert(Helped(None)).converted] == ["attention"]


def test_results_go_to_files_without_notes():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    block = nn.Sequential(model[0], nn.Sequential(*model[1:]))
    assert convert(block).count("norm") == 1
    normed = block[0](torch.randn(2, 8))
    file = io.BytesIO()
    torch.save(normed, file)
    file.seek(0)
    assert torch.equal(torch.load(file), normed) and not vars(normed)


class Detached(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.detach()) + (x - x.detach()) * 0.5


class Softer(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 if self.training else 0.5)


class Clamping(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.clamp(-200, 200))


@pytest.mark.parametrize("cls", [Detached, Softer, Clamping])
def test_what_only_looks_like_a_norm_is_none(cls):
    parent = nn.Sequential()
    assert examine_norm(nn.LayerNorm(8), parent) is not None
    assert examine_norm(cls(8), parent) is None


def test_a_setting_of_a_norm_that_changes_later_is_followed():
    class Switched(nn.LayerNorm):
        twice = False

        def __init__(self) -> None:
            super().__init__(8)
            self.twice = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2 if self.twice else 1)

    block = Careless(lambda x, n: n)
    block.norm = Switched()
    model, stock = twins(randomize(block).double())
    assert convert(model).count("norm") == 1
    for changed in (model, stock):
        changed.norm.twice = True
    assert_same(step(model, *tensors(1)), step(stock, *tensors(1)), 1e-9)


class Inside(nn.Module):
    """Residual blocks whose norm is in one nn.Sequential with the linears."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        parts = (nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.blocks = nn.ModuleList(nn.Sequential(make(), *copy.deepcopy(parts)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("policy", [None, "full", "selective"])
@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(8), lambda: nn.RMSNorm(8, eps=1e-5)], ids=["layer", "rms"])
def test_a_norm_that_the_fused_layer_runs_itself_is_applied_by_its_call(make, policy):
    model, stock = twins(randomize(Inside(make).double()))
    report = convert(model, **({} if policy is None else {"policy": policy}))
    assert [entry.name for entry in report.converted] == ["blocks.0", "blocks.0.0", "blocks.1", "blocks.1.0"]
    x = tensors(1)[0]
    assert_same(step(model, x), step(stock, x), 1e-10)
    with auditing(model) as found:
        model(x).square().mean().backward()
    kept = x.nbytes + (policy == "selective") * 4 * x.nbytes
    assert [row.observed_bytes for row in found.rows] == [kept, 0] * 2
    assert found.ok and not found.warnings
    with torch.no_grad():
        torch.testing.assert_close(model(x), stock(x))
    revert(model)
    assert type(model.blocks[0][0]) is type(make())


def test_what_else_a_fused_layer_runs_first_is_left_as_it_is():
    """Only what is handed to the linears is applied by their call: not a norm before something else, nor one after."""
    linears = (nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    for parts in ((nn.LayerNorm(8), nn.Dropout(0.0), *linears), (*linears, nn.LayerNorm(8))):
        model, stock = twins(randomize(nn.Sequential(nn.Identity(), nn.Sequential(*parts)).double()))
        report = convert(model)
        assert [entry.name for entry in report.converted] == ["1"]
        x = tensors(1)[0]
        assert_same(step(model, x), step(stock, x), 1e-10)


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_hooks_on_a_norm_inside_are_heard(kind):
    model, stock = twins(randomize(Inside(lambda: nn.LayerNorm(8)).double()))
    convert(model)
    for one in (stock, model):
        norm = one.blocks[1][0]
        if kind == "forward":
            norm.register_forward_hook(lambda module, args, result: result * 2)
        else:
            norm.register_full_backward_hook(lambda module, ingoing, outgoing: (ingoing[0] * 3,))
    x = tensors(1)[0]
    assert_same(step(model, x), step(stock, x), 1e-10)
