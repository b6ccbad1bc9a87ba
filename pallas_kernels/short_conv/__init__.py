"""Causal depthwise convolution over packed sequences, with tails kept between calls."""

from pallas_kernels.short_conv.api import short_conv, validate
from pallas_kernels.short_conv.reference import ShortConvOutput

__all__ = ["ShortConvOutput", "short_conv", "validate"]
