"""Rebuild dropped attention and MLP activations inside backward, piece by piece, in a bounded workspace."""

from fused_remat import _extension, show
from fused_remat.accumulation import accumulate_in_fp32
from fused_remat.audit import audit, auditing
from fused_remat.batch import find_batch_size
from fused_remat.budget import workspace
from fused_remat.convert import convert, revert
from fused_remat.dispatch import backend
from fused_remat.explanation import explain
from fused_remat.functional import attention, mlp, multi_head_attention
from fused_remat.guards import RematError, RematWarning, as_region, region
from fused_remat.measure import measure
from fused_remat.nn import MLP, GatedMLP, MultiheadAttention
from fused_remat.plan import InfeasibleBudget, Plan, plan
from fused_remat.policy import policies
from fused_remat.profile import Axis, profile
from fused_remat.settings import LowRank, Norm
from fused_remat.tune import tune

__version__ = "0.1.0"
__all__ = [
    "MLP",
    "Axis",
    "GatedMLP",
    "InfeasibleBudget",
    "LowRank",
    "MultiheadAttention",
    "Norm",
    "Plan",
    "RematError",
    "RematWarning",
    "accumulate_in_fp32",
    "as_region",
    "attention",
    "audit",
    "auditing",
    "backend",
    "convert",
    "explain",
    "find_batch_size",
    "measure",
    "mlp",
    "multi_head_attention",
    "plan",
    "policies",
    "profile",
    "region",
    "revert",
    "show",
    "tune",
    "workspace",
]

_extension.load_installed()
