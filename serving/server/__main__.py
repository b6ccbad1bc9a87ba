"""`python -m serving.server`: the command line in serving/server/command.py."""

import sys

from serving.extra import SERVER, run_with

if __name__ == "__main__":
    sys.exit(run_with(SERVER, "serving.server.command"))
