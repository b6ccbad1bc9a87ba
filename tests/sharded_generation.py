"""Run by test_sharded_model with 8 CPU devices: generation by a model that lies on four of them."""

import numpy as np

import k3jax
from tests.checkpoints import tiny_checkpoint
from tests.golden import vectors

NAME = "kimi-linear-tiny"


def main() -> None:
    known = vectors(NAME, "decode")
    prompt, tokens = known["prompt_ids"].tolist(), known["tokens"].tolist()
    sampling = k3jax.SamplingParams(temperature=0)
    lm = k3jax.load(tiny_checkpoint(NAME), dtype="float32", mesh={"seq": 2, "tensor": 2})
    assert len(lm.params["kda"]["qkv_proj"].sharding.device_set) == 4
    logits = []
    made = k3jax.generate(
        lm, prompt, sampling, max_new_tokens=len(tokens), ignore_eos=True,
        on_logits=lambda first, rows: logits.append(rows),
    )
    assert list(made.token_ids) == tokens
    np.testing.assert_allclose(logits[-1][-1], known["step_logits_fp64"][0], rtol=0, atol=1e-4)
    lm = k3jax.load(tiny_checkpoint(NAME), dtype="float32", mesh={"data": 2})
    try:
        k3jax.generate(lm, prompt, sampling, max_new_tokens=1)
    except k3jax.UserError as error:
        assert "the mesh splits sequences over data, but generation has one" in str(error)
    else:
        raise AssertionError("generated on a mesh that splits sequences")


if __name__ == "__main__":
    main()
    print("ok")
