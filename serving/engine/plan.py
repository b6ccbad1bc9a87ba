"""How much of everything there is: what was asked for, or what memory has room for."""

import dataclasses
import functools

import jax

from k3jax.errors import UserError
from k3jax.language_model import LanguageModel
from k3jax.memory import available_bytes, check_fits, required_bytes
from k3jax.state import PAGE_SIZE, pool_dtype
from serving.engine.config import EngineConfig
from serving.engine.steps import EngineState
from serving.prefix_cache import CacheConfig, CostModel

_SHARES = {"cpu": 0.25}
"""Of free memory; a CPU's is shared with everything else on the machine."""
_SHARE = 0.85
"""On other devices; steps need the rest."""
_CONTEXTS = 2
"""Pages for so many full contexts a slot, if memory has room: one that runs and one that is kept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of the pools.

    Attributes:
      context: most tokens of a request.
      num_slots, num_pages: with the dummies.
      max_pages: of one request.
      cache: settings of the prefix cache.
    """

    context: int
    num_slots: int
    num_pages: int
    max_pages: int
    cache: CacheConfig

    @classmethod
    def of(cls, lm: LanguageModel, config: EngineConfig) -> "Plan":
        """Call it when the weights are in memory.

        Raises:
          UserError: there is not enough memory, or a limit is too small to be of use.
        """
        cost = CostModel.for_model(lm.config, itemsize=jax.numpy.dtype(pool_dtype(lm.dtype)).itemsize)
        page_bytes, smallest = PAGE_SIZE * cost.token_bytes, cost.snapshot_bytes + PAGE_SIZE * cost.token_bytes
        context = config.context or lm.config.max_position_embeddings
        num_slots, max_pages = config.max_batch + 1, -(-context // PAGE_SIZE)
        create = functools.partial(
            EngineState.create, lm.config, num_slots=num_slots, num_pages=1, max_pages=max_pages,
            dtype=pool_dtype(lm.dtype),
        )
        fixed = required_bytes(jax.eval_shape(create))
        # Half for pages, allocated now; half for snapshots, one by one.
        half = _budget(fixed) // 2 if config.num_pages is None or config.cache_bytes is None else 0
        num_pages = config.num_pages
        if num_pages is None:
            num_pages = max(1, min(_CONTEXTS * config.max_batch * max_pages, half // page_bytes))
        if config.context and config.context > num_pages * PAGE_SIZE:
            raise UserError(
                f"context is {config.context}, but {num_pages} pages hold {num_pages * PAGE_SIZE} tokens; "
                "raise num_pages or lower context"
            )
        cache_bytes = max(half, smallest) if config.cache_bytes is None else config.cache_bytes
        if not config.cache:
            cache_bytes = smallest
        if cache_bytes < smallest:
            raise UserError(
                f"cache_bytes is {cache_bytes}, expected at least {smallest}, a snapshot and a page; or no cache"
            )
        context = min(context, num_pages * PAGE_SIZE)
        check_fits(fixed + num_pages * page_bytes, f"{config.max_batch} slots and {num_pages} pages")
        return cls(
            context=context, num_slots=num_slots, num_pages=num_pages + 1, max_pages=-(-context // PAGE_SIZE),
            cache=CacheConfig(
                cost=cost, num_slots=num_slots, num_pages=num_pages + 1, device_bytes=cache_bytes, unit=PAGE_SIZE
            ),
        )

    def create_state(self, lm: LanguageModel) -> EngineState:
        """Empty pools."""
        return EngineState.create(
            lm.config, num_slots=self.num_slots, num_pages=self.num_pages, max_pages=self.max_pages,
            dtype=pool_dtype(lm.dtype),
        )


def _budget(fixed: int) -> int:
    """Bytes that pages and cache may take beside what is there anyway."""
    device = jax.devices()[0]
    free = available_bytes(device)
    if free is None:
        raise UserError(f"{device} does not say how much memory it has; give num_pages and cache_bytes")
    return max(0, int((free - fixed) * _SHARES.get(device.platform, _SHARE)))
