"""`python -m serving.client`: the command line in serving/client/command.py."""

import sys

from serving.client.command import main

if __name__ == "__main__":
    sys.exit(main())
