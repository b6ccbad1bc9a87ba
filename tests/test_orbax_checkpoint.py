"""Converted checkpoints: every bit is there, in files that Orbax reads, and damage is found before it is used."""

import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import k3jax
from k3jax.catalog import describe
from k3jax.checkpoint.orbax import store
from k3jax.checkpoint.orbax.conversion import convert
from k3jax.checkpoint.orbax.items import items_of
from k3jax.checkpoint.orbax.request import check_request
from k3jax.checkpoint.orbax.verification import verify_item
from k3jax.checkpoint.plan import plan_loading
from k3jax.checkpoint.reading import ShardReader
from k3jax.errors import UserError
from k3jax.model import K3ForCausalLM
from tests.checkpoints import TINY, copy_checkpoint, read_shards, tiny_checkpoint

ROOT = pathlib.Path(__file__).parents[1]
LAYER = "language_model.model.layers.2."
EXPERT = LAYER + "block_sparse_moe.experts.5."


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The converted checkpoint of a golden one, made once."""
    folder = tmp_path_factory.mktemp("converted")

    @functools.cache
    def directory(name: str) -> pathlib.Path:
        convert(check_request(tiny_checkpoint(name), folder / name))
        return folder / name

    return directory


@pytest.fixture
def copied(converted, tmp_path):
    """A copy to be damaged."""
    return shutil.copytree(converted("k3-tiny"), tmp_path / "copy")


def assert_same(params, expected) -> None:
    """Equal trees of equal bytes."""
    assert jax.tree.structure(params) == jax.tree.structure(expected)

    def same(path, array, other):
        assert (array.shape, array.dtype, array.sharding) == (other.shape, other.dtype, other.sharding), path
        assert np.asarray(array).tobytes() == np.asarray(other).tobytes(), path

    jax.tree_util.tree_map_with_path(same, params, expected)


def plain_orbax(item: pathlib.Path):
    """What a program that knows nothing of k3jax reads."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(item)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", TINY)
def test_loads_what_the_source_loads(name, dtype, converted):
    lm, source = k3jax.load(converted(name), dtype=dtype), k3jax.load(tiny_checkpoint(name), dtype=dtype)
    assert lm.config == source.config
    assert (lm.tokenizer is None) == (source.tokenizer is None)
    assert_same(lm.params, source.params)


def test_a_plain_orbax_reader_sees_the_tensors(converted):
    tensors = read_shards(tiny_checkpoint("k3-tiny"))
    layer, model = plain_orbax(converted("k3-tiny") / "layers" / "00002"), plain_orbax(converted("k3-tiny") / "model")
    assert set(layer) == {"layer_inputs", "kda", "moe"} and set(model) == {"embeddings", "output"}
    for array, tensor in (
        (layer["moe"]["experts_gate_up_packed"][5, 1], EXPERT + "w3.weight_packed"),
        (layer["moe"]["experts_gate_up_scale"][5, 0], EXPERT + "w1.weight_scale"),
        (layer["moe"]["experts_down_packed"][5], EXPERT + "w2.weight_packed"),
        (layer["kda"]["qkv_proj"][1].reshape(128, 128), LAYER + "self_attn.k_proj.weight"),
        (layer["kda"]["dt_bias"].reshape(-1), LAYER + "self_attn.dt_bias"),
        (model["embeddings"]["lm_head"], "language_model.lm_head.weight"),
    ):
        assert array.dtype == tensors[tensor].dtype and array.tobytes() == tensors[tensor].tobytes(), tensor
    np.testing.assert_array_equal(layer["kda"]["A_log"], tensors[LAYER + "self_attn.A_log"][:4])


def test_every_bit_pattern_in_every_dtype_survives(tmp_path):
    """Not-a-number payloads, infinities, denormals; float16 and float32 where bfloat16 is usual; several in a stack."""
    noise = np.random.default_rng(0)
    tensors = read_shards(tiny_checkpoint("k3-tiny"))

    def bits(name, dtype):
        words = noise.integers(0, 256, tensors[name].size * np.dtype(dtype).itemsize, np.uint8)
        return words.view(dtype).reshape(tensors[name].shape)

    down, router = LAYER + "block_sparse_moe.routed_expert_down_proj.weight", LAYER + "block_sparse_moe.gate.weight"
    norm, q_proj = LAYER + "input_layernorm.weight", LAYER + "self_attn.q_proj.weight"
    changes = {
        down: bits(down, ml_dtypes.bfloat16), router: bits(router, np.float32), norm: bits(norm, np.float16),
        q_proj: tensors[q_proj].astype(np.float32) + np.float32(1e-6),
    }
    (tmp_path / "source").mkdir()
    source = copy_checkpoint("k3-tiny", tmp_path / "source", changes)
    convert(check_request(source, tmp_path / "out"), verify=True)
    layer = plain_orbax(tmp_path / "out" / "layers" / "00002")
    for array, tensor in (
        (layer["moe"]["latent_down"], down), (layer["moe"]["router"], router),
        (layer["layer_inputs"]["attention_norm"], norm), (layer["kda"]["qkv_proj"][0].reshape(128, 128), q_proj),
    ):
        assert array.dtype == changes[tensor].dtype and array.tobytes() == changes[tensor].tobytes(), tensor
    # Two of the three tensors were bfloat16: float32 holds them exactly.
    np.testing.assert_array_equal(
        layer["kda"]["qkv_proj"][1].reshape(128, 128), tensors[LAYER + "self_attn.k_proj.weight"].astype(np.float32)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("stored", [np.float32, np.float16])
def test_converts_on_loading_as_the_source_does(stored, dtype, tmp_path):
    (tmp_path / "source").mkdir()
    source = copy_checkpoint("k3-tiny", tmp_path / "source", {
        name: array if array.dtype == np.uint8 else (array.astype(np.float32) * 1.001).astype(stored)
        for name, array in read_shards(tiny_checkpoint("k3-tiny")).items()
    })
    convert(check_request(source, tmp_path / "out", layers=3))
    params, expected = k3jax.load(tmp_path / "out", dtype=dtype).params, k3jax.load(source, dtype=dtype).params
    for group, name in (("embeddings", "lm_head"), ("moe", "router"), ("moe", "router_bias"), ("kda", "o_norm")):
        array, whole = params[group][name], expected[group][name]
        assert array.dtype == whole.dtype
        np.testing.assert_array_equal(np.asarray(array), np.asarray(whole)[: len(array)])


def test_chunks_and_blocks(tmp_path, monkeypatch):
    """Large arrays are cut where whole experts and heads end, and written in several blocks."""
    monkeypatch.setattr(store, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(store, "BLOCK_BYTES", 20_000)
    convert(check_request(tiny_checkpoint("k3-tiny"), tmp_path / "out"), verify=True)
    assert_same(k3jax.load(tmp_path / "out").params, k3jax.load(tiny_checkpoint("k3-tiny")).params)
    with ocp.StandardCheckpointer() as checkpointer:
        layer = checkpointer.metadata(tmp_path / "out" / "layers" / "00002").item_metadata
    chunk = {name: layer[group][name].storage.chunk_shape for group, name in (
        ("moe", "experts_down_packed"), ("kda", "qkv_proj"), ("kda", "A_log")
    )}
    assert chunk["experts_down_packed"] == (1, 64, 32)
    assert chunk["qkv_proj"][:2] == (1, 1)
    assert chunk["A_log"] == (4,)
    assert all(np.prod(shape) <= 3000 for shape in chunk.values())


def test_writes_block_by_block(tmp_path, monkeypatch):
    """So that copies on their way to the disk stay small; Orbax itself would write an array at once."""
    monkeypatch.setattr(store, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(store, "BLOCK_BYTES", 20_000)
    array, written = np.arange(30_000, dtype=np.int32).reshape(30, 1000), []
    store.save(tmp_path / "item", {("group", "array"): array}, {("group", "array"): (0,)}, written.append)
    assert written == [20_000] * 6
    np.testing.assert_array_equal(plain_orbax(tmp_path / "item")["group"]["array"], array)


@pytest.mark.parametrize("name", TINY)
def test_each_device_gets_its_part(name, converted):
    """On 8 CPU devices: the same values, laid out by the rules."""
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "sharded_orbax_loading.py", tiny_checkpoint(name), converted(name)],
        env=environment, capture_output=True, text=True, timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ok\n"


def test_the_first_layers(tmp_path, converted):
    """Nothing of the later layers is read: what would be refused in them is not seen."""
    later = "language_model.model.layers.4.block_sparse_moe.experts.0.w1.weight_scale"
    (tmp_path / "source").mkdir()
    source = copy_checkpoint("k3-tiny", tmp_path / "source", {
        later: np.full_like(read_shards(tiny_checkpoint("k3-tiny"))[later], 255)
    })
    done = convert(check_request(source, tmp_path / "out", layers=4))
    assert done.layers == 4
    lm, whole = k3jax.load(tmp_path / "out"), k3jax.load(converted("k3-tiny"))
    assert lm.config == whole.config.first_layers(4)
    assert sorted(path.name for path in (tmp_path / "out" / "layers").iterdir()) == [f"0000{n}" for n in range(4)]
    for group, layers in (("layer_inputs", 4), ("kda", 3), ("mla", 1), ("dense_mlp", 1), ("moe", 3)):
        for name, array in lm.params[group].items():
            assert np.asarray(array).tobytes() == np.asarray(whole.params[group][name][:layers]).tobytes(), name
    with pytest.raises(UserError, match=f"^{later}.*255"):
        convert(check_request(source, tmp_path / "all"))


def test_the_manifest_lists_every_file(converted):
    directory = converted("k3-tiny")
    manifest = json.loads((directory / "k3jax.json").read_text())
    files = {str(path.relative_to(directory)): path.stat().st_size for path in directory.rglob("*") if path.is_file()}
    del files["k3jax.json"]
    assert manifest == {"format_version": 1, "layers": 14, "expert_format": "mxfp4", "files": files}
    for name in ("config.json", "tiktoken.model", "tokenizer_config.json"):
        assert (directory / name).read_bytes() == (tiny_checkpoint("k3-tiny") / name).read_bytes()


def change_json(path: pathlib.Path, **changes) -> None:
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, **changes}))


DAMAGE = {
    "truncated": (
        lambda directory: os.truncate(directory / "layers/00003/_METADATA", 100), "_METADATA has 100 bytes, expected"
    ),
    "file missing": (
        lambda directory: (directory / "model" / "manifest.ocdbt").unlink(), "has no model/manifest.ocdbt, which"
    ),
    "layer missing": (lambda directory: shutil.rmtree(directory / "layers" / "00013"), "has no layers/00013/"),
    "not finished": (lambda directory: (directory / "k3jax.json").unlink(), "has no k3jax.json: its conversion or its"),
    "manifest not JSON": (lambda directory: (directory / "k3jax.json").write_text("{"), "k3jax.json is not JSON"),
    "manifest no object": (lambda directory: (directory / "k3jax.json").write_text("[]"), "format_version is None"),
    "later version": (lambda directory: change_json(directory / "k3jax.json", format_version=2), "format_version is 2"),
    "no files listed": (lambda directory: change_json(directory / "k3jax.json", files=None), "lacks valid layers"),
    "layers of another type": (lambda directory: change_json(directory / "k3jax.json", layers="14"), "lacks valid"),
    "too many layers": (lambda directory: change_json(directory / "k3jax.json", layers=15), "cannot take 15 layers"),
}


@pytest.mark.parametrize("damage, message", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_refused_before_anything_is_loaded(damage, message, copied):
    damage(copied)
    with pytest.raises(UserError, match=message) as error:
        describe(copied)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("old, new, message", [
    ('"moe_intermediate_size": 64', '"moe_intermediate_size": 96', r"shape \[2, 128, 128\], config.json asks"),
    ('"use_full_rank_gate": true', '"use_full_rank_gate": null', "kda/g_a_proj is missing"),
])
def test_another_config_is_refused(old, new, message, copied):
    text = (copied / "config.json").read_text()
    assert old in text
    (copied / "config.json").write_text(text.replace(old, new))
    change_json(copied / "k3jax.json", files={})
    with pytest.raises(UserError, match=message) as error:
        k3jax.load(copied)
    assert "\n" not in str(error.value)


def flip(path: pathlib.Path, offset: int, bits: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= bits
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["manifest.ocdbt", "_METADATA", "d/*"])
def test_bytes_that_orbax_cannot_read_give_one_line(file, copied):
    [path] = (copied / "layers" / "00003").glob(file)
    for offset in range(-60, -20):
        flip(path, offset, 0x55)
    done = subprocess.run(
        [sys.executable, "-m", "k3jax.generate", "--checkpoint", copied, "--prompt-ids", "1"], cwd=ROOT,
        capture_output=True, text=True, timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"cannot read {copied}/layers/00003, convert the checkpoint again: " in done.stderr


@pytest.mark.parametrize("which", ["source", "destination"])
def test_verification_finds_a_flipped_bit(which, tmp_path):
    (tmp_path / "source").mkdir()
    source = copy_checkpoint("k3-tiny", tmp_path / "source", {})
    request = check_request(source, tmp_path / "out")
    convert(request)
    weights = K3ForCausalLM.weights(request.config)
    planned = {one.path: one for one in plan_loading(weights, request.config, request.repository).weights}

    def verify() -> None:
        with ShardReader() as reader:
            for item in items_of(weights):
                verify_item(tmp_path / "out", item, planned, reader)

    verify()
    tensor = EXPERT + "w2.weight_packed"
    needle = read_shards(source)[tensor].tobytes()
    [damaged] = [path for path in (tmp_path / ("source" if which == "source" else "out")).rglob("*")
                 if path.is_file() and needle in path.read_bytes()]
    flip(damaged, damaged.read_bytes().index(needle) + 1000)
    with pytest.raises(UserError, match=rf"moe/experts_down_packed in layers/00002 differs from tensor {tensor} in"):
        verify()
