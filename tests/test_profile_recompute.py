"""The bound on what recompute can do, and folding, on recordings made by hand."""

import math

import pytest

from fused_remat.profile.modules import ModuleBytes, folded, patterns
from fused_remat.profile.recompute import alive_at_peak, bound_without_kept, highest_sum
from fused_remat.profile.verdict import moment_of_peak, shares_of_peak
from fused_remat.recording import Allocation, Recording, Span

PHASES = {"forward": (0.0, 10.0), "backward": (10.0, 30.0), "optimizer": (30.0, 40.0)}


def recording(*allocations, static=0):
    return Recording(
        device="cpu",
        source="predicted",
        static={"parameters": static, "buffers": 0, "optimizer": 0, "inputs": 0, "gradients": 0},
        allocations=tuple(Allocation(*a) for a in allocations),
        spans=(Span("a", "forward", 0.0, 9.0),),
        phases=PHASES,
    )


def kept(nbytes, born, died):
    return nbytes, born, died, "kept", "a", "forward"


def temporary(nbytes, born, died, phase="backward"):
    return nbytes, born, died, "temporary", "a", phase


def test_the_bound_counts_a_kept_tensor_while_it_is_made_and_used():
    chain = recording(
        kept(100, 1.0, 24.0), kept(100, 2.0, 18.0), kept(100, 3.0, 12.0),
        temporary(7, 11.0, 13.0), temporary(7, 17.0, 19.0), temporary(7, 23.0, 25.0), static=1000,
    )  # fmt: skip
    assert chain.peak_bytes == 1000 + 300 + 7
    assert bound_without_kept(chain) == 1000 + 100 + 7


def test_the_bound_counts_together_what_one_operation_uses():
    both = recording(kept(100, 1.0, 12.0), kept(50, 2.0, 12.5), temporary(7, 11.0, 20.0))
    assert bound_without_kept(both) == 157  # nothing is made between the two releases


def test_the_bound_cannot_lower_what_is_not_kept():
    optimizer = recording(kept(10, 1.0, 12.0), (500, 31.0, 35.0, "temporary", "", "optimizer"), static=100)
    assert optimizer.peak_phase == "optimizer"
    assert bound_without_kept(optimizer) == optimizer.peak_bytes == 600
    assert moment_of_peak(optimizer) == "in the optimizer's step"


def test_shares_of_the_peak_add_up():
    mixed = recording(
        kept(100, 1.0, 15.0), (60, 11.0, math.inf, "gradients", "a", "backward"), temporary(40, 12.0, 13.0),
        (10, 11.5, 14.0, "rebuilt", "a", "backward"), (2, 5.0, math.inf, "output", "", "forward"), static=188,
    )  # fmt: skip
    assert alive_at_peak(mixed) == {
        "parameters": 188, "buffers": 0, "optimizer": 0, "inputs": 0,
        "gradients": 60, "kept": 100, "temporary": 40, "rebuilt": 10, "output": 2,
    }  # fmt: skip
    shares = shares_of_peak(mixed)
    assert shares["activations"] == 110 / 400
    assert sum(shares.values()) == pytest.approx(1)
    assert moment_of_peak(mixed) == "in backward of a"


def test_highest_sum_frees_before_it_takes():
    assert highest_sum([(0, 2, 5), (2, 4, 5), (1, 3, 1), (3, 3, 99)]) == 6
    assert highest_sum([]) == 0


def modules(*entries):
    """From (path, class, parameters, kept)."""
    return [ModuleBytes(path, cls, parameters, kept, 0, 0) for path, cls, parameters, kept in entries]


def layer(path, kept, parameters=8):
    return (path, "Block", parameters, kept), (f"{path}.up", "Linear", parameters, kept)


def test_equal_layers_fold_and_others_do_not():
    tree = modules(
        ("", "Model", 100, 700), ("layers", "ModuleList", 90, 600),
        *layer("layers.0", 100), *layer("layers.1", 100), *layer("layers.2", 90), *layer("layers.3", 40),
        *layer("layers.4", 270, parameters=9), ("head", "Linear", 10, 100), ("unused", "Linear", 10, 0),
    )  # fmt: skip
    rows = [(row.depth, row.name, row.count, row.module.kept_bytes, row.kept_bytes) for row in folded(tree)]
    assert rows == [
        (0, "(the model)", 1, 700, 700),
        (1, "layers", 1, 600, 600),
        (2, "0-2 (x3)", 3, 100, 290),
        (3, "up", 1, 100, 100),
        (2, "3", 1, 40, 40),  # built alike, and keeps much less: converted or checkpointed
        (3, "up", 1, 40, 40),
        (2, "4", 1, 270, 270),
        (3, "up", 1, 270, 270),
        (1, "head", 1, 100, 100),
    ]


def test_a_container_of_equal_layers_needs_no_row():
    tree = modules(
        ("", "Model", 100, 200), ("layers", "ModuleList", 90, 200), *layer("layers.0", 100), *layer("layers.1", 100)
    )
    assert [(row.depth, row.name) for row in folded(tree)] == [(0, "(the model)"), (1, "layers.0-1 (x2)"), (2, "up")]


def test_few_rows_leave_the_small_ones_out():
    tree = modules(("", "Model", 0, 10_000), *[(f"m{i}", "Linear", i, 100 + i) for i in range(50)])
    rows = folded(tree, rows=20)
    assert len(rows) <= 20 and rows[0].name == "(the model)"


def test_patterns_star_the_numbers_of_equal_layers_only():
    tree = modules(
        ("", "Model", 1, 0), ("layers", "ModuleList", 1, 0), *layer("layers.0", 1), *layer("layers.1", 2),
        ("head", "Sequential", 3, 0), ("head.0", "Linear", 1, 0), ("head.1", "GELU", 0, 0), ("head.2", "Linear", 2, 0),
        ("(the loss)", "", 0, 1),
    )  # fmt: skip
    assert patterns(tree) == {
        "": "", "layers": "layers", "layers.0": "layers.*", "layers.0.up": "layers.*.up", "layers.1": "layers.*",
        "layers.1.up": "layers.*.up", "head": "head", "head.0": "head.0", "head.1": "head.1", "head.2": "head.2",
        "(the loss)": "(the loss)",
    }  # fmt: skip
