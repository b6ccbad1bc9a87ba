"""MLA over packed prompts, with the latents of earlier tokens in pages."""

from pallas_kernels.mla_pages import MlaOutput
from pallas_kernels.mla_prefill.api import mla_prefill, validate

__all__ = ["MlaOutput", "mla_prefill", "validate"]
