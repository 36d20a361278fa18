"""Having a model follow a policy for a while, and giving it back as it was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from fused_remat.convert import convert, revert
from fused_remat.convert.rebind import bind, records_of


def labelled(policies: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """The policies by what a report calls them.

    Raises:
        TypeError: `policies` is neither a sequence nor a mapping from names.
        ValueError: there is none, or two have one name.
    """
    if isinstance(policies, Mapping):
        named = dict(policies)
    elif isinstance(policies, Sequence) and not isinstance(policies, str):
        named = {}
        for policy in policies:
            label = name_of(policy)
            if label in named:
                raise ValueError(f"policies has {label!r} twice; name them: a dict from names to policies")
            named[label] = policy
    else:
        raise TypeError(
            f"policies must be a list of policies or a dict from names to them, got {policies!r}; "
            'for a single one pass a list, e.g. ["full"]'
        )
    if not named:
        raise ValueError('policies is empty; expected at least one, e.g. ["everything", "full"]')
    return named


def name_of(policy: Any) -> str:
    """What a report calls `policy`."""
    if policy is None:
        return "as it is"
    if isinstance(policy, (str, tuple, float, Mapping)):
        return policy if isinstance(policy, str) else repr(policy)
    return getattr(policy, "name", None) or getattr(policy, "__name__", None) or type(policy).__name__.lower()


@contextmanager
def arranged(model: nn.Module, policy: Any) -> Iterator[None]:
    """`model` under `policy` inside; afterwards every layer has the records, fused methods and class that it had.

    `policy`: None changes nothing. Otherwise the model is reverted first; an object with `apply(model)` (a plan) or a
    function of the model converts it, and anything else goes to `convert` as its `policy`.
    """
    if policy is None:
        yield
        return
    found = [(module, dict(records_of(module))) for module in model.modules()]
    try:
        revert(model)
        _follow(model, policy)
        yield
    finally:
        revert(model)
        for module, records in found:
            for record in records.values():
                bind(module, record)


def check_policy(model: nn.Module, policy: Any) -> None:
    """Raises TypeError or ValueError, as `convert`, for a policy that the model cannot follow.

    A function of the model, and what is applied but is no plan, may do anything, and is not tried.
    """
    if hasattr(policy, "check_model"):  # a plan
        policy.check_model(model)
    elif not hasattr(policy, "apply") and not callable(policy):
        with arranged(model, policy):
            pass


def _follow(model: nn.Module, policy: Any) -> None:
    if hasattr(policy, "apply"):
        policy.apply(model)
        return
    apply: Callable[[nn.Module], Any] = policy if callable(policy) else lambda model: convert(model, policy=policy)
    apply(model)
