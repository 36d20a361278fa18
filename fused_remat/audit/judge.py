"""From what was promised and what was seen to verdicts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fused_remat import last_calls
from fused_remat.audit.expected import predicted
from fused_remat.audit.promises import Promise
from fused_remat.audit.report import Row, Verdict
from fused_remat.audit.watching import Kept, Key, Seen, Watching
from fused_remat.last_calls import LastCall
from fused_remat.sizes import format_bytes

_TOLERANCE = 0.01
_NEVER = (
    "no call with gradients was seen: it was not called, or without gradients, or inside torch.compile, where single "
    "layers cannot be told apart"
)
_ONLY_AGAIN = (
    "it ran with gradients inside backward only: something around it (reentrant checkpointing) recomputes it as a "
    "whole, and it then rebuilds its activations once more"
)
_TWICE = (
    "it ran again inside backward: something around it (an outer checkpoint) recomputes it too, so that its products "
    "are made once more than they need to be; leave the layer out of that checkpoint, or out of the conversion"
)


def by_note(promise: Promise) -> Row:
    """The row of a layer whose last call was noted, and not watched."""
    call = last_calls.last_call(promise.layer, promise.method)
    if call is None:
        return _row(promise, None, None, None, "did not run", _why_never(promise))
    verdict, sentence = _verdict_of(promise, call)
    expected = 0 if promise.inside or promise.kind == "norm" else None
    if expected is None and promise.kind != "region":
        expected = predicted(promise, call)
    return _row(promise, None, expected, None, verdict, sentence)


def _verdict_of(promise: Promise, call: LastCall) -> tuple[Verdict, str]:
    if call.reason is not None:
        return "more", f"it ran its own code: {call.reason}"
    if call.backend == "reference":
        return "more", _on_reference(call.op.reference_only)
    if call.replays and not promise.inside and promise.kind not in ("norm", "region"):
        return "less", _TWICE if call.forward else _ONLY_AGAIN
    return "ok", ""


def by_watching(promise: Promise, watching: Watching) -> Row:
    """The row of a layer in a step that was watched."""
    key = (id(promise.layer), promise.method)
    kept = watching.kept or Kept({}, {}, 0, {})
    seen = watching.seen.get(key, Seen())
    observed = kept.by_layer.get(key, 0)
    if not seen.calls:
        if seen.replays:
            return _row(promise, 0, None, observed, "less", _ONLY_AGAIN)
        return _row(promise, 0, None, observed, "did not run", _why_never(promise))
    judge = _Judge(promise, key, seen, kept, observed)
    expected = judge.expected(watching.inputs.get(key, {}))
    verdict, sentence = judge.verdict(expected)
    return _row(promise, seen.calls, expected, observed, verdict, sentence)


@dataclass(frozen=True)
class _Judge:
    promise: Promise
    key: Key
    seen: Seen
    kept: Kept
    observed: int

    @property
    def own_code(self) -> list[str]:
        """The different reasons why calls ran the layer's own code."""
        return list(dict.fromkeys(filter(None, self.seen.reasons)))

    def expected(self, inputs: dict[int, int]) -> int | None:
        if self.promise.inside or self.promise.kind == "norm":
            return 0
        owners = self.kept.owners
        if self.promise.kind == "region":
            return sum(nbytes for address, nbytes in inputs.items() if owners.get(address) == self.key)
        if self.own_code:
            return None
        mine = (n for address, n in self.seen.operands.items() if owners.get(address, self.key) == self.key)
        return self.seen.residual_bytes + sum(mine)

    def verdict(self, expected: int | None) -> tuple[Verdict, str]:
        if self.own_code:
            count = sum(map(bool, self.seen.reasons))
            some = "" if count == self.seen.calls else f" in {count} of {self.seen.calls} calls"
            return "more", f"it ran its own code{some}: {'; '.join(self.own_code)}"
        if self.seen.on_reference:
            return "more", _on_reference(self.seen.on_reference[0])
        if self.seen.replays and not self.promise.inside and self.promise.kind not in ("norm", "region"):
            return "less", _TWICE
        observed = self.kept.in_ops.get(self.key, 0) if self.promise.beside else self.observed
        difference = observed - expected
        if abs(difference) <= _TOLERANCE * max(expected, 64):
            return "ok", self._beside()
        if difference > 0:
            return "more", self._why_more(difference)
        return "less", (
            f"{format_bytes(-difference)} of what it needs were not kept when backward began: its result is not part "
            "of the loss, or other hooks on saved tensors (offloading, an outer checkpoint) took them"
        )

    def _beside(self) -> str:
        beside = self.observed - self.kept.in_ops.get(self.key, 0) if self.promise.beside else 0
        return f"other modules in its {self.promise.method} keep {format_bytes(beside)} besides" if beside else ""

    def _why_more(self, difference: int) -> str:
        more = f"{format_bytes(difference)} more than promised"
        if self.promise.kind == "norm":
            return f"{more}: something besides the fused layers reads its result"
        if self.promise.inside:
            return f"{more}: it ran outside of {self.promise.inside}, the region around it"
        if self.promise.kind == "region":
            return f"{more}: it was not recomputed as a whole"
        return f"{more}: an input is a view of a larger tensor, which is kept whole, or something else saves tensors"


def _on_reference(reason: str | None) -> str:
    return (
        f"it ran on the reference path, which keeps every activation: {reason or 'there are no compiled operators'} "
        "(fused_remat.explain and fused-remat doctor tell more)"
    )


def _why_never(promise: Promise) -> str:
    if "forward" in vars(promise.layer):
        return "it has a forward of its own on the instance, which runs in the place of the fused one"
    return _NEVER


def _row(
    promise: Promise, calls: int | None, expected: int | None, observed: int | None, verdict: Verdict, sentence: str
) -> Row:
    return Row(
        promise.name, promise.method, promise.kind, promise.text, calls, expected, observed, verdict, sentence
    )  # fmt: skip


def name_of(model: nn.Module) -> str:
    """What a report calls `model`."""
    return type(model).__name__
