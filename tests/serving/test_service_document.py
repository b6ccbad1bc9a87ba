"""docs/service.md: what it tells to type works, and gives what it says."""

import contextlib
import io
import json
import logging
import pathlib
import re
import shlex

import pytest

from serving.client import Client
from serving.client.command import main as client_main
from serving.server.command import _parser as server_parser
from serving.server.config import ServerConfig, from_arguments
from serving.server.logs import JsonLines
from tests.checkpoints import tiny_checkpoint
from tests.serving import engine_harness
from tests.serving.api_server import running_server
from tests.serving.stranger import Stranger

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "service.md").read_text()
ADDRESS = "127.0.0.1:50051"
MODEL = "k3-tiny"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


COMMANDS = [line.partition("    #")[0].strip() for block in blocks("sh") for line in block.splitlines()]


@pytest.fixture(scope="module")
def client():
    engine = engine_harness.start(MODEL)
    with running_server(engine, str(tiny_checkpoint(MODEL)), dtype="float32") as server:
        with Client(server.address) as client:
            client.wait_until_ready(10)
            yield client


def test_python_examples(client):
    scope, output = {}, io.StringIO()
    with contextlib.redirect_stdout(output):
        for block in blocks("python"):
            assert ADDRESS in block or scope
            exec(block.replace(ADDRESS, client.address), scope)
    scope["client"].close()
    lines = output.getvalue().splitlines()
    tokens = len(client.tokenize("Once upon a time"))
    assert lines[0] == f"{tokens} prompt tokens, 0 of them cached"
    for line in blocks("python")[1].splitlines():
        if line.startswith("print"):
            told = re.search(r"# ([\d ]+)$", line)[1]
            said = re.findall(r'"([a-z ]+)"', line)[-1]
            assert f"{told} {said}" in lines


def test_commands(client, capsys):
    seen = set()
    for command in COMMANDS:
        words = shlex.split(command)
        if words[:3] == ["python", "-m", "serving.client"]:
            assert client_main([*words[3:], "--address", client.address]) == 0
            assert "new ones, the first after" in capsys.readouterr().err
        elif words[:3] == ["python", "-m", "serving.server"]:
            config = from_arguments(server_parser().parse_args(words[3:]))
            assert config == ServerConfig(metrics_port=9400) and ADDRESS.endswith(f":{config.port}")
        else:
            assert words[0] in ("grpcurl", "pip")
        seen.add(words[0])
    assert seen == {"pip", "python", "grpcurl"}


def grpcurl_calls() -> dict[str, dict]:
    """Method -> its message, in the commands and in the table of calls."""
    calls = {}
    for line in [*(row for row in TEXT.splitlines() if row.startswith("|")), *COMMANDS]:
        if found := re.search(r"(?:-d '(\{.*\})' )?(?:127.0.0.1:50051 )?k3jax.v1.Decoder/(\w+)", line):
            calls[found[2]] = json.loads(found[1] or "{}")
    return calls


def test_grpcurl_commands_by_reflection(client):
    stranger, calls = Stranger(client._channel), grpcurl_calls()
    assert calls.keys() == stranger.methods
    answers = {name: stranger(name, **message) for name, message in calls.items()}
    assert answers["Tokenize"]["token_ids"] == list(client.tokenize("Once"))
    assert answers["Detokenize"]["text"] == client.detokenize([79, 110])
    assert answers["Generate"][-1]["done"]["usage"]["completion_tokens"] == "4"


def test_calls_of_the_table(client, tmp_path):
    table = [row.split("|") for row in TEXT.splitlines() if row.count("|") == 5 and "k3jax.v1.Decoder/" in row]
    assert len(table) == 7
    file = tmp_path / "prompt"
    file.write_text("x")
    for _, _, python, command, *_ in table:
        (call,) = re.findall(r"`client\.(.+)`", python)
        if "..." not in call:
            eval(f"client.{call}", {"client": client})
        for flag in re.findall(r"`(--[a-z-]+)`", command):
            value = {"--prompt": ["x"], "--prompt-file": [str(file)], "--prompt-ids": ["1"]}.get(flag, [])
            assert client_main([flag, *value, "--max-new-tokens", "1", "--address", client.address]) == 0


def test_the_line_in_the_log_has_these_fields(client, caplog):
    caplog.set_level(logging.INFO, "serving")
    list(client.generate([1, 2, 3], max_new_tokens=2))
    (record,) = [record for record in caplog.records if record.message == "request"]
    (example,) = blocks("json")
    assert list(json.loads(example)) == list(json.loads(JsonLines().format(record)))


def test_every_flag_and_status_in_the_text_exists():
    flags = set(re.findall(r"`(--[a-z-]+)`", TEXT)) - {"--prompt", "--prompt-file", "--prompt-ids", "--info", "--stats",
                                                       "--reset-cache", "--timeout", "--help"}
    known = {f"--{name.replace('_', '-')}" for name in ServerConfig.__dataclass_fields__}
    assert flags and flags <= known
    proto = (pathlib.Path(__file__).parents[2] / "serving" / "api" / "v1" / "decoder.proto").read_text()
    codes = set(re.findall(r"// {3}([A-Z_]{6,}) ", proto))
    assert len(codes) == 7 and codes <= set(re.findall(r"\| ([A-Z_]+) \|", TEXT))
