"""`python -m serving.demo`: the command line in serving/client/demo.py."""

import sys

from serving.extra import SERVER, run_with

if __name__ == "__main__":
    sys.exit(run_with(SERVER, "serving.client.demo"))
