"""The example z = (x^2 + 1)^2, one step at a time: a = x^2, b = a + 1, z = b^2, and back to dz/dx.

Backward needs x (the derivative of the first square is 2x) and b (that of the last is 2b). A variant either keeps b, or
drops it and rebuilds it from x. Steps do not depend on x; only the values do. Pure Python: no tensors, no text.
"""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass

SCHEMA = 1

# What a person may type: ASCII digits with an optional sign, decimal point and exponent. The page knows the same.
NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
# Typed for a minus sign: the mathematical one, and the long-vowel mark that Japanese keyboards put on the same key.
MINUS = "\u2212\u30fc"
LARGEST = "1.1e77"  # below the fourth root of the largest float64, from which on z is infinite


class BadNumber(ValueError):
    """`x` cannot be used. `why` is "empty", "not a number", "not finite" or "too large"."""

    def __init__(self, why: str, got: str) -> None:
        super().__init__(f"x: {why}: {got!r}")
        self.why, self.got = why, got


@dataclass(frozen=True)
class Step:
    """One step of a variant.

    Attributes:
        name: of the step; its sentence in the table of words.
        phase: "start", "forward" or "backward".
        computes: the name of what is computed, a value or a gradient; None where nothing is.
        exists: values that exist once the step is over, in the order x, a, b, z.
        kept: those of them that are held for backward.
        freed: values that the step frees.
        rebuilt: those that exist because backward redid their operation.
        gradients: the gradients computed so far.
        counted: what the counter shows: the values kept after forward for backward. It stands still in backward.
        redone: values whose operations have been redone so far.
    """

    name: str
    phase: str
    computes: str | None
    exists: tuple[str, ...]
    kept: tuple[str, ...]
    freed: tuple[str, ...]
    rebuilt: tuple[str, ...]
    gradients: tuple[str, ...]
    counted: tuple[str, ...]
    redone: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """The whole run at one x, b kept or dropped. `values`: see `values_at`."""

    keep_b: bool
    steps: tuple[Step, ...]
    values: dict[str, float]

    @property
    def kept(self) -> dict[str, float]:
        """The values kept after forward for backward: x and b, or x alone."""
        return {name: self.values[name] for name in self.steps[-1].counted}

    @property
    def redone(self) -> tuple[str, ...]:
        """Values whose operations backward redoes: none, or a and b. Never z."""
        return self.steps[-1].redone


def parse(text: str) -> float:
    """The number that `text` writes, with a decimal point. Raises `BadNumber`."""
    plain = unicodedata.normalize("NFKC", text).strip().translate(dict.fromkeys(map(ord, MINUS), "-"))
    if not plain:
        raise BadNumber("empty", text)
    if re.fullmatch(r"[+-]?(inf|infinity|nan)", plain, re.IGNORECASE):
        raise BadNumber("not finite", text)
    if not re.fullmatch(NUMBER, plain, re.ASCII):
        raise BadNumber("not a number", text)
    x = float(plain)
    if math.isinf(x):
        raise BadNumber("too large", text)
    values_at(x)
    return x


def values_at(x: float) -> dict[str, float]:
    """x, a, b, z, then dz/db, dz/da, dz/dx as "db", "da", "dx", and the factors of the chain rule.

    "factor_b" = 2b, "factor_a" = 1, "factor_x" = 2x; their product is dz/dx. Everything in float64, as torch does it.
    Raises `BadNumber` where x is not finite or some value would not be.
    """
    if not math.isfinite(x):
        raise BadNumber("not finite", repr(x))
    x += 0.0  # -0.0 is shown as 0
    a = x * x
    b = a + 1
    z = b * b
    factor_b, factor_a, factor_x = 2 * b, 1.0, 2 * x
    db = factor_b
    da = db * factor_a
    dx = da * factor_x + 0.0
    if not math.isfinite(z):
        raise BadNumber("too large", repr(x))
    return {
        "x": x, "a": a, "b": b, "z": z, "db": db, "da": da, "dx": dx,
        "factor_b": factor_b, "factor_a": factor_a, "factor_x": factor_x,
    }  # fmt: skip


def steps(keep_b: bool) -> tuple[Step, ...]:
    """Every step of a variant, in order."""
    after_forward = ("x", "b") if keep_b else ("x",)
    variant = "keep" if keep_b else "drop"
    script = _Script()
    script.add("start", "start", exists="x")
    script.add("forward_a", "forward", "a", exists="xa", kept="x")
    script.add("forward_b", "forward", "b", exists="xab", kept="x")
    script.add(f"forward_z_{variant}", "forward", "z", exists="xabz", kept=after_forward)
    script.add(f"forward_over_{variant}", "forward", exists=(*after_forward, "z"), kept=after_forward)
    if not keep_b:
        script.add("redo_a", "backward", "a", exists="xaz", kept="x", rebuilt="a")
        script.add("redo_b", "backward", "b", exists="xabz", kept="x", rebuilt="ab")
    script.add(f"backward_b_{variant}", "backward", "db", exists="xz", kept="x")
    script.add("backward_a", "backward", "da", exists="xz", kept="x")
    script.add("backward_x", "backward", "dx", exists="xz")
    return tuple(script.steps)


def run(x: float, keep_b: bool) -> Run:
    """The run at `x`. Raises `BadNumber`, see `values_at`."""
    return Run(keep_b, steps(keep_b), values_at(x))


class _Script:
    """Steps in the making: what is freed, redone and counted follows from what exists before and after a step."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def add(
        self,
        name: str,
        phase: str,
        computes: str | None = None,
        *,
        exists: str | tuple[str, ...],
        kept: str | tuple[str, ...] = (),
        rebuilt: str | tuple[str, ...] = (),
    ) -> None:
        last = self.steps[-1] if self.steps else None
        before = last.exists if last else ()
        gradients = last.gradients if last else ()
        redone = last.redone if last else ()
        if computes in ("db", "da", "dx"):
            gradients = (*gradients, computes)
        elif phase == "backward" and computes is not None:
            redone = (*redone, computes)
        self.steps.append(
            Step(
                name, phase, computes, tuple(exists), tuple(kept),
                freed=tuple(value for value in before if value not in exists), rebuilt=tuple(rebuilt),
                gradients=gradients, counted=last.counted if last and phase == "backward" else tuple(kept),
                redone=redone,
            )
        )  # fmt: skip
