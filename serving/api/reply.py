"""From an engine's events to the messages of one stream."""

from collections.abc import Iterable

from k3jax.text_stream import TextStream
from serving.api.messages import logprobs_message
from serving.api.v1 import decoder_pb2 as pb
from serving.engine.request import Accepted, Done, Event, Request, Tokens


class Reply:
    """Turns tokens into text and ends it at a stop string, which the engine knows nothing of.

    Events that have come together become one Delta, so a client that lags gets fewer, larger messages.

    Args:
      request: as the engine has it.
      request_id: as the client has it.
      text: of the new tokens; None without a tokenizer.

    Attributes:
      request: as the engine has it.
      stop_string: the one that was found: tokens after it are dropped, and the engine need not make any; None before.
      delivered: tokens that are in messages.
      accepted: the event; None before.
      done: the event; None before.
    """

    def __init__(self, request: Request, request_id: str, text: TextStream | None):
        self.request, self._request_id, self._text = request, request_id, text
        self.stop_string: str | None = None
        self.delivered = 0
        self.accepted: Accepted | None = None
        self.done: Done | None = None

    def push(self, events: Iterable[Event]) -> list[pb.GenerateEvent]:
        """The messages that these events give; of Done, what is left of text and tokens."""
        messages = []
        delta, pieces = pb.Delta(), []
        for event in events:
            if isinstance(event, Tokens):
                self._add(event, delta, pieces)
            elif isinstance(event, Accepted):
                self.accepted = event
                messages.append(pb.GenerateEvent(accepted=self._accepted_message(event)))
            else:
                self.done = event
                if self._text:
                    pieces.append(self._text.finish())
                    if event.finish_reason == "length":
                        self.stop_string = self._text.stop
        delta.text = "".join(pieces)
        if delta.token_ids or delta.text:
            self.delivered += len(delta.token_ids)
            messages.append(pb.GenerateEvent(delta=delta))
        return messages

    def _accepted_message(self, event: Accepted) -> pb.Accepted:
        sampling = self.request.sampling
        return pb.Accepted(
            request_id=self._request_id,
            prompt_tokens=event.prompt_tokens,
            cached_tokens=event.cached_tokens,
            seed=None if sampling.greedy else sampling.seed,
        )

    def _add(self, event: Tokens, delta: pb.Delta, pieces: list[str]) -> None:
        for number, token in enumerate(event.ids):
            if self.stop_string is not None:
                return
            delta.token_ids.append(token)
            if event.logprobs is not None:
                delta.logprobs.append(logprobs_message(event.logprobs[number]))
            # A stop token ends the text, whatever it says.
            if self._text and token not in self.request.stop_token_ids:
                pieces.append(self._text.push(token))
                self.stop_string = self._text.stop

    def finish(self) -> pb.GenerateEvent:
        """The Done message, once the engine is done; a stop string counts before the engine's own reason."""
        done = self.done
        message = pb.Done(
            usage=pb.Usage(
                prompt_tokens=done.usage.prompt_tokens,
                cached_tokens=done.usage.cached_tokens,
                completion_tokens=self.delivered,
            ),
            timings=pb.Timings(
                queue_s=done.timings.queue_s, prefill_s=done.timings.prefill_s, decode_s=done.timings.decode_s
            ),
        )
        if self.stop_string is not None:
            message.finish_reason, message.stop_string = pb.FINISH_REASON_STOP, self.stop_string
        elif done.finish_reason == "stop":
            message.finish_reason, message.stop_token_id = pb.FINISH_REASON_STOP, done.stop_token
        elif done.finish_reason == "length":
            message.finish_reason = pb.FINISH_REASON_LENGTH
        else:
            message.finish_reason = pb.FINISH_REASON_ABORT
        return pb.GenerateEvent(done=message)
