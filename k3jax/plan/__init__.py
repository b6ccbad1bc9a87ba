"""`python -m k3jax.plan`: whether a model fits on devices that need not be there."""
