"""The command that converts checkpoints: what it makes, says, refuses, and leaves behind when it fails."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import k3jax
from k3jax.checkpoint.orbax import store
from k3jax.cli.convert import main
from k3jax.errors import UserError
from tests.checkpoints import DATA, copy_checkpoint, read_shards, tiny_checkpoint, write_raw_shard
from tests.golden import vectors

ROOT = pathlib.Path(__file__).parents[1]
SCALE = "language_model.model.layers.2.block_sparse_moe.experts.5.w1.weight_scale"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of a child process, with a compilation cache of these tests' own."""
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


def run(command: str, *arguments, env):
    return subprocess.run(
        [sys.executable, "-m", f"k3jax.{command}", *map(str, arguments)], cwd=ROOT, env=env, capture_output=True,
        text=True, timeout=300, stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("name", ["k3-tiny", pytest.param("kimi-linear-tiny", marks=pytest.mark.slow)])
def test_the_converted_checkpoint_reproduces_the_golden_tokens(name, tmp_path, environment):
    out = tmp_path / "it's out"
    done = run("convert", tiny_checkpoint(name), out, "--verify", env=environment)
    assert done.returncode == 0, done.stderr
    *progress, summary, following = done.stderr.splitlines()
    assert all(line.startswith(("converting weights: ", "verifying: ")) for line in progress)
    assert summary.startswith("k3jax: ") and "arrays of" in summary and f"/s, verified: {out}" in summary
    assert following.startswith("k3jax: next: python -m k3jax.generate --checkpoint '") and done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == [out.name]

    golden = vectors(name, "decode")
    done = run(
        "generate", "--checkpoint", out, "--prompt-ids", ",".join(map(str, golden["prompt_ids"])), "--temperature", 0,
        "--max-new-tokens", 32, "--ignore-eos", "--dtype", "float32", "--json", env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == golden["tokens"].tolist()


def test_an_empty_directory_is_filled_and_links_are_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    assert main([str(tiny_checkpoint("kimi-linear-tiny")), str(tmp_path / "link"), "--layers", "2"]) == 0
    assert (tmp_path / "link").is_symlink() and k3jax.load(tmp_path / "link").config.num_hidden_layers == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "link"]


def source_with(folder: pathlib.Path, changes=None) -> pathlib.Path:
    (folder / "source").mkdir()
    return copy_checkpoint("k3-tiny", folder / "source", changes or {})


def unfinished(folder: pathlib.Path) -> pathlib.Path:
    (folder / "source" / "layers").mkdir(parents=True)
    return folder / "source"


def without_weights(folder: pathlib.Path) -> pathlib.Path:
    (folder / "source").mkdir()
    shutil.copy(DATA / "k3-tiny" / "config.json", folder / "source")
    return folder / "source"


def larger_than_the_disk(folder: pathlib.Path) -> pathlib.Path:
    """A file with a hole for an embedding of more bytes than are free."""
    source = source_with(folder)
    rows = shutil.disk_usage(folder).free // 256
    values = json.loads((source / "config.json").read_text())
    values["text_config"]["vocab_size"] = rows
    (source / "config.json").write_text(json.dumps(values))
    content = (source / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8:start]), content[start:]
    size = len(data)
    for name in ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"):
        begin, end = header[name]["data_offsets"]
        removed = end - begin
        for entry in header.values():
            if "data_offsets" in entry and entry["data_offsets"][0] >= end:
                entry["data_offsets"] = [offset - removed for offset in entry["data_offsets"]]
        size -= removed
        header[name] = {"dtype": "BF16", "shape": [rows, 128], "data_offsets": [0, 0]}
    for name in ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"):
        header[name]["data_offsets"] = [size, size + rows * 256]
        size += rows * 256
    write_raw_shard(source / "model.safetensors", header, b"", size)
    return source


FAILURES = {
    "no source": (lambda folder: folder / "nowhere", "no directory '{folder}/nowhere'; expected a Hugging Face"),
    "source a file": (lambda folder: ROOT / "README.md", "expected a Hugging Face checkpoint directory"),
    "no checkpoint": (lambda folder: ROOT / "docs", "config.json"),
    "no weights": (without_weights, "has neither model.safetensors.index.json nor model.safetensors"),
    "source not finished": (unfinished, "{folder}/source is a converted checkpoint already"),
    "tensor missing": (lambda folder: source_with(folder, {SCALE: None}), f"has no tensor {SCALE}"),
    "tensor unknown": (lambda folder: source_with(folder, {"lm_head.bias": np.zeros(3)}), "tensor lm_head.bias in"),
    "damaged": (lambda folder: source_with(folder, {SCALE: np.full((64, 2), 255, np.uint8)}), f"{SCALE}"),
    "disk too small": (larger_than_the_disk, "not enough disk space in {folder}: "),
}


@pytest.mark.parametrize("make, message", FAILURES.values(), ids=FAILURES)
def test_a_failure_gives_one_line_and_leaves_nothing(make, message, tmp_path, capsys):
    source = make(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main([str(source), str(tmp_path / "out")]) == 2
    error = one_line(capsys)
    assert message.format(folder=tmp_path) in error
    assert sorted(tmp_path.iterdir()) == before


def one_line(capsys) -> str:
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and error.startswith("k3jax: error: "), error
    return error


DESTINATIONS = {
    "not empty": (lambda folder: ROOT / "docs", "docs is not empty; choose another directory or remove it"),
    "a file": (lambda folder: ROOT / "README.md", "README.md exists and is not a directory"),
    "no parent": (lambda folder: folder / "a" / "b", "no directory {folder}/a to make b in"),
    "the source": (lambda folder: folder / "source", "{folder}/source lies inside {folder}/source"),
    "inside the source": (lambda folder: folder / "source" / "out", "{folder}/source/out lies inside {folder}/source"),
}


@pytest.mark.parametrize("make, message", DESTINATIONS.values(), ids=DESTINATIONS)
def test_a_bad_destination_is_refused_before_anything_is_read(make, message, tmp_path, capsys):
    source = without_weights(tmp_path)  # which would be refused too
    assert main([str(source), str(make(tmp_path))]) == 2
    assert message.format(folder=tmp_path) in one_line(capsys)
    assert [path.name for path in source.iterdir()] == ["config.json"]


def test_a_mount_point_is_refused(tmp_path, capsys):
    """It could not be replaced at the end."""
    mounts = (line.split()[1] for line in pathlib.Path("/proc/mounts").read_text().splitlines())
    empty = [path for path in mounts if os.access(path, os.R_OK | os.X_OK) and os.path.isdir(path)
             and not os.listdir(path)]
    if not empty:
        pytest.skip("needs an empty mount point")
    assert main([str(tiny_checkpoint("k3-tiny")), empty[0]]) == 2
    assert f"{empty[0]} is a mount point, which cannot be replaced" in one_line(capsys)


@pytest.mark.parametrize("arguments, message", [
    ([], "the following arguments are required: SRC, DST"),
    (["a", "b", "--layers", "0"], "'0' is not a whole number of at least 1"),
    (["a", "b", "--dtype", "float32"], "unrecognized arguments: --dtype float32"),
    ([str(tiny_checkpoint("k3-tiny")), "out", "--layers", "15"], "cannot take 15 layers of a model with 14"),
    (["demo", "out"], "no directory 'demo'"),
])
def test_wrong_arguments(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in one_line(capsys)


def test_help_names_the_exit_codes(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "exit codes:" in text and "130" in text and "examples:" in text


def test_mistakes_are_found_before_jax_is_imported():
    code = "import sys; from k3jax.cli.convert import main; print(main(['nowhere', 'out']), 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 False\n"


def test_verification_finds_what_a_faulty_disk_wrote(tmp_path, capsys, monkeypatch):
    def save(directory, *arguments):
        real_save(directory, *arguments)
        if directory.name == "00001":
            files = [path for path in directory.rglob("*") if path.is_file()]
            largest = max(files, key=lambda path: path.stat().st_size)
            content = bytearray(largest.read_bytes())
            content[len(content) // 2] ^= 4
            largest.write_bytes(content)

    real_save = store.save
    monkeypatch.setattr(store, "save", save)
    assert main([str(tiny_checkpoint("k3-tiny")), str(tmp_path / "out"), "--verify"]) == 2
    assert " in layers/00001 differs from tensor language_model.model.layers.1." in one_line(capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_gets_full_leaves_one_line_and_nothing_else(tmp_path):
    """No file may be larger than 20 kB here, which tensorstore meets as it would a full disk."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    child = start(tiny_checkpoint("k3-tiny"), tmp_path / "out", limit)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 2
    assert errors == f"k3jax: error: cannot write {tmp_path}/out: File too large\n"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def wide_checkpoint(tmp_path_factory) -> pathlib.Path:
    """Kimi-Linear-tiny with six layers of about 50 MB, in a file without contents."""
    source = tmp_path_factory.mktemp("wide")
    values = json.loads((DATA / "kimi-linear-tiny" / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(values | {"moe_intermediate_size": 4096}))
    header, size = {}, 0
    for name, array in read_shards(tiny_checkpoint("kimi-linear-tiny")).items():
        shape = [4096 if length == 64 and ".block_sparse_moe." in name else length for length in array.shape]
        nbytes = int(np.prod(shape)) * array.itemsize
        dtype = {"bfloat16": "BF16", "float32": "F32"}[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [size, size + nbytes]}
        size += nbytes
    write_raw_shard(source / "model.safetensors", header, b"", size)
    return source


def test_memory_is_bounded_by_a_layer(wide_checkpoint, tmp_path):
    code = """
import os, pathlib, sys
from k3jax.checkpoint.orbax.conversion import convert
from k3jax.checkpoint.orbax.request import check_request
from k3jax.memory import peak_rss_bytes
source, small, out = map(pathlib.Path, sys.argv[1:])
convert(check_request(source, small, layers=1))
before = peak_rss_bytes()
done = convert(check_request(source, out))
print(done.nbytes, peak_rss_bytes() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, wide_checkpoint, tmp_path / "small", tmp_path / "out"], cwd=ROOT, check=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, text=True, timeout=120,
    )
    total, growth = map(int, done.stdout.split())
    layer = 17 * 3 * 4096 * 128 * 2
    assert total > 7.9 * layer
    # A layer, and copies of it on their way to the disk.
    assert growth < 4 * layer


def start(source: pathlib.Path, out: pathlib.Path, before: str) -> subprocess.Popen:
    """A conversion in a process that first does something else."""
    code = f"{before}; import runpy; runpy.run_module('k3jax.convert', run_name='__main__', alter_sys=True)"
    return subprocess.Popen(
        [sys.executable, "-c", code, source, out, "--verify"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )


def wait_for_layers(child: subprocess.Popen, out: pathlib.Path) -> None:
    deadline = time.monotonic() + 60
    while not list(out.parent.glob(f".{out.name}.partial-*/layers/*")):
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.01)


def test_ctrl_c_leaves_nothing(wide_checkpoint, tmp_path):
    # A job in the background, as these tests may be, is started with SIGINT ignored, and so are its children.
    child = start(
        wide_checkpoint, tmp_path / "out", "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    )
    wait_for_layers(child, tmp_path / "out")
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert errors.splitlines()[-1] == "k3jax: interrupted; nothing is left behind" and "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_conversion_leaves_is_refused(wide_checkpoint, tmp_path):
    child = start(wide_checkpoint, tmp_path / "out", "pass")
    wait_for_layers(child, tmp_path / "out")
    child.kill()
    child.communicate(timeout=60)
    [left] = tmp_path.iterdir()
    assert left.name.startswith(".out.partial-")
    with pytest.raises(UserError, match="has no k3jax.json: its conversion or its copy was not finished"):
        k3jax.load(left)
