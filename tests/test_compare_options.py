"""`fused-remat compare`: the options that it refuses, and how."""

from __future__ import annotations

import re
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

from fused_remat.compare.command import compare

app = typer.Typer()
app.command()(compare)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "gpt"], ["--model", "'gpt'", "vit, llama, both or module:callable", "leave it out"]),
        (["--steps", "0"], ["--steps", "'0'", "whole number from 1", "for example"]),
        (["--steps", "-3"], ["--steps", "'-3'", "whole number from 1", "for example"]),
        (["--steps", "1.5"], ["--steps", "'1.5'", "whole number from 1", "for example"]),
        (["--steps", "many"], ["--steps", "'many'", "whole number from 1", "for example"]),
        (["--steps", ""], ["--steps", "''", "whole number from 1", "for example"]),
        (["--seed", "-1"], ["--seed", "'-1'", "whole number from 0", "for example"]),
        (["--seed", "99999999999"], ["--seed", "'99999999999'", "2147483647", "for example"]),
        (["--workspace", "0"], ["--workspace", "'0'", "whole number from 1", "for example"]),
        (["--workspace", "8MiB"], ["--workspace", "'8MiB'", "whole number from 1", "for example"]),
        (["--device", "tpu"], ["--device", "'tpu'", "cpu or cuda", "leave it out"]),
    ],
)
def test_compare_refuses_a_bad_value_before_it_starts(arguments, words, tmp_path):
    folder = tmp_path / "out"
    run = CliRunner().invoke(app, ["--out", str(folder), *arguments])
    text = _plain(run.output)
    assert run.exit_code == 2
    assert all(word in text for word in words), text
    assert not folder.exists()


def test_compare_refuses_a_file_as_folder(tmp_path):
    file = tmp_path / "taken"
    file.write_text("mine", encoding="utf-8")
    for out in (file, file / "below"):
        run = CliRunner().invoke(app, ["--model", "llama", "--steps", "1", "--out", str(out)])
        text = _plain(run.output)
        assert run.exit_code == 2 and "--out" in text and "choose another path" in text
    assert file.read_text(encoding="utf-8") == "mine"


def test_compare_says_when_there_is_no_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = CliRunner().invoke(app, ["--device", "cuda", "--out", str(tmp_path / "out")])
    text = _plain(run.output)
    assert run.exit_code == 2 and "'cuda'" in text and "use --device cpu" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("package", "model"), [("torchvision", "vit"), ("transformers", "llama"), ("matplotlib", "llama")]
)
def test_compare_names_the_extra_that_is_missing(package, model, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    run = CliRunner().invoke(app, ["--model", model, "--out", str(tmp_path / "out")])
    assert run.exit_code == 1
    assert package in run.output and "pip install 'fused_remat[demo]'" in run.output
    assert not (tmp_path / "out").exists()


def _plain(text: str) -> str:
    """Without the error box, colours and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", text).split())
