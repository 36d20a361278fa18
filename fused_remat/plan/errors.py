"""What `plan` raises."""

from __future__ import annotations


class InfeasibleBudget(ValueError):
    """No plan stays within the budget.

    Attributes:
        budget: in bytes.
        smallest: the smallest peak that a plan reaches, in bytes.
        source: "measured" or "predicted", of `smallest`.
    """

    def __init__(self, message: str, budget: int, smallest: int, source: str):
        super().__init__(message)
        self.budget, self.smallest, self.source = budget, smallest, source

    def __reduce__(self):  # the message alone does not rebuild it
        return type(self), (self.args[0], self.budget, self.smallest, self.source)
