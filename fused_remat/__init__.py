"""Rebuild dropped attention and MLP activations inside backward, piece by piece, in a bounded workspace."""

from fused_remat import _extension
from fused_remat.accumulation import accumulate_in_fp32
from fused_remat.budget import workspace
from fused_remat.convert import convert, revert
from fused_remat.dispatch import backend
from fused_remat.explanation import explain
from fused_remat.functional import attention, mlp, multi_head_attention
from fused_remat.measure import measure
from fused_remat.nn import MLP, GatedMLP, MultiheadAttention
from fused_remat.settings import LowRank, Norm
from fused_remat.tune import tune

__version__ = "0.1.0"
__all__ = [
    "MLP",
    "GatedMLP",
    "LowRank",
    "MultiheadAttention",
    "Norm",
    "accumulate_in_fp32",
    "attention",
    "backend",
    "convert",
    "explain",
    "measure",
    "mlp",
    "multi_head_attention",
    "revert",
    "tune",
    "workspace",
]

_extension.load_installed()
