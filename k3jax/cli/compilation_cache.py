"""JAX's persistent compilation cache in a private folder of the user."""

import os
import pathlib
import stat


def private_cache_folder() -> pathlib.Path | None:
    """The folder `k3jax/jit` in the user's cache, made if need be; None where nobody else can be kept out of it.

    What lies in the cache is run as code later, so others must not be able to write there.
    """
    try:
        base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        folder = pathlib.Path(base) / "k3jax" / "jit"
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (folder.parent, folder):
            path.mkdir(mode=0o700, exist_ok=True)
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                return None
            path.chmod(0o700)
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return None
    return folder


def enable_compilation_cache() -> None:
    """Turns the cache on; a `JAX_COMPILATION_CACHE_DIR` of the user's own stays in force."""
    import jax

    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    folder = private_cache_folder()
    if folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # Random weights are made by many small programs; JAX's default keeps only those that take a second each.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
