"""Sections of documents that a command prints."""

from __future__ import annotations

from pathlib import Path


def markers(name: str) -> tuple[str, str]:
    """The lines before and after the section of that name."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def section(path: Path, name: str) -> str:
    """What stands between the markers. Raises ValueError where they are not there once, in order."""
    first, last = markers(name)
    text = path.read_text()
    if text.count(first) != 1 or text.count(last) != 1 or text.index(first) > text.index(last):
        raise ValueError(f"{path} must hold {first!r} and then {last!r}, once each")
    return text.split(first)[1].split(last)[0].strip("\n")


def replace_section(path: Path, name: str, content: str) -> None:
    """Put `content` between the markers."""
    section(path, name)
    first, last = markers(name)
    text = path.read_text()
    before, after = text.split(first)[0], text.split(last)[1]
    path.write_text(f"{before}{first}\n{content}\n{last}{after}")
