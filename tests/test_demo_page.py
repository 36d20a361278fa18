"""The page of `fused-remat demo` in a real browser: keys, clicks, languages, counters, names; and its colours."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import pytest
from chromium import chromium, needs_chromium

from fused_remat.demo import page as pages
from fused_remat.demo.mlp_example import MlpExample, by_formula
from fused_remat.demo.observe import observe
from fused_remat.demo.report import counter_lines, sentence
from fused_remat.demo.run import BadNumber, parse, run
from fused_remat.demo.words import LANGUAGES, fill, shown, words

MEASURED = MlpExample(
    measured=True, chunk_features=208, workspace_bytes=428672, kept_plain=2162688, kept_fused=65536,
    peak_plain=3211264, peak_fused=494208,
)  # fmt: skip


def write(file: Path, *, x: float = 2.0, language: str = "en", mlp: MlpExample = MEASURED) -> Path:
    runs = [run(x, keep_b) for keep_b in (True, False)]
    observed = {keep_b: observe(x, keep_b) for keep_b in (True, False)}
    file.write_text(pages.page(language, runs, observed, mlp), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def page(browser, tmp_path):
    """The page at x = 2, just opened. Afterwards: nothing was asked of any network, nothing was complained about."""
    file = write(tmp_path / "demo.html")
    browser.size(1000, 900)
    browser.media(prefers_color_scheme="light", prefers_reduced_motion="reduce")
    browser.open(file)
    yield browser
    assert browser.requests == [file.resolve().as_uri()]
    assert browser.problems == []


def text(page, selector: str) -> str:
    return page.look(f"document.querySelector({json.dumps(selector)}).innerText").replace("\u00a0", " ")


def flat(page, selector: str) -> str:
    return re.sub(r"\s+", " ", text(page, selector))


def focused(page) -> str:
    return page.look("document.activeElement.className || document.activeElement.id || document.activeElement.lang")


def tab_to(page, name: str) -> None:
    """Presses Tab until the element with that id, class or language has the focus."""
    for _ in range(30):
        page.press("Tab")
        if focused(page) == name:
            return
    raise AssertionError(f"the keyboard does not reach {name}")


# The file


def test_page_is_one_offline_file(tmp_path):
    html = write(tmp_path / "demo.html").read_text(encoding="utf-8")
    assert not re.search(r"@[A-Z_]+@", html)
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", html)
    assert "default-src 'none'" in html
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])
    assert data["words"] == {language: words(language) for language in LANGUAGES}
    assert html.count("<script") == 2 and "Step 10 of 10" in html.partition("<noscript>")[2].partition("</noscript>")[0]


def test_page_cannot_be_broken_by_its_texts(tmp_path, monkeypatch):
    table = dict(words("en")) | {"title": "</script><b>&", "no_script": "<i>"}
    monkeypatch.setattr(pages, "words", lambda language: table)
    html = write(tmp_path / "demo.html").read_text(encoding="utf-8")
    assert "<title>&lt;/script&gt;&lt;b&gt;&amp;</title>" in html and "<i>" not in html
    assert html.count("</script>") == 2


def test_page_is_the_same_every_time(tmp_path):
    assert write(tmp_path / "one.html").read_bytes() == write(tmp_path / "two.html").read_bytes()


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_colours_have_enough_contrast_in_light_and_dark():
    css = (Path(pages.__file__).parent / "page.html").read_text(encoding="utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    for scheme in (light, dark):
        colors = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", scheme))
        for ground in ("ground", "card"):
            for ink in ("ink", "quiet", "accent", "rebuilt", "error"):
                assert contrast(colors[ink], colors[ground]) >= 4.5, (ink, ground)
        assert contrast(colors["on-accent"], colors["accent"]) >= 4.5
        assert contrast(colors["line"], colors["ground"]) >= 3


def test_headings_go_down_one_level_at_a_time():
    html = (Path(pages.__file__).parent / "page.html").read_text(encoding="utf-8")
    levels = [int(level) for level in re.findall(r"<h(\d)", html)]
    assert levels[0] == 1 and levels.count(1) == 1 and levels.count(2) == 2
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), levels


# Stepping


@needs_chromium
@pytest.mark.parametrize("variant", ["keep", "drop"])
@pytest.mark.parametrize("x", ["2", "0", "-3"])
def test_stepping_to_the_end_by_keyboard_alone(page, x, variant):
    tab_to(page, "x")
    page.press("Backspace", *x, "Enter")
    tab_to(page, "use-x")
    page.press("Tab")  # the radio button that is chosen
    if variant == "drop":
        page.press("ArrowDown")
    tab_to(page, "next")
    one, table = run(float(x), variant == "keep"), words("en")
    for number, step in enumerate(one.steps):
        assert f"Step {number + 1} of {len(one.steps)}." in text(page, "#example .text")
        assert sentence(table, one, step) in text(page, "#example .text")
        assert [text(page, "#kept"), text(page, "#redone")] == counter_lines(table, one, step)[1:]
        for value in "xabz":
            there = shown(one.values[value]) if value in step.exists else "\u2013"
            assert text(page, f"#box-{value} .value") == there
            computed = f"d{value}" in step.gradients
            gradient = f"dz/d{value} = {shown(one.values[f'd{value}'])}" if computed else ""
            assert text(page, f"#box-{value} .gradient") == gradient
        page.press("Enter" if number % 2 else " ")
    assert focused(page) == "next"  # the last step takes nothing away
    assert page.look("document.querySelector('#example .next').getAttribute('aria-disabled')") == "true"
    b, z = {"2": (5, 25), "0": (1, 1), "-3": (10, 100)}[x]
    kept = f"x = {x}, b = {b}. Number of values: 2." if variant == "keep" else f"x = {x}. Number of values: 1."
    assert text(page, "#kept") == f"Kept for backward: {kept}"
    assert text(page, "#redone").endswith("none. Number: 0." if variant == "keep" else "a, b. Number: 2.")
    assert text(page, "#box-z .value") == str(z)
    assert text(page, "#box-x .gradient") == f"dz/dx = {4 * int(x) * b}"


@needs_chromium
def test_stepping_by_mouse_and_by_arrow_keys(page):
    page.click("#example .next")
    page.click("#example .next")
    assert "Step 3 of 8" in text(page, "#example .text")
    page.press("ArrowRight", "ArrowRight", "ArrowLeft")
    assert "Step 4 of 8" in text(page, "#example .text")
    page.press("End", "ArrowRight")
    assert "Step 8 of 8" in text(page, "#example .text")
    page.press("Home", "ArrowLeft")
    assert "Step 1 of 8" in text(page, "#example .text")
    page.click("input[value=drop]")
    assert "Step 1 of 10. Start, b is dropped" in text(page, "#example .text")
    page.press("ArrowUp")  # within the radio buttons it chooses
    assert "Step 1 of 8" in text(page, "#example .text")
    page.click("#example .next")
    page.click("#example .back")
    page.click("#example .next")
    page.click("#example .reset")
    assert "Step 1 of 8" in text(page, "#example .text")
    assert "Step 1 of 18" in text(page, "#mlp .text")


@needs_chromium
def test_playing_goes_on_by_itself_and_can_be_paused(page):
    page.click("#example .play")  # motion is reduced: at once
    assert "Step 8 of 8" in text(page, "#example .text")
    page.media(prefers_reduced_motion="no-preference")
    page.click("#example .play")
    assert "Step 1 of 8" in text(page, "#example .text") and text(page, "#example .play") == "Pause"
    page.wait("document.querySelector('#example .text').innerText.includes('Step 2 of 8')")
    page.click("#example .play")
    assert text(page, "#example .play") == "Play to the end"
    assert page.look("example.timer") is None and "Step 2 of 8" in text(page, "#example .text")


@needs_chromium
def test_no_script_runs_no_steps_but_shows_them_all(browser, tmp_path):
    file = write(tmp_path / "demo.html")
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(file)
        tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    seen = " ".join(str(node.get("name", {}).get("value", "")) for node in tree)
    assert "Step 10 of 10" in seen and words("en")["no_script"] in seen and words("en")["use_x"] not in seen


# x


def enter(page, x: str) -> None:
    page.click("#x")
    page.look("document.querySelector('#x').select()")
    page.press("Backspace", *x, "Enter")


@needs_chromium
def test_a_bad_x_is_explained_and_changes_nothing(page):
    page.click("#example .next")
    for typed, why in (("two", "not_a_number"), ("", "empty"), ("-inf", "not_finite"), ("1e78", "too_large"),
                       ("0,5", "not_a_number"), ("nan", "not_finite")):  # fmt: skip
        enter(page, typed)
        expected = fill(words("en")[f"error_{why}"], {"got": typed, "largest": "1.1e77"})
        assert text(page, "#x-error") == f"{expected} The steps still show x = 2."
        assert page.look("document.querySelector('#x').getAttribute('aria-invalid')") == "true"
        assert "Step 2 of 8" in text(page, "#example .text") and text(page, "#box-x .value") == "2"
        assert not re.search("NaN|Infinity", text(page, "#example main, #boxes"))
    page.click("[lang=pl]")
    assert text(page, "#x-error").startswith("x: podano „nan”") and text(page, "#x-error").endswith("x = 2.")
    enter(page, "-0.5")
    assert text(page, "#x-error") == "" and text(page, "#box-x .value") == "-0.5"
    assert page.look("document.querySelector('#x').getAttribute('aria-invalid')") == "false"


@needs_chromium
def test_page_and_terminal_read_and_show_numbers_alike(page):
    random.seed(0)
    texts = ["-3", "+.5", "5.", "1e3", "-0", "1e-400", "1e77", "1.1e77", "1.2e77", "1e400", "", " 7 ", "0x10", "1_0",
             "two", "Inf", "-nan", "\u22123", "\u30fc2", "\uff11\uff0e\uff15", "\u0663", "1234567890.5", "1e-6",
             "0.1"]  # fmt: skip
    texts += [repr(random.choice((-1, 1)) * 10 ** random.uniform(-320, 77)) for _ in range(200)]
    ours = []
    for one in texts:
        try:
            values = run(parse(one), keep_b=True).values
            ours.append([shown(value) for value in values.values()])
        except BadNumber as error:
            ours.append(error.why.replace(" ", "_"))
    theirs = page.look(
        f"({json.dumps(texts)}).map((t) => {{ const {{x, problem}} = parse(t);"
        " return problem ?? Object.values(valuesAt(x)).map(shown); })"
    )
    assert dict(zip(texts, theirs, strict=True)) == dict(zip(texts, ours, strict=True))


# Languages


@needs_chromium
@pytest.mark.parametrize("language", LANGUAGES)
def test_language_switch_changes_every_text_and_the_attribute(page, language):
    page.click("input[value=drop]")
    page.click("#mlp .next")
    tab_to(page, language)
    page.press("Enter")
    table = words(language)
    assert page.look("document.documentElement.lang") == language
    assert page.look("document.title") == table["title"] == text(page, "h1")
    pressed = page.look("[...document.querySelectorAll('[aria-pressed=true]')].map((b) => b.lang)")
    assert pressed == [language]
    one = run(2.0, keep_b=False)
    for step in one.steps:
        assert sentence(table, one, step) in text(page, "#example .text")
        assert [text(page, "#kept"), text(page, "#redone")] == counter_lines(table, one, step)[1:]
        page.click("#example .next")
    for name in ("next", "back", "play", "reset"):
        assert text(page, f"#mlp .{name}") == table[name]
    shown_now = re.sub(r"\s+", " ", page.look("document.body.innerText"))
    for name in ("lead", "left_out", "keys", "rounded", "mlp_title", "mlp_lead", "mlp_row_peak", "planned", "never"):
        assert table[name] in shown_now, name
    assert "PyTorch" in text(page, "#torch-check")


@needs_chromium
def test_page_opens_in_the_language_and_at_the_x_that_it_was_made_for(browser, tmp_path):
    browser.open(write(tmp_path / "demo.html", x=-3.0, language="ja"))
    assert browser.look("[document.documentElement.lang, document.querySelector('#x').value]") == ["ja", "-3"]
    assert words("ja")["title"] == text(browser, "h1") and text(browser, "#box-x .value") == "-3"


# The MLP


@needs_chromium
def test_mlp_steps_through_its_chunks(page):
    page.click("#mlp .next")
    assert "Forward is over" in text(page, "#mlp .text") and flat(page, "#mlp-redone") == "Chunks rebuilt: 0 of 5."
    assert flat(page, "#mlp-kept") == "Kept for backward: x, 64.0 KiB."
    states = []
    for _ in range(3):
        page.press("ArrowRight")  # the focus is in this section
        states.append(flat(page, "#chunks li:first-child"))
    assert states == [
        "features 0\u2013207 in the workspace: up",
        "features 0\u2013207 in the workspace: hidden, dup",
        "features 0\u2013207 done, freed",
    ]
    assert flat(page, "#mlp-redone") == "Chunks rebuilt: 1 of 5."
    page.press("End")
    assert "Backward is over" in text(page, "#mlp .text") and "Step 18 of 18" in text(page, "#mlp .text")
    assert flat(page, "#chunks li:last-child") == "features 832\u20131023 done, freed"
    assert flat(page, "#mlp-redone") == "Chunks rebuilt: 5 of 5."
    assert "Step 1 of 8" in text(page, "#example .text")
    rows = [
        re.sub(r"\s+", " ", row)
        for row in page.look("[...document.querySelectorAll('#mlp-rows tr')].map((r) => r.innerText)")
    ]
    assert rows == [
        "kept for backward 2112.0 KiB measured 64.0 KiB measured",
        "highest sum in backward, beside y and gradients 3136.0 KiB measured 482.6 KiB measured",
        "one whole [M, F] tensor 1024.0 KiB by formula never made",
        "workspace of one backward chunk not used 418.6 KiB from the plan (explain)",
    ]
    assert "allocator events" in text(page, "#mlp-note")


@needs_chromium
def test_mlp_by_formula_is_labelled_so(browser, tmp_path):
    browser.open(write(tmp_path / "demo.html", mlp=by_formula()))
    table = flat(browser, "#mlp-rows")
    assert "kept for backward 2112.0 KiB by formula 64.0 KiB by formula" in table
    assert table.count("not measured") == 2 and " measured" not in table.replace("not measured", "")
    assert text(browser, "#mlp-note").startswith("Nothing in this table was measured")
    assert browser.look("document.querySelectorAll('#chunks li').length") == 4


# For everyone


@needs_chromium
def test_everything_that_takes_the_focus_has_a_name_and_a_visible_ring(page):
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]

    def is_focusable(node) -> bool:
        return any(p["name"] == "focusable" and p["value"]["value"] for p in node.get("properties", ()))

    named = [
        (n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if is_focusable(n) and not n["ignored"]
    ]
    assert all(name for role, name in named if role != "RootWebArea"), named
    assert ("textbox", "x =") in named and ("radio", "Keep b") in named and ("button", "Use this x") in named
    buttons = [name for role, name in named if role == "button"]
    assert len(set(buttons)) == len(buttons) and "Next step Steps of the MLP" in buttons
    roles = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes]
    for wanted in (("group", "Steps of the example"), ("group", "Steps of the MLP"), ("group", "What happens to b"),
                   ("heading", "Keep it or rebuild it"), ("table", "Bytes")):  # fmt: skip
        assert wanted in roles, wanted
    live = page.look(
        "[...document.querySelectorAll('[aria-live]')].map((e) => [e.ariaLive, e.ariaAtomic, e.className])"
    )
    assert live == [["polite", "true", "text"]] * 2
    seen = []
    for _ in range(14):
        page.press("Tab")
        style = "getComputedStyle(document.activeElement)"
        assert page.look(f"{style}.outlineStyle + {style}.outlineWidth") == "solid3px", focused(page)
        seen.append(page.look("[...document.querySelectorAll('*')].indexOf(document.activeElement)"))
    # Languages, x, its button, the variant, the steps, the steps of the MLP, its table: from top to bottom.
    assert seen == sorted(set(seen))


@needs_chromium
@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("width", [320, 360, 640, 1280])
def test_nothing_is_wider_than_the_window(page, width, language):
    page.size(width, 800)
    page.click(f"[lang={language}]")
    enter(page, "-1.234567890123e76")
    page.press("Tab", "Tab", "ArrowDown")
    page.look("example.to(6)")
    assert page.look("document.documentElement.scrollWidth <= innerWidth")
