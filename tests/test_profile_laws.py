"""Growth laws from exact points."""

import pytest

from fused_remat.profile.laws import fit_law

SIZES = [4, 8, 12, 16]
MIB = 2**20


@pytest.mark.parametrize(
    ("value", "kind", "coefficients", "words"),
    [
        (lambda s: 7 * MIB, "constant", (7 * MIB,), "does not grow with batch"),
        (lambda s: 3 * MIB * s, "linear", (0, 3 * MIB), "grows linearly with batch: 3.0 MiB each"),
        (
            lambda s: 3 * MIB * s + 5 * MIB,
            "linear",
            (5 * MIB, 3 * MIB),
            "grows linearly with batch: 3.0 MiB each above a fixed 5.0 MiB",
        ),
        (lambda s: 2 * MIB * s * s, "quadratic", (0, 0, 2 * MIB), "grows with the square of batch"),
        (
            lambda s: MIB * s * s + 8 * MIB * s,
            "quadratic",
            (0, 8 * MIB, MIB),
            "grows with the square of batch (50 % of it at batch 8; the rest more slowly)",
        ),
        (lambda s: MIB * s**3, "power", None, "grows about as batch^3.0"),
        (lambda s: {4: 9, 8: 1, 12: 9, 16: 2}[s] * MIB, "irregular", None, "follows no simple law in batch"),
        (lambda s: 0, "constant", (0,), "does not grow with batch"),
    ],
)
def test_fit_law(value, kind, coefficients, words):
    law = fit_law(SIZES, [value(s) for s in SIZES])
    assert law.kind == kind
    assert law.in_words("batch", 8) == words
    if coefficients is not None:
        assert law.coefficients == coefficients  # exactly
        assert law.residual == 0
        assert law.at(100) == value(100)


def test_fit_law_forgives_rounding_to_blocks_but_not_a_slow_square():
    rounded = [-(-(1000 * s + 7) // 512) * 512 for s in (400, 800, 1200, 1600)]
    assert fit_law([400, 800, 1200, 1600], rounded).kind == "linear"
    slow = [1_000_000 * s + 10_000 * s * s for s in SIZES]  # 14 % square at the largest size
    assert fit_law(SIZES, slow).kind == "quadratic"


def test_fit_law_of_an_image_side_counts_pixels():
    law = fit_law([112, 224, 336, 448], [48 * s * s + 1000 for s in (112, 224, 336, 448)], power=2)
    assert law.kind == "linear"
    assert law.coefficients == (1000, 48)
    assert law.exponent == pytest.approx(2, abs=0.01)
    assert law.in_words("resolution", 224) == "grows linearly with the number of pixels"
    attention = fit_law([112, 224, 336, 448], [s**4 for s in (112, 224, 336, 448)], power=2)
    assert attention.in_words("resolution", 224) == "grows with the square of the number of pixels"


def test_law_to_dict():
    assert fit_law([1, 2, 3], [5, 10, 15]).to_dict() == {
        "kind": "linear",
        "coefficients": [0.0, 5.0],
        "exponent": pytest.approx(1.0),
        "residual": 0.0,
        "power": 1,
    }
