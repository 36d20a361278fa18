"""How bytes grow with a size: the polynomial through a few runs, and the words for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from fused_remat.sizes import format_bytes

# The allocator of CUDA rounds every block up, so that a straight line is straight to about a thousandth.
_TOLERANCE = 2e-3
_KINDS = ("constant", "linear", "quadratic")


@dataclass(frozen=True)
class Law:
    """Bytes as a function of a size.

    Attributes:
        kind: "constant", "linear" or "quadratic", the lowest of these polynomials that meets every point to 0.2 % of
            the largest value; "power" where none does and the bytes rise with every size; else "irregular".
        coefficients: of 1, u and u^2 (those of its kind; of the quadratic least-squares fit where `kind` is none of
            them), u being the size raised to `power`.
        exponent: of the size, between the smallest and the largest run: log(bytes ratio) / log(size ratio).
        residual: the largest distance of a point from the polynomial, as a fraction of the largest value.
        power: in how many dimensions the size counts: 2 for an image's side, whose pixels are its square.
    """

    kind: str
    coefficients: tuple[float, ...]
    exponent: float
    residual: float
    power: int = 1

    def at(self, size: float) -> float:
        """The polynomial's bytes at that size: a prediction."""
        return sum(c * size ** (self.power * degree) for degree, c in enumerate(self.coefficients))

    def in_words(self, axis: str, size: int) -> str:
        """The law as the end of a sentence that begins with what grows; `size` is the one of the model's own inputs."""
        what = axis if self.power == 1 else ("the number of pixels" if self.power == 2 else f"{axis}^{self.power}")
        if self.kind == "constant":
            return f"does not grow with {axis}"
        if self.kind == "linear":
            fixed = self.coefficients[0]
            apart = f" above a fixed {format_bytes(fixed)}" if fixed > _TOLERANCE * abs(self.at(size)) else ""
            each = f": {format_bytes(self.coefficients[1])} each" if self.power == 1 else ""
            return f"grows linearly with {what}{each}{apart}"
        if self.kind == "quadratic":
            share = self.coefficients[2] * size ** (2 * self.power) / self.at(size)
            part = "" if share > 0.995 else f" ({100 * share:.0f} % of it at {axis} {size}; the rest more slowly)"
            return f"grows with the square of {what}{part}"
        if self.kind == "power":
            return f"grows about as {axis}^{self.exponent:.1f}"
        return f"follows no simple law in {axis}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "kind": self.kind,
            "coefficients": list(self.coefficients),
            "exponent": self.exponent,
            "residual": self.residual,
            "power": self.power,
        }


def fit_law(sizes: Sequence[int], nbytes: Sequence[int], power: int = 1) -> Law:
    """The law of `nbytes[i]` at `sizes[i]`: at least 3 sizes, ascending and distinct. Exact where the bytes are.

    Three points lie on some quadratic whatever they are, so that "quadratic" means something from four sizes on.
    """
    points = [(Fraction(size**power), Fraction(value)) for size, value in zip(sizes, nbytes, strict=True)]
    largest = max(map(abs, nbytes)) or 1
    kind = "power" if all(a < b for a, b in pairwise(nbytes)) else "irregular"
    for degree, name in enumerate(_KINDS):
        polynomial = _least_squares(points, degree)
        residual = max(abs(_value(polynomial, u) - y) for u, y in points) / largest
        if residual <= _TOLERANCE:
            kind = name
            break
    return Law(kind, tuple(map(float, polynomial)), _exponent(sizes, nbytes), float(residual), power)


def _exponent(sizes: Sequence[int], nbytes: Sequence[int]) -> float:
    if min(nbytes[0], nbytes[-1]) <= 0:
        return 0.0
    return math.log(nbytes[-1] / nbytes[0]) / math.log(sizes[-1] / sizes[0])


def _value(polynomial: Sequence[Fraction], u: Fraction) -> Fraction:
    return sum((c * u**degree for degree, c in enumerate(polynomial)), Fraction(0))


def _least_squares(points: Sequence[tuple[Fraction, Fraction]], degree: int) -> list[Fraction]:
    """Coefficients, lowest first, of the polynomial of that degree nearest to the points (the normal equations)."""
    n = degree + 1
    rows = [
        [*(sum(u ** (i + j) for u, _ in points) for j in range(n)), sum(y * u**i for u, y in points)] for i in range(n)
    ]
    for i in range(n):
        rows[i] = [value / rows[i][i] for value in rows[i]]  # positive: the sizes are distinct
        for k in range(n):
            if k != i:
                rows[k] = [a - rows[k][i] * b for a, b in zip(rows[k], rows[i], strict=True)]
    return [row[n] for row in rows]
