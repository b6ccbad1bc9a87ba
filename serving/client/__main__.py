"""`python -m serving.client`: the command line in serving/client/command.py."""

import sys

from serving.extra import CLIENT, run_with

if __name__ == "__main__":
    sys.exit(run_with(CLIENT, "serving.client.command"))
