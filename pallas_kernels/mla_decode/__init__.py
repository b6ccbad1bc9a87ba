"""MLA for one new token a sequence, evaluated in latent space."""

from pallas_kernels.mla_decode.api import mla_decode, validate
from pallas_kernels.mla_pages import MlaOutput

__all__ = ["MlaOutput", "mla_decode", "validate"]
