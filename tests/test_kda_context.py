"""Context parallelism on 8 CPU devices: one child process runs all cases of `sharded_kda_context.py`."""

import os
import pathlib
import subprocess
import sys


def test_rows_split_over_devices_change_nothing():
    script = pathlib.Path(__file__).parent / "sharded_kda_context.py"
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(script.parents[1]),
    }
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("10 cases hold\n")
