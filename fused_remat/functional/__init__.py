"""Functional API: argument checks, then one op call (or the reference path where no compiled op can be right)."""

from fused_remat.functional.attention import attention
from fused_remat.functional.mlp import mlp
from fused_remat.functional.multi_head_attention import multi_head_attention

__all__ = ["attention", "mlp", "multi_head_attention"]
