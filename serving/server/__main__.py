"""`python -m serving.server`: the command line in serving/server/command.py."""

import sys

from serving.server.command import main

if __name__ == "__main__":
    sys.exit(main())
