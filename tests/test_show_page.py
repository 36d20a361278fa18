"""The offline page: its numbers are those of the JSON, it loads nothing, and it can be read in every way."""

from __future__ import annotations

import io
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

pytest.importorskip("matplotlib")

import torch
from chromium import chromium, needs_chromium
from show_cases import UNIT, chain
from torch import nn

from fused_remat import show
from fused_remat.plan import FrontPoint
from fused_remat.policy import Assignment
from fused_remat.profile.modules import ModuleBytes
from fused_remat.recording import record_step
from fused_remat.show.theme import DARK, LIGHT
from fused_remat.sizes import format_bytes
from fused_remat.training_step import make_step

REGIONS = tuple(tuple(f"layers.{first + i}" for i in range(4)) for first in (0, 4, 8))
FRONT = tuple(FrontPoint((16 - i) * UNIT, i * 10**9, None if i < 4 else (15 - i) * UNIT) for i in range(8))
BASELINES = (show.Point(8 * UNIT, 9e9, "measured", "full"),)


class Page(HTMLParser):
    """Tags, ids, what would be loaded, texts of cells and of alternatives."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.ids, self.loads, self.images, self.focusable = Counter(), [], [], [], 0
        self.data: list[list[tuple[float, str]]] = []  # (number, text) by row of a table
        self.rows: list[list[str]] = []
        self._number = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags[tag] += 1
        self.ids += [found["id"]] if "id" in found else []
        self.loads += [found[name] for name in ("src", "srcset", "href", "data", "poster") if found.get(name)]
        self.focusable += found.get("tabindex") == "0"
        if found.get("role") == "img":
            self.images.append(found["aria-label"])
        if tag == "tr":
            self.rows.append([])
            self.data.append([])
        if tag == "data":
            self._number = found["value"]

    def handle_data(self, text):
        if self.rows and self.lasttag in ("th", "td", "data"):
            self.rows[-1].append(text)
            if self._number is not None:
                self.data[-1].append((float(self._number), text))
                self._number = None

    def numbers(self, name: str) -> list[list[float]]:
        """The exact numbers of every row of that name."""
        return [[n for n, _ in data] for row, data in zip(self.rows, self.data, strict=True) if row[:1] == [name]]


@pytest.fixture(scope="module")
def recordings():
    return {"before": chain(12), "after": chain(12, segment=4, source="predicted")}


@pytest.fixture(scope="module")
def written(recordings, tmp_path_factory):
    """(path, text) of a page with everything on it."""
    law = SimpleNamespace(in_words=lambda axis, size: f"grows linearly with {axis}")
    points = [
        SimpleNamespace(size=s, source="measured", kept_bytes=s * UNIT, peak_bytes=2 * s * UNIT) for s in (1, 2, 4)
    ]
    tensors = [
        SimpleNamespace(module=f"layers.{i}.fc", op="AddmmBackward0", shape=(4, 8), dtype="float32", nbytes=nbytes,
                        source="block.py:41") for nbytes in (UNIT, *range(1, 42)) for i in range(12)
    ]  # fmt: skip
    paths = ["", "layers", *(f"layers.{i}{inner}" for i in range(12) for inner in ("", ".fc"))]
    modules = [ModuleBytes(path, "Module", 0, 0, 0, 0) for path in paths]
    profile = SimpleNamespace(
        verdict="Activations are 71 % of the peak: <recompute> can help.", advice=["Half the batch & accumulate."],
        notes=[], kept=tensors, modules=modules,
        growth={"batch": SimpleNamespace(axis="batch", base=1, points=points, laws={"kept": law, "peak": law})},
    )  # fmt: skip
    assignment = Assignment({f"layers.{i}.mlp": () for i in range(12)}, REGIONS)
    plan = SimpleNamespace(
        front=FRONT,
        chosen=5,
        everything_kept=17 * UNIT,
        minimise="flops",
        budget_bytes=12 * UNIT,
        assignment=assignment,
        explain=lambda: "keeps & rebuilds",
    )
    path = tmp_path_factory.mktemp("page") / "report.html"
    arguments = dict(profile=profile, plan=plan, recordings=recordings, baselines=BASELINES)
    assert show.write_report(path, **arguments) == path
    first = path.read_bytes()
    show.write_report(path, **arguments)
    assert path.read_bytes() == first  # the same numbers, the same bytes
    return path, first.decode()


def test_page_loads_nothing_and_runs_nothing(written):
    _, text = written
    page = Page(text)
    assert not any(page.tags[tag] for tag in ("script", "link", "iframe", "object", "embed", "img"))
    assert "://" not in text and "@import" not in text and "http" not in text
    assert all(target.startswith("#") for target in page.loads)
    assert set(re.findall(r"url\((.)", text)) == {"#"}
    assert len(text) < 2_000_000


def test_ids_are_unique_and_every_reference_has_its_target(written):
    page = Page(written[1])
    assert len(page.ids) == len(set(page.ids))
    wanted = set(re.findall(r"url\(#([^)]*)\)", written[1])) | {target[1:] for target in page.loads}
    wanted |= set(re.findall(r'aria-labelledby="([^"]*)"', written[1]))
    assert wanted and wanted <= set(page.ids)


def test_pictures_take_their_colours_from_the_page(written):
    _, text = written
    pictures = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert not set(re.findall(r"#[0-9a-f]{6}\b", pictures)) - set(re.findall(r'id="[^"]*(#[0-9a-f]{6})', pictures))
    for name in ("ground", "ink", "fused", "rebuilt", "gradients", "alarm"):
        assert f"var(--{name})" in pictures
        assert f"--{name}: {getattr(LIGHT, name)};" in text and f"--{name}: {getattr(DARK, name)};" in text


def test_tables_have_the_numbers_of_the_recordings(written, recordings):
    page = Page(written[1])
    seen = Counter()
    for number, recording in enumerate(recordings.values()):
        facts = recording.to_dict()
        assert page.numbers("together")[number][1] == facts["peak_bytes"]
        assert page.numbers("kept for backward")[number] == [facts["kept_bytes"]]
        assert page.numbers("budget")[number] == [12 * UNIT]
        top = next(levels for moment, levels in recording.timeline() if sum(levels.values()) == recording.peak_bytes)
        timeline = recording.timeline()
        for kind in (kind for kind in top if any(levels[kind] for _, levels in timeline)):
            highest = max(levels[kind] for _, levels in timeline)
            assert page.numbers(kind)[seen[kind]] == [top[kind], highest]
            seen[kind] += 1
    assert seen["rebuilt"] == 1 and seen["kept"] == 2
    assert all(format_bytes(n) == text for row in page.data for n, text in row if "B" in text and "FLOP" not in text)
    kept = [a for a in recordings["before"].to_dict()["allocations"] if a["kind"] == "kept"]
    assert [page.numbers(a["module"])[0] for a in kept] == [[a["nbytes"]] * 2 for a in kept]
    ways = [row for name in ("considered", "chosen", "full", "everything") for row in page.numbers(name)]
    assert sorted(ways) == sorted(
        [[17 * UNIT, 0], [8 * UNIT, 9e9], *([p.peak, p.cost] for p in FRONT)]
        + [[p.measured, p.cost] for p in FRONT if p.measured]
    )
    assert page.numbers("layers.*.fc")[:2] == [[UNIT, 12 * UNIT], [41, 12 * 41]]  # equal layers in one row
    assert page.numbers("kept over batch") == [[UNIT], [2 * UNIT], [4 * UNIT]]


def test_every_picture_has_its_numbers_in_words_and_takes_the_focus(written, recordings):
    page = Page(written[1])
    assert page.tags["svg"] == len(page.images) == 5
    memory, before, after, tradeoff, growth = page.images
    for name, recording in recordings.items():
        assert (
            f"{name}: Memory over one step, {recording.source} on cpu: peak {format_bytes(recording.peak_bytes)}"
            in memory
        )
    assert "The budget is 12.0 MiB" in memory and "over it by 4.9 MiB" in memory
    assert "12 values kept until backward uses them, 0 dropped" in before
    assert "3 values kept until backward uses them, 9 dropped and rebuilt" in after
    assert "Chosen, measured: 10.0 MiB at 5 GFLOP." in tradeoff and "everything, predicted: 17.0 MiB" in tradeoff
    assert "kept over batch (measured) 1.0 MiB at 1 to 4.0 MiB at 4, grows linearly with batch" in growth
    assert page.focusable == page.tags["svg"] + page.tags["table"] + page.tags["pre"]


def test_page_escapes_texts_and_says_what_it_leaves_out(written):
    _, text = written
    assert "&lt;recompute&gt; can help" in text and "keeps &amp; rebuilds" in text and "<recompute>" not in text
    assert "Largest kept tensors: 24 smaller ones are left out." in text
    assert "Kept and peak are two numbers" in text and "Not in these pictures" in text
    assert "layers.*.mlp  RRRRRRRRRRRR" in text and "layers.*      [RRRR] [RRRR] [RRRR]" in text


def test_odd_names_stay_texts(tmp_path):
    recording = chain(3)
    odd = tuple(replace(a, module=f"{a.module}.<b>日本</b>\"'$") for a in recording.allocations)
    text = show.write_report(tmp_path / "a.html", recordings=replace(recording, allocations=odd)).read_text("utf-8")
    assert "<b>" not in text and "&lt;b&gt;日本&lt;/b&gt;" in text


def test_report_of_a_real_step_shows_its_numbers(tmp_path):
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    step = make_step(model, (torch.randn(8, 16),), optimizer=torch.optim.AdamW)
    measured, predicted = record_step(step), record_step(step, fake=True)
    path = show.write_report(tmp_path / "real.html", recordings={"run": measured, "fake": predicted}, budget="1MiB")
    page = Page(path.read_text("utf-8"))
    for number, recording in enumerate((measured, predicted)):
        assert page.numbers("together")[number] == [recording.peak_bytes] * 2
        assert page.numbers("parameters")[number] == [recording.static["parameters"]] * 2
        assert page.numbers("kept for backward")[number] == [recording.kept_bytes]
    assert (
        "run: Memory over one step, measured" in page.images[0]
        and "fake: Memory over one step, predicted" in page.images[0]
    )


@needs_chromium
def test_page_in_a_browser(written, tmp_path):
    from matplotlib.image import imread

    path, _ = written
    with chromium(tmp_path / "browser") as page:
        for scheme, theme in (("light", LIGHT), ("dark", DARK)):
            page.media(prefers_color_scheme=scheme)
            page.size(1200, 900)
            page.open(path)
            assert page.problems == [] and page.requests == [path.resolve().as_uri()]
            pixels = imread(io.BytesIO(page.screenshot()))[..., :3]
            ground = [int(theme.ground[i : i + 2], 16) / 255 for i in (1, 3, 5)]
            assert pixels[0, 0].tolist() == pytest.approx(ground, abs=0.004)
            kept = [int(theme.kept[i : i + 2], 16) / 255 for i in (1, 3, 5)]
            assert (abs(pixels - kept).max(axis=-1) < 0.01).sum() > 10_000  # the kept bytes are painted in its colour
        drawn = page.look(
            "[...document.querySelectorAll('svg')].map(s => [s.clientWidth, s.scrollWidth, s.clientHeight, "
            "getComputedStyle(s.querySelector('text')).fill])"
        )
        for width, inside, height, ink in drawn:
            assert width >= 500 and inside <= width and height > 100
            assert ink == f"rgb({', '.join(str(int(DARK.ink[i : i + 2], 16)) for i in (1, 3, 5))})"
        # Nothing but a table may be wider than a small window, and those scroll in their own box.
        page.size(360, 640)
        assert page.look("document.documentElement.scrollWidth") <= 360
        outline = []
        for _ in range(3):
            page.press("Tab")
            outline.append(page.look("[document.activeElement.getAttribute('role'), document.activeElement.ariaLabel]"))
        assert [role for role, _ in outline] == ["region", "img", "region"] and all(label for _, label in outline)
