"""`python -m serving.simulate`: the command line in serving/simulator/command.py."""

import sys

from serving.simulator.command import main

if __name__ == "__main__":
    sys.exit(main())
