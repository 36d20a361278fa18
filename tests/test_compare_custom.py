"""`fused-remat compare` on models of the user's own: factories, inputs, losses, blocks, and what is refused."""

from __future__ import annotations

import csv
import json
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

from fused_remat import _extension
from fused_remat.compare.blocks import repeated_blocks
from fused_remat.compare.command import compare
from fused_remat.compare.custom import custom_workload
from fused_remat.compare.factory import BadOption, importable_from_here
from fused_remat.compare.inputs import draw, from_shapes
from fused_remat.compare.run import compare_model, work_units
from fused_remat.compare.variants import CHECKPOINT, FUSED, STOCK
from fused_remat.training_step import find_loss

pytest.importorskip("matplotlib")

app = typer.Typer()
app.command()(compare)
CPU = torch.device("cpu")

SOURCE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.mlp(self.norm(x)))

class Stack(nn.Module):
    def __init__(self, width=16, depth=2, dropout=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.width = width

    def forward(self, x, target=None):
        for block in self.blocks:
            x = block(x)
        return x if target is None else {"loss": (x - target).square().mean(), "out": x}

class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x).tanh()).sum()

class Exploding(Flat):
    def forward(self, x):
        return self.first.weight.sum() * (1.0 if self.training and self.calls() < 30 else float("nan"))

    def calls(self):
        Exploding.count = getattr(Exploding, "count", 0) + 1
        return Exploding.count

class NaNInEvaluation(Flat):
    def forward(self, x):
        return super().forward(x) * (1.0 if self.training else float("nan"))

class Detached(Flat):
    def forward(self, x):
        return super().forward(x).detach()

class Uncopyable(Flat):
    def __deepcopy__(self, memo):
        raise TypeError("holds a socket")

class Infinite(Flat):
    def forward(self, x):
        return super().forward(x) / 0.0

def make_batch(model, step):
    x = torch.randn(4, 8, model.width)
    return {"x": x, "target": x.roll(1, dims=1)}

def make_pair(model, step):
    x = torch.randn(4, 8, model.width)
    return x, x.roll(1, dims=1)

def raising(*args, **kwargs):
    raise RuntimeError("no such shape\\nmore lines")

def nothing(*args, **kwargs):
    return None

def no_parameters():
    return nn.GELU()

number = 3

class makers:
    stack = Stack
"""


@pytest.fixture(scope="module", autouse=True)
def loaded(tmp_path_factory) -> Iterator[Path]:
    """The user's module, in the current folder; one thread, and the extension loaded with whatever it warns of."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "own_models.py").write_text(SOURCE, encoding="utf-8")
    (folder / "broken_models.py").write_text("raise KeyError('setting')\n", encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        _extension.load()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(folder))])
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield folder
        torch.set_num_threads(threads)
    sys.modules.pop("own_models", None)


def run(folder: Path, *arguments: str, steps: int = 2):
    return CliRunner().invoke(app, ["--steps", str(steps), "--out", str(folder), "--workspace", "1", *arguments])


def plain(text: str) -> str:
    """Without the error box, colours and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", text).split())


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read(folder: Path) -> tuple[dict, dict]:
    """(settings, the one model) of `summary.json`."""
    content = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    (found,) = content["models"]
    return content["settings"], found


def workload(model: str, **options: str | None):
    given = {"config": None, "inputs": None, "batch": None} | options
    with importable_from_here():
        return custom_workload(model, **given, seed=0, device=CPU)


X = '{"x": {"shape": [4, 8, 16]}}'
FLAT = '[{"shape": [4, 8]}]'


def test_own_model_end_to_end(tmp_path):
    config = '{"width": 16, "depth": 3}'
    options = ["--model", "own_models:Stack", "--config", config, "--batch", "own_models:make_batch"]
    made = run(tmp_path, *options)
    assert made.exit_code == 0, made.output
    files = {"Stack.png", "losses.csv", "summary.csv", "summary.json", "report.html"}
    assert {path.name for path in tmp_path.iterdir()} == files
    settings, model = read(tmp_path)
    assert settings["models"] == ["own_models:Stack"]
    given = {"model": "own_models:Stack", "config": config, "inputs": None, "batch": "own_models:make_batch"}
    assert settings["options"] == given
    assert model["name"] == "Stack" and model["mlp_shape"] is None
    stock, checkpoint, fused = model["variants"]
    assert [v["variant"] for v in model["variants"]] == [STOCK, CHECKPOINT, FUSED]
    assert (stock["blocks_checkpointed"], checkpoint["blocks_checkpointed"], fused["blocks_checkpointed"]) == (0, 3, 0)
    assert (stock["mlps_changed"], checkpoint["mlps_changed"], fused["mlps_changed"]) == (0, 0, 3)
    assert checkpoint["kept_mib"] < stock["kept_mib"] and fused["kept_mib"] < stock["kept_mib"]
    assert checkpoint["largest_loss_difference"] == 0.0 and fused["largest_loss_difference"] < 1e-5
    losses = [float(row["loss"]) for row in rows(tmp_path / "losses.csv") if row["variant"] == STOCK]
    assert len(losses) == 2 and losses[0] != losses[1]
    text = plain(made.output)
    for words in ("the loss is the output's own .loss", "batches from own_models:make_batch", "blocks checkpointed"):
        assert words in text
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "around each of 3 Block" in html and "draws no random numbers" in html


def test_transformers_class_gets_its_config_object(tmp_path):
    pytest.importorskip("transformers")
    settings = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": 0, "eos_token_id": 1}
    tiny, out = tmp_path / "tiny.json", tmp_path / "out"
    tiny.write_text(json.dumps(settings | {"hiden_act": "relu"}), encoding="utf-8")
    tokens = {"shape": [2, 8], "dtype": "int64", "below": 32}
    inputs = {"input_ids": tokens, "labels": tokens, "attention_mask": {"shape": [2, 8], "dtype": "int64", "value": 1}}
    options = ["--model", "transformers:LlamaForCausalLM", "--config", str(tiny), "--inputs", json.dumps(inputs)]
    made = run(out, *options)
    assert made.exit_code == 0, made.output
    versions, model = read(out)[0]["versions"], read(out)[1]
    assert "transformers" in versions
    _, checkpoint, fused = model["variants"]
    assert checkpoint["blocks_checkpointed"] == fused["mlps_changed"] == 2
    assert checkpoint["largest_loss_difference"] == 0.0 and fused["largest_loss_difference"] < 1e-5
    remarks = " ".join(model["remarks"])
    assert "LlamaConfig has no setting hiden_act, and may ignore it." in remarks
    assert "use_cache was turned off" in remarks and "draws no random numbers" in remarks
    assert "input_ids [2, 8] int64, labels [2, 8] int64, attention_mask [2, 8] int64" in model["description"]
    made = workload("transformers:LlamaForCausalLM", config=str(tiny), inputs=json.dumps(inputs))
    assert made.build().config.use_cache is False and made.build().config.hidden_size == 16


def test_model_without_blocks_is_not_checkpointed(tmp_path):
    made = run(tmp_path, "--model", "own_models:Flat", "--inputs", FLAT)
    assert made.exit_code == 0, made.output
    assert [row["variant"] for row in rows(tmp_path / "summary.csv")] == [STOCK, FUSED]
    assert "checkpoint is left out: the model has no nn.ModuleList" in plain(made.output)
    assert "the loss is the model's scalar output" in plain(made.output)
    units = []
    compare_model(workload("own_models:Flat", inputs=FLAT), 1, lambda text, done: units.append(done))
    assert sum(units) == work_units(1)


def test_dropout_is_remarked_on():
    quiet = workload("own_models:Stack", inputs=X).remarks()
    loud = workload("own_models:Stack", inputs=X, config='{"dropout": 0.5}').remarks()
    assert any("draws no random numbers" in remark for remark in quiet)
    assert any("losses differ by more than rounding" in remark for remark in loud)


@pytest.mark.parametrize("batch", ["make_batch", "make_pair"])
def test_batches_are_a_function_of_seed_and_step(batch):
    one = workload("own_models:makers.stack", batch=f"own_models:{batch}")
    before = torch.get_rng_state()
    first, again, later = one.batch(0), one.batch(0), one.batch(1)
    assert torch.equal(before, torch.get_rng_state())
    first, again, later = (list(b.values()) if isinstance(b, dict) else b for b in (first, again, later))
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], later[0])
    assert one.loss(one.build(), one.batch(0)).item() > 0.0


def test_weights_are_a_function_of_the_seed():
    before = torch.get_rng_state()
    one, two = (workload("own_models:Stack", inputs=X).build().state_dict() for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert one["blocks.0.mlp.0.weight"].data_ptr() != two["blocks.0.mlp.0.weight"].data_ptr()


def test_random_inputs_have_the_shapes_and_ranges_described():
    make, text = from_shapes(
        {
            "ids": {"shape": [50, 20], "dtype": "int32", "below": 7},
            "half": {"shape": [3], "dtype": "bfloat16"},
            "flags": {"shape": [64], "dtype": "bool"},
            "ones": {"shape": [2, 2], "dtype": "int64", "value": 1},
        }
    )
    batch = draw(make, nn.Identity(), 0, 0, CPU)
    assert text == "random inputs ids [50, 20] int32, half [3] bfloat16, flags [64] bool, ones [2, 2] int64"
    assert batch["ids"].dtype == torch.int32 and set(batch["ids"].flatten().tolist()) == set(range(7))
    assert batch["half"].dtype == torch.bfloat16 and batch["half"].shape == (3,)
    assert batch["flags"].dtype == torch.bool and 0 < batch["flags"].sum() < 64
    assert torch.equal(batch["ones"], torch.ones(2, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("output", "expected", "words"),
    [
        (SimpleNamespace(loss=torch.tensor(2.0), logits=torch.ones(3)), 2.0, "own .loss"),
        ({"loss": torch.tensor([2.0, 4.0])}, 3.0, "own .loss"),
        (torch.tensor([[5.0]]), 5.0, "scalar output"),
        (torch.tensor([3.0, -1.0]), 5.0, r"mean square of the model's first output [2]"),
        ((torch.tensor([1, 2]), {"a": [torch.tensor([3.0, -1.0])]}), 5.0, "mean square"),
        (SimpleNamespace(loss=None, logits=torch.tensor([3.0, -1.0])), 5.0, "mean square"),
        (torch.tensor([1, 2]), None, ""),
        ("text", None, ""),
    ],
)
def test_loss_is_the_outputs_own_or_stands_in(output, expected, words):
    loss, source = find_loss(output)
    assert (None if loss is None else loss.item()) == expected and words in source


class Named(nn.Module):
    """A module of any children."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def block(**more: nn.Module) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 8) if not more else Named(linear=nn.Linear(2, 2), **more)


def test_blocks_are_found_by_structure():
    layers = nn.TransformerEncoder(block(), 3, enable_nested_tensor=False)
    assert repeated_blocks(layers) == list(layers.layers)
    two = Named(encoder=nn.ModuleList([block(), block()]), decoder=nn.Sequential(block(), block()))
    assert repeated_blocks(two) == [*two.encoder, *two.decoder]
    experts = Named(
        layers=nn.ModuleList([block(experts=nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in "abcd"))])
    )
    assert repeated_blocks(experts) == list(experts.layers)
    shared = block()
    assert repeated_blocks(nn.ModuleList([shared, shared])) == [shared]
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
    assert repeated_blocks(nn.ModuleList([block(), nn.Sequential(nn.Linear(2, 2))])) == []
    assert repeated_blocks(nn.Linear(2, 2)) == []


STACK = ["--model", "own_models:Stack"]
REFUSED = {
    "no callable": (["--model", "own_models:"], ["--model", "expected module:callable"]),
    "a path": (["--model", "models/vit.py:make"], ["--model", "expected module:callable"]),
    "no module": (["--model", "own_modelz:Stack"], ["module own_modelz cannot be imported", "No module named"]),
    "module raises": (["--model", "broken_models:f"], ["broken_models cannot be imported: KeyError: 'setting'"]),
    "no attribute": (["--model", "own_models:Stak"], ["own_models has no 'Stak'"]),
    "no attribute of it": (["--model", "own_models:makers.vit"], ["own_models.makers has no 'vit'"]),
    "not callable": (["--model", "own_models:number"], ["of type int, expected something to call"]),
    "factory raises": (["--model", "own_models:raising"], ["raising() raised RuntimeError: no such shape;"]),
    "wrong setting": ([*STACK, "--config", '{"widht": 3}'], ["Stack(widht=...) raised TypeError", "--config"]),
    "returns None": (["--model", "own_models:nothing"], ["nothing returned a NoneType, expected a torch.nn.Module"]),
    "no parameters": (["--model", "own_models:no_parameters"], ["without trainable parameters"]),
    "cannot be copied": (["--model", "own_models:Uncopyable"], ["cannot be copied", "holds a socket"]),
    "detached": (["--model", "own_models:Detached"], ["no differentiable loss", "expected a .loss"]),
    "infinite": (["--model", "own_models:Infinite"], ["the first loss is", "expected a finite number"]),
    "wrong input": ([*STACK, "--inputs", '{"y": {"shape": [1]}}'], ["its forward raised TypeError", "'y'"]),
    "bad JSON": ([*STACK, "--config", "{'width': 3}"], ["--config", "not valid JSON", "line 1 column 2"]),
    "JSON of another kind": ([*STACK, "--config", "[3]"], ["got a JSON list, expected an object of keyword"]),
    "no file": ([*STACK, "--config", "tiny.json"], ["'tiny.json' is neither JSON", "nor a file"]),
    "inputs empty": ([*STACK, "--inputs", "{}"], ["--inputs", "describes no tensor", "for example"]),
    "no shape": ([*STACK, "--inputs", '{"x": [3]}'], ["x: expected an object with a", '"shape"']),
    "bad shape": ([*STACK, "--inputs", '[{"shape": [0]}]'], ["0: shape must be a list of whole numbers"]),
    "bad dtype": (
        [*STACK, "--inputs", '{"x": {"shape": [1], "dtype": "nn"}}'],
        ["dtype must name a real dtype", "'nn'"],
    ),
    "no range": ([*STACK, "--inputs", '{"x": {"shape": [1], "dtype": "int64"}}'], ["needs", '"below"', '"value"']),
    "range of floats": ([*STACK, "--inputs", '{"x": {"shape": [1], "below": 3}}'], ["below must be", "float32"]),
    "bad value": ([*STACK, "--inputs", '{"x": {"shape": [1], "value": "a"}}'], ["value must be a number", "'a'"]),
    "unknown key": ([*STACK, "--inputs", '{"x": {"shape": [1], "low": 3}}'], ["unknown low, expected some of below"]),
    "neither inputs": ([*STACK, "--batch", ""], ["--batch"]),
    "both inputs": ([*STACK, "--inputs", X, "--batch", "own_models:make_batch"], ["give one of them"]),
    "batch raises": ([*STACK, "--batch", "own_models:raising"], ["--batch", "raised RuntimeError: no such shape"]),
    "batch of None": ([*STACK, "--batch", "own_models:nothing"], ["returned a NoneType, expected a dict or tuple"]),
    "no batch function": ([*STACK, "--batch", "own_models:missing"], ["--batch", "own_models has no 'missing'"]),
    "built-in with config": (["--model", "vit", "--config", "{}"], ["--config", "module:callable"]),
    "built-in with inputs": (["--model", "llama", "--inputs", X], ["--inputs", "leave --inputs out"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_compare_refuses_before_anything_is_trained(case, tmp_path):
    arguments, words = REFUSED[case]
    if not {"--inputs", "--batch"} & set(arguments):
        arguments = [*arguments, "--inputs", X if arguments[:2] == STACK else FLAT]
    made = run(tmp_path / "out", *arguments)
    text = plain(made.output)
    assert made.exit_code == 2, text
    assert all(plain(word) in text for word in words), text
    assert "Traceback" not in text and not (tmp_path / "out").exists()


def test_missing_inputs_name_what_forward_takes(tmp_path):
    made = run(tmp_path / "out", *STACK)
    text = plain(made.output)
    assert made.exit_code == 2 and "its forward takes x, target" in text and "--batch module:callable" in text


def test_loss_that_explodes_ends_the_run(tmp_path):
    made = run(tmp_path / "out", "--model", "own_models:Exploding", "--inputs", FLAT, steps=30)
    assert made.exit_code == 1
    assert re.search(
        r"Error: Exploding: the loss of (stock|fused_remat) in step \d+ is nan, so there is nothing", made.output
    )
    assert not list((tmp_path / "out").iterdir())


def test_validation_that_is_no_number_ends_the_run(tmp_path):
    made = run(tmp_path / "out", "--model", "own_models:NaNInEvaluation", "--inputs", FLAT, steps=1)
    assert made.exit_code == 1
    assert "Error: NaNInEvaluation: the evaluation loss, first batch of stock is nan" in made.output


def test_search_path_is_left_as_it_was(loaded):
    before = list(sys.path)
    with importable_from_here():
        assert sys.path[0] == str(loaded)
    assert sys.path == before
    with pytest.raises(BadOption, match="cannot be imported"):
        custom_workload("nowhere_at_all:f", None, X, None, seed=0, device=CPU)
