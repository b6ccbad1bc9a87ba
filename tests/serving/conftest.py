"""Workers of a test run share what they compile: it takes longer than all else."""

import os

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="session", autouse=True)
def shared_compilation_cache(tmp_path_factory):
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        yield
        return
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    jax.config.update("jax_compilation_cache_dir", str(folder / "jit"))
    compilation_cache.reset_cache()  # JAX looks at the setting once
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
