"""Models and steps for the tests of recordings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fused_remat.recording import Recording, one_dnn


class Chain(nn.Module):
    """tanh layers on a parameter, in `segments` checkpointed segments (None: without checkpointing)."""

    def __init__(self, layers: int, segments: int | None, elements: int, *, reentrant: bool = False):
        super().__init__()
        self.start = nn.Parameter(torch.zeros(elements))
        self.layers = nn.ModuleList(nn.Tanh() for _ in range(layers))
        self._segments, self._reentrant = segments, reentrant

    def forward(self) -> Tensor:
        x, step = self.start, len(self.layers) // (self._segments or 1)
        for first in range(0, len(self.layers), step):

            def segment(x: Tensor, first: int = first) -> Tensor:
                for layer in self.layers[first : first + step]:
                    x = layer(x)
                return x

            x = segment(x) if self._segments is None else checkpoint(segment, x, use_reentrant=self._reentrant)
        return x.sum()


class Residual(nn.Module):
    """Gradients meet at every turn, and a module is called several times."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + torch.tanh(self.a(x)) * self.b(x)
        return x


class UNet(nn.Module):
    """Convolutions of all sorts, skips, in-place activations, running statistics."""

    def __init__(self, width: int = 8):
        super().__init__()

        def block(channels: int, out: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
                nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU(),
            )  # fmt: skip

        self.down1, self.down2, self.middle = block(3, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.merge2, self.merge1 = block(4 * width, 2 * width), block(3 * width, width)
        self.up1, self.head = nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.avg_pool2d(b, 2))
        y = self.merge2(torch.cat([self.up2(c), b], 1))
        y = self.merge1(torch.cat([self.up1(y), a], 1))
        return F.cross_entropy(self.head(y), labels)


class Encoder(nn.Module):
    """A small transformer over patches, as timm and torchvision build them."""

    def __init__(self, *, checkpointed: bool = False, dropout: float = 0.1):
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 8, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, dropout, "gelu", batch_first=True, norm_first=True) for _ in range(3)
        )
        self.head, self._checkpointed = nn.Linear(64, 10), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._checkpointed else block(x)
        return self.head(x.mean(1))


def mlp(width: int = 32, hidden: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def kinds(recording: Recording) -> dict[str, int]:
    """Bytes of all allocations by kind."""
    total: dict[str, int] = {}
    for a in recording.allocations:
        total[a.kind] = total.get(a.kind, 0) + a.nbytes
    return total


def assert_predicts(predicted: Recording, measured: Recording, *, within: float = 0.01) -> None:
    """The same step, once measured and once predicted. A few counters of the CPU are predicted by nobody, nor is what
    oneDNN's products in half precision take on processors that have them, of which the prediction tells."""
    assert (predicted.source, measured.source) == ("predicted", "measured")
    assert predicted.static == measured.static
    assert predicted.flop == measured.flop and predicted.redone == measured.redone
    if predicted.blind:
        assert one_dnn.computes(torch.bfloat16), predicted.blind
        assert 0.5 * measured.peak_bytes <= predicted.peak_bytes <= (1 + within) * measured.peak_bytes
        return
    assert abs(predicted.peak_bytes - measured.peak_bytes) <= within * measured.peak_bytes
    assert abs(predicted.kept_bytes - measured.kept_bytes) <= within * measured.kept_bytes
    assert (predicted.peak_phase, predicted.peak_module) == (measured.peak_phase, measured.peak_module)
    assert {(s.module, s.phase) for s in predicted.spans} == {(s.module, s.phase) for s in measured.spans}
