"""Modules: parameters and settings of the fused layers; the maths is `fused_remat.functional`.

Each module holds the children that stock code would hold, so that adapters, hooks, parametrisations, quantisation and
tensor parallel plans find what they expect. While every child is plain, `forward` is one fused call; as soon as one is
not, `forward` calls it, as stock code would (`fused_remat.plain` decides, at every call).
"""

from fused_remat.nn.attention import MultiheadAttention
from fused_remat.nn.mlp import MLP, GatedMLP

__all__ = ["MLP", "GatedMLP", "MultiheadAttention"]
