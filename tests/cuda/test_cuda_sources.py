"""The sources of the CUDA C++ kernels and of their host code keep the rules of `source_rules`."""

from __future__ import annotations

import re

import pytest
from source_rules import RULES, complaints, sources, without_comments


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.name)
def test_a_source_keeps_the_rules(path):
    assert complaints(path.name, path.read_text()) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.why)
def test_a_rule_finds_what_it_is_for(rule):
    name = f"sample{rule.endings[0]}"
    text = f"// a comment\nvoid f() {{\n  {rule.example}\n}}\n"
    (found,) = complaints(name, text)
    assert found.startswith(f"{name}:3: ") and found.endswith(rule.why)
    for allowed in rule.but_in:
        assert complaints(allowed, text) == []


def test_comments_and_strings_are_no_code():
    text = 'f("cudaMalloc(" /* cudaFree\n */);  // t.cpu()\n#include "x.h"\n'
    assert complaints("a.cpp", text) == []
    assert without_comments(text) == 'f("" \n);  \n#include "x.h"\n'


def test_only_one_library_defines_an_op():
    """Both the library for GPUs and the one for the host may be in a process; a second definition would abort it."""
    fragments = [text for path in sources() for text in path.read_text().split("TORCH_LIBRARY_FRAGMENT")[1:]]
    assert len(fragments) >= 3
    for text in fragments:
        first, op = re.search(r'is_defined\("fused_remat::(\w+)"\)\) return;\s+m\.def\(\s*"(\w+)', text).groups()
        assert first == op
