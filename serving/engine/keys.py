"""Keys of prompts, by which the cache tells prefixes apart."""

from collections.abc import Hashable, Sequence

import numpy as np

from k3jax.language_model import LanguageModel
from serving.engine.config import EngineConfig
from serving.prefix_cache import ChainHasher


class PrefixKeys:
    """Keys of prompts for the cache; with the cache off, no two prompts share any."""

    def __init__(self, lm: LanguageModel, config: EngineConfig, unit: int):
        self._unit = unit
        self._hasher = None
        if config.cache:
            # The cache lives and dies with one model in memory, so there are no versions to tell apart.
            self._hasher = ChainHasher(model=repr(lm.config), weights="", state_layout=str(lm.dtype), unit=unit)

    def of(self, tokens: np.ndarray, salt: str) -> Sequence[Hashable]:
        """One for each complete unit; thread-safe."""
        if self._hasher:
            return self._hasher.keys(tokens, salt=salt)
        nobody = object()
        return [(nobody, number) for number in range(len(tokens) // self._unit)]
