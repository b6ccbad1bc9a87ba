"""The engine without its thread: admits, dispatches steps, reads them back; called round by round."""

import bisect
import collections
import dataclasses
import heapq
import logging
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

import jax
import numpy as np

from k3jax.generation import TokenLogprobs
from k3jax.language_model import LanguageModel
from k3jax.sampling.sampler import GENERATED, Sample, seen_in_prompt
from serving.engine.config import EngineConfig
from serving.engine.keys import PrefixKeys
from serving.engine.plan import Plan
from serving.engine.programs import Programs, empty_prefill
from serving.engine.request import Done, Event, FinishReason, Tokens
from serving.engine.scheduler import Chunk, plan_prefill, victim
from serving.engine.sequence import Sequence
from serving.engine.shapes import snapshot_counts
from serving.engine.slots import Slots
from serving.engine.stats import Counters
from serving.engine.steps import EngineState, slot_contents
from serving.prefix_cache import PrefixCache

_ROOM = 256
"""New tokens that an admission has pages for; more are taken as the answer grows."""
_FEW = 64
"""Requests that have ended and whose deadlines may still be in the list."""
_NO_NUMBERS = "the model gave no numbers: its weights are damaged, or its values are too large for the dtype"

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Step:
    """A dispatched step, until its tokens are read back.

    Attributes:
      kind: "prefill" or "decode".
      since: when its round began.
      count: tokens that it computes.
      sample: what it chose.
      rows: [n] rows of the sample that are wanted; None for the first n.
      slots: [n] whose they are.
      sequences: theirs too; a slot may have another owner by the time that the step is read.
      last: [n] bool, whether the row's answer has its full length with this token.
    """

    kind: str
    since: float
    count: int
    sample: Sample
    rows: np.ndarray | None
    slots: np.ndarray
    sequences: list[Sequence]
    last: np.ndarray

    @property
    def result(self) -> jax.Array:
        """Comes with it."""
        return self.sample.token_ids


@dataclasses.dataclass(frozen=True)
class Restoration:
    """A dispatched copy of a snapshot into a slot; it is in flight like a step, so that it can be timed."""

    since: float
    result: jax.Array


class Core:
    """All requests of an engine, its device state and its cache.

    A round is `dispatch`, then `deliver` as long as `wait` finds something: at most two rounds are in flight.

    Attributes:
      waiting: in order.
      by_id: all that have not ended.
      lost: what `count_lost` found.
    """

    def __init__(self, lm: LanguageModel, config: EngineConfig, plan: Plan, programs: Programs, keys: PrefixKeys,
                 counters: Counters, state: EngineState, waiting: SequenceOf[Sequence] = ()):
        self._lm, self._config, self._plan, self._programs, self._keys = lm, config, plan, programs, keys
        self._counters, self._state = counters, state
        self.cache = PrefixCache(plan.cache, stats=counters.cache)
        self.slots = Slots(plan.num_slots, plan.max_pages)
        self.waiting = list(waiting)
        self.by_id = {sequence.request.id: sequence for sequence in self.waiting}
        self._prefilling: list[Sequence] = []
        self._deadlines: list[tuple[float, int, Sequence]] = []
        for sequence in self.waiting:
            self._watch(sequence)
        self._in_flight: collections.deque[Step | Restoration] = collections.deque()
        self.lost = 0
        self._read_at = 0.0  # when the latest step had ended
        self._ahead = 0  # of those in flight, how many the latest round has added
        self._restored: list[Restoration] = []  # in this round
        self._may_admit = True  # something has changed since an admission was refused

    # Commands

    def submit(self, sequence: Sequence) -> None:
        """A request came."""
        self.by_id[sequence.request.id] = sequence
        bisect.insort(self.waiting, sequence, key=lambda waiting: waiting.order)
        self._watch(sequence)
        self._may_admit = True

    def abort(self, request_id: str, now: float) -> None:
        """Ends a request, if there is such a one."""
        sequence = self.by_id.get(request_id)
        if sequence:
            self._finish(sequence, "abort", now)

    def abort_all(self, now: float) -> None:
        """Ends all requests."""
        for sequence in list(self.by_id.values()):
            self._finish(sequence, "abort", now)

    def reset_cache(self, now: float) -> None:
        """Forgets all prefixes."""
        self.cache.reset(now=now)
        self._may_admit = True

    def end_all(self, reason: FinishReason, now: float, message: str | None = None, *, waiting: bool = True) -> None:
        """Ends all requests, or those that run. Touches neither device nor cache: the core is not used after this."""
        for sequence in list(self.by_id.values()):
            if waiting or sequence.admission:
                self._report_end(sequence, reason, now, message=message)

    # A round

    @property
    def idle(self) -> bool:
        """Whether nothing will happen without a command, or a deadline."""
        admits = self.waiting and self._may_admit
        return not (self._in_flight or self._prefilling or admits or self.slots.decoding.any())

    @property
    def next_deadline(self) -> float | None:
        """The earliest, of requests that may have ended."""
        return self._deadlines[0][0] if self._deadlines else None

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return self.cache.slots.count - 1 - len(self.cache.slots.free)

    def count_lost(self) -> None:
        """Slots and pages that nobody has, or that have two owners; called when nothing runs. Not 0: there is a bug."""
        slots, pool, pages = self.cache.slots, self.cache.device.pool, self.cache.device.pages
        before, self.lost = self.lost, (
            abs(slots.count - 1 - len(slots.free)) + abs(pool.count - 1 - len(pool.free) - pages.size)
            + pages.num_locked
        )
        if self.lost > before:
            logger.error("%d slots and pages are lost", self.lost)

    def dispatch(self, now: float) -> None:
        """Ends what is late, admits what fits, and dispatches a decode and a prefill step if there is something."""
        self._expire(now)
        self._admit(now)
        steps = [*self._decode(now), *self._prefill(now)]
        if steps:
            self._counters.iteration_tokens.add(sum(step.count for step in steps))
        dispatched = [*self._restored, *steps]
        self._restored.clear()
        self._in_flight.extend(dispatched)
        self._ahead = len(dispatched)

    def wait(self) -> bool:
        """Waits for the next step of earlier rounds, of any round if this one had none; False if there is none."""
        if len(self._in_flight) <= self._ahead:
            return False
        self._in_flight[0].result.block_until_ready()
        return True

    def deliver(self, now: float) -> None:
        """Passes on the tokens of the step that was waited for."""
        step = self._in_flight.popleft()
        # The device does one after the other: it began when the one before had ended, if it was dispatched by then.
        seconds, self._read_at = now - max(step.since, self._read_at), now
        if isinstance(step, Restoration):
            self._counters.restore_seconds.add(seconds)
        else:
            self._counters.step_seconds[step.kind].add(seconds)
            self._read(step, now)

    # Admission

    def _watch(self, sequence: Sequence) -> None:
        if sequence.request.deadline is None:
            return
        if len(self._deadlines) > _FEW + 2 * len(self.by_id):
            # Most end long before their deadline, and nothing else keeps them in memory.
            self._deadlines = [entry for entry in self._deadlines if not entry[-1].done]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (sequence.request.deadline, sequence.arrival, sequence))

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            *_, sequence = heapq.heappop(self._deadlines)
            if not sequence.done:
                self._finish(sequence, "deadline", now)

    def _admit(self, now: float) -> None:
        """In order; the first that finds no room keeps those behind it waiting, so that nobody starves."""
        if not self._may_admit:
            return
        self._may_admit = False
        for sequence in list(self.waiting):
            if not self.cache.slots.free:
                break
            length = len(sequence.tokens)
            match = self.cache.lookup(sequence.keys, length)
            if match.pending_tokens > match.hit_tokens and self._is_computed_ahead(sequence, match.hit_tokens):
                continue  # to wait costs less than to do it twice
            # A preempted request goes on from a prefill of its answer, which rounds differently from decode steps.
            room = sequence.left if self._config.deterministic else min(sequence.left, _ROOM)
            admission = self.cache.admit(
                sequence.keys, length, now=now, max_new_tokens=room,
                declared=sequence.request.breakpoints,
            )
            if admission is None:
                break
            first_time = sequence.accepted is None
            sequence.admitted(admission, now)
            self.waiting.remove(sequence)
            self._occupy(sequence, now)
            if first_time:
                self._counters.prompt_tokens += length
                self._send(sequence, sequence.accepted, now)

    def _is_computed_ahead(self, sequence: Sequence, hit_tokens: int) -> bool:
        """Whether somebody who goes first is about to publish more of its prompt than it could use now.

        Those behind it do not count: whoever waits for them lets everybody in between pass.
        """
        unit = self._plan.cache.unit
        for running in self._prefilling:
            if running.order > sequence.order:
                break
            for stop in running.admission.stops:
                if max(running.computed, hit_tokens) < stop < len(sequence.tokens):
                    last = stop // unit - 1
                    if running.keys[last] == sequence.keys[last]:
                        return True
        return False

    def _occupy(self, sequence: Sequence, now: float) -> None:
        """Fills the slot of a sequence that was admitted."""
        admission, slot = sequence.admission, self.slots.take(sequence)
        prompt = len(sequence.request.token_ids)
        seen = seen_in_prompt(sequence.tokens[:prompt], self._lm.config.vocab_size)
        seen[sequence.tokens[prompt:]] |= GENERATED
        self._state = self._programs.admit(self._state, slot, slot_contents(
            admission.pages, self._plan.max_pages, sequence.request.sampling, sequence.seed, seen
        ))
        if admission.restore is not None:
            self._state, restored = self._programs.restore(self._state, slot, admission.restore)
            self._restored.append(Restoration(now, restored))
            self.cache.restored(admission, now=now)
        bisect.insort(self._prefilling, sequence, key=lambda running: running.order)

    # Steps

    def _decode(self, now: float) -> Iterator[Step]:
        for sequence in self.slots.without_room():
            self._make_room(sequence, now)
        planned = self.slots.decode_rows(self._programs.decode_rows)
        if planned is None:
            return
        slots, rows = planned
        self._state, sample = self._programs.decode(self._state, rows)
        self._counters.decode_steps += 1
        sequences = [self.slots.sequences[slot] for slot in slots.tolist()]
        yield self._dispatched("decode", now, len(sequences), sample, None, slots, sequences)

    def _prefill(self, now: float) -> Iterator[Step]:
        planned = plan_prefill(
            self._prefilling, self._programs.prefill_shapes, keep=self._config.cache,
            grid=self._config.prefill_tokens if self._config.deterministic else None,
        )
        if planned is None:
            return
        shape, chunks = planned
        kept = [(chunk, stop) for chunk in chunks for stop in chunk.stops]
        counts = snapshot_counts(shape, self._config)
        inputs = empty_prefill(shape, next(count for count in counts if count >= len(kept)))
        row = 0
        for number, chunk in enumerate(chunks):
            inputs.tokens[row : row + chunk.count] = chunk.sequence.tokens[chunk.first : chunk.end]
            inputs.slots[number] = chunk.sequence.admission.slot
            inputs.context_lens[number] = chunk.first
            inputs.ends[number] = chunk.ends_prompt
            for stop in chunk.stops:
                inputs.snapshot_positions[kept.index((chunk, stop))] = row + stop - chunk.first
            row += chunk.count
            inputs.cu_seqlens[number + 1 :] = row
        self._state, sample, snapshots = self._programs.prefill(self._state, shape, inputs)
        self._counters.prefill_steps += 1
        self._counters.computed_tokens += row
        for (chunk, stop), snapshot in zip(kept, snapshots):
            self.cache.publish(chunk.sequence.admission, stop, snapshot, now=now)
            self._may_admit = True
        yield self._advance(chunks, row, sample, now)

    def _advance(self, chunks: SequenceOf[Chunk], count: int, sample: Sample, now: float) -> Step:
        """The chunks were dispatched, so many tokens in all."""
        ended = []
        for number, chunk in enumerate(chunks):
            sequence = chunk.sequence
            sequence.computed = chunk.end
            if chunk.ends_prompt:
                self._prefilling.remove(sequence)
                self.slots.begin_decoding(sequence.admission.slot, chunk.end, sequence.left - 1)
                ended.append(number)
        sequences = [chunks[number].sequence for number in ended]
        slots = np.array([sequence.admission.slot for sequence in sequences], np.int64)
        return self._dispatched("prefill", now, count, sample, np.array(ended, np.int64), slots, sequences)

    def _dispatched(self, kind: str, now: float, count: int, sample: Sample, rows: np.ndarray | None, slots: np.ndarray,
                    sequences: list[Sequence]) -> Step:
        sample.token_ids.copy_to_host_async()
        return Step(kind, now, count, sample, rows, slots, sequences, self.slots.left[slots] == 0)

    def _read(self, step: Step, now: float) -> None:
        """Passes the tokens of a step on."""
        tokens = np.asarray(step.sample.token_ids)
        tokens = tokens[: step.slots.size] if step.rows is None else tokens[step.rows]
        stops = self.slots.are_stops(step.slots, tokens).tolist()
        for row, (sequence, token, stop, last) in enumerate(
            zip(step.sequences, tokens.tolist(), stops, step.last.tolist())
        ):
            if not sequence.done:
                self._push(sequence, token, step, row, stop, last, now)

    def _push(self, sequence: Sequence, token: int, step: Step, row: int, stop: bool, last: bool, now: float) -> None:
        if token < 0:
            self._counters.nan_requests += 1
            self.cache.distrust(sequence.admission, now=now)
            self._finish(sequence, "error", now, message=_NO_NUMBERS)
            return
        sequence.push(token, now)
        self._counters.generated_tokens += 1
        logprobs = None
        if sequence.request.sampling.logprobs is not None:
            logprobs = (_logprobs(step, row, sequence.request.sampling.logprobs),)
        self._send(sequence, Tokens((token,), logprobs), now)
        if sequence.done:
            return
        if stop:
            self._finish(sequence, "stop", now, stop_token=token)
        elif last:
            self._finish(sequence, "length", now)

    # Making room

    def _make_room(self, sequence: Sequence, now: float) -> None:
        """Gets a page for the next token of a sequence, from others if need be."""
        while sequence.admission and not sequence.done:
            slot = sequence.admission.slot
            if self.cache.extend(sequence.admission, int(self.slots.context[slot]) + 1, now=now):
                self.slots.set_pages(slot, sequence.admission.pages)
                return
            if self._in_flight:
                # Some may have ended already; and of a preempted one every token must be known.
                self.deliver(now)
            else:
                self._preempt(victim(filter(None, self.slots.sequences)), now)

    def _preempt(self, sequence: Sequence, now: float) -> None:
        """Back to the queue; nothing of it is in flight."""
        self._release(sequence, now)
        tokens = np.concatenate([sequence.tokens[: len(sequence.request.token_ids)], np.int32(sequence.generated)])
        sequence.preempted(tokens, self._keys.of(tokens, sequence.request.salt))
        bisect.insort(self.waiting, sequence, key=lambda waiting: waiting.order)
        self._counters.preemptions += 1

    # The end

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float, *, stop_token: int | None = None,
                message: str | None = None) -> None:
        """Ends a request wherever it is. Steps in flight may still write to its slot and pages: those who get them
        next are dispatched later, so they come later."""
        if sequence.admission:
            self._release(sequence, now)
            self._may_admit = True
        else:
            self.waiting.remove(sequence)
        self._report_end(sequence, reason, now, stop_token=stop_token, message=message)

    def _release(self, sequence: Sequence, now: float) -> None:
        self.slots.leave(sequence.admission.slot)
        self.cache.release(sequence.admission, now=now)
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)

    def _report_end(self, sequence: Sequence, reason: FinishReason, now: float, *, stop_token: int | None = None,
                    message: str | None = None) -> None:
        sequence.ended(now)
        del self.by_id[sequence.request.id]
        self._counters.finished[reason] += 1
        self._send(sequence, Done(reason, stop_token, sequence.usage(), sequence.timings(), message), now)

    def _send(self, sequence: Sequence, event: Event, now: float) -> None:
        """A sink that fails is nobody else's concern."""
        try:
            sequence.sink(event)
        except Exception:
            logger.exception("request %s: its sink failed on %s", sequence.request.id, type(event).__name__)
            if not sequence.done:
                self._finish(sequence, "abort", now)


def _logprobs(step: Step, row: int, count: int) -> TokenLogprobs:
    """Of the token in a wanted row, with so many of the most likely ones."""
    if step.rows is not None:
        row = step.rows[row]
    _, logprobs, top_ids, top_logprobs = (np.asarray(field)[row] for field in step.sample)
    top = zip(top_ids[:count].tolist(), top_logprobs[:count].tolist())
    return TokenLogprobs(float(logprobs), tuple(top))
