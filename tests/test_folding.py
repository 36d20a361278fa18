"""Equal layers as one row, and tables as aligned text: what every report of the package is printed with."""

from __future__ import annotations

import pytest

from fused_remat._columns import aligned
from fused_remat._folding import name_of, neighbours, order_of, starred


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("layers.3.mlp", "layers.*.mlp"),
        ("0", "*"),
        ("a.10.b.2", "a.*.b.*"),
        ("conv3.0", "conv3.*"),
        ("layers.3 [2]", "layers.* [2]"),
        ("layers.3.mlp [12]", "layers.*.mlp [12]"),
        ("block 3", "block 3"),
        ("", ""),
    ],
)
def test_indices_become_stars(path, pattern):
    assert starred(path) == pattern


def test_paths_are_ordered_as_layers_run():
    assert sorted(["b.10", "b.9.mlp", "b.9", "a", "b.2"], key=order_of) == ["a", "b.2", "b.9", "b.9.mlp", "b.10"]


def test_neighbours_that_are_alike_share_a_group():
    assert neighbours([1, 3, 2, 4, 5], lambda one, other: one % 2 == other % 2) == [[1, 3], [2, 4], [5]]
    assert neighbours([], lambda one, other: True) == []


@pytest.mark.parametrize(
    ("paths", "name"),
    [
        ([""], "(the model)"),
        (["blocks.3"], "blocks.3"),
        (["blocks.0", "blocks.1", "blocks.2"], "blocks.0-2 (x3)"),
        (["h.8.mlp", "h.9.mlp", "h.10.mlp"], "h.8-10.mlp (x3)"),
        (["h.0.mlp", "h.1.mlp", "h.3.mlp", "h.7.mlp", "h.8.mlp"], "h.0-1,3,7-8.mlp (x5)"),
        (["h.2", "h.0", "h.1"], "h.0-2 (x3)"),
        (["0", "1"], "0-1 (x2)"),
        (["stem", "head"], "stem ... head (x2)"),
        (["a.0.b.0", "a.1.b.1"], "a.0.b.0 ... a.1.b.1 (x2)"),
        (["a.0", "a.1.b"], "a.0 ... a.1.b (x2)"),
        (["a.0", "a.0.b"], "a.0 ... a.0.b (x2)"),
        (["", "a"], "(the model) ... a (x2)"),
    ],
)
def test_what_a_row_of_layers_is_called(paths, name):
    assert name_of(paths) == name


def test_columns_are_aligned_to_both_sides():
    rows = [("layer", "bytes", ""), ("a", "10", "x"), ("long name", "7", "")]
    assert aligned(rows, right=(1,)) == ["layer      bytes", "a             10  x", "long name      7"]
    with pytest.raises(ValueError):
        aligned([("a", "b"), ("c",)])


def test_columns_shrink_in_their_order_and_keep_the_ends_that_are_asked_for():
    rows = [("name", "line"), ("abcdefghij", "path/to/file.py:12")]
    assert aligned(rows, width=24, squeeze={1: 10, 0: 6}, ends=(1,)) == ["name        line", "abcdefghij  ..file.py:12"]
    assert aligned(rows, width=18, squeeze={1: 10, 0: 6}, ends=(1,)) == ["name    line", "abcd..  ..le.py:12"]
    assert aligned(rows, width=30, squeeze={1: 10}) == ["name        line", "abcdefghij  path/to/file.py:12"]
    assert aligned(rows, width=9) == ["name   ..", "abcdefg.."]


def test_cells_go_on_in_further_lines_and_nothing_is_lost():
    sentence = "it throws its weights away and nobody knows why that should be so"
    rows = [("layer", "note", "because"), ("blocks.0.attention", "fine", sentence), ("b", "", "")]
    lines = aligned(rows, width=60, wrap=(1, 2))
    assert max(map(len, lines)) <= 60
    assert lines[0] == "layer               note  because"
    assert lines[1].startswith("blocks.0.attention  fine  it throws its weights")
    assert " ".join(line[26:].strip() for line in lines[1:-1]) == sentence and lines[-1] == "b"
    assert aligned(rows, wrap=(1, 2))[1].endswith(sentence)  # no width: one line
