"""A prefix cache's world, modelled naively: pages and slots with contents, prompts as plain tuples of tokens.

Nothing here hashes. What a page or a snapshot holds is the very prefix it was computed from, and what a lookup must
find is searched for by comparing tokens. Only evictions are not predicted: which of the published snapshots are left is
read from the cache, and whether each loss was allowed is checked.
"""

import dataclasses

from serving.prefix_cache import Admission, Phase, PrefixCache, Transfer

UNIT = 64
POISON = "poison"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Units of one symbol each, and a tail of 1 .. 64 tokens; perhaps an image in one unit."""

    salt: str
    units: tuple[int, ...]
    tail: int
    image: int | None = None

    @property
    def tokens(self) -> list[int]:
        return [symbol for symbol in self.units for _ in range(UNIT)] + [9] * self.tail

    @property
    def extra(self) -> dict[int, bytes]:
        return {} if self.image is None else {self.image: b"image"}

    def __len__(self) -> int:
        return len(self.units) * UNIT + self.tail

    def prefix(self, num_tokens: int) -> tuple:
        """All that a state after so many tokens depends on."""
        image = self.image if self.image is not None and self.image * UNIT < num_tokens else None
        return self.salt, tuple(self.tokens[:num_tokens]), image

    def shared_units(self, other: "Prompt", other_units: int) -> int:
        """Leading units in common, of those before this prompt's last token and of the other's first ones."""
        units = min((len(self) - 1) // UNIT, other_units)
        while units and self.prefix(units * UNIT) != other.prefix(units * UNIT):
            units -= 1
        return units


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """An immutable handle: what it holds is what was computed."""

    prompt: Prompt
    num_tokens: int

    def __post_init__(self):
        assert self.num_tokens % UNIT == 0

    @property
    def prefix(self) -> tuple:
        return self.prompt.prefix(self.num_tokens)

    @property
    def units(self) -> int:
        return self.num_tokens // UNIT


@dataclasses.dataclass(eq=False)
class Request:
    """The engine's side of an admission."""

    prompt: Prompt
    admission: Admission
    epoch: int
    ahead: list[int]
    done: int  # tokens in the slot and in the pages
    reusable: int  # tokens of it that are cached
    reads: set[int]  # cached pages that must stay for it
    source: Snapshot | None  # must stay until it is copied


@dataclasses.dataclass(eq=False)
class Copy:
    """The engine's side of a transfer."""

    transfer: Transfer
    source: Snapshot
    epoch: int
    reads: set[int]  # pages of the source tier
    request: Request | None  # that waits for it


class Oracle:
    """What must be true of a cache, given what was done to it."""

    def __init__(self, cache: PrefixCache):
        self.cache = cache
        self.config = cache.config
        self.device_pages: dict[int, object] = {}
        self.host_pages: dict[int, object] = {}
        self.prompts: list[Prompt] = []  # admitted since the last reset
        self.requests: list[Request] = []
        self.copies: list[Copy] = []
        self.pins: dict[Snapshot, tuple[float, float, set[int]]] = {}  # until, ttl, pages
        self.device: set[Snapshot] = set()
        self.host: set[Snapshot] = set()
        self.epoch = 0
        self.queried = self.hit = 0

    # What a lookup must find

    def expected_hit(self, prompt: Prompt) -> tuple[int, str | None, Snapshot | None]:
        """The deepest snapshot of a proper prefix; the device's where both tiers have it."""
        best = (0, None, None)
        for tier, snapshots in (("host", self.host), ("device", self.device)):
            for snapshot in snapshots:
                fits = snapshot.num_tokens < len(prompt) and snapshot.prefix == prompt.prefix(snapshot.num_tokens)
                if fits and snapshot.num_tokens >= best[0]:
                    best = (snapshot.num_tokens, tier, snapshot)
        return best

    def expected_mla(self, prompt: Prompt) -> int:
        """How far cached device pages reach."""
        cached = [(snapshot.prompt, snapshot.units) for snapshot in self.device]
        cached += [(r.prompt, r.reusable // UNIT) for r in self.requests if r.epoch == self.epoch]
        return max((prompt.shared_units(other, units) for other, units in cached), default=0) * UNIT

    def expected_junction(self, prompt: Prompt, hit: int) -> int:
        """The longest prefix shared with an earlier prompt, if some prompt with it went on differently."""
        shared = [(prompt.shared_units(other, len(other)), (len(other) - 1) // UNIT) for other in self.prompts]
        longest = max((units for units, _ in shared), default=0)
        went_on = any(units == longest < end for units, end in shared)
        return longest * UNIT if went_on and hit < longest * UNIT < (len(prompt) - 1) // UNIT * UNIT else 0

    def expected_pending(self, prompt: Prompt) -> int:
        """The deepest stop that a running request has ahead on this path."""
        stops = [
            stop for r in self.requests if r.epoch == self.epoch for stop in r.ahead
            if stop < len(prompt) and prompt.prefix(stop) == r.prompt.prefix(stop)
        ]
        return max(stops, default=0)

    def expected_stops(self, prompt: Prompt, hit: int, declared: tuple[int, ...]) -> list[int]:
        """All positions that somebody wants a state at."""
        end = (len(prompt) - 1) // UNIT * UNIT
        stops = {end, self.expected_junction(prompt, hit), *(position // UNIT * UNIT for position in declared)}
        if self.config.interval:
            stops.update(range(0, end + 1, self.config.interval))
        return sorted(stop for stop in stops if hit < stop <= end)

    # Memory

    def path_pages(self, prompt: Prompt, num_tokens: int, keys: list[bytes]) -> list[int]:
        """Cached device pages of a prefix; their contents are what they should be."""
        pages = [self.cache.device.pages.page_of[key] for key in keys[: num_tokens // UNIT]]
        for number, page in enumerate(pages):
            assert self.device_pages[page] == prompt.prefix((number + 1) * UNIT), "a cached page was overwritten"
        return pages

    def pages_in_use(self) -> set[int]:
        """Device pages that nobody else may have."""
        used = {page for request in self.requests for page in (*request.admission.pages, *request.reads)}
        used.update(page for copy in self.copies if copy.transfer.to == "host" for page in copy.reads)
        used.update(page for copy in self.copies if copy.transfer.to == "device" for page in copy.reads)
        used.update(page for _, _, pages in self.pins.values() for page in pages)
        return used

    def can_admit(self, prompt: Prompt, max_new_tokens: int, keys: list[bytes]) -> bool:
        """Whether a slot is left, and enough pages if everything went that may."""
        hit, _, _ = self.expected_hit(prompt)
        shared = min(hit, self.expected_mla(prompt)) // UNIT
        path = self.path_pages(prompt, shared * UNIT, keys)
        wanted = -(-(len(prompt) + max_new_tokens) // UNIT) - shared
        slots = self.config.num_slots - 1 - len(self.requests)
        return slots > 0 and self.config.num_pages - 1 - len(self.pages_in_use() | set(path)) >= wanted

    def idle_bytes(self) -> int:
        """Bytes of the device tier: snapshots, and pages that only they need."""
        cached = {page for resident in self.cache.device.residents.values() for page in self._pages_of(resident)}
        pages = len(cached - self.pages_in_use())
        return len(self.device) * self.config.snapshot_bytes + pages * self.config.page_bytes

    def _pages_of(self, resident) -> list[int]:
        return [self.cache.device.pages.page_of[key] for key in resident.path]

    # After every operation

    def observe(self, *, published: Snapshot | None = None, stored: Snapshot | None = None, reset: bool = False,
                may_evict: bool = True, pages_short: bool = False) -> None:
        """Takes in which snapshots are left, and checks everything."""
        device = self._snapshots(self.cache.device, self.device_pages)
        host = self._snapshots(self.cache.host, self.host_pages)
        assert device - self.device <= ({published} - {None}), "a snapshot appeared that nobody published"
        assert host - self.host <= ({stored} - {None}), "a snapshot appeared in the host tier"
        lost = self.device - device
        if not reset:
            needed = {request.source for request in self.requests if request.source}
            needed |= {copy.source for copy in self.copies if copy.transfer.to == "host" and copy.epoch == self.epoch}
            assert not needed & lost and not self.pins.keys() & lost, "a pinned snapshot was evicted"
            loading = {copy.source for copy in self.copies if copy.transfer.to == "device" and copy.epoch == self.epoch}
            assert not loading & (self.host - host), "a host snapshot was evicted while it was read"
            assert may_evict or not lost, "a snapshot was evicted for nothing"
        self.device, self.host = device, host
        if lost and not reset:
            self._check_that_it_was_tight(lost, pages_short)

        limit = self.config.max_snapshots
        assert self.idle_bytes() <= self.config.device_bytes and (limit is None or len(device) <= limit), "over budget"
        host_used = len(host) * self.config.snapshot_bytes
        assert host_used <= self.config.host_bytes, "over the host budget"
        pinned = sum(s.units * self.config.page_bytes + self.config.snapshot_bytes for s in self.pins)
        assert pinned <= self.config.pin_bytes, "more is pinned than allowed"

        slots = [request.admission.slot for request in self.requests]
        assert len(set(slots)) == len(slots) and all(0 < slot < self.config.num_slots for slot in slots)
        for request in self.requests:
            self._check_request(request)
        used, free = self.pages_in_use(), self.cache.device.pool.free
        assert not used & set(free), "a page in use is free"
        assert len(set(free)) == len(free) and 0 not in used and 0 not in free

    def _snapshots(self, tier, contents: dict[int, object]) -> set[Snapshot]:
        """Those of a tier; all their pages are there and hold what they should."""
        for key, resident in tier.residents.items():
            snapshot: Snapshot = resident.snapshot
            assert len(resident.path) == snapshot.units and resident.path[-1] == key
            for number, step in enumerate(resident.path):
                page = tier.pages.page_of[step]
                assert contents[page] == snapshot.prompt.prefix((number + 1) * UNIT), "a cached page is wrong"
        return {resident.snapshot for resident in tier.residents.values()}

    def _check_that_it_was_tight(self, lost: set[Snapshot], pages_short: bool) -> None:
        """The last one to go had to: with it, bytes or pages would not have sufficed."""
        config = self.config
        largest = max(snapshot.units for snapshot in lost)
        with_it = self.idle_bytes() + config.snapshot_bytes + largest * config.page_bytes
        too_many = config.max_snapshots is not None and len(self.device) >= config.max_snapshots
        no_page = pages_short and len(self.cache.device.pool.free) < largest
        assert with_it > config.device_bytes or too_many or no_page, "a snapshot was evicted though there was room"

    def _check_request(self, request: Request) -> None:
        """Its pages hold what it computed or was given, and belong to it alone beyond that."""
        admission = request.admission
        assert admission.phase is not Phase.RELEASED
        for number in range(request.done // UNIT):
            content = self.device_pages[admission.pages[number]]
            assert content == request.prompt.prefix((number + 1) * UNIT), "a page of a running request was overwritten"
        assert len(set(admission.pages)) == len(admission.pages)
        if self.epoch == request.epoch and request.ahead:
            assert admission.stops[-len(request.ahead):] == tuple(request.ahead)
