"""`plan`: which layers keep and which rebuild, under a budget for the peak of the whole step.

In reading order: `places` are the units of a model and what each may do; `reading` takes a recording apart into what
each unit takes, `numbers` makes the recordings; `timeline` is the model of a step made of these numbers, `solver` its
exact optimum; `choose` runs plans until one fits; `plan` holds the result, `explain` tells it; `make` is the whole.
"""

from fused_remat.plan.errors import InfeasibleBudget
from fused_remat.plan.make import plan
from fused_remat.plan.plan import FrontPoint, Plan, UnitRow

__all__ = ["FrontPoint", "InfeasibleBudget", "Plan", "UnitRow", "plan"]
