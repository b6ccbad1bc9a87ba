"""Block attention residuals: each sublayer reads a learned mix of earlier blocks' sums."""

from pallas_kernels.attn_res.api import AttnResOutput, attn_res, validate

__all__ = ["AttnResOutput", "attn_res", "validate"]
