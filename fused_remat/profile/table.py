"""A profile as plain text, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from fused_remat._about import trained, versions
from fused_remat._columns import aligned
from fused_remat._folding import MODEL
from fused_remat.profile.growth import Growth
from fused_remat.profile.kept import LOSS, KeptTensor
from fused_remat.profile.modules import Row, alike, folded
from fused_remat.profile.profile import Profile, gradient_bytes
from fused_remat.profile.recompute import alive_at_peak
from fused_remat.profile.verdict import moment_of_peak
from fused_remat.sizes import format_bytes

WIDTH = 100
_LINES = 12  # of the list of kept tensors
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64", "int64": "i64", "bool": "b8"}
_KIND_NAMES = {
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "inputs": "inputs",
    "kept": "kept activations",
    "rebuilt": "rebuilt activations",
    "temporary": "temporary buffers",
    "output": "outputs",
}


def as_text(profile: Profile) -> str:
    """The whole table."""
    blocks = [
        _head(profile),
        _kinds(profile),
        _modules(profile),
        _tensors(profile),
        *(_growth(growth) for growth in profile.growth.values()),
        _wrapped("Verdict: ", [profile.verdict]),
        _wrapped("Cheaper first: " if profile.advice else "", profile.advice),
        _wrapped("", _footer(profile)),
    ]
    return "\n\n".join("\n".join(lines) for block in blocks if (lines := list(block)))


def _head(profile: Profile) -> Iterator[str]:
    about = profile.about
    yield from _filled(f"{about['model']} on {about['device']}, one optimizer step, {profile.recording.source}")
    yield from _filled(trained(about))
    yield versions(about)


def _kinds(profile: Profile) -> Iterator[str]:
    recording = profile.recording
    alive = alive_at_peak(recording)
    whole = {
        **recording.static,
        "gradients": gradient_bytes(recording),
        "kept": recording.kept_bytes,
    }
    rows = [("", "after its phase", "at the peak", "")]
    for kind, name in _KIND_NAMES.items():
        total, now = whole.get(kind), alive.get(kind, 0)
        if total or now:
            share = f"{100 * now / recording.peak_bytes:.0f} %"
            rows.append((name, format_bytes(total) if total is not None else "", format_bytes(now), share))
    rows.append(("peak", "", format_bytes(recording.peak_bytes), moment_of_peak(recording)))
    yield from aligned(rows, right=(1, 2), width=WIDTH)


def _modules(profile: Profile) -> Iterator[str]:
    rows = [("module", "kept each", "kept", "params each", "transient fwd", "bwd")]
    for row in folded(profile.modules):
        m = row.module
        rows.append(
            (
                _name(row), _kept_each(row), format_bytes(row.kept_bytes),
                format_bytes(m.parameter_bytes), format_bytes(m.forward_transient_bytes),
                format_bytes(m.backward_transient_bytes),
            )
        )  # fmt: skip
    yield from aligned(rows, right=(1, 2, 3, 4, 5), squeeze={0: 30}, ends=(0,), width=WIDTH)


def _kept_each(row: Row) -> str:
    if row.count == 1:
        return ""
    most = format_bytes(row.module.kept_bytes)
    return most if row.kept_bytes == row.count * row.module.kept_bytes else f"<= {most}"


def _name(row: Row) -> str:
    class_name = f" {row.module.class_name}" if row.depth == 0 and row.module.class_name else ""
    return f"{'  ' * row.depth}{row.name}{class_name}"


def _tensors(profile: Profile) -> Iterator[str]:
    largest = alike(profile.kept, profile.modules)
    if not largest:
        return
    rows = [("kept", "times", "saved in", "by", "shape", "line")]
    for same in largest[:_LINES]:
        t = same.tensor
        also = f" +{len(t.shared_with)}" if t.shared_with else ""
        rows.append(
            (
                format_bytes(t.nbytes), f"x{same.count}", (same.module or MODEL) + also,
                t.op.removesuffix("0").removesuffix("Backward"), _shape(t),
                t.source or ("(default loss)" if t.module == LOSS else "(no line)"),
            )
        )  # fmt: skip
    yield from aligned(rows, right=(0, 1), squeeze={3: 16, 2: 20, 5: 20}, ends=(2, 5), width=WIDTH)
    rest = largest[_LINES:]
    if rest:
        nbytes = sum(same.count * same.tensor.nbytes for same in rest)
        yield f"and {sum(same.count for same in rest)} smaller ones, together {format_bytes(nbytes)}"
    if any(same.tensor.shared_with for same in largest[:_LINES]):
        yield "+n: n more modules save the same memory; it is counted once, where it is saved first"


def _shape(tensor: KeptTensor) -> str:
    return f"{'x'.join(map(str, tensor.shape)) or 'scalar'} {_DTYPES.get(tensor.dtype, tensor.dtype)}"


def _growth(growth: Growth) -> Iterator[str]:
    rows = [(growth.axis, "kept", "peak", "peak is", "")]
    for point in growth.points:
        where = point.peak_phase + (f" of {point.peak_module}" if point.peak_module else "")
        rows.append(
            (str(point.size), format_bytes(point.kept_bytes), format_bytes(point.peak_bytes), point.source, where)
        )
    yield from aligned(rows, right=(0, 1, 2), squeeze={4: 20}, ends=(4,), width=WIDTH)
    for sentence in growth.sentences():
        yield from _filled(sentence)


def _footer(profile: Profile) -> Iterator[str]:
    recording, r = profile.recording, profile.recompute
    yield (
        f"Kept and peak are two numbers: {format_bytes(recording.kept_bytes)} kept after forward, "
        f"{format_bytes(recording.peak_bytes)} at the peak ({recording.source}). Kept leaves out parameters, inputs, "
        "the loss, gradients and short-lived buffers; a storage counts once."
    )
    if r.converted_peak_bytes is not None:
        now = f"{format_bytes(r.peak_bytes)} ({recording.source})"
        yield (
            f"With the {r.converted_layers} layers that fused_remat.convert(model) can convert, the peak is predicted "
            f"to be {format_bytes(r.converted_peak_bytes)} instead of {now}."
        )
    yield from profile.notes


def _wrapped(heading: str, sentences: Iterable[str]) -> Iterator[str]:
    for number, sentence in enumerate(sentences):
        yield from _filled(sentence, heading if number == 0 else " " * len(heading))


def _filled(text: str, first: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False)
