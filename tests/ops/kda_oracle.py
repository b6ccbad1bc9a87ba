"""KDA in float64 numpy, one token at a time, and random cases for the KDA tests."""

import os
import pathlib

import numpy as np
import pytest

DATA = pathlib.Path(__file__).parents[1] / "data" / "ops"


def golden(name):
    """Arrays of a golden file kept with the tests."""
    with np.load(DATA / f"{name}.npz") as arrays:
        return dict(arrays)


def full_golden(name):
    """Arrays of a golden file that is too large to keep; skips unless K3JAX_GOLDEN names the golden folder."""
    folder = os.environ.get("K3JAX_GOLDEN")
    if not folder:
        pytest.skip("K3JAX_GOLDEN is not set to the folder of golden vectors")
    with np.load(pathlib.Path(folder) / "ops" / f"{name}.npz") as arrays:
        return dict(arrays)


def sigmoid(x):
    return np.exp(-np.logaddexp(0, -x))


def silu(x):
    return x * sigmoid(x)


def l2_normalize(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def decay_gate(raw, A_log, dt_bias, lower_bound):
    rate = np.exp(A_log)[:, None]
    if lower_bound is None:
        return -rate * np.logaddexp(0, raw + dt_bias)
    return lower_bound * sigmoid(rate * (raw + dt_bias))


def recurrence(q, k, v, log_decay, beta, state):
    """Outputs [T, H, V] and the states [T + 1, H, V, K] before and after every token."""
    outs, states = [], [state]
    for t in range(len(q)):
        decayed = states[-1] * np.exp(log_decay[t])[:, None, :]
        error = v[t] - np.einsum("hvk,hk->hv", decayed, k[t])
        states.append(decayed + beta[t][:, None, None] * np.einsum("hv,hk->hvk", error, k[t]))
        outs.append(np.einsum("hvk,hk->hv", states[-1], q[t]) * q.shape[-1] ** -0.5)
    return np.array(outs).reshape(v.shape), np.array(states)


def kda(q, k, v, gate, beta, A_log, dt_bias, state, lower_bound):
    """The recurrence of one sequence from raw inputs."""
    q, k, v, gate, beta, A_log, dt_bias, state = (
        np.asarray(x, np.float64) for x in (q, k, v, gate, beta, A_log, dt_bias, state)
    )
    log_decay = decay_gate(gate, A_log, dt_bias, lower_bound)
    return recurrence(l2_normalize(q), l2_normalize(k), v, log_decay, sigmoid(beta), state)


def conv(x, weight, tail):
    """SiLU of the causal convolution of one sequence [T, ...] and its new tail [..., W - 1]."""
    x, weight, tail = (np.asarray(a, np.float64) for a in (x, weight, tail))
    width = weight.shape[-1]
    inputs = np.concatenate([np.moveaxis(tail, -1, 0), x])
    out = np.array([sum(inputs[t + j] * weight[..., j] for j in range(width)) for t in range(len(x))])
    return silu(out).reshape(x.shape), np.moveaxis(inputs[len(x):], 0, -1)


def layer(token, weight, tail, state, lower_bound, norm_eps, dtype=np.float64):
    """The whole layer of model tokens [T, ...] of one sequence: (out, tail, state); rounds where the ops round."""
    def rounded(x):
        return np.asarray(x, dtype).astype(np.float64)

    token, weight = ({key: np.asarray(x, np.float64) for key, x in group.items()} for group in (token, weight))
    convolved, tail = conv(token["qkv"], weight["conv_weight"], tail)
    q, k, v = np.moveaxis(rounded(convolved), 1, 0)
    out, states = kda(q, k, v, token["gate"], token["beta"], weight["A_log"], weight["dt_bias"], state, lower_bound)
    out = rounded(out)
    normed = out / np.sqrt((out * out).mean(-1, keepdims=True) + norm_eps) * weight["norm_weight"]
    return normed * sigmoid(token["output_gate"]), tail, states[-1]


GATES = {"mixed": (3.0, 0.0), "floor": (0.0, 40.0), "near_zero": (1.0, -20.0), "alternating": None}
KEYS = ("random", "correlated", "identical")
BETAS = {"mixed": (2.0, 0.0), "zero": (0.0, -200.0), "one": (0.0, 40.0)}


def prefill_inputs(rng, tokens, heads, key_width, value_width, gate="mixed", keys="random", beta="mixed"):
    """Raw float32 inputs (q, k, v, gate, beta, A_log, dt_bias) of `kda_prefill`, as a dictionary."""
    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    noise = {"random": 1.0, "correlated": 0.1, "identical": 0.0}[keys]
    k = normal(tokens, heads, key_width) * np.float32(noise)
    if keys != "random":
        k += normal(1, heads, key_width)
    if gate == "alternating":
        logits = np.where(np.arange(tokens) % 2, 30.0, -12.0)[:, None, None] + normal(tokens, heads, key_width)
    else:
        spread, centre = GATES[gate]
        logits = spread * normal(tokens, heads, key_width) + centre
    spread, centre = BETAS[beta]
    return {
        "q": normal(tokens, heads, key_width),
        "k": k,
        "v": normal(tokens, heads, value_width),
        "gate": logits.astype(np.float32),
        "beta": (spread * normal(tokens, heads) + centre).astype(np.float32),
        "A_log": rng.uniform(-0.5, 1.0, heads).astype(np.float32),
        "dt_bias": normal(heads, key_width),
    }
