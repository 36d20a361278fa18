"""What the guards of a recomputed region raise and warn."""

from __future__ import annotations


class RematError(RuntimeError):
    """A recomputed region cannot be replayed faithfully. The base of everything the guards raise."""


class RematMutation(RematError):
    """A tensor, parameter or other state that the replay needs was changed."""


class RematMismatch(RematError):
    """The replay saved other tensors than the forward: another number, form or (with `verify`) other values."""


class RematCache(RematError):
    """A key-value cache, or an object that grows like one, reached a region while gradients are on."""


class RematDevice(RematError):
    """The region works on a device whose tensors or random numbers cannot be replayed."""


class RematWarning(UserWarning):
    """A region works, but not as its caller may expect."""
