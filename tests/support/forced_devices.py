"""Run scripts that need several devices in a process that has them."""

import os
import pathlib
import subprocess
import sys

import jax


def run_on(devices, *command):
    """Return what Python prints for `command` with this many forced CPU devices."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env=os.environ
        | {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "JAX_PLATFORMS": "cpu",
            # With the cache XLA would warn, as checked below, the first time only.
            "JAX_ENABLE_COMPILATION_CACHE": "false",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # XLA warns so when it computes for long what the program should compute.
    assert "Constant folding" not in done.stderr, done.stderr
    return done.stdout


def script(name):
    return pathlib.Path(__file__).with_name(name)


def run_checks(module, devices, checks):
    """Run some of the `CHECKS` of a script, and check that all of them ran."""
    names = [check.__name__ for check in checks]
    printed = run_on(devices, script(f"{module}.py"), *names)
    assert printed.split() == names


def run_named(checks, devices):
    """Run the checks that the command line names; called by such a script."""
    assert jax.device_count() == devices
    for check in checks:
        if check.__name__ in sys.argv[1:]:
            check()
            print(check.__name__)
