"""Sizes in bytes as people write and read them: "6GiB", "500 MB", 0.6 of a device."""

from __future__ import annotations

import re

from fused_remat.budget import check_bytes

_UNITS = {
    "": 1, "b": 1,
    **{prefix + "b": 1000**power for power, prefix in enumerate("kmgtp", start=1)},
    **{prefix + "ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
}  # fmt: skip
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[a-z]*|%)")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_ROLLS_OVER = 1023.95  # what "%.1f" would print as 1024.0
_FORMS = 'a number of bytes (an int) or a string such as "6GiB" or "500 MB"'


def parse_bytes(name: str, value: object, *, whole: int | None = None) -> int:
    """The bytes that `value` stands for, rounded down; at least 1.

    Args:
        name: of the argument, for the errors.
        value: an int (bytes); a string, a number with a unit: B, KiB, MiB, GiB, TiB, PiB (powers of 1024) or KB, MB,
            GB, TB, PB (powers of 1000), any case, with or without a space; or a fraction of `whole`, as a float above
            0 and at most 1 or as a string that ends in "%".
        whole: what fractions are taken of, in bytes (the memory of a device). None: fractions are refused.

    Raises:
        TypeError: `value` is of another type (True included).
        ValueError: it is no size, below 1 byte, 2**63 bytes or more, or a fraction where there is no `whole` to take
            it of or above 1.
    """
    if isinstance(value, float):
        return _fraction(name, value, value, whole)
    if isinstance(value, str):
        return _written(name, value, whole)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be {_forms(whole)}, got {value!r}")
    return check_bytes(name, value)


def format_bytes(nbytes: float) -> str:
    """`nbytes` in the binary unit that fits: "0 B", "512 B", "1.5 KiB", "64.0 MiB", "4.06 GiB"; a sign is kept.

    Two decimals from GiB on, where one would hide tens of MiB.
    """
    size, unit = abs(nbytes), 0
    while size >= (1024 if unit == 0 else _ROLLS_OVER) and unit < len(_BINARY) - 1:
        size, unit = size / 1024, unit + 1
    decimals = (0, 1, 1, 2, 2, 2)[unit]
    return f"{'-' if nbytes < 0 else ''}{size:.{decimals}f} {_BINARY[unit]}"


def _written(name: str, text: str, whole: int | None) -> int:
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{name} must be {_forms(whole)}, got {text!r}")
    number, unit = match["number"], match["unit"]
    if unit == "%":
        return _fraction(name, text, float(number) / 100, whole)
    if unit not in _UNITS:
        raise ValueError(
            f"{name} has the unknown unit {unit!r} in {text!r}; expected B, KiB, MiB, GiB, TiB, KB, MB, ..."
        )
    if unit == "" and "." in number:
        raise ValueError(
            f"{name} must be {_forms(whole)}, got {text!r}: it has no unit, and bytes are whole numbers; as text, a "
            'fraction is written "60%"'
        )
    return check_bytes(name, int(number) * _UNITS[unit] if number.isdecimal() else int(float(number) * _UNITS[unit]))


def _fraction(name: str, given: object, fraction: float, whole: int | None) -> int:
    if whole is None:
        raise ValueError(
            f"{name} is the fraction {given!r}, and there is no device memory here to take it of; "
            f"give {_FORMS}, or state the size of the device"
        )
    if not 0 < fraction <= 1:
        raise ValueError(
            f"{name} as a fraction must be above 0 and at most 1, got {given!r}; bytes are given as an int"
        )
    return check_bytes(name, int(fraction * whole))


def _forms(whole: int | None) -> str:
    return _FORMS if whole is None else f"{_FORMS}, or a fraction of the device such as 0.6"
