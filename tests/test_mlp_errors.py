"""Bad input to the MLP gets one clear error, in eager and under torch.compile; so do backends and budgets."""

from __future__ import annotations

import subprocess
import sys

import mlp_cases as cases
import pytest
import torch

import fused_remat
from fused_remat import dispatch

needs_extension = pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension))


def _tensors(**changes):
    given = cases.operands(3, 4, 6, 5, gated=True, dtype=torch.float32, requires_grad=False)
    return {name: value for name, value in (given | changes).items() if value is not None}


def _adapter(out, width, *, rank=2, device="cpu", dtype=torch.float32, scale=1.0):
    a, b = torch.ones(rank, width, dtype=dtype, device=device), torch.ones(out, rank, dtype=dtype, device=device)
    return fused_remat.LowRank(a, b, scale)


# case -> (changed operands, changed settings, error, words of its message)
BAD = {
    "0-dim x": ({"x": torch.ones(())}, {}, ValueError, "x must be"),
    "width of x": ({"x": torch.ones(3, 5)}, {}, ValueError, r"x has 5 features.*D=4"),
    "rank of w_up": ({"w_up": torch.ones(6)}, {}, ValueError, r"w_up must be \[out, in\]"),
    "rank of w_down": ({"w_down": torch.ones(1, 5, 6)}, {}, ValueError, "w_down must be"),
    "shape of w_down": ({"w_down": torch.ones(5, 7)}, {}, ValueError, r"w_down must have shape \[5, 6\].*\[5, 7\]"),
    "shape of w_gate": ({"w_gate": torch.ones(6, 3)}, {}, ValueError, r"w_gate must have shape \[6, 4\]"),
    "shape of b_up": ({"b_up": torch.ones(5)}, {}, ValueError, r"b_up must have shape \[6\]"),
    "shape of b_down": ({"b_down": torch.ones(6)}, {}, ValueError, r"b_down must have shape \[5\]"),
    "shape of b_gate": ({"b_gate": torch.ones(1, 6)}, {}, ValueError, r"b_gate must have shape \[6\]"),
    "b_gate alone": ({"w_gate": None}, {}, ValueError, "b_gate was given without w_gate"),
    "no tensor": ({"x": [1.0, 2.0]}, {}, TypeError, "x must be a tensor, got list"),
    "dtype": (
        {"w_up": torch.ones(6, 4, dtype=torch.float64)},
        {},
        TypeError,
        "w_up is torch.float64, x is torch.float32",
    ),
    "integers": ({"x": torch.ones(3, 4, dtype=torch.int64)}, {}, TypeError, "x must be floating point"),
    "device": ({"b_up": torch.ones(6, device="meta")}, {}, ValueError, "b_up is on meta, x on cpu"),
    "adapter of up": (
        {},
        {"up_adapter": _adapter(6, 5)},
        ValueError,
        r"up_adapter.a and up_adapter.b must be \[r, 4\]",
    ),
    "adapter of down": (
        {},
        {"down_adapter": _adapter(6, 4)},
        ValueError,
        r"down_adapter.b must be \[r, 6\] and \[5, r\]",
    ),
    "ranks of an adapter": (
        {},
        {"gate_adapter": fused_remat.LowRank(torch.ones(2, 4), torch.ones(6, 3))},
        ValueError,
        r"gate_adapter.b must be .* got \[2, 4\] and \[6, 3\]",
    ),
    "dims of an adapter": (
        {},
        {"up_adapter": fused_remat.LowRank(torch.ones(4), torch.ones(6, 1))},
        ValueError,
        "up_adapter.a and",
    ),
    "device of an adapter": (
        {},
        {"up_adapter": _adapter(6, 4, device="meta")},
        ValueError,
        "up_adapter.a is on meta, x on cpu",
    ),
    "dtype of an adapter": (
        {},
        {"up_adapter": _adapter(6, 4, dtype=torch.int32)},
        TypeError,
        "up_adapter.a must be floating point",
    ),
    "complex adapter": (
        {},
        {"up_adapter": _adapter(6, 4, dtype=torch.complex64)},
        TypeError,
        "up_adapter.a is torch.complex64",
    ),
    "scale of an adapter": (
        {},
        {"down_adapter": _adapter(5, 6, scale=float("nan"))},
        ValueError,
        "down_adapter.scale must be a finite",
    ),
    "a tuple as adapter": (
        {},
        {"up_adapter": (torch.ones(2, 4), torch.ones(6, 2))},
        TypeError,
        "must be a fused_remat.LowRank or None",
    ),
    "factor that is no tensor": (
        {},
        {"up_adapter": fused_remat.LowRank(torch.ones(2, 4), None)},
        TypeError,
        "up_adapter.b must be a tensor",
    ),
    "gate_adapter alone": (
        {"w_gate": None, "b_gate": None},
        {"gate_adapter": _adapter(6, 4)},
        ValueError,
        "gate_adapter was given without w_gate",
    ),
    "activation": ({}, {"activation": "swish"}, ValueError, "activation must be one of gelu.*got 'swish'"),
    "keep name": ({}, {"keep": ("hidden",)}, ValueError, "keep names.*hidden"),
    "keep gate of a plain layer": (
        {"w_gate": None, "b_gate": None},
        {"keep": ("gate",)},
        ValueError,
        "plain MLP can keep",
    ),
    "keep type": ({}, {"keep": "up"}, TypeError, "keep must be a tuple"),
    "keep fraction": ({}, {"keep": 1.5}, ValueError, "keep as a fraction"),
    "dropout of 1": ({}, {"dropout_p": 1.0}, ValueError, r"dropout_p must be a number in \[0, 1\)"),
    "negative dropout": ({}, {"dropout_p": -0.1}, ValueError, "dropout_p"),
    "dropout NaN": ({}, {"dropout_p": float("nan")}, ValueError, "dropout_p"),
    "negative workspace": ({}, {"workspace": -1}, ValueError, "workspace must be at least 1 byte"),
    "workspace type": ({}, {"workspace": 1.5}, TypeError, "workspace must be an int"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case):
    operands, chosen, error, message = BAD[case]
    given, state = _tensors(**operands), torch.get_rng_state()
    with pytest.raises(error, match=message):
        fused_remat.mlp(**given, **{"dropout_p": 0.5, **chosen})
    assert torch.equal(torch.get_rng_state(), state), "nothing may be drawn before the refusal"


@pytest.mark.parametrize("case", [case for case in BAD if case != "no tensor"])
def test_bad_input_is_refused_under_compile(case):
    operands, chosen, error, message = BAD[case]
    torch._dynamo.reset()
    compiled = torch.compile(lambda **given: fused_remat.mlp(**given, **chosen), backend="eager")
    with pytest.raises(error, match=message):
        compiled(**_tensors(**operands))


def test_fullgraph_compile_names_the_reason():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda **given: fused_remat.mlp(**given, activation="swish"), backend="eager", fullgraph=True
    )
    with pytest.raises(torch._dynamo.exc.Unsupported, match="activation must be one of gelu"):
        compiled(**_tensors())


@needs_extension
def test_the_op_checks_its_own_arguments():
    """A caller of torch.ops gets an error too, never a crash or a wrong number."""
    given = _tensors()
    given["x"].requires_grad_()
    layer = cases.op_layer(given)
    op, good = torch.ops.fused_remat.mlp, ("gelu", 0.0, 0, 0, 1000, "cpp")
    op(given["x"], *layer, *good)
    bad = {
        "x has 3 features": (given["x"][:, :3], *layer, *good),
        "w_down has": (given["x"], layer[0], layer[1][:, :4], *layer[2:], *good),
        "up_a and up_b must be": (given["x"], *layer[:8], *[torch.ones(2, 3)] * 2, *layer[10:], *good),
        "down_a must be": (given["x"], *layer[:12], *[torch.ones(6)] * 2, *layer[14:], *good),
        "gate_b go together": (given["x"], *layer[:10], torch.ones(2, 4), *layer[11:], *good),
        "gate_a was given without": (
            given["x"],
            *layer[:4],
            None,
            None,
            *layer[6:10],
            torch.ones(2, 4),
            torch.ones(6, 2),
            *layer[12:],
            *good,
        ),
        "b_up must be": (given["x"], *layer[:2], layer[2][:3], *layer[3:], *good),
        "activation": (given["x"], *layer, "swish", *good[1:]),
        "dropout_p": (given["x"], *layer, "gelu", 1.0, *good[2:]),
        "keep_up": (given["x"], *layer, "gelu", 0.0, 7, *good[3:]),
        "mlp_fwd_chunk_nobody": (given["x"], *layer, *good[:5], "nobody"),
    }
    for message, arguments in bad.items():
        with pytest.raises((ValueError, RuntimeError), match=message):
            op(*arguments)


# Budgets ------------------------------------------------------------------------------------------------------------


def test_workspace_settings_take_precedence_in_order():
    from fused_remat import budget

    assert budget.resolve(None, "cpu") == 32 * 2**20 and budget.resolve(None, "cuda") == 256 * 2**20
    with fused_remat.workspace(5000):
        assert budget.resolve(None, "cpu") == 5000 and budget.resolve(77, "cpu") == 77
        with fused_remat.workspace(600):
            assert budget.resolve(None, "cpu") == 600
        assert budget.resolve(None, "cpu") == 5000
    assert budget.resolve(None, "cpu") == 32 * 2**20


@pytest.mark.parametrize(("value", "error"), ((0, ValueError), (-5, ValueError), (True, TypeError), (1.5, TypeError)))
def test_bad_workspace_context(value, error):
    with pytest.raises(error, match="bytes must be"), fused_remat.workspace(value):
        pass


@pytest.mark.parametrize(("value", "expected"), (("4096", "4096"), ("32MiB", "ValueError"), ("0", "ValueError")))
def test_workspace_from_the_environment(value, expected):
    code = (
        "from fused_remat import budget\n"
        "try: print(budget.resolve(None, 'cpu'))\n"
        "except ValueError as error: print('ValueError', error)"
    )
    environment = {"FUSED_REMAT_WORKSPACE": value, "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(expected)
    assert expected != "ValueError" or "FUSED_REMAT_WORKSPACE" in done.stdout


# Backends -----------------------------------------------------------------------------------------------------------


def test_an_unknown_backend_is_refused():
    with (
        pytest.raises(ValueError, match=r"triton, cuda, cpp, aten, reference; got 'cudnn'"),
        fused_remat.backend("cudnn"),
    ):
        pass


@pytest.mark.parametrize("name", cases.REFUSED_ON_A_CPU)
def test_a_named_backend_that_cannot_run_says_why(name, monkeypatch):
    with cases.refused_on_a_cpu(name, "mlp", monkeypatch):
        fused_remat.mlp(**_tensors())


@needs_extension
def test_the_chosen_backend_is_the_one_that_ran():
    given = _tensors()
    for name in ("cpp", "aten"):
        with fused_remat.backend(name):
            ran = cases.kernels_of(lambda: fused_remat.mlp(**given))
        assert f"mlp_fwd_chunk_{name}" in ran
    with fused_remat.backend("reference"):
        assert cases.kernels_of(lambda: fused_remat.mlp(**given)) == []
    assert "mlp_fwd_chunk_cpp" in cases.kernels_of(lambda: fused_remat.mlp(**given))


@needs_extension
def test_complex_operands_take_the_reference_path():
    given = {name: value.to(torch.complex64) for name, value in _tensors(w_gate=None, b_gate=None).items()}
    assert cases.kernels_of(lambda: fused_remat.mlp(**given, activation="tanh")) == []
    with fused_remat.backend("cpp"), pytest.raises(RuntimeError, match="complex64 is not one of"):
        fused_remat.mlp(**given, activation="tanh")


def test_why_not_lists_every_reason():
    call = dispatch.Call("mlp", "cuda", torch.complex64, "gelu", reference_only="a reason")
    reasons = dispatch.why_not("cpp", call)
    assert len(reasons) >= 2 and any("run on cpu" in reason for reason in reasons)
    assert dispatch.why_not("reference", call) == []
