"""docs/background.md: every statement has a row, and every test that a row names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "background.md").read_text(encoding="utf-8")


def test_every_statement_has_a_row():
    rows = [name for cell in re.findall(r"^\| ([AB]\d[^|]*) \|", PAGE, re.M) for name in cell.split(", ")]
    assert rows == [*(f"A{i}" for i in range(1, 23)), *(f"B{i}" for i in range(1, 35))]


def test_every_test_that_is_named_exists():
    defined = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        defined |= set(re.findall(r"^def (test_\w+)\(", file.read_text(encoding="utf-8"), re.M))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert named - defined == set()
    assert len(named) > 50


def test_every_statement_that_is_met_names_a_test():
    met = re.findall(r"^\| ([AB]\d[^|]*) \|[^|]*\| met \|(.*)\|$", PAGE, re.M)
    assert len(met) > 40
    assert [name for name, shown in met if not re.search(r"`test_\w+`", shown)] == []


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([\w./]+)(?:#[\w-]+)?\)", PAGE):
        assert (ROOT / "docs" / target).is_file(), target
