"""Prefix cache of KDA chunk states and MLA pages: match finely, store coarsely, copy before extending.

Pure Python and NumPy: no model, no server and no clock of its own; see docs/prefix-cache.md.
"""

from serving.prefix_cache.admission import Admission, Match, Phase
from serving.prefix_cache.cache import PrefixCache
from serving.prefix_cache.config import CacheConfig
from serving.prefix_cache.cost import CostModel
from serving.prefix_cache.hashing import ChainHasher
from serving.prefix_cache.policy import LeastRecentlyUsed, Policy
from serving.prefix_cache.reuse import LearnedReuse
from serving.prefix_cache.stats import Stats
from serving.prefix_cache.transfers import Transfer

__all__ = [
    "Admission", "CacheConfig", "ChainHasher", "CostModel", "LearnedReuse", "LeastRecentlyUsed", "Match", "Phase",
    "Policy", "PrefixCache", "Stats", "Transfer",
]
