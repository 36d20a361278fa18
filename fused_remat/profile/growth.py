"""How the bytes of a step grow along a sweep, and the largest size that would fit a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fused_remat.profile.axes import Sweep
from fused_remat.profile.kept import KeptTensor
from fused_remat.profile.laws import Law, fit_law
from fused_remat.profile.modules import ModuleBytes, patterns
from fused_remat.profile.recompute import alive_at_peak
from fused_remat.recording import Recording
from fused_remat.sizes import format_bytes, parse_bytes

_SAID = 3  # tensors and modules that the sentences name
# How far a prediction looks: above, the size is "more than that".
_FARTHEST = 2**40


@dataclass(frozen=True)
class Observed:
    """One step at one size."""

    recording: Recording
    kept: tuple[KeptTensor, ...]
    modules: tuple[ModuleBytes, ...]


@dataclass(frozen=True)
class Point:
    """The bytes of one run; `source` is "measured" or "predicted" (fake tensors)."""

    size: int
    source: str
    peak_bytes: int
    peak_phase: str
    peak_module: str
    kept_bytes: int
    temporary_bytes: int  # those alive at the peak

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return vars(self).copy()


@dataclass(frozen=True)
class TensorLaw:
    """The law of the kept tensors with the same module (up to the numbers of equal layers, which are stars),
    operation, source and number of dimensions."""

    module: str
    op: str
    source: str
    shape: tuple[int, ...]  # of the largest, at the model's own size
    nbytes: int  # of all of them at the model's own size
    law: Law

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**vars(self), "shape": list(self.shape), "law": self.law.to_dict()}


@dataclass(frozen=True)
class Growth:
    """What a sweep found.

    Attributes:
        axis: its name.
        base: the size of the model's own inputs; the smallest one of the sweep where a function makes the inputs.
        points: the runs, by size.
        laws: "peak", "kept" and each kind of bytes before the step ("parameters", "inputs", ...): the law of its bytes.
        modules: path of each module that keeps something -> law of the bytes kept in it and below.
        tensors: laws of the kept tensors, the largest group first.
    """

    axis: str
    base: int
    points: tuple[Point, ...]
    laws: Mapping[str, Law]
    modules: Mapping[str, Law]
    tensors: tuple[TensorLaw, ...]

    def largest_size(self, budget: int | str) -> int:
        """The largest size whose peak is *predicted* to be within the budget (bytes, or a string such as "6GiB").

        Read from the runs of the sweep, straight between them, and above the largest from the law of the peak, never
        below the straight line through the last two runs. 0: none would fit. At most 2**40.

        Raises: as `fused_remat.sizes.parse_bytes`.
        """
        wanted = parse_bytes("budget", budget)
        if self.predicted_peak(1) > wanted:
            return 0
        low, high = 1, 2
        while high < _FARTHEST and self.predicted_peak(high) <= wanted:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.predicted_peak(middle) <= wanted else (low, middle)
        return high if high == _FARTHEST and self.predicted_peak(high) <= wanted else low

    def predicted_peak(self, size: int) -> float:
        """Bytes of the predicted peak at `size`; see `largest_size`."""
        points = self.points
        following = next((i for i, point in enumerate(points) if point.size >= size), None)
        if following == 0:
            return min(points[0].peak_bytes, max(_line(points[0], points[1], size), 0))
        if following is not None:
            return _line(points[following - 1], points[following], size)
        return max(self.laws["peak"].at(size), _line(points[-2], points[-1], size), points[-1].peak_bytes)

    def sentences(self) -> list[str]:
        """The laws in words: of all that is kept, of the peak, and of what grows in another way than the rest."""
        kept = self.laws["kept"]
        said = [
            f"What is kept {kept.in_words(self.axis, self.base)}.",
            f"The peak {self.laws['peak'].in_words(self.axis, self.base)}.",
        ]
        faster = [t for t in self.tensors if t.law.kind in ("quadratic", "power") and t.law.exponent > 1][:_SAID]
        largest = [t for t in self.tensors if t.law.kind == "linear"][: max(0, _SAID - len(faster))]
        for tensor in faster + (largest if kept.kind != "linear" else []):
            said.append(
                f"{tensor.op} in {tensor.module or 'the model'} ({tensor.source or 'no line'}, "
                f"{format_bytes(tensor.nbytes)}) {tensor.law.in_words(self.axis, self.base)}."
            )
        return said

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "axis": self.axis,
            "base": self.base,
            "points": [point.to_dict() for point in self.points],
            "laws": {name: law.to_dict() for name, law in self.laws.items()},
            "modules": {path: law.to_dict() for path, law in self.modules.items()},
            "tensors": [tensor.to_dict() for tensor in self.tensors],
            "sentences": self.sentences(),
        }


def growth_along(sweep: Sweep, observe: Callable[[int], Observed]) -> Growth:
    """Runs the sweep and fits its laws. `observe(size)` records one step at that size."""
    seen = {size: observe(size) for size in sweep.sizes}
    runs = list(seen.values())
    base = sweep.base if sweep.base in seen else sweep.sizes[0]

    def law(values: Iterable[int]) -> Law:
        return fit_law(sweep.sizes, list(values), sweep.power)

    laws = {
        "peak": law(run.recording.peak_bytes for run in runs),
        "kept": law(run.recording.kept_bytes for run in runs),
        **{kind: law(run.recording.static.get(kind, 0) for run in runs) for kind in runs[0].recording.static},
    }
    by_path = [{m.path: m.kept_bytes for m in run.modules} for run in runs]
    modules = {
        path: law(own.get(path, 0) for own in by_path) for path in by_path[0] if any(own.get(path) for own in by_path)
    }
    points = tuple(_point(size, run.recording) for size, run in seen.items())
    return Growth(sweep.name, base, points, laws, modules, tuple(_tensor_laws(seen, base, law)))


def _tensor_laws(seen: Mapping[int, Observed], base: int, law: Callable[[Iterable[int]], Law]) -> list[TensorLaw]:
    """Of the groups of tensors that are there at every size, equally many of them."""
    pattern = patterns(seen[base].modules)

    def group_of(tensor: KeptTensor) -> tuple[Any, ...]:
        return pattern[tensor.module], tensor.op, tensor.source, len(tensor.shape)

    totals: list[Counter[tuple[Any, ...]]] = []
    counts: list[Counter[tuple[Any, ...]]] = []
    for run in seen.values():
        totals.append(Counter())
        counts.append(Counter())
        for tensor in run.kept:
            totals[-1][group_of(tensor)] += tensor.nbytes
            counts[-1][group_of(tensor)] += 1
    shapes = {group_of(t): t.shape for t in reversed(seen[base].kept)}
    at_base = totals[list(seen).index(base)]
    laws = [
        TensorLaw(*group[:3], shapes[group], at_base[group], law(total[group] for total in totals))
        for group, count in counts[0].items()
        if all(other[group] == count for other in counts)
    ]
    return sorted(laws, key=lambda found: -found.nbytes)


def _point(size: int, recording: Recording) -> Point:
    return Point(
        size, recording.source, recording.peak_bytes, recording.peak_phase, recording.peak_module,
        recording.kept_bytes, alive_at_peak(recording).get("temporary", 0),
    )  # fmt: skip


def _line(a: Point, b: Point, size: int) -> float:
    return a.peak_bytes + (b.peak_bytes - a.peak_bytes) * (size - a.size) / (b.size - a.size)
