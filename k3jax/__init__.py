"""k3jax: Kimi K3 and Kimi-Linear in JAX.

    lm = k3jax.load("path/to/checkpoint")
    print(k3jax.generate(lm, "The key to a good cache is").text)
"""

import importlib

__version__ = "0.1.0"

# Name -> its module. Imported on first use: `import k3jax` stays quick and can be followed by JAX settings.
_HOME = {
    "DecodeState": "k3jax.state",
    "Generation": "k3jax.generation",
    "K3Config": "k3jax.config",
    "K3ForCausalLM": "k3jax.model",
    "LanguageModel": "k3jax.language_model",
    "SamplingParams": "k3jax.sampling",
    "TokenLogprobs": "k3jax.generation",
    "UserError": "k3jax.errors",
    "generate": "k3jax.generation",
    "load": "k3jax.language_model",
    "preset": "k3jax.presets",
}

__all__ = ["__version__", *_HOME]  # noqa: PLE0604


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'k3jax' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
