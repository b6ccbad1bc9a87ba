"""Random operations on a prefix cache, each checked against the oracle."""

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import Phase as TestPhase
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from serving.prefix_cache import CacheConfig, ChainHasher, CostModel, LeastRecentlyUsed, Phase, PrefixCache
from tests.serving.cache_oracle import POISON, UNIT, Copy, Oracle, Prompt, Request, Snapshot

COST = CostModel(flops_per_token=100.0, attention_flops=1.0, snapshot_bytes=150, token_bytes=1)
HASHER = ChainHasher(model="tiny", weights="1", state_layout="f32", unit=UNIT)
ENTRY = COST.snapshot_bytes + UNIT * COST.token_bytes

CONFIGS = st.builds(
    CacheConfig,
    cost=st.just(COST),
    unit=st.just(UNIT),
    num_slots=st.integers(2, 8),
    num_pages=st.integers(8, 60),
    device_bytes=st.integers(ENTRY, 20 * ENTRY),
    max_snapshots=st.sampled_from([None, None, None, 1, 3]),
    host_bytes=st.sampled_from([0, ENTRY, 5 * ENTRY, 20 * ENTRY, 20 * ENTRY]),
    interval=st.sampled_from([0, 0, 2 * UNIT]),
    max_tombstones=st.sampled_from([1, 4, 1000]),
    max_seen_units=st.sampled_from([0, 7, 10_000, 10_000]),
)
SYMBOLS = st.lists(st.integers(0, 1), max_size=5).map(tuple)
PROMPTS = st.builds(
    Prompt, salt=st.sampled_from(["a", "a", "b"]), units=SYMBOLS, tail=st.sampled_from([1, 5, 63, 64]),
    image=st.sampled_from([None, None, None, 0, 2]),
)
MORE = st.lists(st.integers(0, 1), max_size=2).map(tuple)
PICK = st.integers(0, 1000)


class CacheMachine(RuleBasedStateMachine):
    """An engine that does everything that is allowed, and some things that are not."""

    operations = 0
    check_books = True

    @initialize(config=CONFIGS, pins=st.sampled_from([0, 1, 2]), learned=st.booleans(), resets=st.booleans())
    def start(self, config, pins, learned, resets):
        config = dataclasses.replace(config, pin_bytes=config.device_bytes * pins // 2)
        self.cache = PrefixCache(config, None if learned else LeastRecentlyUsed())
        self.resets = resets
        self.oracle = Oracle(self.cache)
        self.now = 0.0
        self.released: list[Request] = []

    # Helpers

    def done(self, **observed):
        """After each operation."""
        self.oracle.observe(**observed)
        if self.check_books:
            self.cache.check()
        CacheMachine.operations += 1

    def keys(self, prompt: Prompt) -> list[bytes]:
        return HASHER.keys(prompt.tokens, salt=prompt.salt, extra=prompt.extra)

    def state(self):
        """Everything that an operation without effect must leave alone."""
        cache, table = self.cache, self.cache.boundaries
        return (
            list(cache.slots.free), list(cache.evidence.seen.items()), list(table.tombstones),
            [(boundary.key, boundary.turn, boundary.forks) for boundary in table.known.values()],
            table.classes.tobytes(), table.since.tobytes(), dict(cache.pending), len(cache.transfers.under_way),
            cache.stats.published, cache.stats.admitted, [
                (list(tier.pool.free), list(tier.pages.locks), list(tier.pages.page_of), list(tier.residents),
                 tier.evictable.tobytes(), tier.reserved_bytes)
                for tier in (cache.device, cache.host)
            ],
        )

    def expire_pins(self):
        oracle = self.oracle
        oracle.pins = {snapshot: pin for snapshot, pin in oracle.pins.items() if pin[0] > self.now}
        self.cache.pins.expire(self.now)
        assert {pin.resident.snapshot for pin in self.cache.pins.pins.values()} == oracle.pins.keys()

    def pick(self, items, number, where=lambda item: True):
        items = [item for item in items if where(item)]
        return items[number % len(items)] if items else None

    def running(self):
        return [r for r in self.oracle.requests if r.admission.phase is Phase.RUNNING]

    # Lookups and admissions

    @rule(prompt=PROMPTS)
    def look_up_new(self, prompt):
        self.look_up(prompt)

    @precondition(lambda self: self.oracle.prompts)
    @rule(number=PICK, more=SYMBOLS)
    def look_up_known(self, number, more):
        prompt = self.oracle.prompts[number % len(self.oracle.prompts)]
        self.look_up(dataclasses.replace(prompt, units=(prompt.units + more)[:7]))

    def look_up(self, prompt):
        keys, before = self.keys(prompt), self.state()
        match = self.cache.lookup(keys, len(prompt))
        assert self.state() == before, "a lookup changed something"
        hit, tier, _ = self.oracle.expected_hit(prompt)
        assert (match.hit_tokens, match.tier) == (hit, tier)
        assert match.mla_tokens == self.oracle.expected_mla(prompt)
        assert match.pending_tokens == self.oracle.expected_pending(prompt)
        if self.cache.config.max_seen_units >= 10_000:
            assert match.junction == self.oracle.expected_junction(prompt, hit)
        self.done(may_evict=False)

    @rule(
        prompt=PROMPTS, max_new_tokens=st.sampled_from([0, 0, 1, 150]),
        declared=st.lists(st.integers(0, 300), max_size=2),
    )
    def admit_new(self, prompt, max_new_tokens, declared):
        self.admit(prompt, max_new_tokens, tuple(min(position, len(prompt)) for position in declared))

    @precondition(lambda self: self.oracle.prompts)
    @rule(number=PICK, more=MORE, cut=st.integers(0, 2))
    def admit_known(self, number, more, cut):
        self.admit(self.again(number, more, cut), 0, ())

    def again(self, number, more, cut):
        """The next turn, the same prompt again, or another end of it."""
        prompt = self.oracle.prompts[number % len(self.oracle.prompts)]
        units = prompt.units[: len(prompt.units) - cut] if cut else prompt.units
        return dataclasses.replace(prompt, units=(units + more)[:7])

    def admit(self, prompt, max_new_tokens, declared):
        keys, oracle, config = self.keys(prompt), self.oracle, self.cache.config
        self.expire_pins()
        if -(-(len(prompt) + max_new_tokens) // UNIT) >= config.num_pages:
            before = self.state()
            with pytest.raises(ValueError, match="shorten the request"):
                self.cache.admit(keys, len(prompt), now=self.now, max_new_tokens=max_new_tokens)
            assert self.state() == before
            return self.done(may_evict=False)
        hit, tier, source = oracle.expected_hit(prompt)
        shared = min(hit, oracle.expected_mla(prompt)) // UNIT
        stops = oracle.expected_stops(prompt, hit, declared)
        junction = oracle.expected_junction(prompt, hit)
        path, can, before = oracle.path_pages(prompt, shared * UNIT, keys), *self._can(prompt, max_new_tokens, keys)
        admission = self.cache.admit(
            keys, len(prompt), now=self.now, max_new_tokens=max_new_tokens, declared=declared
        )
        assert (admission is not None) == can, "admitted what does not fit, or refused what does"
        if admission is None:
            assert self.state() == before, "a refusal changed something"
            return self.done(may_evict=False)

        assert admission.hit_tokens == hit
        if config.max_seen_units >= 10_000:
            assert list(admission.stops) == stops
        else:
            assert set(stops) - {junction} <= set(admission.stops)
            assert all(stop % UNIT == 0 and hit < stop < len(prompt) for stop in admission.stops)
        assert admission.pages[:shared] == path
        assert len(admission.pages) == -(-(len(prompt) + max_new_tokens) // UNIT)
        fresh = admission.pages[shared:]
        assert not oracle.pages_in_use() & set(fresh), "a page in use was given away"
        oracle.device_pages.update((page, POISON) for page in fresh)
        request = Request(
            prompt, admission, oracle.epoch, list(admission.stops), done=shared * UNIT, reusable=shared * UNIT,
            reads=set(path), source=source if tier == "device" else None,
        )
        oracle.requests.append(request)
        oracle.prompts.append(prompt)
        oracle.queried += len(prompt)
        oracle.hit += hit
        assert (self.cache.stats.prompt_tokens, self.cache.stats.hit_tokens) == (oracle.queried, oracle.hit)
        for snapshot, (_, ttl, pages) in oracle.pins.items():
            if snapshot.num_tokens < len(prompt) and prompt.prefix(snapshot.num_tokens) == snapshot.prefix:
                oracle.pins[snapshot] = (self.now + ttl, ttl, pages)
        if tier == "host":
            assert admission.phase is Phase.LOADING and admission.restore is None
            transfer = self.cache.loading(admission)
            assert transfer.snapshot is source and transfer.target_pages == fresh[: hit // UNIT - shared]
            oracle.copies.append(Copy(transfer, source, oracle.epoch, set(fresh), request))
        else:
            assert admission.phase is Phase.RUNNING and admission.restore is source
        self.done(pages_short=True)

    def _can(self, prompt, max_new_tokens, keys):
        return self.oracle.can_admit(prompt, max_new_tokens, keys), self.state()

    # A request's life

    @precondition(lambda self: any(r.ahead for r in self.running()))
    @rule(number=PICK, skip=st.integers(0, 4))
    def prefill(self, number, skip):
        """To the next stop, where a state is published; now and then a stop is left out."""
        request = self.pick(self.running(), number, lambda r: r.ahead)
        if skip == 0 and len(request.ahead) > 1:
            request.ahead.pop(0)
        self.publish(request, request.ahead.pop(0))

    def publish(self, request, stop):
        oracle, keys, prompt = self.oracle, self.keys(request.prompt), request.prompt
        for number in range(request.done // UNIT, stop // UNIT):
            page = request.admission.pages[number]
            assert page in request.admission.owned, "a request was to write to a shared page"
            oracle.device_pages[page] = prompt.prefix((number + 1) * UNIT)
        request.done = stop
        snapshot, twins = Snapshot(prompt, stop), [s for s in oracle.device if s.prefix == prompt.prefix(stop)]
        request.source = None
        result = self.cache.publish(request.admission, stop, snapshot, now=self.now)
        if request.epoch != oracle.epoch:
            assert result is False
            return self.done()
        request.reusable, request.reads = stop, set(oracle.path_pages(prompt, stop, keys))
        self.done(published=snapshot)
        assert result == any(s.prefix == prompt.prefix(stop) for s in oracle.device)
        assert not (twins and snapshot in oracle.device), "a twin's snapshot was replaced"

    @precondition(lambda self: self.released)
    @rule(number=PICK)
    def publish_too_late(self, number):
        request = self.pick(self.released, number)
        before = self.state()
        for stop in request.admission.stops or (UNIT,):
            assert self.cache.publish(request.admission, stop, Snapshot(request.prompt, UNIT), now=self.now) is False
        assert self.state() == before
        self.done(may_evict=False)

    @precondition(lambda self: self.running())
    @rule(number=PICK)
    def publish_wrongly(self, number):
        """Off a stop, behind, or nothing at all."""
        request = self.pick(self.running(), number, lambda r: r.epoch == self.oracle.epoch)
        if request is None:
            return
        before = self.state()
        wrong = {1, UNIT + 1, request.done, len(request.prompt), UNIT} - set(request.ahead)
        for stop in wrong:
            with pytest.raises(ValueError, match="expected one of the stops"):
                self.cache.publish(request.admission, stop, Snapshot(request.prompt, UNIT), now=self.now)
        for stop in request.ahead:
            with pytest.raises(ValueError, match="expected a handle"):
                self.cache.publish(request.admission, stop, None, now=self.now)
        assert self.state() == before
        self.done(may_evict=False)

    @precondition(lambda self: self.running())
    @rule(number=PICK)
    def restored(self, number):
        request = self.pick(self.running(), number)
        request.source = None
        self.cache.restored(request.admission, now=self.now)
        assert request.admission.restore is None
        self.done()

    @precondition(lambda self: self.running())
    @rule(number=PICK, more=st.integers(1, 4 * UNIT))
    def extend(self, number, more):
        request = self.pick(self.running(), number)
        oracle, admission, config = self.oracle, request.admission, self.cache.config
        wanted = len(admission.pages) * UNIT - UNIT // 2 + more
        fresh = -(-wanted // UNIT) - len(admission.pages)
        if len(admission.pages) + fresh >= config.num_pages:
            return
        before, old = self.state(), list(admission.pages)
        can = config.num_pages - 1 - len(oracle.pages_in_use()) >= fresh
        assert self.cache.extend(admission, wanted, now=self.now) == can
        if not can:
            assert self.state() == before and admission.pages == old
            return self.done(may_evict=False)
        taken = admission.pages[len(old):]
        assert admission.pages[: len(old)] == old and len(taken) == max(fresh, 0)
        others = {page for r in oracle.requests if r is not request for page in (*r.admission.pages, *r.reads)}
        assert not set(taken) & (others | set(old) | request.reads)
        oracle.device_pages.update((page, POISON) for page in taken)
        self.done(pages_short=True)

    @precondition(lambda self: self.oracle.requests)
    @rule(number=PICK, again=st.booleans(), partly=st.booleans())
    def release(self, number, again, partly):
        """Finish, abort, deadline or error, in any phase; perhaps in the middle of a chunk, perhaps twice."""
        self.let_go(self.pick(self.oracle.requests, number), again, partly)

    def let_go(self, request, again=False, partly=False):
        admission, oracle = request.admission, self.oracle
        if partly and request.ahead and admission.phase is Phase.RUNNING:
            for page in admission.pages[request.done // UNIT : request.ahead[0] // UNIT]:
                oracle.device_pages[page] = "half written"
        oracle.requests.remove(request)
        self.released.append(request)
        self.released = self.released[-5:]
        self.cache.release(admission, now=self.now)
        self.done()
        if again:
            before = self.state()
            self.cache.release(admission, now=self.now)
            assert self.state() == before, "a second release did something"
            self.done(may_evict=False)

    @precondition(lambda self: self.oracle.requests)
    @rule(number=PICK)
    def preempt(self, number):
        """Release, and the same prompt at once anew: it goes on from what it had published."""
        request = self.pick(self.oracle.requests, number)
        self.let_go(request)
        self.admit(request.prompt, 0, ())

    @rule(prompt=PROMPTS, store=st.booleans())
    def come_and_go(self, prompt, store):
        """A whole request, so that there is something to hit, perhaps in the host tier."""
        self.together(prompt, 1)
        if store and self.cache.config.host_bytes:
            self.store("end")

    @precondition(lambda self: self.oracle.prompts)
    @rule(number=PICK, more=MORE, cut=st.integers(0, 2))
    def come_again(self, number, more, cut):
        self.together(self.again(number, more, cut), 1)

    @rule(prompt=PROMPTS, count=st.integers(2, 3))
    def come_together(self, prompt, count):
        """Twins in one step: the first to publish wins, and all go on."""
        self.together(prompt, count)

    def together(self, prompt, count):
        requests = []
        for _ in range(count):
            before = len(self.oracle.requests)
            self.admit(prompt, 0, ())
            requests += self.oracle.requests[before:]
        while any(r.ahead and r.admission.phase is Phase.RUNNING for r in requests):
            for request in requests:
                if request.ahead and request.admission.phase is Phase.RUNNING:
                    self.publish(request, request.ahead.pop(0))
        for request in requests:
            self.let_go(request)

    @rule()
    def squeeze(self):
        """One request wants all pages that can be had: nothing unpinned stays on the device."""
        free = self.cache.config.num_pages - 1 - len(self.oracle.pages_in_use())
        requests = len(self.oracle.requests)
        if free:
            self.admit(Prompt("nobody else", (), 1), (free - 1) * UNIT, ())
        for request in self.oracle.requests[requests:]:
            assert not self.cache.device.pool.free
            self.let_go(request)

    # The host tier

    @precondition(lambda self: self.cache.config.host_bytes and self.oracle.device)
    @rule(then=st.sampled_from(["go on", "end", "reset"]))
    def store(self, then):
        """A copy to the host begins, and is under way for a while or across a reset; or all there are, to their end."""
        copies = len(self.oracle.copies)
        if then == "go on" or then == "reset" and not self.resets:
            return self.start_store()
        if then == "reset":
            self.start_store()
            self.reset(0)
            while len(self.oracle.copies) > copies:
                self.end(self.oracle.copies.pop(), True)
            return
        self.start_store()
        while len(self.oracle.copies) > copies:
            self.end(self.oracle.copies.pop(), True)
            self.start_store()

    @precondition(lambda self: self.oracle.host)
    @rule(number=PICK, ending=st.sampled_from(["release", "arrive", "fail", "reset", "none"]))
    def come_back(self, number, ending):
        """A hit in the host tier, most likely."""
        snapshot = self.pick(sorted(self.oracle.host, key=lambda s: (s.prefix[:2], str(s.prefix))), number)
        self.squeeze()
        copies = len(self.oracle.copies)
        self.admit(dataclasses.replace(snapshot.prompt, tail=64), 0, ())
        if len(self.oracle.copies) > copies:
            if ending == "release":
                self.let_go(self.oracle.requests[-1])
            elif ending == "reset" and self.resets:
                self.reset(0)
            if ending != "none":
                self.end(self.oracle.copies.pop(), ending != "fail")

    def start_store(self):
        oracle, before = self.oracle, len(self.cache.transfers.under_way)
        transfer = self.cache.store(now=self.now)
        if transfer is None:
            assert len(self.cache.transfers.under_way) == before
            return self.done()
        source: Snapshot = transfer.snapshot
        assert source in oracle.device and source.prefix not in {s.prefix for s in oracle.host}
        assert all(copy.source is not source for copy in oracle.copies if copy.transfer.to == "host")
        path = oracle.path_pages(source.prompt, source.num_tokens, self.keys(source.prompt))
        assert transfer.source_pages == path[len(path) - len(transfer.target_pages) :]
        used = {page for copy in oracle.copies if copy.transfer.to == "host" for page in copy.transfer.target_pages}
        cached = {page for r in self.cache.host.residents.values() for page in self._host_path(r)}
        assert not set(transfer.target_pages) & (used | cached)
        oracle.copies.append(Copy(transfer, source, oracle.epoch, set(path), None))
        self.done()

    def _host_path(self, resident):
        return [self.cache.host.pages.page_of[key] for key in resident.path]

    @precondition(lambda self: self.oracle.copies)
    @rule(number=PICK, arrives=st.integers(0, 2))
    def end_transfer(self, number, arrives):
        self.end(self.oracle.copies.pop(number % len(self.oracle.copies)), arrives > 0)

    def end(self, copy, arrives):
        oracle = self.oracle
        transfer, source = copy.transfer, copy.source
        load = transfer.to == "device"
        here, there = (oracle.host_pages, oracle.device_pages) if load else (oracle.device_pages, oracle.host_pages)
        copied = Snapshot(source.prompt, source.num_tokens)
        waiting = copy.request if copy.request in oracle.requests else None
        # The copy was under way until now: what it read must still be there.
        first = source.units - len(transfer.target_pages)
        for number, (page, target) in enumerate(zip(transfer.source_pages, transfer.target_pages)):
            if copy.epoch == oracle.epoch or not load:
                assert here[page] == source.prompt.prefix((first + number + 1) * UNIT), "a page changed under a copy"
            there[target] = here[page]
        if not arrives:
            self.cache.fail(transfer, now=self.now)
            if waiting:
                assert waiting.admission.phase is Phase.FAILED
            self.done()
            others = any(c.source is source and c.transfer.to == "device" for c in oracle.copies)
            assert not load or others or source not in oracle.host
        else:
            if waiting:
                waiting.done = source.num_tokens
                if copy.epoch == oracle.epoch:
                    waiting.reusable = source.num_tokens
            self.cache.complete(transfer, copied, now=self.now)
            if waiting:
                assert waiting.admission.phase is Phase.RUNNING and waiting.admission.restore is copied
                if copy.epoch == oracle.epoch:
                    path = oracle.path_pages(source.prompt, source.num_tokens, self.keys(source.prompt))
                    waiting.reads = set(path)
            current = copied if copy.epoch == oracle.epoch else None
            self.done(published=current if waiting else None, stored=None if load else current)
            if waiting and copied in oracle.device:
                waiting.source = copied
        with pytest.raises(ValueError, match="ended before"):
            self.cache.complete(transfer, copied, now=self.now)

    @precondition(lambda self: any(r.admission.phase is not Phase.RUNNING for r in self.oracle.requests))
    @rule(number=PICK)
    def step_without_a_state(self, number):
        request = self.pick(self.oracle.requests, number, lambda r: r.admission.phase is not Phase.RUNNING)
        before = self.state()
        for attempt in (
            lambda: self.cache.extend(request.admission, 1, now=self.now),
            lambda: self.cache.restored(request.admission, now=self.now),
        ):
            with pytest.raises(ValueError, match="expected it to be running"):
                attempt()
        assert self.state() == before
        self.done(may_evict=False)

    # The operator, and time

    @precondition(lambda self: self.oracle.device)
    @rule(number=PICK, count=st.integers(1, 3), ttl=st.sampled_from([0.5, 100.0]), outlast=st.booleans())
    def pin(self, number, count, ttl, outlast):
        self.expire_pins()
        snapshots = sorted(self.oracle.device, key=lambda s: (s.prefix[:2], str(s.prefix)))
        for following in range(count):
            self.pin_one(snapshots[(number + following) % len(snapshots)], ttl)
        assert not self.cache.pin(b"no such key", ttl=ttl, now=self.now)
        self.done(may_evict=False)
        if outlast:
            self.wait(ttl)

    def pin_one(self, snapshot, ttl):
        oracle, config, keys = self.oracle, self.cache.config, self.keys(snapshot.prompt)
        used = sum(s.units * config.page_bytes + config.snapshot_bytes for s in oracle.pins)
        size = snapshot.units * config.page_bytes + config.snapshot_bytes
        pinned = self.cache.pin(keys[snapshot.units - 1], ttl=ttl, now=self.now)
        assert pinned == (snapshot in oracle.pins or used + size <= config.pin_bytes)
        if pinned:
            path = oracle.path_pages(snapshot.prompt, snapshot.num_tokens, keys)
            oracle.pins[snapshot] = (self.now + ttl, ttl, set(path))

    @precondition(lambda self: self.oracle.pins)
    @rule(number=PICK)
    def unpin(self, number):
        self.expire_pins()
        if self.oracle.pins:
            snapshot = self.pick(list(self.oracle.pins), number)
            del self.oracle.pins[snapshot]
            self.cache.unpin(self.keys(snapshot.prompt)[snapshot.units - 1], now=self.now)
        self.done()

    @precondition(lambda self: self.resets and (self.oracle.device or self.oracle.copies))
    @rule(really=st.integers(0, 3))
    def reset(self, really):
        if really and not self.oracle.copies:
            return
        oracle = self.oracle
        oracle.epoch += 1
        oracle.prompts.clear()
        oracle.pins.clear()
        for request in oracle.requests:
            request.source = None
        self.cache.reset(now=self.now)
        self.done(reset=True)
        assert not oracle.device and not oracle.host
        late = self.pick(self.running(), 0, lambda r: r.ahead)
        if late:
            self.publish(late, late.ahead.pop(0))

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0, 100.0]))
    def wait(self, seconds):
        self.now += seconds
        self.expire_pins()
        self.done()

    def teardown(self):
        """Everybody leaves: nothing is in use, and after a reset nothing is left."""
        if not hasattr(self, "oracle"):
            return
        for request in list(self.oracle.requests):
            self.let_go(request)
        while self.oracle.copies:
            self.end_transfer(0, len(self.oracle.copies) % 2)
        for tier in (self.cache.device, self.cache.host):
            assert tier.pages.num_locked == 0 and tier.reserved_bytes == 0 or self.oracle.pins
        self.cache.reset(now=self.now)
        self.oracle.pins.clear()
        if self.check_books:
            self.cache.check()
        assert len(self.cache.slots.free) == self.cache.config.num_slots - 1
        for tier in (self.cache.device, self.cache.host):
            assert len(tier.pool.free) == tier.pool.count - 1


def run_machine(operations: int, *, machine: type[CacheMachine] = CacheMachine, first_seed: int = 0, steps: int = 100,
                examples: int = 50, shrink: bool = True) -> int:
    """Runs at least so many operations; returns how many.

    Each batch has its own seed, so a failure is found again.
    """
    before, number = CacheMachine.operations, first_seed
    phases = (TestPhase.generate, TestPhase.shrink) if shrink else (TestPhase.generate,)
    while CacheMachine.operations - before < operations:
        batch = type(machine.__name__, (machine,), {})
        run_state_machine_as_test(
            seed(number)(batch),
            settings=settings(
                max_examples=examples, stateful_step_count=steps, deadline=None, database=None, phases=phases,
                suppress_health_check=list(HealthCheck), report_multiple_bugs=False, print_blob=False,
            ),
        )
        number += 1
    return CacheMachine.operations - before
