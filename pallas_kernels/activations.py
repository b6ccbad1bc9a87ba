"""GLU activations: callables on (gate, up), evaluated in float32."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Silu:
    """`silu(gate) * up`, used by Kimi-Linear."""

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Float32 result of the inputs' shape, from inputs of any float dtype."""
        gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
        return jax.nn.silu(gate) * up


@dataclasses.dataclass(frozen=True)
class Situ:
    """SiTU, used by Kimi K3 (technical report, eq. 12): both branches softly capped by tanh.

    `beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)`; the sigmoid reads the uncapped
    gate.

    Attributes:
      beta: cap of the gate branch.
      linear_beta: cap of the up branch; None leaves it uncapped.
    """

    beta: float = 1.0
    linear_beta: float | None = None

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Float32 result of the inputs' shape, from inputs of any float dtype."""
        gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
        capped = self.beta * jnp.tanh(gate / self.beta) * jax.nn.sigmoid(gate)
        if self.linear_beta is not None:
            up = self.linear_beta * jnp.tanh(up / self.linear_beta)
        return capped * up
