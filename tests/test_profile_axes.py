"""What a sweep changes in the inputs."""

import pytest
import torch
from torch import nn

from fused_remat.profile import Axis
from fused_remat.profile.axes import resolve_sweeps


class Model(nn.Module):
    def forward(self, tokens, mask=None, *, labels=None):
        raise NotImplementedError


def sweeps(sweep, *args, **kwargs):
    return resolve_sweeps(sweep, Model(), args, kwargs)


def test_names_stand_for_dimensions_and_sizes_around_the_own():
    (batch,) = sweeps("batch", torch.arange(24).reshape(4, 6))
    assert (batch.name, batch.base, batch.sizes, batch.power) == ("batch", 4, (2, 4, 6, 8), 1)
    (sequence,) = sweeps({"sequence": None}, torch.zeros(4, 5, dtype=torch.long))
    assert (sequence.base, sequence.sizes) == (5, (5, 10, 15, 20))
    (resolution,) = sweeps(["resolution"], torch.zeros(2, 3, 32, 48))
    assert (resolution.base, resolution.sizes, resolution.power) == (32, (16, 32, 48, 64), 2)
    assert [t.shape for t in resolution.make(64)[0]] == [(2, 3, 64, 96)]
    assert [s.name for s in sweeps(("batch", "sequence"), torch.zeros(4, 6))] == ["batch", "sequence"]
    assert sweeps(None, torch.zeros(4, 6)) == []


def test_values_are_repeated_and_cut_so_that_they_stay_valid():
    tokens = torch.tensor([[1, 2, 3]])
    (sequence,) = sweeps({"sequence": [2, 3, 5]}, tokens)
    made = {size: sequence.make(size)[0][0].tolist() for size in sequence.sizes}
    assert all(sequence.make(size)[0][0].untyped_storage().nbytes() == 8 * size for size in sequence.sizes)
    assert made == {2: [[1, 2]], 3: [[1, 2, 3]], 5: [[1, 2, 3, 1, 2]]}
    assert tokens.tolist() == [[1, 2, 3]]


def test_every_input_of_that_size_grows_in_containers_too_and_others_stay():
    x = torch.zeros(4, 6, requires_grad=True)
    extra = {"pair": [torch.zeros(4, 2), 7], "table": torch.zeros(9, 6)}
    (batch,) = sweeps("batch", x, mask=extra, labels=torch.zeros(4))
    args, kwargs = batch.make(8)
    assert args[0].shape == (8, 6) and args[0].requires_grad and args[0].is_leaf
    assert kwargs["mask"]["pair"][0].shape == (8, 2) and kwargs["mask"]["pair"][1] == 7
    assert kwargs["mask"]["table"] is extra["table"]
    assert kwargs["labels"].shape == (8,)
    assert extra["pair"][0].shape == (4, 2)


def test_inputs_by_position_and_name():
    tokens, mask, labels = torch.zeros(2, 6), torch.zeros(2, 1, 6, 6), torch.zeros(2, 6)
    for first, second in ((0, 1), ("tokens", "mask")):
        (sequence,) = sweeps({"length": {first: 1, second: (2, 3), "labels": -1}}, tokens, mask, labels=labels)
        assert (sequence.base, sequence.power) == (6, 1)
        args, kwargs = sequence.make(9)
        assert [tuple(t.shape) for t in (*args, kwargs["labels"])] == [(2, 9), (2, 1, 9, 9), (2, 9)]


@pytest.mark.parametrize(
    ("made", "args", "kwargs"),
    [
        (lambda n: torch.zeros(n), [(3,)], {}),
        (lambda n: (torch.zeros(n), torch.zeros(n, 1)), [(3,), (3, 1)], {}),
        (lambda n: {"tokens": torch.zeros(n)}, [], {"tokens": (3,)}),
        (lambda n: ((torch.zeros(n),), {"mask": torch.zeros(n, 2)}), [(3,)], {"mask": (3, 2)}),
    ],
)
def test_inputs_by_a_function(made, args, kwargs):
    (own,) = sweeps({"boxes": Axis(inputs=made, sizes=(9, 3, 6))}, torch.zeros(1))
    assert (own.base, own.sizes) == (None, (3, 6, 9))
    got_args, got_kwargs = own.make(3)
    assert [tuple(t.shape) for t in got_args] == args
    assert {name: tuple(t.shape) for name, t in got_kwargs.items()} == kwargs


@pytest.mark.parametrize(
    ("sweep", "error", "says"),
    [
        (3, TypeError, "sweep must be a name"),
        (["batch", 1], TypeError, "sweep must be a name"),
        ({1: 0}, TypeError, "sweep must be a name"),
        ({"batch": "two"}, TypeError, "sweep must be a name"),
        ({"batch": lambda n: n}, TypeError, "needs sizes"),
        ({"batch": [1, 2.0, 3]}, TypeError, "must be ints"),
        ({"batch": [1, 2]}, ValueError, "at least 3 different sizes"),
        ({"batch": [1, 2, 2]}, ValueError, "at least 3 different sizes"),
        ({"batch": [0, 1, 2]}, ValueError, "at least 1"),
        ("heads", ValueError, "does not say which dimension"),
        ("resolution", ValueError, "none has it"),
        ({"length": {}}, ValueError, "names no input"),
        ({"length": {"label": 0}}, ValueError, "names the input 'label', and the inputs given are"),
        ({"length": {0: 5}}, ValueError, "a tensor of shape"),
        ({"length": {"mask": 0}}, ValueError, "which is a int"),
        ({"length": {0: "first"}}, TypeError, "must be a dimension"),
        ({"length": {0: 1, "labels": 0}}, ValueError, "must have one size there"),
        (Axis(0), TypeError, "sweep must be a name"),
        ({"batch": Axis(inputs=lambda n: n)}, ValueError, "sizes must be given"),
        ({"batch": Axis(dims="first")}, TypeError, "dimensions must be an int"),
    ],
)
def test_errors_name_the_sweep(sweep, error, says):
    with pytest.raises(error, match=says):
        sweeps(sweep, torch.zeros(4, 6), 5, labels=torch.zeros(4))


def test_a_size_that_does_not_come_out_even():
    (sweep,) = sweeps({"resolution": [15, 16, 32]}, torch.zeros(1, 3, 16, 20))
    with pytest.raises(ValueError, match="would not be whole"):
        sweep.make(15)


def test_a_function_that_returns_no_inputs():
    (own,) = sweeps({"boxes": Axis(inputs=lambda n: n, sizes=(1, 2, 3))}, torch.zeros(1))
    with pytest.raises(TypeError, match="must return a tensor, a tuple"):
        own.make(1)
