"""Mixture-of-Experts layers as modules: a router, packed expert weights, and the op that runs them.

For inference, as the ops are: parameters do not require grad.
"""

from tileops.nn.moe import MoE
from tileops.nn.shared_expert import MoESharedExpert

__all__ = ["MoE", "MoESharedExpert"]
