"""Bad shapes, dtypes and values of the routed experts' arguments."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

from pallas_kernels.moe_mlp import moe_mlp, validate
from pallas_kernels.mxfp4 import MxFp4
from tests.ops.moe_oracle import INNER, SITU, D, E, K, L, banks, inputs


def bad(message, **changes):
    return pytest.param(changes, message, id=message[:30])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        bad(r"expert_ids has shape \(5,\)", expert_ids=jnp.zeros((5,), jnp.int32)),
        bad(r"expert_weights has shape \(5, 2\), expected \[T=5, k=3\]", expert_weights=jnp.zeros((5, 2))),
        bad("expert_ids has dtype float32, expected int32", expert_ids=jnp.zeros((5, K))),
        bad("x has dtype int32", x=jnp.zeros((5, D), jnp.int32)),
        bad("down has shape .* expected", down=jnp.zeros((L, E, D, INNER + 1))),
        bad("gate_up has dtype uint8", gate_up=jnp.zeros((L, E, 2, INNER, D), jnp.uint8)),
        bad("both MxFp4 or both dense", down=banks("mxfp4")[0][1]),
        bad("D is 48, expected a multiple of 32", x=jnp.zeros((5, 48)), gate_up=banks("mxfp4")[0][0],
            down=banks("mxfp4")[0][1]),
        bad(r"gate_up.scale has shape .* expected \[L=2, E=6, 2, 32, 2\]", down=banks("mxfp4")[0][1],
            gate_up=MxFp4(banks("mxfp4")[0][0].packed, jnp.zeros((L, E, 2, INNER, 1), jnp.uint8))),
        bad("down.scale has dtype float32", gate_up=banks("mxfp4")[0][0],
            down=MxFp4(banks("mxfp4")[0][1].packed, jnp.zeros((L, E, D, 1)))),
    ],
)
def test_bad_arguments(changes, message):
    x, ids, weights = inputs(5)
    gate_up, down = banks("float32")[0]
    arguments = {"x": x, "expert_ids": ids, "expert_weights": weights, "gate_up": gate_up, "down": down} | changes
    for function in (moe_mlp, validate):
        with pytest.raises(ValueError, match=f"moe_mlp: .*{message}"):
            function(**arguments, layer=0, activation=SITU)


def test_validate_values():
    x, ids, weights = inputs(5)
    (gate_up, down), _ = banks("mxfp4")
    check = functools.partial(validate, activation=SITU)
    check(x, ids.at[2].set(-1), weights, gate_up, down, 1)
    check(x, ids.at[2].set(E), weights, gate_up, down, 1, first_expert=2)
    check(x, ids.at[2].set(E), weights, gate_up, down, 1, num_experts=E + 1)
    check(x[:0], ids[:0], weights[:0], gate_up, down, 1)
    damaged = MxFp4(down.packed, down.scale.at[1, 2, 3].set(255))
    check(x, ids, weights, gate_up, damaged, 0)
    for message, arguments in {
        r"expert id 6, expected -1 \(none\) .. 5": (x, ids.at[2, 1].set(E), weights, gate_up, down, 1),
        "expert id -2": (x, ids.at[2, 1].set(-2), weights, gate_up, down, 1),
        "expert weight nan": (x, ids, weights.at[0, 0].set(jnp.nan), gate_up, down, 1),
        "layer is 2, expected 0 .. 1": (x, ids, weights, gate_up, down, 2),
        "down.scale holds 255": (x, ids, weights, gate_up, damaged, 1),
    }.items():
        with pytest.raises(ValueError, match=f"^moe_mlp: {message}"):
            check(*arguments)
    with pytest.raises(ValueError, match="expert id 8, expected .* 7"):
        check(x, ids.at[0, 0].set(8), weights, gate_up, down, 1, first_expert=2, num_experts=8)


def test_debug_mode_checks_inside_the_program(monkeypatch):
    monkeypatch.setenv("K3JAX_DEBUG", "1")
    x, ids, weights = inputs(4)
    gate_up, down = banks("float32")[0]
    checked = jax.jit(
        checkify.checkify(lambda ids, weights: moe_mlp(x, ids, weights, gate_up, down, 0, activation=SITU))
    )
    error, out = checked(ids, weights)
    assert error.get() is None and jnp.isfinite(out).all()
    assert "moe_mlp: expert id -3" in checked(ids.at[1, 1].set(-3), weights)[0].get()
    assert "moe_mlp: expert weight inf" in checked(ids, weights.at[1, 1].set(jnp.inf))[0].get()
