"""How the next token is chosen, and when to stop.

`k3jax.sampling.sampler` is the part that runs on the device; the rest does without JAX.
"""

from k3jax.sampling.params import MAX_LOGPROBS, SamplingParams, fresh_seed

__all__ = ["MAX_LOGPROBS", "SamplingParams", "fresh_seed"]
