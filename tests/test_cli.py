"""The command line: golden tokens and logits, statistics, bad input, Ctrl-C and closed pipes."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

import k3jax
from k3jax.cli import compilation_cache
from k3jax.cli.generate import main
from k3jax.cli.logits_file import LogitsFile
from k3jax.errors import UserError
from tests.checkpoints import DATA, TINY, tiny_checkpoint
from tests.golden import vectors

ROOT = pathlib.Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "k3jax.generate"]
TIMINGS = {"load_s", "compile_s", "prefill_s", "prefill_tokens_per_s", "decode_s", "decode_tokens_per_s",
           "peak_memory_bytes"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of a child process, with a compilation cache of these tests' own."""
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture
def no_stdin(monkeypatch):
    """Standard input as in a cron job: the null device."""
    with open(os.devnull) as null:
        monkeypatch.setattr(sys, "stdin", null)
        yield


def run(*arguments, env, **options):
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], cwd=ROOT, env=env, capture_output=True, timeout=300,
        **{"stdin": subprocess.DEVNULL, **options},
    )


def with_generation_config(name: str, directory: pathlib.Path, **values) -> pathlib.Path:
    """A golden checkpoint that comes with a `generation_config.json`."""
    directory.mkdir()
    for file in tiny_checkpoint(name).iterdir():
        (directory / file.name).symlink_to(file)
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


@pytest.mark.parametrize("name", TINY)
def test_reproduces_the_golden_tokens_and_logits(name, tmp_path, environment):
    if name == "k3-tiny":
        arguments = ["--checkpoint", with_generation_config(name, tmp_path / "model", do_sample=False)]
    else:
        arguments = ["--checkpoint", tiny_checkpoint(name), "--temperature", 0]
    (tmp_path / "out").mkdir()
    decode, prompt = vectors(name, "decode"), vectors(name, "len37")
    assert np.array_equal(decode["prompt_ids"], prompt["input_ids"])
    out = tmp_path / "out" / "logits.npz"
    done = run(
        *arguments, "--prompt-ids", ",".join(map(str, decode["prompt_ids"])),
        "--max-new-tokens", 32, "--ignore-eos", "--dtype", "float32", "--chunk", 16, "--json",
        "--logprobs", 1, "--logits-out", out, env=environment,
    )
    assert done.returncode == 0, done.stderr.decode()
    result = json.loads(done.stdout)
    assert result["token_ids"] == decode["tokens"].tolist()
    assert (result["finish_reason"], result["stop_reason"], result["seed"]) == ("length", None, None)
    assert [own["top"][0] for own in result["logprobs"]] == [
        [token, own["logprob"]] for token, own in zip(result["token_ids"], result["logprobs"])
    ]
    assert result["usage"] == {"prompt_tokens": 37, "completion_tokens": 32, "total_tokens": 69}
    assert set(result["timings"]) == TIMINGS
    assert (result["text"] is None) == (not (DATA / name / "tiktoken.model").exists())
    with np.load(out) as arrays:
        assert arrays.files == ["logits"] and arrays["logits"].dtype == np.float32
        assert np.abs(arrays["logits"] - prompt["logits_fp64"]).max() <= 1e-4
    assert [path.name for path in out.parent.iterdir()] == ["logits.npz"]


def test_demo_streams_text_and_ends_with_statistics(environment):
    done = run("--max-new-tokens", 8, env=environment)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode("utf-8").endswith("\n") and len(done.stdout) > 1
    statistics = done.stderr.decode().splitlines()[-1]
    for word in ("load", "compile", "prefill", "decode", "tok/s", "peak memory", "seed "):
        assert word in statistics
    cache = pathlib.Path(environment["XDG_CACHE_HOME"]) / "k3jax" / "jit"
    assert cache.stat().st_mode & 0o777 == 0o700


def test_json_equals_the_streamed_text(environment):
    prompt = "héllo<|open|>"
    options = ["--markup", "--max-new-tokens", 12, "--ignore-eos", "--seed", 2**62 + 1, "--top-k", 100]
    streamed = run("--prompt", prompt, *options, env=environment)
    result = json.loads(run("--prompt", prompt, *options, "--json", env=environment).stdout)
    assert streamed.stdout.decode() == result["text"] + "\n"
    assert b"seed 4611686018427387905, finished by length" in streamed.stderr
    assert result["usage"]["prompt_tokens"] == 7 and result["seed"] == 2**62 + 1 and result["logprobs"] is None
    ids, letter = result["token_ids"], result["text"].strip("\ufffd")[-1]
    piped = json.loads(run(
        *options, "--json", "--stop", "never", "--stop", letter, env=environment, stdin=None, input=prompt.encode()
    ).stdout)
    assert piped["text"] == result["text"][: result["text"].index(letter)]
    assert piped["token_ids"] == ids[: len(piped["token_ids"])]
    assert (piped["finish_reason"], piped["stop_reason"]) == ("stop", letter)


def test_ctrl_c_prints_what_was_made(environment):
    arguments = ["--prompt", "x", "--max-new-tokens", "4000", "--ignore-eos"]
    # A job in the background, as these tests may be, is started with SIGINT ignored, and so are its children.
    start = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('k3jax.generate', run_name='__main__', alter_sys=True)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", start, *arguments], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    first = child.stdout.read(1)  # by now it decodes
    child.send_signal(signal.SIGINT)
    rest, errors = child.communicate(timeout=120)
    assert child.returncode == 130, errors.decode()
    assert (first + rest).endswith(b"\n")
    assert b"Traceback" not in errors and b"finished by interrupted" in errors


def test_closed_pipe_ends_quietly(environment):
    child = subprocess.Popen(
        [*COMMAND, "--prompt", "x", "--max-new-tokens", "4000", "--ignore-eos"], cwd=ROOT, env=environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    child.stdout.read(1)
    child.stdout.close()
    errors = child.stderr.read().decode()
    assert child.wait(timeout=120) == 141
    assert "Traceback" not in errors and "BrokenPipe" not in errors


def test_wrong_argument_in_a_real_process(environment):
    done = run("--checkpoint", "no/such/folder", "--prompt", "x", env=environment)
    assert done.returncode == 2 and done.stdout == b""
    assert done.stderr.decode() == (
        "k3jax: error: no checkpoint 'no/such/folder'; expected a directory, demo, or random:PRESET[:layers]\n"
    )


NO_TOKENIZER = str(DATA / "kimi-linear-tiny")
MISTAKES = {
    "empty prompt": (["--prompt", ""], "the prompt is empty"),
    "no ids": (["--prompt-ids", ""], "'' is not a list of token ids"),
    "ids not numbers": (["--prompt-ids", "1,two"], "'1,two' is not a list of token ids"),
    "id too large": (["--prompt-ids", "1,512"], "token id 512 is outside the vocabulary, 0..511"),
    "id negative": (["--prompt-ids=-1"], "token id -1 is outside the vocabulary"),
    "no new tokens": (["--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens: '0' is not a whole number"),
    "negative limit": (["--prompt", "x", "--max-new-tokens", "-3"], "--max-new-tokens: '-3' is not a whole number"),
    "limit not a number": (["--prompt", "x", "--max-new-tokens", "many"], "'many' is not a whole number"),
    "chunk of nothing": (["--prompt", "x", "--chunk", "0"], "--chunk: '0' is not a whole number of at least 1"),
    "negative seed": (["--prompt", "x", "--seed=-1"], "--seed: '-1' is not a whole number of at least 0"),
    "seed too large": (["--prompt", "x", "--seed", str(2**63)], "seed is 9223372036854775808, expected a whole number"),
    "temperature": (["--prompt", "x", "--temperature", "nan"], "temperature is nan, expected a number of at least 0"),
    "temperature not a number": (["--prompt", "x", "--temperature", "hot"], "--temperature: 'hot' is not a number"),
    "top-k": (["--prompt", "x", "--top-k=-1"], "--top-k: '-1' is not a whole number of at least 0"),
    "top-p": (["--prompt", "x", "--top-p", "1.5"], "top_p is 1.5, expected a number above 0 and at most 1"),
    "min-p": (["--prompt", "x", "--min-p=-0.5"], "min_p is -0.5, expected a number from 0 (off) to 1"),
    "repetition penalty": (["--prompt", "x", "--repetition-penalty", "0"], "repetition_penalty is 0.0, expected"),
    "presence penalty": (["--prompt", "x", "--presence-penalty", "3"], "presence_penalty is 3.0, expected"),
    "empty stop string": (["--prompt", "x", "--stop", ""], "stop is ('',), expected texts of at least one character"),
    "stop string not UTF-8": (["--prompt", "x", "--stop", "a\udcff"], "stop is ('a\\udcff',), expected texts"),
    "stop string without tokenizer": (
        ["--checkpoint", NO_TOKENIZER, "--prompt-ids", "1", "--stop", "x"], "has no tokenizer files"
    ),
    "stop ids not numbers": (["--prompt", "x", "--stop-ids", "x"], "--stop-ids: 'x' is not a list of token ids"),
    "stop id too large": (["--prompt", "x", "--stop-ids", "3,512"], "stop token id 512 is outside the vocabulary"),
    "stop id negative": (["--prompt", "x", "--stop-ids=-1"], "stop_token_ids is (-1,), expected token ids"),
    "too many logprobs": (["--prompt", "x", "--json", "--logprobs", "21"], "logprobs is 21, expected a whole number"),
    "logprobs unseen": (["--prompt", "x", "--logprobs", "1"], "--logprobs are printed with --json only"),
    "markup in ids": (["--prompt-ids", "1", "--markup"], "--markup is about text"),
    "dtype": (["--prompt", "x", "--dtype", "float16"], "--dtype: invalid choice: 'float16'"),
    "unknown option": (["--prompt", "x", "--beams", "3"], "--beams"),
    "text and ids": (["--prompt", "x", "--prompt-ids", "1"], "not allowed with argument --prompt"),
    "text and file": (["--prompt", "x", "--prompt-file", "y"], "not allowed with argument --prompt"),
    "file and ids": (["--prompt-file", "x", "--prompt-ids", "1"], "not allowed with argument --prompt-file"),
    "prompt not UTF-8": (["--prompt", "ab\udcff"], "--prompt is not valid UTF-8: byte 0xff at offset 2"),
    "no prompt": (["--checkpoint", "random:demo"], "no prompt; give --prompt"),
    "missing prompt file": (["--prompt-file", "no-such-file"], "cannot read --prompt-file no-such-file"),
    "prompt file a folder": (["--prompt-file", "."], "cannot read --prompt-file ."),
    "beyond the context": (["--prompt", "x" * 4000, "--max-new-tokens", "97"], "beyond the context of 4096"),
    "missing checkpoint": (["--checkpoint", "nowhere", "--prompt", "x"], "no checkpoint 'nowhere'"),
    "not a checkpoint": (["--checkpoint", str(ROOT / "docs"), "--prompt", "x"], "config.json"),
    "unknown preset": (["--checkpoint", "random:kimi-k9", "--prompt-ids", "1"], "no preset 'kimi-k9'"),
    "layers not a number": (["--checkpoint", "random:demo:few", "--prompt-ids", "1"], "random:demo:few"),
    "no layers": (["--checkpoint", "random:demo:0", "--prompt-ids", "1"], "cannot take 0 layers"),
    "too many layers": (["--checkpoint", "random:demo:14", "--prompt-ids", "1"], "cannot take 14 layers"),
    "text without tokenizer": (["--checkpoint", NO_TOKENIZER, "--prompt", "x"], "has no tokenizer files"),
    "unwritable output": (["--prompt", "x", "--logits-out", "no/folder/x.npz"], "cannot write no/folder/x.npz"),
    "output a folder": (["--prompt", "x", "--logits-out", "."], "cannot write '.'"),
    "output a device": (["--prompt", "x", "--logits-out", os.devnull], "not a regular file"),
    "output nothing": (["--prompt", "x", "--logits-out", ""], "cannot write ''"),
}


def one_line(capsys) -> str:
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("k3jax: error: ")
    return err


@pytest.mark.parametrize("arguments, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_give_one_line_and_exit_code_2(arguments, message, capsys, no_stdin):
    assert main(arguments) == 2
    assert message in one_line(capsys)


def test_prompt_file_that_is_not_utf8(tmp_path, capsys):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"good\xc3(bad")
    assert main(["--prompt-file", str(path)]) == 2
    assert "is not valid UTF-8: byte 0xc3 at offset 4" in one_line(capsys)
    path.write_bytes(b"")
    assert main(["--prompt-file", str(path)]) == 2
    assert "the prompt is empty" in one_line(capsys)


@pytest.mark.parametrize(
    "data, message", [(b"", "the prompt is empty"), (b"\xff", "standard input is not valid UTF-8")]
)
def test_bad_standard_input(data, message, capsys, monkeypatch, tmp_path):
    (tmp_path / "stdin").write_bytes(data)
    with open(tmp_path / "stdin", encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main([]) == 2
    assert message in one_line(capsys)


@pytest.mark.parametrize("arguments", [["--prompt", "x", "--logits-out", "no/folder/x.npz"], ["--prompt-ids", "600"]])
def test_nothing_is_loaded_before_a_mistake_is_found(arguments, capsys, monkeypatch):
    monkeypatch.setattr(k3jax, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    assert main(arguments) == 2


def test_jax_is_not_imported_before_a_mistake_is_found(tmp_path):
    directory = with_generation_config("k3-tiny", tmp_path / "model", temperature=-1)
    code = "import sys; from k3jax.cli.generate import main; print(main(sys.argv[1:]), 'jax' in sys.modules)"
    for arguments, message in (
        (["--checkpoint", directory, "--prompt", "x"], f"{directory}/generation_config.json: temperature is -1"),
        (["--prompt", "x", "--stop-ids", "600"], "stop token id 600"),
        (["--prompt-ids", "600"], "token id 600"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.stdout == "2 False\n" and message in done.stderr


def test_a_failure_while_loading_leaves_no_output(tmp_path, capsys):
    out = tmp_path / "logits.npz"
    assert main(["--checkpoint", "random:demo:99", "--prompt-ids", "1", "--logits-out", str(out)]) == 2
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_config_field_is_reported_once(tmp_path, capsys, monkeypatch):
    config = json.loads((DATA / "kimi-linear-tiny" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "novel_field": 3}))

    def load(checkpoint, **_):
        k3jax.K3Config.from_file(tmp_path / "config.json")
        raise UserError("far enough")

    monkeypatch.setattr(k3jax, "load", load)
    assert main(["--checkpoint", str(tmp_path), "--prompt-ids", "1"]) == 2
    warning, error = capsys.readouterr().err.splitlines()
    assert warning.startswith("k3jax: warning: ") and "novel_field" in warning and "far enough" in error


def test_help_names_the_exit_codes(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "exit codes:" in text and "130" in text and "examples:" in text


def test_logits_file_keeps_the_old_file_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "x.npz"
    path.write_bytes(b"old")
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    with LogitsFile(path, rows=4) as file:
        file.write(0, rows[:3])
    assert path.read_bytes() == b"old" and not file.complete
    with pytest.raises(RuntimeError), LogitsFile(path, rows=4) as file:
        file.write(0, rows)
        raise RuntimeError
    assert path.read_bytes() == b"old"
    with LogitsFile(path, rows=4) as file:
        file.write(0, rows[:3])
        with pytest.raises(ValueError, match="position 2 came, expected 3"):
            file.write(2, rows[2:])
        file.write(3, rows[3:])
    assert np.array_equal(np.load(path)["logits"], rows)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
def test_full_disk_is_reported_as_a_mistake(tmp_path, monkeypatch):
    file = LogitsFile(tmp_path / "x.npz", rows=1000)
    file._temporary = tmp_path / "full"
    monkeypatch.setattr(pathlib.Path, "open", lambda self, mode: open("/dev/full", "wb"))
    with pytest.raises(UserError, match="No space left"), file:
        file.write(0, np.zeros((1000, 1000), np.float32))


def test_compilation_cache_is_private_or_off(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "k3jax").mkdir(mode=0o755)
    (tmp_path / "k3jax" / "jit").mkdir(mode=0o777)
    folder = compilation_cache.private_cache_folder()
    assert folder == tmp_path / "k3jax" / "jit" and folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    assert compilation_cache.private_cache_folder() is None
    folder.unlink()
    folder.write_text("a file in the way")
    assert compilation_cache.private_cache_folder() is None
