"""The name of `_C_cuda`, which `import fused_remat` compares with the sources: what is read for it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from fused_remat import _build, _build_cuda, _cuda_toolkit, _extension


def test_every_source_is_read_once(monkeypatch):
    read = Counter()
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: pytest.fail("as text, a second time"))
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.update([path]) or read_bytes(path))
    _build_cuda.fingerprint(_build.source_root())
    assert set(_build_cuda.sources(_build.source_root())) < set(read)
    assert set(read.values()) == {1}


def test_the_name_changes_with_what_is_included_alone(tmp_path):
    files = {
        "cuda/kernel.cu": '#include "rows.cuh"\n  #  include "../shared.h"\n#include <vector>\n',
        "cuda/rows.cuh": '#include "deep/from_root.h"\n#include "missing.h"\n',
        "shared.h": '#include "../outside.h"\n',
        "deep/from_root.h": "",
        "library_small.cpp": "",
        "unrelated.h": "",
        "other.cpp": "",
        "cuda/README.md": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    whole = _build_cuda.fingerprint(tmp_path)
    assert whole == _build_cuda.fingerprint(tmp_path)
    counts = {}
    for name, text in files.items():
        (tmp_path / name).write_text(text + "// changed\n")
        counts[name] = _build_cuda.fingerprint(tmp_path) != whole
        (tmp_path / name).write_text(text)
    assert [name for name, counted in counts.items() if not counted] == ["unrelated.h", "other.cpp", "cuda/README.md"]


def test_a_library_for_another_torch_asks_no_source(tmp_path, monkeypatch):
    (tmp_path / f"_C_cuda.torch2.1-cu11.0-80-0123456789ab{_build.EXT_SUFFIX}").touch()
    monkeypatch.setattr(_extension, "__file__", str(tmp_path / "_extension.py"))
    monkeypatch.setattr(_cuda_toolkit, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(_build_cuda, "fingerprint", lambda root: pytest.fail("the sources were read"))
    path, reason = _extension._ahead_of_time_cuda()
    assert path is None and "was built for torch 2.1 with CUDA 11.0, this is torch" in reason
