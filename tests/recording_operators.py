"""Operators of models for vision and language, small, by kind: what a prediction is compared with a recording on."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fused_remat.recording import Recording

M = (64, 128)
IMAGES = (4, 16, 16, 16)
VOLUMES = (2, 8, 8, 8, 8)
LINES = (8, 16, 64)
HEADS = (2, 4, 64, 32)
SQUARES = (16, 16, 16)


def _numbers(high: int, *shape: int) -> Tensor:
    return torch.arange(math.prod(shape)).mul(7).remainder(high).view(shape)


INDEX, WIDE, LABELS = _numbers(64, 80), _numbers(64, *M), _numbers(128, 64)
MASK = torch.arange(64 * 128).view(M) % 3 == 0
TARGET = torch.linspace(0.1, 0.9, 64 * 128).view(M)


class Part(nn.Module):
    """`fn(*inputs)` on inputs of its own, and a number of it: its sum, whose gradient is one number expanded, or
    (`dense`) of its sine."""

    def __init__(self, fn: Callable, *shapes: tuple[int, ...], dense: bool, dtype=torch.float32):
        super().__init__()
        self.inputs = nn.ParameterList(nn.Parameter(self._made(shape).to(dtype)) for shape in shapes)
        self.fn, self.dense = fn, dense

    @staticmethod
    def _made(shape: tuple[int, ...]) -> Tensor:
        x = torch.linspace(0.1, 0.9, math.prod(shape)).view(shape)
        square = len(shape) == 3 and shape[1] == shape[2]
        return x + torch.eye(shape[1]) * shape[1] if square else x  # solvable

    def forward(self) -> Tensor:
        y = self.fn(*self.inputs)
        return (y.float().sin() if self.dense else y).sum()


class Parts(nn.Module):
    """The sum of all parts, by name."""

    def __init__(self, parts: dict[str, Part]):
        super().__init__()
        self.names = list(parts)
        self.parts = nn.ModuleList(parts.values())

    def forward(self) -> Tensor:
        return sum(part() for part in self.parts)


def own_peak(recording: Recording, path: str) -> int:
    """The highest sum of what this module, and those in it, made and still holds."""
    changes = []
    for a in recording.allocations:
        if a.module == path or a.module.startswith(f"{path}."):
            changes += [(a.born, True, a.nbytes), (a.died, False, -a.nbytes)]
    level = highest = 0
    for _, _, delta in sorted(changes):
        level += delta
        highest = max(highest, level)
    return highest


def kept(recording: Recording, path: str) -> int:
    """`kept_by_module` of this module and those in it."""
    return sum(n for name, n in recording.kept_by_module().items() if name == path or name.startswith(f"{path}."))


def _by_channels(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


def _attention(backend=None, **settings):
    def run(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        masked = {"attn_mask": mask[0]} if mask else {}
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, **masked, **settings)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **masked, **settings)

    return run


def _each(names: str, shape: tuple[int, ...], **settings) -> dict:
    return {name: (lambda x, name=name: getattr(F, name)(x, **settings), shape) for name in names.split()}


_SUMS = (
    "sum", "mean", "prod", "amax", "std", "cumsum", "cumprod", "logcumsumexp", "logsumexp", "softmax", "log_softmax",
)  # fmt: skip
_OF_ALL = ("sum", "mean", "prod", "max", "amax", "std", "norm", "median")


def _losses(reduction: str) -> dict:
    r = {"reduction": reduction}
    return {
        f"{name}, {reduction}": case
        for name, case in {
            "cross entropy": (lambda x: F.cross_entropy(x, LABELS, **r), M),
            "of probabilities": (lambda x, y: F.cross_entropy(x, y, **r), M, M),
            "smoothed": (lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1, **r), M),
            "of images": (lambda x: F.cross_entropy(x, _numbers(16, 4, 16, 16), **r), IMAGES),
            "nll": (lambda x: F.nll_loss(x, LABELS, **r), M),
            "bits": (lambda x: F.binary_cross_entropy(x, TARGET, **r), M),
            "bits of logits": (lambda x: F.binary_cross_entropy_with_logits(x, TARGET, **r), M),
            "weighted bits": (
                lambda x: F.binary_cross_entropy_with_logits(x, TARGET, pos_weight=torch.ones(128), **r), M,
            ),
            "kl": (lambda x, y: F.kl_div(x, y, **r), M, M),
            "mse": (lambda x: F.mse_loss(x, TARGET, **r), M),
            "l1": (lambda x: F.l1_loss(x, TARGET, **r), M),
            "smooth l1": (lambda x: F.smooth_l1_loss(x, TARGET, **r), M),
            "huber": (lambda x: F.huber_loss(x, TARGET, **r), M),
            "soft margin": (lambda x: F.soft_margin_loss(x, TARGET, **r), M),
            "triplets": (lambda x, y: F.triplet_margin_loss(x, y, x * y, **r), M, M),
        }.items()
    }  # fmt: skip


KINDS: dict[str, dict[str, tuple]] = {
    "norms": {
        "batch": (lambda x: F.batch_norm(x, None, None, training=True), IMAGES),
        "batch, rows": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), M, (128,), (128,)),
        "batch, by channels": (lambda x: F.batch_norm(_by_channels(x), None, None, training=True), IMAGES),
        "batch, volumes": (lambda x: F.batch_norm(x, None, None, training=True), VOLUMES),
        "instance": (lambda x: F.instance_norm(x), IMAGES),
        "group": (lambda x, w, b: F.group_norm(x, 4, w, b), IMAGES, (16,), (16,)),
        "group, by channels": (lambda x: F.group_norm(_by_channels(x), 4), IMAGES),
        "group, back to images": (lambda x: F.group_norm(_by_channels(x), 4).contiguous(), IMAGES),
        "layer": (lambda x, w, b: F.layer_norm(x, (128,), w, b), M, (128,), (128,)),
        "layer, transposed": (lambda x: F.layer_norm(x.transpose(1, 2), (16,)), LINES),
        "layer, of images": (lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (16,)).permute(0, 3, 1, 2), IMAGES),
        "rms": (lambda x, w: F.rms_norm(x, (128,), w), M, (128,)),
        "local response": (lambda x: F.local_response_norm(x, 5), IMAGES),
        "normalized": (lambda x: F.normalize(x, dim=1), M),
        "cosine": (F.cosine_similarity, M, M),
        "weight": (lambda g, v: torch._weight_norm(v, g, 0), (64, 1), M),
    },
    "pools": {
        **_each("max_pool2d avg_pool2d", IMAGES, kernel_size=2),
        **_each("adaptive_avg_pool2d adaptive_max_pool2d", IMAGES, output_size=4),
        **_each("max_pool1d avg_pool1d", LINES, kernel_size=2),
        **_each("max_pool3d avg_pool3d", VOLUMES, kernel_size=2),
        "max, by channels": (lambda x: F.max_pool2d(_by_channels(x), 2), IMAGES),
        "average, by channels": (lambda x: F.avg_pool2d(_by_channels(x), 2), IMAGES),
        "adaptive, by channels": (lambda x: F.adaptive_avg_pool2d(_by_channels(x), 4), IMAGES),
        "max, transposed": (lambda x: F.max_pool2d(x.transpose(2, 3), 2), IMAGES),
        "average, transposed": (lambda x: F.avg_pool2d(x.transpose(2, 3), 2), IMAGES),
        "adaptive, transposed": (lambda x: F.adaptive_avg_pool2d(x.transpose(2, 3), 4), IMAGES),
        "unpooled": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), IMAGES),
        "lp": (lambda x: F.lp_pool2d(x, 2, 2), IMAGES),
        **{
            f"interpolated, {mode}": (lambda x, mode=mode: F.interpolate(x, scale_factor=2, mode=mode), IMAGES)
            for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
        },
        "large": (lambda x: F.interpolate(x, size=(80, 80), mode="bilinear"), (2, 4, 16, 16)),
        "by channels": (lambda x: F.interpolate(_by_channels(x), scale_factor=2), IMAGES),
        "antialiased": (lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True), IMAGES),
        "antialiased, bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic", antialias=True), IMAGES),
        "lines": (lambda x: F.interpolate(x, scale_factor=2, mode="linear"), LINES),
        "lines, nearest": (lambda x: F.interpolate(x, scale_factor=2), LINES),
        "volumes": (lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), VOLUMES),
        "volumes, nearest": (lambda x: F.interpolate(x, scale_factor=2), VOLUMES),
        "shuffled": (lambda x: F.pixel_shuffle(x, 2), IMAGES),
        "unshuffled": (lambda x: F.pixel_unshuffle(x, 2), IMAGES),
        "channels shuffled": (lambda x: F.channel_shuffle(x, 4), IMAGES),
        **{
            f"padded, {mode}": (lambda x, mode=mode: F.pad(x, (2, 2, 2, 2), mode=mode), IMAGES)
            for mode in ("constant", "reflect", "replicate", "circular")
        },
        "padded, by channels": (lambda x: F.pad(_by_channels(x), (2, 2, 2, 2), mode="reflect"), IMAGES),
        "padded, transposed": (lambda x: F.pad(x.transpose(2, 3), (2, 2, 2, 2), mode="reflect"), IMAGES),
        **{
            f"padded {of}, {mode}": (lambda x, pad=pad, mode=mode: F.pad(x, pad, mode=mode), shape)
            for of, pad, shape in (("lines", (2, 2), LINES), ("volumes", (1,) * 6, VOLUMES))
            for mode in ("reflect", "replicate")
        },
        "unfolded": (lambda x: F.unfold(x, 3, padding=1), (2, 4, 16, 16)),
        "folded": (lambda x: F.fold(x, (16, 16), 3, padding=1), (2, 36, 256)),
        "sampled": (lambda x, g: F.grid_sample(x, g, align_corners=False), IMAGES, (4, 16, 16, 2)),
        "grid": (lambda t: F.affine_grid(t, [8, 16, 32, 32], align_corners=False), (8, 2, 3)),
    },
    "selections": {
        "index": (lambda x: x[INDEX], M),
        "index of two": (lambda x: x[INDEX, INDEX], M),
        "index_select": (lambda x: x.index_select(0, INDEX), M),
        "index_select of columns": (lambda x: x.transpose(1, 2).index_select(1, INDEX[:40]), LINES),
        "gather": (lambda x: x.gather(1, WIDE), M),
        "take": (lambda x: x.take(INDEX), M),
        "scatter": (lambda x, y: x.scatter(0, WIDE, y), M, M),
        "scatter_add": (lambda x, y: x.scatter_add(0, WIDE, y), M, M),
        "scatter_reduce": (lambda x, y: x.scatter_reduce(0, WIDE, y, "mean"), M, M),
        "index_add": (lambda x, y: x.index_add(0, INDEX[:32], y), M, (32, 128)),
        "index_copy": (lambda x, y: x.index_copy(0, INDEX[:32], y), M, (32, 128)),
        "index_put": (lambda x, y: x.index_put((INDEX[:32],), y, accumulate=True), M, (32, 128)),
        "masked_fill": (lambda x: x.masked_fill(MASK, 0.0), M),
        "masked_scatter": (lambda x, y: x.masked_scatter(torch.ones(M, dtype=torch.bool), y), M, M),
        "where": (lambda x, y: torch.where(MASK, x, y), M, M),
        "tril": (torch.tril, M),
        "roll": (lambda x: x.roll(7, 0), M),
        "roll of both": (lambda x: x.roll((3, 7), (0, 1)), M),
        "flip": (lambda x: x.flip(0), M),
        "chunk": (lambda x: sum(c * c for c in x.chunk(4, 1)), M),
        "cat": (lambda x, y: torch.cat([x, y], 1), M, M),
        "stack": (lambda x, y: torch.stack([x, y]), M, M),
        "repeat_interleave": (lambda x: x.repeat_interleave(3, 0), M),
        "embedding": (lambda w: F.embedding(_numbers(64, 32, 8), w), (64, 32)),
        "bag": (lambda w: F.embedding_bag(_numbers(64, 32, 8), w, mode="sum"), (64, 32)),
        "bag, mean": (lambda w: F.embedding_bag(_numbers(64, 32, 8), w), (64, 32)),
        "bag, max": (lambda w: F.embedding_bag(_numbers(64, 32, 8), w, mode="max"), (64, 32)),
        "bag, weighted": (
            lambda w, each: F.embedding_bag(_numbers(64, 32, 64), w, per_sample_weights=each, mode="sum"),
            (64, 32),
            (32, 64),
        ),
        "diff": (lambda x: x.diff(dim=1), M),
        "trace": (torch.trace, M),
        "windows": (lambda x: x.unfold(1, 16, 8) * 1.0, M),
    },
    "sums": {
        **{
            f"{name} of {dim}": (lambda x, name=name, dim=dim: getattr(torch, name)(x, dim), M)
            for dim in (0, 1)
            for name in _SUMS
        },
        **{f"{name} of all": (getattr(torch, name), M) for name in _OF_ALL},
        "softmax, transposed": (lambda x: x.transpose(1, 2).softmax(1), LINES),
        "log_softmax, transposed": (lambda x: x.transpose(1, 2).log_softmax(1), LINES),
        "norm of rows": (lambda x: x.norm(3, dim=1), M),
        "sort": (lambda x: x.sort(0)[0], M),
        "topk": (lambda x: x.topk(8)[0], M),
        "kthvalue": (lambda x: x.kthvalue(3, 1)[0], M),
        "median": (lambda x: x.median(1)[0], M),
        "max of rows": (lambda x: x.max(1)[0], M),
        "cummax": (lambda x: x.cummax(0)[0], M),
        "of a mask": (lambda x: x * MASK.sum(1, keepdim=True), M),
        "mean of numbers": (lambda x: x.nanmean(1), M),
        "distance": (torch.dist, M, M),
        "distances": (torch.cdist, (64, 32), (64, 32)),
        "variance and mean": (lambda x: sum(torch.var_mean(x, 1)), M),
    },
    "pointwise": {
        **_each("gelu silu mish elu softplus hardswish hardtanh leaky_relu logsigmoid relu6 glu sigmoid tanh", M),
        "gelu, tanh": (lambda x: F.gelu(x, approximate="tanh"), M),
        "prelu": (F.prelu, LINES, (16,)),
        "mixed dtypes": (lambda x, y: x.bfloat16() * y, M, M),
        "in place, mixed dtypes": (lambda x: (x * 2).mul_(MASK), M),
        "compared": (lambda x: x * (x > LABELS[:, None]), M),
        "of integers": (lambda x: x * WIDE, M),
        "maximum": (torch.maximum, M, M),
        "minimum": (torch.minimum, M, M),
        "addcmul": (lambda x, y: torch.addcmul(x, x, y), M, M),
        "pow": (torch.pow, M, M),
        "xlogy": (torch.xlogy, M, M),
        "logaddexp": (torch.logaddexp, M, M),
        "lerp": (lambda x, y: x.lerp(y, 0.3), M, M),
        "clamp": (lambda x: x.clamp(0.2, 0.8), M),
        "absolute": (lambda x, y: torch.complex(x, y).abs(), M, M),
        "rfft": (lambda x: torch.view_as_real(torch.fft.rfft(x)), M),
        "fft2": (lambda x: torch.view_as_real(torch.fft.fft2(x)), M),
        "irfft": (lambda x: torch.fft.irfft(torch.fft.rfft(x)), M),
    },
    "losses": {**_losses("mean"), **_losses("none")},
    "products": {
        "linear": (F.linear, M, (64, 128), (64,)),
        "linear, of rows": (F.linear, (4, 16, 128), (64, 128)),
        "bmm": (torch.bmm, (8, 32, 32), (8, 32, 32)),
        "bmm, transposed": (lambda x, y: x @ y.transpose(1, 2), (8, 32, 64), (8, 32, 64)),
        "broadcast": (torch.matmul, (8, 32, 32), (32, 32)),
        "mv": (torch.mv, M, (128,)),
        "addmm": (torch.addmm, (64, 64), (64, 128), (128, 64)),
        "einsum": (lambda x, y: torch.einsum("bihd,bjhd->bhij", x, y), (2, 32, 4, 16), (2, 32, 4, 16)),
        "einsum of three": (lambda x, w, y: torch.einsum("bi,oij,bj->bo", x, w, y), (64, 32), (8, 32, 32), (64, 32)),
        "bilinear": (F.bilinear, (64, 32), (64, 24), (12, 32, 24)),
        "inverse": (torch.linalg.inv, SQUARES),
        "solved": (torch.linalg.solve, SQUARES, (16, 16, 8)),
        "cholesky": (lambda x: torch.linalg.cholesky(x @ x.mT), SQUARES),
        "cholesky, solved": (lambda x, y: torch.cholesky_solve(y, x), SQUARES, (16, 16, 8)),
        "determinants": (lambda x: torch.linalg.slogdet(x)[1], SQUARES),
        "qr": (lambda x: torch.linalg.qr(x)[0], SQUARES),
        "attention": (_attention(), HEADS, HEADS, HEADS),
        "attention, causal": (_attention(is_causal=True), HEADS, HEADS, HEADS),
        "attention, bias": (_attention(), HEADS, HEADS, HEADS, (2, 4, 64, 64)),
        "attention, dropout": (_attention(dropout_p=0.1), HEADS, HEADS, HEADS),
        "attention, grouped": (_attention(enable_gqa=True), HEADS, (2, 2, 64, 32), (2, 2, 64, 32)),
        "attention, by formula": (_attention(SDPBackend.MATH), HEADS, HEADS, HEADS),
    },
}


def _conv(*shapes: tuple[int, ...], transposed: bool = False, last: bool = False, **settings) -> tuple:
    """Of an input and weights; where there is one shape, of weights alone, on an image that needs no gradient."""
    n = len(shapes[-1]) - 2
    run = getattr(F, f"conv{'_transpose' if transposed else ''}{n}d")

    def of_input(x: Tensor, w: Tensor) -> Tensor:
        return run(_by_channels(x) if last else x, w, **settings)

    def of_weights(w: Tensor) -> Tensor:
        return run(torch.ones(2, 3, *[4 * k for k in w.shape[2:]]), w, **settings)

    return (of_input if len(shapes) == 2 else of_weights, *shapes)


CONVOLUTIONS = {
    "few channels": _conv((4, 3, 24, 24), (16, 3, 3, 3), padding=1),
    "many": _conv((4, 24, 16, 16), (40, 24, 3, 3), padding=1),
    "odd channels": _conv((4, 5, 24, 24), (7, 5, 3, 3), padding=1),
    "four channels": _conv((4, 4, 24, 24), (12, 4, 3, 3), padding=1),
    "strided": _conv((4, 32, 16, 16), (64, 32, 3, 3), stride=2, padding=1),
    "strided, few channels": _conv((2, 3, 56, 56), (64, 3, 7, 7), stride=2, padding=3),
    "dilated": _conv((4, 16, 24, 24), (32, 16, 3, 3), dilation=2, padding=2),
    "dilated, few channels": _conv((4, 3, 24, 24), (32, 3, 3, 3), dilation=2, padding=2),
    "strided and dilated": _conv((4, 16, 24, 24), (32, 16, 3, 3), stride=2, dilation=2, padding=2),
    "by channel": _conv((4, 32, 16, 16), (32, 1, 3, 3), padding=1, groups=32),
    "by channel, wide": _conv((4, 32, 16, 16), (32, 1, 7, 7), padding=3, groups=32),
    "by channel, odd": _conv((4, 20, 16, 16), (20, 1, 3, 3), padding=1, groups=20),
    "by channel, dilated": _conv((4, 32, 16, 16), (32, 1, 3, 3), dilation=2, padding=2, groups=32),
    "in groups": _conv((4, 32, 16, 16), (64, 16, 3, 3), padding=1, groups=2),
    "in groups of 24": _conv((4, 48, 16, 16), (48, 24, 3, 3), padding=1, groups=2),
    "in groups of four": _conv((4, 8, 24, 24), (8, 4, 3, 3), padding=1, groups=2),
    "in groups of few": _conv((4, 6, 24, 24), (32, 3, 3, 3), padding=1, groups=2),
    "in small groups": _conv((4, 20, 24, 24), (20, 5, 3, 3), padding=1, groups=4),
    "pointwise": _conv((4, 32, 16, 16), (32, 32, 1, 1)),
    "pointwise in groups": _conv((4, 32, 16, 16), (64, 8, 1, 1), groups=4),
    "pointwise, strided": _conv((4, 24, 24, 24), (20, 24, 1, 1), stride=2),
    "one small image": _conv((1, 16, 12, 12), (16, 16, 3, 3)),
    "patches": _conv((2, 3, 64, 64), (64, 3, 16, 16), stride=16),
    "patches of images without gradients": _conv((64, 3, 16, 16), stride=16),
    "small patches": _conv((64, 3, 4, 4), stride=4),
    "patches of 14": _conv((96, 3, 14, 14), stride=14),
    "patches of one channel": _conv((2, 1, 64, 64), (64, 1, 16, 16), stride=16),
    "patches, by channels": _conv((2, 3, 64, 64), (64, 3, 16, 16), stride=16, last=True),
    "channels innermost": _conv((4, 32, 16, 16), (48, 32, 3, 3), padding=1, last=True),
    "channels innermost, strided": _conv((4, 32, 16, 16), (48, 32, 3, 3), padding=1, stride=2, last=True),
    "channels innermost, dilated": _conv((4, 16, 16, 16), (32, 16, 3, 3), padding=2, dilation=2, last=True),
    "channels innermost, by channel": _conv((4, 32, 16, 16), (32, 1, 5, 5), padding=2, groups=32, last=True),
    "lines": _conv((4, 32, 128), (48, 32, 3)),
    "lines, strided": _conv((2, 1, 512), (32, 1, 10), stride=5),
    "lines, dilated": _conv((4, 16, 128), (32, 16, 3), dilation=2),
    "volumes": _conv((2, 16, 8, 8, 8), (24, 16, 3, 3, 3), padding=1),
    "volumes, few channels": _conv((2, 3, 8, 8, 8), (24, 3, 3, 3, 3), padding=1),
    "volumes, one channel": _conv((2, 1, 16, 16, 16), (24, 1, 3, 3, 3)),
    "volumes, dilated": _conv((2, 16, 8, 8, 8), (24, 16, 3, 3, 3), dilation=2, padding=2),
    "volumes, strided": _conv((2, 16, 8, 16, 16), (24, 16, 3, 3, 3), stride=2, padding=1),
    "volumes, by channel": _conv((2, 16, 8, 8, 8), (16, 1, 3, 3, 3), padding=1, groups=16),
    "volumes, pointwise": _conv((2, 16, 8, 8, 8), (24, 16, 1, 1, 1)),
    "patches of volumes": _conv((2, 3, 8, 32, 32), (32, 3, 2, 16, 16), stride=(2, 16, 16)),
    "transposed": _conv((4, 32, 12, 12), (32, 16, 2, 2), stride=2, transposed=True),
    "transposed, overlapping": _conv((4, 32, 12, 12), (32, 16, 4, 4), stride=2, padding=1, transposed=True),
    "transposed, odd": _conv((4, 32, 12, 12), (32, 3, 3, 3), stride=2, padding=1, transposed=True),
    "transposed, not strided": _conv((4, 32, 12, 12), (32, 16, 3, 3), padding=1, transposed=True),
    "transposed, patches": _conv((4, 32, 4, 4), (32, 3, 16, 16), stride=16, transposed=True),
    "transposed lines": _conv((4, 32, 64), (32, 16, 4), stride=2, padding=1, transposed=True),
    "transposed volumes": _conv((2, 16, 6, 8, 8), (16, 8, 2, 2, 2), stride=2, transposed=True),
}
