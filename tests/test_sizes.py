"""Sizes as people write and read them."""

import pytest

from fused_remat.budget import check_workspace
from fused_remat.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        (1, 1),
        (123456, 123456),
        ("6GiB", 6 * 2**30),
        ("6 gib", 6 * 2**30),
        (" 500 MB ", 500_000_000),
        ("1.5KiB", 1536),
        (".5 MiB", 2**19),
        ("2B", 2),
        ("77", 77),
        ("1TB", 10**12),
        ("9007199254740993 B", 9007199254740993),  # exact where a float is not
    ],
)
def test_parse_bytes(written, nbytes):
    assert parse_bytes("budget", written) == nbytes
    assert parse_bytes("budget", written, whole=5) == nbytes


@pytest.mark.parametrize(("fraction", "nbytes"), [(0.6, 600), (1.0, 1000), ("25%", 250), ("0.5 %", 5)])
def test_parse_bytes_takes_fractions_of_the_whole(fraction, nbytes):
    assert parse_bytes("budget", fraction, whole=1000) == nbytes
    with pytest.raises(ValueError, match=r"budget is the fraction .* no device memory here"):
        parse_bytes("budget", fraction)


@pytest.mark.parametrize("value", [True, None, [6], b"6GiB"])
def test_parse_bytes_refuses_other_types(value):
    with pytest.raises(TypeError, match="budget must be a number of bytes"):
        parse_bytes("budget", value, whole=1000)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("6 gigs", "unknown unit 'gigs'"),
        ("GiB", "budget must be"),
        ("-6GiB", "budget must be"),
        ("", "budget must be"),
        ("1.5", "no unit"),
        (0, "at least 1 byte"),
        ("0 MiB", "at least 1 byte"),
        (0.0001, "at least 1 byte"),
        (1.5, "above 0 and at most 1"),
        (0.0, "above 0 and at most 1"),
        (-0.5, "above 0 and at most 1"),
        (float("nan"), "above 0 and at most 1"),
        ("150%", "above 0 and at most 1"),
        ("9000 PiB", "below 2\\*\\*63"),
    ],
)
def test_parse_bytes_says_what_is_wrong(value, says):
    with pytest.raises(ValueError, match=says):
        parse_bytes("budget", value, whole=1000)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (64 * 2**20, "64.0 MiB"),
        (int(4.06 * 2**30), "4.06 GiB"),
        (2**60, "1024.00 PiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_format_bytes(nbytes, text):
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize("value", [0, -1, "0 MiB"])
def test_a_size_that_is_no_workspace_is_not_told_about_tiles(value):
    with pytest.raises(ValueError, match=r"^limit must be at least 1 byte, got -?\d$"):
        parse_bytes("limit", value)
    with pytest.raises(ValueError, match=r"; a pass takes the smallest tile below what fits$"):
        check_workspace("workspace", 0)
