"""Who decides what is kept: named policies, rules and plans, all of which become an `Assignment` of a model.

In reading order: `named` turns words into an `Assignment`; an `Arrangement` examines a model once and switches it
between assignments; `chains` finds its repeated blocks; `region` recomputes a module, `segment` several as one.
"""

from fused_remat.policy.arrangement import Arrangement, LayerInfo
from fused_remat.policy.assignment import Assignment
from fused_remat.policy.named import POLICIES, assignment_of, policies
from fused_remat.policy.segment import SegmentError

__all__ = ["POLICIES", "Arrangement", "Assignment", "LayerInfo", "SegmentError", "assignment_of", "policies"]
