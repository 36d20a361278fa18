"""What the tests of policies share: blocks, small models and what one step of them keeps, runs and computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fused_remat import measure
from fused_remat.convert.rebind import records_of
from fused_remat.measure import Measurement
from fused_remat.policy import Arrangement, Assignment

WIDTH, HEADS, BATCH, LENGTH = 32, 4, 2, 64
STREAM = BATCH * LENGTH * WIDTH * 4  # bytes of the residual stream
LSE = BATCH * HEADS * LENGTH * 4


def rows(seed: int = 5) -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))


class MLPBlock(nn.Module):
    """A pre-norm residual block around an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class AttentionBlock(nn.Module):
    """A pre-norm residual block around an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.attention(normed, normed, normed, need_weights=False)[0]


class ConvBlock(nn.Module):
    """A block that no fused layer can be made of, with running statistics."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class Looped(nn.Module):
    """Blocks that a loop calls, each with the same other arguments."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor, **others: object) -> Tensor:
        for layer in self.layers:
            x = layer(x, **others)
        return x


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def mlp_chain() -> nn.Module:
    return seeded(lambda: nn.Sequential(*(MLPBlock() for _ in range(4))))


def attention_chain() -> nn.Module:
    return seeded(lambda: nn.Sequential(*(AttentionBlock() for _ in range(4))))


def conv_chain() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 1), *(ConvBlock() for _ in range(4))))


def vit() -> nn.Module:
    import timm

    settings = dict(img_size=64, depth=2, num_classes=10, embed_dim=48, num_heads=3)
    return seeded(lambda: timm.create_model("vit_tiny_patch16_224", **settings))


def llama(layers: int = 2, **settings: object) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, use_cache=False,
    )  # fmt: skip
    return seeded(lambda: LlamaForCausalLM(LlamaConfig(**config | settings)))


def tokens() -> Tensor:
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(6))


def image() -> Tensor:
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(7))


def tensor_of(output: object) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def measured(model: nn.Module, *inputs: Tensor) -> Measurement:
    return measure(lambda: tensor_of(model(*inputs)), repeats=0)


def stepped(model: nn.Module, *inputs: Tensor, **options: object) -> dict[str, Tensor]:
    """Output and gradients of a step, and what the buffers are afterwards."""
    torch.manual_seed(1)
    model.zero_grad()
    out = tensor_of(model(*inputs, **options))
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
    results = {"output": out.detach().clone()}
    results |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return results | {f"buffer {name}": b.clone() for name, b in model.named_buffers() if b.is_floating_point()}


def state_of(model: nn.Module) -> list[tuple]:
    """What must be as it was after reverting: classes, records, names, identities of parameters, hooks."""
    return [
        (name, type(m), dict(records_of(m)), [id(p) for p in m._parameters.values()], sorted(vars(m)),
         list(m._forward_pre_hooks.values()), m.training)
        for name, m in model.named_modules()
    ]  # fmt: skip


def arranged(model: nn.Module, *regions: tuple[str, ...], **layers) -> Arrangement:
    arrangement = Arrangement(model)
    arrangement.set(Assignment(layers, regions))
    return arrangement


def paths(prefix: str, *indices: int) -> tuple[str, ...]:
    return tuple(f"{prefix}{index}" for index in indices)
