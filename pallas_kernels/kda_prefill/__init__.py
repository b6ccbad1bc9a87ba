"""Kimi Delta Attention over packed sequences."""

from pallas_kernels.kda_prefill.api import kda_prefill, validate
from pallas_kernels.kda_prefill.reference import KdaPrefillOutput

__all__ = ["KdaPrefillOutput", "kda_prefill", "validate"]
