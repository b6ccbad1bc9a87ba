"""What remains of a request: measurements, and a line in the log."""

import logging
import time
from collections.abc import Iterable

from serving.api.metrics import Metrics
from serving.api.reply import Reply
from serving.api.status import Refusal
from serving.api.v1 import decoder_pb2 as pb
from serving.engine.request import Event, Tokens

log = logging.getLogger(__name__)


class Record:
    """Follows one request from now to its end.

    Args:
      metrics: that it counts in.
      request_id: as the client has it.

    Attributes:
      reply: once the engine has the request; None before.
      outcome: "cancelled" until it is known: "stop", "length" or "abort" of an answer, or a status in small letters.
    """

    def __init__(self, metrics: Metrics, request_id: str):
        self._metrics, self._request_id = metrics, request_id
        self._arrived = time.monotonic()
        self._first_token: float | None = None
        self._last_token = 0.0
        self._refusal: Refusal | None = None
        self.reply: Reply | None = None
        self.outcome = "cancelled"

    def received(self, events: Iterable[Event]) -> None:
        """Events that came together: now."""
        now, tokens = time.monotonic(), sum(len(event.ids) for event in events if isinstance(event, Tokens))
        if not tokens:
            return
        if self._first_token is None:
            self._metrics.time_to_first_token.observe(now - self._arrived)
            self._first_token = self._last_token = now
            tokens -= 1
        for _ in range(tokens):
            self._metrics.inter_token_latency.observe((now - self._last_token) / tokens)
        self._last_token = now

    def answered(self, done: pb.Done) -> None:
        """The client has all of its answer."""
        self.outcome = pb.FinishReason.Name(done.finish_reason).removeprefix("FINISH_REASON_").lower()

    def refused(self, refusal: Refusal) -> None:
        """It ends with a status."""
        self.outcome, self._refusal = refusal.code.name.lower(), refusal

    def end(self) -> None:
        """Nothing more will come: counts it, and writes it down."""
        seconds = time.monotonic() - self._arrived
        self._count(seconds)
        reply = self.reply
        fields = {"request_id": self._request_id, "outcome": self.outcome}
        if self._refusal:
            fields["detail"] = self._refusal.message
        if reply:
            fields |= {
                "prompt_tokens": len(reply.request.token_ids),
                "cached_tokens": reply.accepted.cached_tokens if reply.accepted else None,
                "completion_tokens": reply.delivered,
                "max_new_tokens": reply.request.max_new_tokens,
            }
            if reply.done:
                timings = reply.done.timings
                fields |= {"queue_s": timings.queue_s, "prefill_s": timings.prefill_s, "decode_s": timings.decode_s}
            if self._first_token is not None:
                fields["first_token_s"] = self._first_token - self._arrived
        fields["total_s"] = seconds
        log.info("request", extra={
            name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()
        })

    def _count(self, seconds: float) -> None:
        metrics, reply = self._metrics, self.reply
        if reply is None and self._refusal:
            metrics.rejections.labels(self._refusal.code.name).inc()
            return
        metrics.e2e_latency.observe(seconds)
        if self.outcome == "cancelled":
            accepted = reply and reply.accepted
            phase = "waiting" if not accepted else "prefill" if self._first_token is None else "decode"
            metrics.cancelled.labels(phase).inc()
        elif not self._refusal:
            metrics.success.labels(self.outcome).inc()
            timings = reply.done.timings
            metrics.queue_time.observe(timings.queue_s)
            metrics.prefill_time.observe(timings.prefill_s)
            metrics.decode_time.observe(timings.decode_s)
            metrics.inference_time.observe(timings.prefill_s + timings.decode_s)
            metrics.prompt_tokens.observe(reply.done.usage.prompt_tokens)
            metrics.generation_tokens.observe(reply.delivered)
