"""How a prompt is cut, packed and padded does not change what the model computes, nor anybody else's state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden import TINY, decode_batch, new_state, prefill_batch, tiny_model, vectors

ROWS = 160
TOLERANCE = 3e-5


@functools.cache
def step(name: str):
    """The model's step, compiled once for each kind of batch."""
    return jax.jit(tiny_model(name).model.apply)


def prefill(name, state, pieces, **batch):
    """One packed call padded to ROWS tokens; three sequences, so that one program serves all."""
    pieces = [*pieces, *[()] * (3 - len(pieces))]
    tokens = np.full(ROWS, 511, np.int32)
    flat = np.concatenate([np.asarray(piece, np.int32) for piece in pieces])
    tokens[: len(flat)] = flat
    batch = {"snapshots": (-1, -1), "slots": (1, 2, 3)} | batch
    batch["context"] = [*batch.get("context", ()), *[0] * 3][:3]
    return step(name)(
        {"params": tiny_model(name).params}, jnp.asarray(tokens), state,
        prefill_batch([len(piece) for piece in pieces], **batch),
    )


def fresh(name):
    return new_state(tiny_model(name), slots=4, pages=50)


def close(actual, expected):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=0, atol=TOLERANCE)


def same_sequence(actual, expected, length, slot=1):
    """States and pages of one slot agree."""
    close(actual.kda_state[:, slot], expected.kda_state[:, slot])
    close(actual.conv_tail[:, slot], expected.conv_tail[:, slot])
    first = 1 + (slot - 1) * 16

    def latents(state):
        pages = state.mla_pages[:, first : first + 16]
        return pages.reshape(pages.shape[0], -1, pages.shape[-1])[:, :length]

    close(latents(actual), latents(expected))


@functools.cache
def whole(name):
    """The 150-token prompt and what one call makes of it."""
    prompt = vectors(name, "len200")["input_ids"][:150]
    return prompt, prefill(name, fresh(name), [prompt], snapshots=(64, 150))


@pytest.mark.parametrize("name", TINY)
@settings(deadline=None, max_examples=8)
@given(cuts=st.lists(st.integers(1, 149), max_size=4, unique=True), decoded=st.integers(0, 4))
def test_any_split_and_decode_steps_equal_one_call(name, cuts, decoded):
    prompt, expected = whole(name)
    end = len(prompt) - decoded
    bounds = [0, *sorted(cut for cut in cuts if cut < end), end]
    state = fresh(name)
    for first, last in zip(bounds, bounds[1:]):
        output = prefill(name, state, [prompt[first:last]], context=[first])
        state = output.state
    for position in range(end, len(prompt)):
        output = step(name)(
            {"params": tiny_model(name).params}, jnp.asarray([0, prompt[position]]), state,
            decode_batch([0, 1], [0, position]),
        )
        state = output.state
    row = 1 if decoded else 0
    close(output.logits[row], expected.logits[0])
    same_sequence(output.state, expected.state, len(prompt))


@pytest.mark.parametrize("name", TINY)
def test_packed_neighbours_change_nothing(name):
    prompt = vectors(name, "len200")["input_ids"]
    pieces = [prompt[:70], prompt[100:101], prompt[30:80]]
    packed = prefill(name, fresh(name), pieces)
    for number, piece in enumerate(pieces):
        alone = prefill(name, fresh(name), [piece])
        close(packed.logits[number], alone.logits[0])
        close(packed.state.kda_state[:, number + 1], alone.state.kda_state[:, 1])
        close(packed.state.conv_tail[:, number + 1], alone.state.conv_tail[:, 1])


@pytest.mark.parametrize("name", TINY)
def test_snapshots_are_the_states_of_their_prefixes(name):
    prompt, output = whole(name)
    for number, length in enumerate((64, 150)):
        prefix = prefill(name, fresh(name), [prompt[:length]])
        close(output.snapshots.kda_state[:, number], prefix.state.kda_state[:, 1])
        close(output.snapshots.conv_tail[:, number], prefix.state.conv_tail[:, 1])


@pytest.mark.parametrize("name", TINY)
def test_only_the_slots_and_pages_in_use_are_written(name):
    """Whatever lies in other slots and pages, NaN included, stays there and reaches nobody."""
    lm = tiny_model(name)
    prompt, expected = whole(name)
    poisoned = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), fresh(name))
    output = prefill(name, poisoned, [prompt])
    close(output.logits[0], expected.logits[0])
    state = step(name)(
        {"params": lm.params}, jnp.asarray([7, 3]), output.state, decode_batch([0, 1], [0, len(prompt)])
    ).state
    used_pages = range(1, 1 + -(-(len(prompt) + 1) // 16))
    for pool, used in ((state.kda_state, [1]), (state.conv_tail, [1]), (state.mla_pages, used_pages)):
        others = np.delete(np.asarray(pool), list(used), axis=1)
        assert np.isnan(others).all()
        assert not np.isnan(np.asarray(pool)[:, 1]).any()


@pytest.mark.parametrize("name", TINY)
def test_logits_do_not_depend_on_later_tokens(name):
    lm, prompt = tiny_model(name), vectors(name, "len200")["input_ids"][:150]
    changed = prompt.copy()
    changed[100:] = changed[100:][::-1]
    model = jax.jit(lm.model.apply)
    rows = jnp.arange(100)
    first, second = (
        model({"params": lm.params}, jnp.asarray(ids), fresh(name), prefill_batch([150]), rows).logits
        for ids in (prompt, changed)
    )
    close(first, second)
