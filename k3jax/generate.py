"""`python -m k3jax.generate`: the command line in k3jax/cli/generate.py."""

import sys

if __name__ == "__main__":
    from k3jax.cli.generate import main

    sys.exit(main())

# The command is named like the function `k3jax.generate`, and importing a submodule binds it on its package. So an
# import of this module hands out the function instead, and the package attribute means one thing whatever came first.
from k3jax.generation import generate

sys.modules[__name__] = generate  # type: ignore[assignment]
