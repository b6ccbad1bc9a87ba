"""Weights: from Hugging Face directories, converted ones, or random."""

import importlib

# Name -> its module. Imported on first use: looking at a directory must not import JAX.
_HOME = {
    "LoadingPlan": "k3jax.checkpoint.plan",
    "Repository": "k3jax.checkpoint.repository",
    "detect_expert_format": "k3jax.checkpoint.repository",
    "load_params": "k3jax.checkpoint.loading",
    "plan_loading": "k3jax.checkpoint.plan",
    "random_params": "k3jax.checkpoint.random_weights",
}

__all__ = [*_HOME]  # noqa: PLE0604


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'k3jax.checkpoint' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value
