"""A real gRPC server with a real engine on a tiny checkpoint, what its clients hear, and what that is compared with."""

import contextlib
import dataclasses
import time

import grpc
import numpy as np

from serving.client import Accepted, Client, Delta, Done, RequestError, Sampling
from serving.client.events import event_of
from serving.client.request import generate_request
from serving.engine.engine import Engine
from serving.server.server import Server
from tests.checkpoints import tiny_checkpoint
from tests.serving import engine_harness
from tests.serving.api_server import running_server

GREEDY = Sampling(temperature=0.0, logprobs=0)
SECONDS = 60.0
"""Most time of a call."""
BOUND = 1e-4
"""Of log-probabilities: how far apart two runs in the default mode may be, unless experts tie."""


@dataclasses.dataclass
class Service:
    """What `serving` started."""

    name: str
    engine: Engine
    server: Server
    client: Client


@contextlib.contextmanager
def serving(name, *, dtype="float32", server=None, **options):
    """A service; afterwards nothing is in flight and nothing has leaked."""
    engine = engine_harness.start(name, dtype=dtype, **options)
    settings = {"dtype": dtype, "metrics_port": 0, **(server or {})}
    with running_server(engine, str(tiny_checkpoint(name)), **settings) as running:
        with Client(running.address) as client:
            client.wait_until_ready(10)
            yield Service(name, engine, running, client)
        engine_harness.check_idle(engine)
    assert engine.state == "stopped"


class Heard:
    """All events of an answer, in the order that the protocol promises."""

    def __init__(self, events):
        self.accepted, *self.deltas, self.done = events
        assert isinstance(self.accepted, Accepted) and isinstance(self.done, Done)
        assert all(isinstance(delta, Delta) for delta in self.deltas)
        self.cached = self.accepted.cached_tokens
        self.ids = [token for delta in self.deltas for token in delta.token_ids]
        self.text = "".join(delta.text for delta in self.deltas)
        self.logprobs = [entry for delta in self.deltas for entry in delta.logprobs]
        usage = self.done.usage
        assert usage.completion_tokens == len(self.ids)
        assert usage.prompt_tokens == self.accepted.prompt_tokens
        assert usage.cached_tokens == self.accepted.cached_tokens

    @property
    def scores(self) -> np.ndarray:
        """[n] log-probabilities of the tokens."""
        return np.array([entry.logprob for entry in self.logprobs])


class Call:
    """A request that was sent at once; those of one thread arrive in order."""

    def __init__(self, service: Service, ids, *, new=6, sampling=GREEDY, timeout=None, **options):
        options = {"ignore_eos": True, "max_new_tokens": new, "sampling": sampling, **options}
        self._address = service.client.address
        self._call = service.client._stub.Generate(generate_request(ids, **options), timeout=timeout or SECONDS)
        self.events = []

    def hear(self):
        """The next event; raises RequestError as a client does."""
        try:
            self.events.append(event_of(next(self._call)))
        except grpc.RpcError as error:
            raise RequestError.of(error, self._address) from None
        return self.events[-1]

    def answer(self) -> Heard:
        """Waits for the end."""
        while not self.events or not isinstance(self.events[-1], Done):
            self.hear()
        assert next(self._call, None) is None
        return Heard(self.events)

    def cancel(self) -> None:
        """The client goes away."""
        self._call.cancel()


def wait_for(condition, seconds=10.0) -> None:
    """What happens sooner or later."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def ask(service: Service, ids, **options) -> Heard:
    """Sends a request and waits for its end."""
    return Call(service, ids, **options).answer()


def ask_all(service: Service, prompts, **options) -> list[Heard]:
    """The same for several at once."""
    calls = [Call(service, ids, **options) for ids in prompts]
    return [call.answer() for call in calls]


def check_same(service: Service, ids, answer: Heard, cold: Heard) -> None:
    """Warm = cold: the same tokens, with log-probabilities within the bound; where they part, there was a tie (N3).

    Of two tokens, when their logits are within the bound, or of experts: then one is chosen that is as good as another.
    """
    assert (answer.done.finish_reason, len(answer.ids)) == (cold.done.finish_reason, len(cold.ids))
    for number, (token, other) in enumerate(zip(answer.ids, cold.ids)):
        near = abs(answer.logprobs[number].logprob - cold.logprobs[number].logprob) < BOUND
        if token == other and near:
            continue
        before = [*ids, *cold.ids[: number + 1]]
        (logits,) = engine_harness.oracle(service.name, before, 1)
        if token != other and abs(logits[token] - logits[other]) < BOUND:
            return  # what follows is another answer
        assert engine_harness.experts_tie(service.name, before[:-1]), f"token {number} differs"
        if token != other:
            return


def check_greedy(service: Service, ids, answer: Heard) -> None:
    """Each token is the most likely one by one call of the model over all of them, ties aside."""
    engine_harness.check_greedy(service.name, ids, answer)
