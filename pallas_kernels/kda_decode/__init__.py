"""One token of Kimi Delta Attention per row, from raw projections to the gated output."""

from pallas_kernels.kda_decode.api import kda_decode, validate
from pallas_kernels.kda_decode.reference import KdaDecodeOutput

__all__ = ["KdaDecodeOutput", "kda_decode", "validate"]
