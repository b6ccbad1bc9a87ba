"""Tables, placements and their errors; what runs on several devices is in test_sharded_model.py."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

import k3jax
from k3jax.errors import UserError
from k3jax.expert_parallel import capacity, exchange_pays
from k3jax.model import K3ForCausalLM
from k3jax.presets import preset
from k3jax.state import DecodeState, PrefillBatch
from k3jax.weights import leaves, placements
from sharding import DECODE, MESH_AXES, PREFILL, STRATEGIES, TRAIN, Layout, make_mesh


def layout(strategy=DECODE, **sizes: int) -> Layout:
    return Layout(AbstractMesh(tuple(sizes.get(axis, 1) for axis in MESH_AXES), MESH_AXES), strategy)


def declared(config) -> dict:
    """Axes and shape of every weight and pool."""
    weights = {"/".join(path): (weight.axes, weight.shape) for path, weight in leaves(K3ForCausalLM.weights(config))}
    state = jax.eval_shape(lambda: DecodeState.create(config, num_slots=64, num_pages=1024, dtype=jnp.bfloat16))
    axes = DecodeState.axes()
    pools = {
        field.name: (getattr(axes, field.name), getattr(state, field.name).shape)
        for field in dataclasses.fields(state)
    }
    return weights | pools


def test_the_tables_name_mesh_axes_and_axes_that_exist():
    names = {axis for axes, _ in declared(preset("kimi-k3")).values() for axis in axes}
    names |= {axis for axes, _ in declared(preset("kimi-linear-48b")).values() for axis in axes}
    activations = {"sequences", "tokens", "snapshots"}
    for strategy in STRATEGIES.values():
        assert {name for axes in strategy.table.values() for name in axes} <= set(MESH_AXES)
        assert set(strategy.table) <= names | activations, strategy.name


@pytest.mark.parametrize("name", ("kimi-k3", "kimi-linear-48b"))
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_no_array_of_a_model_uses_a_mesh_axis_twice(name, strategy):
    layout(strategy, data=2, expert=2, seq=2, tensor=2).placements(declared(preset(name)))


def test_where_weights_and_pools_of_k3_lie():
    """Written out by hand, for the mesh of 128 devices that decodes K3 on tpu7x 4x4x4."""
    placed = layout(expert=4, seq=8, tensor=4).placements(declared(preset("kimi-k3")))
    heads, blocks = ("tensor", "seq"), ("expert",)
    expected = {
        "kda/qkv_proj": (None, None, heads, None, None),
        "kda/o_proj": (None, None, heads),
        "mla/q_b_proj": (None, heads, None, None),
        "mla/kv_b_proj": (None, ("tensor",), None, None),
        "mla/kv_a_proj": (None, None, None),
        "moe/experts_gate_up_packed": (None, ("expert", "seq"), None, ("tensor",), None),
        "moe/experts_down_scale": (None, ("expert", "seq"), None, ("tensor",)),
        "moe/router": (None, None, None),
        "moe/latent_down": (None, heads, None),
        "embeddings/lm_head": (heads, None),
        "kda_state": (None, blocks, heads, None, None),
        "conv_tail": (None, blocks, None, heads, None, None),
        "mla_pages": (None, blocks, ("seq",), None),
    }
    for name, spec in expected.items():
        assert placed[name].spec == PartitionSpec(*spec), name


def test_a_long_prompt_is_split_by_position_and_not_by_head():
    prefill = layout(PREFILL, seq=4, tensor=2)
    assert prefill.over("tokens") == ("seq",) and prefill.over("kda_heads") == ("tensor",)
    assert layout(TRAIN, data=2, tensor=2).spec(("vocab", "embed")) == PartitionSpec(("tensor",), ("data",))


def test_mesh_axes_of_size_one_and_missing_ones_split_nothing():
    assert layout(tensor=2).spec(("experts", "embed")) == PartitionSpec(None, None)
    assert Layout(AbstractMesh((2,), ("tensor",))).spec(("kda_heads",)) == PartitionSpec(("tensor",))
    assert layout(tensor=2, seq=4).parts("kda_heads") == 8 and Layout().parts("kda_heads") == 1


def test_a_mesh_that_does_not_divide():
    """One array's sizes, then those that suit all arrays that are split over the same mesh axes."""
    with pytest.raises(ValueError) as error:
        layout(tensor=5).placement(("kda_heads", "key_dim"), (96, 128), "state")
    assert str(error.value) == (
        "state: axis 'kda_heads' of size 96 does not split over tensor 5 devices; sizes that would work: 1, 2, 3, 4"
    )
    with pytest.raises(ValueError, match=r"^moe/experts_gate_up_packed: axis 'experts' of size 896 does not split over "
                       r"expert 3 x seq 4 = 12 devices; sizes that would work: 1, 2, 4, 7, 8$"):
        layout(expert=3, seq=4).placements({
            "moe/experts_gate_up_packed": (("experts",), (896,)),
        })
    with pytest.raises(ValueError, match="size 12 .* work: 1, 2, 4$"):
        layout(tensor=8).placements({"a": (("mlp",), (16,)), "b": (("kda_heads",), (12,))})


def test_mxfp4_scales_are_checked_by_group():
    """A mesh may divide the columns of an expert but not their groups of 32."""
    weights = {name: it for name, it in declared(preset("kimi-k3")).items() if name.startswith("moe/experts_down")}
    with pytest.raises(ValueError, match="experts_down_scale: axis 'expert_mlp_groups' of size 96 does not split over "
                       "tensor 64 devices; sizes that would work: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48$"):
        layout(tensor=64).placements(weights)


def test_an_array_split_twice_over_a_mesh_axis():
    with pytest.raises(ValueError, match="axes kda_heads, vocab: strategy 'prefill' splits two of them over mesh axis "
                       "'tensor'"):
        layout(PREFILL, tensor=2).spec(("kda_heads", "vocab"))


@pytest.mark.parametrize("sizes, message", (
    ({"model": 2}, "mesh axis is 'model', expected one of data, expert, seq, tensor"),
    ({"expert": 0}, "mesh axis 'expert' has size 0, expected at least 1"),
    ({"expert": 4, "tensor": 8}, "mesh expert 4 x tensor 8 needs 32 devices, 1 are present; take sizes whose product"),
))
def test_meshes_that_cannot_be(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(sizes, jax.devices()[:1])


def test_a_mesh_takes_the_first_devices():
    mesh = make_mesh({"tensor": 1})
    assert mesh.axis_names == MESH_AXES and mesh.devices.item() == jax.devices()[0]


def test_one_device_changes_no_program():
    """The one-device layout gives back what it gets."""
    one = Layout()

    def function(x):
        return x

    x = jnp.ones(3)
    assert one.local(function, (("tokens",),), ("tokens",)) is function
    assert one.constrain(x, ("tokens",)) is x and one.sum(x, one.over("experts")) is x
    assert one.gather(x, (), 0) is x and one.index("experts") == 0 and hash(one) == hash(Layout())


def test_a_model_that_does_not_divide_is_a_users_mistake():
    """Heads would allow 6, but the vocabulary and the widths of experts would not."""
    with pytest.raises(UserError) as error:
        placements(K3ForCausalLM.weights(preset("kimi-k3")), layout(PREFILL, tensor=6))
    assert str(error.value).endswith("does not split over tensor 6 devices; sizes that would work: 1, 2, 4")
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="kda_state: axis 'slots' of size 9 does not split over data 2 devices"):
        DecodeState.abstract(preset("demo"), num_slots=9, num_pages=8, dtype=jnp.float32, layout=layout(data=2))


@pytest.mark.parametrize("options, message", (
    ({"mesh": {"tensor": 1000}}, "mesh tensor 1000 needs 1000 devices, 1 are present"),
    ({"mesh": {"model": 2}}, "mesh axis is 'model', expected one of data, expert, seq, tensor"),
    ({"mesh": Mesh(jax.devices()[:1], ("x",))}, "the mesh has axes x, expected some of data, expert, seq, tensor"),
    ({"strategy": "fast"}, "strategy is 'fast', expected one of prefill, decode, train"),
))
def test_loading_onto_a_mesh_that_cannot_be(options, message):
    with pytest.raises(UserError, match=message):
        k3jax.load("demo", **options)


def test_rows_that_do_not_divide():
    model = K3ForCausalLM(preset("demo"), jnp.float32, layout(PREFILL, seq=4))
    batch = PrefillBatch(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2,), (1,), (1,), (1, 4), (0,))))
    state = DecodeState.abstract(preset("demo"), num_slots=2, num_pages=5, dtype=jnp.float32)
    params = K3ForCausalLM.abstract_params(preset("demo"), jnp.float32)
    with pytest.raises(UserError, match="tokens of a step: axis 'tokens' of size 66 does not split over seq 4 devices"):
        jax.eval_shape(
            lambda *arguments: model.apply({"params": arguments[0]}, *arguments[1:]), params,
            jax.ShapeDtypeStruct((66,), jnp.int32), state, batch,
        )


def test_rows_are_exchanged_when_there_are_many_more_devices_than_experts_of_a_token():
    """K3 has 16 experts a token: 64 devices with experts are enough, 32 are not, nor are a few rows."""
    many, few = layout(PREFILL, expert=8, seq=8, tensor=2), layout(PREFILL, expert=4, seq=8, tensor=4)
    assert exchange_pays(128, 16, many) and not exchange_pays(128, 16, few) and not exchange_pays(32, 16, many)
    assert capacity(128, 16, many) == 64
    assert not exchange_pays(4096, 16, layout(tensor=8)), "no device has rows that others need"
