"""Both model families against vectors made by independent implementations, end to end and layer by layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.golden import TINY, decode_batch, new_state, prefill_batch, tiny_model, vectors

LENGTHS = (1, 37, 200)
BFLOAT16_RMS = {"k3-tiny": (0.014, 0.17, 0.23), "kimi-linear-tiny": (0.03, 0.26, 0.16)}
BFLOAT16_SAME_ARGMAX = {"k3-tiny": (1.0, 0.84, 0.91), "kimi-linear-tiny": (1.0, 0.89, 0.93)}


@functools.cache
def program(name: str, dtype: str):
    """The prefill, compiled once for each number of rows."""
    return jax.jit(functools.partial(tiny_model(name, dtype).model.apply, capture=True))


@functools.cache
def prefilled(name: str, length: int, dtype: str = "float32", rows: int = max(LENGTHS)):
    """Output of one prefill over the whole golden prompt, padded to `rows` tokens; padding is cut off again."""
    lm = tiny_model(name, dtype)
    tokens = jnp.zeros(rows, jnp.int32).at[:length].set(vectors(name, f"len{length}")["input_ids"])
    output = program(name, dtype)(
        {"params": lm.params}, tokens, new_state(lm), prefill_batch([length]), jnp.arange(rows)
    )
    intermediates = {key: value[:, :length] for key, value in output.intermediates.items()}
    return output._replace(logits=output.logits[:length], intermediates=intermediates)


def close(actual, expected, tolerance):
    np.testing.assert_allclose(np.asarray(actual, np.float64), np.asarray(expected, np.float64), rtol=0, atol=tolerance)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", TINY)
def test_logits(name, length):
    close(prefilled(name, length).logits, vectors(name, f"len{length}")["logits_fp64"], 1e-4)


@pytest.mark.parametrize("name", TINY)
def test_without_padding(name):
    close(prefilled(name, 37, rows=37).logits, vectors(name, "len37")["logits_fp64"], 1e-4)


@pytest.mark.parametrize("name", TINY)
def test_bfloat16_is_as_close_as_the_reference(name):
    """Over all positions together: at a single one a rounding can flip an expert, which says nothing."""
    square_errors, same = 0.0, 0
    for length in LENGTHS:
        expected = vectors(name, f"len{length}")["logits_fp64"].astype(np.float64)
        logits = np.asarray(prefilled(name, length, "bfloat16").logits, np.float64)
        square_errors += length * np.mean((logits - expected) ** 2)
        same += np.sum(logits.argmax(-1) == expected.argmax(-1))
    reference = sum(length * rms**2 for length, rms in zip(LENGTHS, BFLOAT16_RMS[name]))
    assert square_errors <= 1.2**2 * reference
    assert same / sum(LENGTHS) >= np.average(BFLOAT16_SAME_ARGMAX[name], weights=LENGTHS) - 0.02


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", TINY)
def test_router(name, length):
    golden = vectors(name, f"len{length}")
    taken = prefilled(name, length).intermediates
    order, golden_order = np.argsort(taken["router_ids"], -1), np.argsort(golden["router_topk_ids"], -1)

    def sort(values, by):
        return np.take_along_axis(np.asarray(values), by, -1)

    np.testing.assert_array_equal(
        sort(taken["router_ids"], order), sort(golden["router_topk_ids"], golden_order)
    )
    close(sort(taken["router_weights"], order), sort(golden["router_topk_weights"], golden_order), 2e-5)
    if "router_scores" in golden:
        close(taken["router_scores"], golden["router_scores"], 2e-5)


@pytest.mark.parametrize("name", TINY)
def test_hidden_states(name):
    golden, taken = vectors(name, "len37"), prefilled(name, 37).intermediates
    params, eps = tiny_model(name).params["layer_inputs"], tiny_model(name).config.rms_norm_eps

    def normed(x, weight):
        x = np.asarray(x, np.float64)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * np.asarray(weight, np.float64)[:, None]

    taken = {key: value[:, golden["rows"]] for key, value in taken.items() if value.ndim >= 3}
    close(taken["attention_input"], normed(golden["attn_in"], params["attention_norm"]), 1e-4)
    close(taken["mlp_input"], normed(golden["mlp_in"], params["mlp_norm"]), 1e-4)
    close(taken["attention_output"], golden["attn_out"], 5e-5)
    close(taken["mlp_output"], golden["mlp_out"], 5e-5)
    close(taken["kda_decay"], golden["kda_decay"], 2e-5)
    if "block_residuals" in golden:
        close(taken["block_residuals"], golden["block_residuals"], 5e-5)


def test_attn_res_sources():
    """The captured weights make the golden inputs of all sublayers out of the golden outputs of those before."""
    golden, taken = vectors("k3-tiny", "len37"), prefilled("k3-tiny", 37).intermediates
    blocks, running, filled = golden["block_residuals"].astype(np.float64), golden["block_residuals"][0], 0
    for layer in range(14):
        for mix, out, expected in (("attention", "attn_out", "attn_in"), ("mlp", "mlp_out", "mlp_in")):
            weights = np.asarray(taken[f"{mix}_sources"][layer, golden["rows"]], np.float64)
            close(weights.sum(-1), 1, 1e-6)
            assert not weights[:, filled:-1].any()
            sources = [*blocks[:filled], running]
            mixed = sum(weights[:, index, None] * source for index, source in zip([*range(filled), -1], sources))
            close(mixed, golden[expected][layer], 1e-4)
            starts = mix == "attention" and layer % 4 == 0
            running, filled = golden[out][layer] + (0 if starts else running), filled + starts
    final = taken["output_sources"]
    assert final.shape[-1] == 5 and np.allclose(final.sum(-1), 1)


@pytest.mark.parametrize("name", TINY)
def test_states_after_the_prompt(name):
    golden, output = vectors(name, "len37"), prefilled(name, 37)
    layers = golden["state_layers"]
    state = output.state.kda_state[layers, 1]
    # The golden state is [head, key, value]; ours is value-major. A transposed state would differ by far more.
    expected = golden["kda_state"].swapaxes(-1, -2)
    close(state, expected, 2e-5)
    assert np.abs(np.asarray(state) - golden["kda_state"]).max() > 0.1
    check_conv_tail(output.state.conv_tail[layers, 1], golden["kda_conv_state"])
    close(output.intermediates["kda_beta"], golden["kda_beta"], 2e-5)
    latent = golden["mla_latent"].shape[-1]
    pages = output.state.mla_pages[:, 1:].reshape(len(golden["mla_latent"]), -1, output.state.mla_pages.shape[-1])
    close(pages[:, :37, :latent], golden["mla_latent"], 4e-5)
    close(pages[:, :37, latent:], golden["mla_k_rope"], 4e-5)


def check_conv_tail(tail, golden):
    """Golden tails [layers, 3, channels, 4] keep one more column than ours [layers, 3, H, K, 3]."""
    layers, parts, channels, _ = golden.shape
    close(np.asarray(tail).reshape(layers, parts, channels, 3), golden[..., 1:], 2e-5)


@pytest.mark.parametrize("name", TINY)
def test_greedy_decode(name):
    lm, golden = tiny_model(name), vectors(name, "decode")
    prompt, expected = golden["prompt_ids"], golden["tokens"]
    step = jax.jit(lm.model.apply)
    params = {"params": lm.params}
    output = step(params, jnp.asarray(prompt), new_state(lm), prefill_batch([len(prompt)]))
    tokens = []
    for number in range(len(expected)):
        close(output.logits[0], golden["step_logits_fp64"][number], 1e-4)
        tokens.append(int(output.logits[0].argmax()))
        if number + 1 < len(expected):
            batch = decode_batch([1], [len(prompt) + number])
            output = step(params, jnp.array(tokens[-1:]), output.state, batch)
    assert tokens == expected.tolist()
    layers = golden["state_layers"]
    close(output.state.kda_state[layers, 1], golden["kda_state_after"].swapaxes(-1, -2), 2e-5)
    check_conv_tail(output.state.conv_tail[layers, 1], golden["kda_conv_state_after"])
