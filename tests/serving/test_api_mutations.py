"""Each deliberate defect of the front end turns a test red."""

import inspect

import pytest

from serving.api import messages, status
from serving.api.backend import Backend
from serving.api.inbox import Inbox, Inboxes
from serving.api.reply import Reply
from serving.api.servicer import DecoderServicer
from serving.client import Client, RequestError
from serving.server import server
from serving.server.server import Server
from tests.serving import test_api_faults as faults
from tests.serving import test_api_messages as fields
from tests.serving import test_api_reply as reply
from tests.serving.mutation import break_source

UNREAD = faults.test_unread_tokens_are_bounded
NAMES = faults.test_a_name_is_taken_while_its_request_runs_and_abort_ends_it
GOES_AWAY = faults.test_client_that_goes_away_frees_the_request
LAGS = faults.test_client_that_lags_gets_fewer_messages_and_all_tokens
AFTER_STOP = faults.test_tokens_after_a_stop_string_are_dropped
MALFORMED = faults.test_messages_that_are_none

DEFECTS = {
    "a client's leaving that nobody tells the engine": (
        DecoderServicer, "_answer", "if not reply.done:", "if False:", GOES_AWAY),
    "a name that is never free again": (
        DecoderServicer, "_answer", "del self._engine_ids[request_id]", "pass", GOES_AWAY),
    "two requests of one name": (
        DecoderServicer, "_answer", "if request_id in self._engine_ids:", "if False:", NAMES),
    "the client's name as the engine's": (
        DecoderServicer, "_answer", 'f"{request_id}#{next(self._numbers)}"', "request_id", GOES_AWAY),
    "no deadline but the client's": (
        DecoderServicer, "_answer", "min(remaining, self._max_seconds)", "remaining",
        faults.test_server_has_a_deadline_of_its_own),
    "dropped tokens that nobody mentions": (
        DecoderServicer, "_answer", "if inbox.overflowed:", "if False:", UNREAD),
    "an engine that goes on after a stop string": (
        DecoderServicer, "_answer", "if reply.stop_string is not None:", "if False:",
        faults.test_stop_string_ends_the_request_in_the_engine_too),
    "endless patience with who does not read": (
        DecoderServicer, "_write", "asyncio.timeout(self._stall_seconds)", "asyncio.timeout(None)",
        faults.test_client_that_does_not_read_loses_its_request_and_nobody_elses),
    "a fault that looks like an end": (
        DecoderServicer, "_final", 'if done.finish_reason == "error":', "if False:",
        faults.test_engine_fault_reaches_those_in_flight),
    "a deadline that looks like an end": (
        DecoderServicer, "_final", 'if done.finish_reason == "deadline":', "if False:",
        faults.test_server_has_a_deadline_of_its_own),
    "a shutdown that looks like an abort": (
        DecoderServicer, "_final", "self._backend.draining", "False",
        faults.test_shutting_down_ends_what_takes_too_long),
    "an abort that is not passed on": (
        DecoderServicer, "Abort", "self._engine().abort(engine_id)", "pass", NAMES),
    "requests for an engine that has failed": (
        Backend, "serving", 'self.engine.state == "serving"', "True", faults.test_health_follows_the_engine),
    "a shutdown that nobody is told of": (
        Server, "stop", "self.backend.draining = True", "pass", faults.test_shutting_down_ends_what_takes_too_long),
    "a shutdown that does not wait": (
        Server, "stop", "engine.drain, grace", "engine.drain, 0",
        faults.test_shutting_down_lets_requests_finish_and_refuses_new_ones),
    "a health that stays as it was": (
        Server, "_watch_health", "if serving != reported:", "if not reported:", faults.test_health_follows_the_engine),
    "a stuck engine that counts as well": (
        Server, "_watch_health", "serving, stuck = False, True", "stuck = True", faults.test_health_follows_the_engine),
    "a full queue without a hint": (
        status, "refusal", "str(error), _RETRY_AFTER_MS", "str(error)", faults.test_queue_full_says_when_to_try_again),
    "a mistake as a fault": (
        status, "refusal", "grpc.StatusCode.INVALID_ARGUMENT", "grpc.StatusCode.INTERNAL", MALFORMED),
    "bytes that are no message as a fault": (
        status, "_lenient", "except DecodeError:", "except KeyError:", MALFORMED),
    "an exception told to strangers": (
        status, "refusal", "\"internal error; the server's log says more\"", "str(error)",
        faults.test_unforeseen_exception_is_logged_and_not_told),
    "an exception that nobody writes down": (
        status, "refusal", 'log.error("a call failed", exc_info=error)', "pass",
        faults.test_unforeseen_exception_is_logged_and_not_told),
    "one wake-up and never again": (
        Inboxes, "_wake", "self._scheduled = False", "pass", LAGS),
    "tokens without a limit": (
        Inbox, "put", "self._tokens_put - self._tokens_taken > self._max_tokens", "False", UNREAD),
    "a limit of all tokens instead of the unread ones": (
        Inbox, "take", "self._tokens_taken += ", "", UNREAD),
    "one message for each token": (
        Inbox, "take", "range(len(self._events))", "range(1)", LAGS),
    "events in the wrong order": (
        Inbox, "take", "self._events.popleft()", "self._events.pop()", LAGS),
    "text held back for ever": (
        Reply, "push", "pieces.append(self._text.finish())", "pass", reply.test_bytes_held_back_come_at_the_end),
    "the text of a stop token": (
        Reply, "_add", " and token not in self.request.stop_token_ids", "",
        reply.test_stop_token_ends_the_text_and_is_delivered_as_id),
    "tokens after a stop string": (
        Reply, "_add", "if self.stop_string is not None:", "if False:", AFTER_STOP),
    "a stop string in the last bytes that does not count": (
        Reply, "push", "self.stop_string = self._text.stop", "pass", reply.test_bytes_held_back_come_at_the_end),
    "an abort as a stop": (
        Reply, "finish", "pb.FINISH_REASON_ABORT", "pb.FINISH_REASON_STOP", reply.test_abort_keeps_what_there_is),
    "a prompt that was never cached": (
        Reply, "_accepted_message", "cached_tokens=event.cached_tokens", "cached_tokens=0",
        reply.test_stop_token_ends_the_text_and_is_delivered_as_id),
    "tokens counted that nobody got": (
        Reply, "finish", "completion_tokens=self.delivered", "completion_tokens=done.usage.completion_tokens",
        AFTER_STOP),
    "no priority": (
        messages, "engine_request", "priority=message.priority", "priority=0", fields.test_every_field_that_is_set),
    "no salt": (
        messages, "engine_request", "salt=message.cache_salt", "salt=''", fields.test_every_field_that_is_set),
    "no breakpoints": (
        messages, "engine_request", "tuple(message.cache_breakpoints)", "()", fields.test_every_field_that_is_set),
    "no deadline": (
        messages, "engine_request", "time.monotonic() + seconds", "None", fields.test_every_field_that_is_set),
    "the model's stop tokens against the client's will": (
        messages, "engine_request", "() if message.ignore_eos else ", "", fields.test_every_field_that_is_set),
    "a limit of zero for who does not say": (
        messages, "engine_request", "if message.HasField(\"max_new_tokens\") else MAX_NEW_TOKENS", "",
        fields.test_what_is_not_set),
    "one seed for all": (
        messages, "engine_request", "fresh_seed()", "0", fields.test_what_is_not_set),
    "a zero that counts as nothing": (
        messages, "sampling_params", "if message.HasField(name)", "if getattr(message, name)",
        fields.test_a_zero_is_a_value),
    "lists that are not passed on": (
        messages, "sampling_params", "for name in _LISTS", "for name in ()", fields.test_every_field_that_is_set),
}


pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Nobody waits longer than a busy machine takes for what does happen."""
    events, wait_for = Client._events, faults.wait_for
    monkeypatch.setattr(server, "_LAST_WORDS", 1.0)
    monkeypatch.setattr(Client, "_events", lambda self, request, timeout: events(self, request, timeout or 3.0))
    monkeypatch.setattr(faults, "wait_for", lambda condition, seconds=0.0: wait_for(condition, 3.0))


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_seen(defect, monkeypatch, request):
    owner, name, old, new, test = DEFECTS[defect]
    break_source(monkeypatch, owner, name, old, new)
    if owner in (messages, status):  # others have taken the name from there
        for module in (fields, faults.servicer, status):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(owner, name))
    with pytest.raises((AssertionError, RequestError, AttributeError, pytest.fail.Exception)):
        run(test, request)


@pytest.mark.parametrize("test", {test.__name__: test for *_, test in DEFECTS.values()}.values())
def test_without_a_defect_it_is_green(test, request):
    run(test, request)


def run(test, request):
    """With the fixtures that it asks for."""
    test(*(request.getfixturevalue(name) for name in inspect.signature(test).parameters))
