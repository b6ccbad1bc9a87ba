"""`python -m k3jax.convert`: the command line in k3jax/cli/convert.py."""

import sys

from k3jax.cli.convert import main

if __name__ == "__main__":
    sys.exit(main())
