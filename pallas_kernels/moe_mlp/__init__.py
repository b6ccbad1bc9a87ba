"""The routed experts of a mixture of experts: each token through its chosen experts, weighted and summed."""

from pallas_kernels.moe_mlp.api import moe_mlp, validate

__all__ = ["moe_mlp", "validate"]
