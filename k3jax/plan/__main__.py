"""`python -m k3jax.plan`: the command line in k3jax/cli/plan.py."""

import sys

from k3jax.cli.plan import main

if __name__ == "__main__":
    sys.exit(main())
