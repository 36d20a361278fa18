"""A small torchvision Vision Transformer on scikit-learn's handwritten digits (1797 images of 8 x 8, ten classes)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchvision.models.vision_transformer import MLPBlock, VisionTransformer

from fused_remat.compare.workload import Batch, MlpShape, Workload

_SIDE, _PATCH = 8, 2
_PATCHES = (_SIDE // _PATCH) ** 2
_TOKENS = _PATCHES + 1  # and the class token
_HELD_OUT = 360
_HEAD_WIDTH = 64
_RATIO = 4

# torchvision starts position embeddings at 0.02, where they drown next to the patch embeddings of normalised digits: a
# run of some dozen steps would learn a bag of patches.
_POSITION_STD = 0.5


class DigitsVit(Workload):
    """ViT, 4 pre-norm blocks of width 192 (MLPs 192 -> 768 -> 192), 16 patches per digit, 256 digits per step."""

    name = "vit"
    title = "Vision Transformer (torchvision) on handwritten digits (scikit-learn)"
    metric = "validation accuracy"
    learning_rate = 1e-3
    mlp_class = MLPBlock
    batch_size = 256
    width = 192
    depth = 4

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(seed, device)
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32)  # [N, 8, 8], 0 to 16
        labels = torch.tensor(digits.target, dtype=torch.int64)  # [N]
        order = torch.randperm(len(labels), generator=self.generator(0))
        train, held_out = order[_HELD_OUT:], order[:_HELD_OUT]
        mean, std = images[train].mean(), images[train].std()
        images = ((images - mean) / std).unsqueeze(1).repeat(1, 3, 1, 1)  # torchvision's ViT takes colours
        self._train = images[train].to(device), labels[train].to(device)
        self._held_out = images[held_out].to(device), labels[held_out].to(device)

    @property
    def shape(self) -> MlpShape:
        return MlpShape(self.batch_size * _TOKENS, self.width, _RATIO * self.width, gated=False, count=self.depth)

    def describe(self) -> str:
        return (
            f"{self.depth} blocks of width {self.width}, MLPs {self.width} -> {self.shape.hidden} -> {self.width}, "
            f"{_PATCHES} patches and a class token per image, batches of {self.batch_size} = {self.shape.rows} rows; "
            f"{len(self._train[1])} images to train on, {_HELD_OUT} held out"
        )

    def build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = VisionTransformer(
                image_size=_SIDE,
                patch_size=_PATCH,
                num_layers=self.depth,
                num_heads=self.width // _HEAD_WIDTH,
                hidden_dim=self.width,
                mlp_dim=_RATIO * self.width,
                num_classes=10,
            )
            nn.init.trunc_normal_(model.encoder.pos_embedding, std=_POSITION_STD)
        return model.to(self.device).train()

    def batch(self, step: int) -> Batch:
        """Images [B, 3, 8, 8] (grey, zero mean, unit variance) and labels [B] (int64); each epoch is a new shuffle."""
        images, labels = self._train
        per_epoch = len(labels) // self.batch_size
        epoch, position = divmod(step, per_epoch)
        order = torch.randperm(len(labels), generator=self.generator(1 + epoch))
        chosen = order[position * self.batch_size : (position + 1) * self.batch_size].to(self.device)
        return images[chosen], labels[chosen]

    def inputs(self, batch: Batch) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        return batch[:1], {}

    def loss_of(self, output: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(output, batch[1])

    def validate(self, model: nn.Module) -> float:
        """Share of the held-out digits that are classified correctly, 0 to 1."""
        images, labels = self._held_out
        return (model(images).argmax(dim=-1) == labels).float().mean().item()
