"""A small Llama-architecture decoder (Hugging Face, random start) on the bytes of Python's standard library sources."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from fused_remat.compare.workload import Batch, MlpShape, Workload

_VOCABULARY = 256
_HEAD_WIDTH = 64
_RATIO = 3
_HELD_OUT_EVERY = 10
_HELD_OUT_WINDOWS = 64


def standard_library_files() -> list[Path]:
    """The top-level modules of the running Python's standard library, sorted by name.

    Raises:
        FileNotFoundError: this Python comes without sources (a zipped or stripped standard library).
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"), key=lambda file: file.name)
    if len(files) < 2 * _HELD_OUT_EVERY:
        raise FileNotFoundError(
            f"the text to train on is Python's standard library, expected as .py files in {folder}, where there are "
            f"{len(files)}; run a Python that comes with its sources, or use --model vit"
        )
    return files


class SourceLlama(Workload):
    """Llama decoder, 4 layers of width 256 (gated MLPs 256 -> 768 -> 256), on 16 windows of 128 bytes per step."""

    name = "llama"
    title = "Llama-architecture decoder (transformers) on the sources of Python's standard library"
    metric = "validation loss (nats/byte)"
    learning_rate = 1e-3
    mlp_class = LlamaMLP
    attention_class = LlamaAttention
    batch_size = 16
    length = 128
    width = 256
    depth = 4

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(seed, device)
        files = standard_library_files()
        held_out = files[::_HELD_OUT_EVERY]
        train = [file for file in files if file not in held_out]
        self._files = len(train), len(held_out)
        self._train, self._held_out = _read(train), _read(held_out)  # uint8 [bytes]

    @property
    def shape(self) -> MlpShape:
        return MlpShape(self.batch_size * self.length, self.width, _RATIO * self.width, gated=True, count=self.depth)

    def describe(self) -> str:
        return (
            f"{self.depth} layers of width {self.width}, gated MLPs {self.width} -> {self.shape.hidden} -> "
            f"{self.width}, {self.batch_size} windows of {self.length} bytes = {self.shape.rows} token rows; "
            f"{self._files[0]} files ({len(self._train) / 1e6:.1f} MB) to train on, {self._files[1]} held out"
        )

    def build(self) -> nn.Module:
        config = LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=self.width,
            intermediate_size=self.shape.hidden,
            num_hidden_layers=self.depth,
            num_attention_heads=self.width // _HEAD_WIDTH,
            num_key_value_heads=self.width // _HEAD_WIDTH,
            max_position_embeddings=self.length,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = LlamaForCausalLM(config)
        return model.to(self.device).train()

    def batch(self, step: int) -> Batch:
        """Bytes [B, L] and the bytes that follow each of them [B, L], int64."""
        starts = torch.randint(len(self._train) - self.length, (self.batch_size,), generator=self.generator(1 + step))
        return self._windows(self._train, starts)

    def inputs(self, batch: Batch) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        return batch[:1], {}

    def loss_of(self, output: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), batch[1].flatten())

    def validate(self, model: nn.Module) -> float:
        """Mean cross entropy on 64 windows spread evenly over the held-out files."""
        starts = torch.linspace(0, len(self._held_out) - self.length - 1, _HELD_OUT_WINDOWS, dtype=torch.float64).long()
        return self.loss(model, self._windows(self._held_out, starts)).item()

    def _windows(self, text: Tensor, starts: Tensor) -> Batch:
        window = text[starts.unsqueeze(1) + torch.arange(self.length + 1)].to(self.device, torch.int64)  # [B, L + 1]
        return window[:, :-1], window[:, 1:]


def _read(files: list[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
