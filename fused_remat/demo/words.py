"""Every sentence of the demo, in three languages, and how numbers and values are put into them.

The tables are JSON files beside this one; the terminal and the page read the same. The page has `fill`, `shown` and
`fillings` once more in JavaScript: what both print for a number is the same (tested).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Context, Decimal
from pathlib import Path

LANGUAGES = ("en", "pl", "ja")
Words = Mapping[str, str]

_DIGITS = 10
# Powers of ten that are written out; beyond, a number gets an exponent.
_SMALLEST, _LARGEST = -5, 12


@functools.cache
def words(language: str) -> Words:
    """The table of `language`, one of `LANGUAGES`."""
    return json.loads((Path(__file__).parent / f"words_{language}.json").read_text(encoding="utf-8"))


def fill(template: str, values: Mapping[str, object]) -> str:
    """`template` with each {name} replaced. Raises KeyError for a name that has no value."""
    return re.sub(r"\{([^}]+)\}", lambda match: str(values[match[1]]), template)


def shown(number: float) -> str:
    """At most 10 significant digits, ties away from zero, without trailing zeros; the same on every machine."""
    if not number:
        return "0"
    rounded = Context(prec=_DIGITS, rounding=ROUND_HALF_UP).create_decimal(Decimal(number)).normalize()
    exponent = rounded.adjusted()
    if _SMALLEST <= exponent < _LARGEST:
        return f"{rounded:f}"
    digits = "".join(map(str, rounded.as_tuple().digits))
    mantissa = digits[0] + (f".{digits[1:]}" if digits[1:] else "")
    return f"{'-' * (rounded < 0)}{mantissa}e{exponent:+d}"


def fillings(values: Mapping[str, float]) -> dict[str, str]:
    """Each value as text by its name, and by its name in brackets with brackets around it where it is negative."""
    texts = {name: shown(value) for name, value in values.items()}
    return texts | {f"({name})": f"({text})" if text.startswith("-") else text for name, text in texts.items()}


def listed(table: Words, items: list[str]) -> str:
    """The items with the language's separator, or its word for none."""
    return table["separator"].join(items) if items else table["none"]


def kibibytes(nbytes: int) -> str:
    return f"{nbytes / 1024:.1f} KiB"
