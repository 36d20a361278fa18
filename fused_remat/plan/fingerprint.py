"""What makes a model the one that a plan was made for: names, classes, shapes and dtypes. Values do not count."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import nn

from fused_remat._folding import starred
from fused_remat.convert.rebind import original_class

_MOST_NAMED = 5


def fingerprint_of(model: nn.Module) -> dict[str, Any]:
    """Modules and parameters of the model, those of equal layers folded ("layers.*.weight"), and a hash of it all."""
    modules = [(name, _class_name(module)) for name, module in model.named_modules(remove_duplicate=False)]
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    described = [(name, f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}") for name, t in tensors]
    whole = json.dumps([modules, described], separators=(",", ":"))
    return {
        "sha256": hashlib.sha256(whole.encode()).hexdigest(),
        "modules": _folded(modules),
        "tensors": _folded(described),
    }


def differences(planned: dict[str, Any], model: nn.Module) -> list[str]:
    """What of `model` is not as in the fingerprint, in words; empty if it is the same."""
    own = fingerprint_of(model)
    if own["sha256"] == planned["sha256"]:
        return []
    found = []
    for kind in ("modules", "tensors"):
        for pattern in dict.fromkeys([*planned[kind], *own[kind]]):
            was, now = planned[kind].get(pattern), own[kind].get(pattern)
            if was != now:
                name = pattern or "the model itself"
                found.append(f"{name}: planned {_told(was)}, here {_told(now)}")
    more = len(found) - _MOST_NAMED
    found = found[:_MOST_NAMED] + ([f"{more} more"] if more > 0 else [])
    return found or ["its modules or parameters are in another order"]


def _folded(described: list[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """By name with numbers replaced by "*": how often each description occurs."""
    folded: dict[str, dict[str, int]] = {}
    for name, text in described:
        counts = folded.setdefault(starred(name), {})
        counts[text] = counts.get(text, 0) + 1
    return folded


def _told(counts: dict[str, int] | None) -> str:
    if counts is None:
        return "nothing"
    return " and ".join(text if count == 1 else f"{count} x {text}" for text, count in counts.items())


def _class_name(module: nn.Module) -> str:
    cls = original_class(module)
    return f"{cls.__module__}.{cls.__qualname__}"
