"""Weights: from Hugging Face directories, or random."""

from k3jax.checkpoint.loading import load_params
from k3jax.checkpoint.plan import LoadingPlan, plan_loading
from k3jax.checkpoint.random_weights import random_params
from k3jax.checkpoint.repository import Repository, detect_expert_format

__all__ = ["LoadingPlan", "Repository", "detect_expert_format", "load_params", "plan_loading", "random_params"]
