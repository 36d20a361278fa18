"""The policy "sqrt": chains cut into equal segments, whatever their length, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from convert_cases import assert_same
from policy_cases import ConvBlock, Looped, MLPBlock, image, mlp_chain, rows, seeded, stepped
from torch import nn

from fused_remat import convert, profile
from fused_remat.policy import Arrangement, SegmentError, assignment_of
from fused_remat.policy.chains import equal_segments


@pytest.mark.parametrize(
    ("length", "lengths"),
    [
        (1, [1]),
        (2, [1, 1]),
        (3, [1, 2]),
        (4, [2, 2]),
        (5, [1, 2, 2]),
        (7, [2, 2, 3]),
        (10, [2, 3, 2, 3]),
        (64, [8] * 8),
    ],
)
def test_n_blocks_are_cut_into_the_square_root_of_n_rounded_up(length, lengths):
    blocks = [str(i) for i in range(length)]
    segments = equal_segments(blocks)
    assert [len(segment) for segment in segments] == lengths
    assert [path for segment in segments for path in segment] == blocks


def regions(model: nn.Module, policy: object = "sqrt", **options: object) -> list[str]:
    found = assignment_of(Arrangement(model, **options), policy)
    return [" ".join(paths) for paths in found.regions]


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_chains_of_any_length_compute_what_stock_does(depth):
    def make() -> nn.Module:
        return seeded(lambda: Looped(*(MLPBlock() for _ in range(depth))))

    model, x = make(), rows()
    report = convert(model, policy="sqrt")
    assert report.count("region") == {2: 2, 3: 2, 5: 3}[depth] and report.count("mlp") == 0
    assert_same(stepped(model, x), stepped(make(), x), 0.0)


class Staged(nn.Module):
    """A chain of stages that are chains themselves, and one beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.stages = nn.Sequential(*(nn.Sequential(*(ConvBlock() for _ in range(4))) for _ in range(2)))
        self.tail = nn.Sequential(ConvBlock(), ConvBlock(), ConvBlock())

    def forward(self, x):
        return self.tail(self.stages(self.stem(x)))


def test_every_chain_is_cut_and_stages_inside():
    model, stock, x = seeded(Staged), seeded(Staged), image()[:, :, :16, :16]
    expected = ["stages.0.0 stages.0.1", "stages.0.2 stages.0.3", "stages.1.0 stages.1.1", "stages.1.2 stages.1.3",
                "tail.0", "tail.1 tail.2"]  # fmt: skip
    assert regions(model) == expected
    convert(model, policy="sqrt", verify="always")
    assert_same(stepped(model, x), stepped(stock, x), 0.0)  # running statistics, too: they moved once


def test_rules_and_exclude_leave_the_rest_of_a_chain():
    model = mlp_chain()
    assert regions(model) == ["0 1", "2 3"]
    assert regions(model, exclude="0") == ["1", "2 3"]
    assert regions(model, {"1": "everything", "*": "sqrt"}) == ["0", "2", "3"]
    # A rule for what is inside a segment: fused there, and no region of its own.
    found = assignment_of(Arrangement(model), {"3.mlp": "full", "2.mlp": "region", "?": "sqrt"})
    assert found.regions == (("0", "1"), ("2", "3")) and found.layers["3.mlp"] == () and found.layers["0.mlp"] is None
    # Modules that compute alone are blocks, too.
    lines = nn.Sequential(*(nn.Tanh() for _ in range(4)))
    assert regions(lines, {"?": "sqrt"}) == ["0 1", "2 3"]


def test_a_model_without_a_chain_is_refused():
    with pytest.raises(ValueError, match="'sqrt', but there is no chain to cut: no consecutive children of equal"):
        convert(MLPBlock(), policy="sqrt")


def test_a_loop_that_reads_between_the_blocks_is_named():
    class Reads(Looped):
        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x

    model = seeded(lambda: Reads(*(MLPBlock() for _ in range(4))))
    convert(model, policy="sqrt")
    with pytest.raises(
        SegmentError, match=r"the output of layers\.0 was read, but layers\.0 \.\.\. layers\.1 run as"
    ) as e:
        model(rows())
    # The error holds what was read, as that of a notebook does. Whoever looks at all tensors passes that by.
    assert e.value.__traceback__ is not None and profile(MLPBlock(), rows()).recording.kept_bytes > 0
    with torch.no_grad():
        assert model(rows()).shape == rows().shape
