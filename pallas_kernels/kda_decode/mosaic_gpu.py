"""KDA decode on Hopper: one kernel, one program for each row and head.

A program's state [V, K] travels through shared memory by TMA, in halves of V, and is written back from there: each byte
is read once and written once. The copies start first; behind them the program computes the row's q, k, v and decay, a
channel a thread. `kda_decode.xla` has the algebra that needs only one read of the state.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import kda_math
from pallas_kernels.kda_decode.reference import KdaDecodeOutput

WIDTH = 128
HALF = 64
# Rows of the vectors in shared memory.
Q, K, V, DECAY, OUT, SQUARE = range(6)


def kda_decode(qkv, gate, beta, output_gate, conv_weight, norm_weight, A_log, dt_bias, conv_pool, state_pool, layer,
               slots, *, lower_bound, norm_eps) -> KdaDecodeOutput:
    """See `pallas_kernels.kda_decode.api.kda_decode`.

    Raises:
      NotImplementedError: this JAX, device or width is not served.
    """
    _refuse(qkv.shape[-1], conv_weight.shape[-1])
    rows, _, heads, _ = qkv.shape
    run = _kernel(rows, heads, conv_weight.shape[-1], qkv.dtype, state_pool.shape[1], lower_bound, norm_eps)
    # The kernel writes into references: in place when the caller donates the pools.
    conv_ref, state_ref = jax.new_ref(conv_pool), jax.new_ref(state_pool)
    out = run(
        qkv, gate, beta, output_gate, conv_weight, norm_weight, A_log, dt_bias, conv_ref, state_ref,
        jnp.asarray(layer, jnp.int32)[None], slots,
    )
    return KdaDecodeOutput(out, jax.freeze(conv_ref), jax.freeze(state_ref))


def _refuse(width: int, taps: int) -> None:
    """Raises NotImplementedError with the reason why the kernel does not take the case."""
    if jax.__version_info__ < (0, 11):
        raise NotImplementedError(f"needs JAX 0.11 or newer, this is {jax.__version__}")
    if width != WIDTH:
        raise NotImplementedError(f"heads are {width} wide, the kernel is written for {WIDTH}")
    if taps < 2:
        raise NotImplementedError("a convolution of one tap has no tail to keep")
    device = jax.devices()[0]
    # On other platforms the kernel is only lowered, for a GPU elsewhere.
    if device.platform == "gpu" and getattr(device, "compute_capability", None) != "9.0":
        raise NotImplementedError(f"{device.device_kind} is not a Hopper GPU")


def _softplus(x: jax.Array) -> jax.Array:
    """`log(1 + e^x)` without log1p, which Mosaic GPU lacks: off by up to 1e-7, as far as float32 resolves the decay."""
    return jnp.maximum(x, 0.0) + jnp.log(1.0 + jnp.exp(-jnp.abs(x)))


@functools.cache
def _kernel(rows, heads, taps, dtype, num_slots, lower_bound, norm_eps):
    """The `plgpu.kernel` of one shape."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    f32 = jnp.float32
    tile = plgpu.Layout.WGMMA
    of_columns, of_rows = tile.reduce(0), tile.reduce(1)
    of_threads = plgpu.Layout.WG_STRIDED((WIDTH,), vec_size=1)

    def load(ref, layout=of_threads):
        return plgpu.load(ref, layout=layout, optimized=False)

    def over_rows(vector):
        return jax.lax.broadcast_in_dim(vector, (HALF, WIDTH), [1])

    def kernel(qkv, gate, beta, output_gate, conv_weight, norm_weight, A_log, dt_bias, conv_pool, state_pool, layer,
               slots, out, state, vectors, loaded):
        row, head = jax.lax.axis_index("row"), jax.lax.axis_index("head")
        slot, layer = slots[row], layer[0]
        # A slot beyond the pool would be somebody else's memory.
        used = (slot > 0) & (slot < num_slots)

        def half_of_pool(half):
            return state_pool.at[layer, slot, head, pl.ds(half * HALF, HALF)]

        @pl.when(used)
        def _():
            for half in range(2):
                plgpu.copy_gmem_to_smem(half_of_pool(half), state.at[half], loaded.at[half])

            # A channel a thread; all loads come before the first store, to be in flight together.
            tails = [conv_pool.at[layer, slot, part, head] for part in range(3)]
            inputs = [
                [load(tail.at[:, tap]).astype(dtype) for tap in range(taps - 1)] + [load(qkv.at[row, part, head])]
                for part, tail in enumerate(tails)
            ]
            weights = [[load(conv_weight.at[part, head, :, tap]) for tap in range(taps)] for part in range(3)]
            logits = load(gate.at[row, head]).astype(f32) + load(dt_bias.at[head])
            out_logits, norm_scale = load(output_gate.at[row, head]), load(norm_weight)
            rate, strength = jnp.exp(A_log[head]), jax.nn.sigmoid(beta[row, head].astype(f32))
            for index in (Q, K, V):
                vectors[index] = kda_math.conv_silu(inputs[index], weights[index]).astype(dtype).astype(f32)
            vectors[DECAY] = jnp.exp(kda_math.log_decay(logits, rate, lower_bound, _softplus))
            for tail, window in zip(tails, inputs):
                for tap, x in enumerate(window[1:]):
                    tail[:, tap] = x.astype(conv_pool.dtype)
            plgpu.commit_smem()

            # Every warp has all columns of a tile, so that these sums need no barrier.
            q, k = (load(vectors.at[index], of_columns) for index in (Q, K))
            q_scale = kda_math.l2_scale(jnp.sum(q * q)) * WIDTH**-0.5
            k_scale = kda_math.l2_scale(jnp.sum(k * k))
            q_dot_k = jnp.sum(q * k) * q_scale * k_scale

            # A loop, because a program also waits for its instructions to be fetched.
            @pl.loop(0, 2)
            def _(half):
                part = pl.ds(half * HALF, HALF)
                plgpu.barrier_wait(loaded.at[half])
                decayed = load(state.at[half], tile) * over_rows(load(vectors.at[DECAY], of_columns))
                read_q = jnp.sum(decayed * over_rows(load(vectors.at[Q], of_columns)), axis=1) * q_scale
                read_k = jnp.sum(decayed * over_rows(load(vectors.at[K], of_columns)), axis=1) * k_scale
                value = load(vectors.at[V, part], of_rows)
                head_out, update = kda_math.delta_rule(read_q, read_k, q_dot_k, value, strength)
                head_out = head_out.astype(dtype).astype(f32)
                vectors[OUT, part] = head_out
                # Its own row: one load in two layouts does not lower.
                vectors[SQUARE, part] = head_out * head_out
                update = jax.lax.broadcast_in_dim(update * k_scale, (HALF, WIDTH), [0])
                state[half] = decayed + update * over_rows(load(vectors.at[K], of_columns))
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(state.at[half], half_of_pool(half))

            mean_square = jnp.sum(load(vectors.at[SQUARE], of_columns)) * (1 / WIDTH)
            out[row, head] = kda_math.rms_gate(
                load(vectors.at[OUT]), mean_square, out_logits, norm_scale, norm_eps
            ).astype(dtype)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(~used)
        def _():
            out[row, head] = plgpu.layout_cast(jnp.zeros((WIDTH,), dtype), of_threads)

    swizzled = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, heads, WIDTH), dtype),
        scratch_types=(
            plgpu.SMEM((2, HALF, WIDTH), f32, transforms=swizzled),
            plgpu.SMEM((6, WIDTH), f32),
            plgpu.Barrier(num_barriers=2),
        ),
        # Threads exchange values through `vectors` alone, and commit_smem lies between its stores and loads. The
        # automatic barriers around every store cost 15 % at batch 1.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        grid=(rows, heads),
        grid_names=("row", "head"),
        kernel_name="kda_decode",
    )
