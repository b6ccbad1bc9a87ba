"""Settings that must be there before anything imports JAX."""

import os

# Tests describe the CPU unless the caller asks for a device.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
