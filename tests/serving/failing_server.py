"""The server's command, with a device that is lost: at each SIGUSR1 the next decode step loses what it works on."""

import signal
import sys
import threading
import time

import jax

from serving.engine.plan import Plan
from serving.engine.programs import Programs
from serving.server.command import main

lost = threading.Event()
decode, create_state = Programs.decode, Plan.create_state


def fragile_decode(self, state, rows):
    if lost.is_set():
        lost.clear()
        jax.tree.map(lambda pool: pool.delete(), state)
    return decode(self, state, rows)


def slow_create_state(self, lm):
    """As long as a large device takes, so that one can see what the server says meanwhile."""
    time.sleep(0.5)
    return create_state(self, lm)


if __name__ == "__main__":
    Programs.decode, Plan.create_state = fragile_decode, slow_create_state
    signal.signal(signal.SIGUSR1, lambda *_: lost.set())
    sys.exit(main())
