"""Scripts that want several devices, run in a process of their own that has them."""

import os
import pathlib
import subprocess
import sys

import jax


def run_on(devices, *command):
    """Return what Python prints for `command`, on so many forced CPU devices."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env=os.environ
        | {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "JAX_PLATFORMS": "cpu",
            # Else what XLA says below would be said the first time only.
            "JAX_ENABLE_COMPILATION_CACHE": "false",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # XLA says so when it computes for long what a program should.
    assert "Constant folding" not in done.stderr, done.stderr
    return done.stdout


def script(name):
    return pathlib.Path(__file__).with_name(name)


def run_checks(module, devices, checks):
    """Run some of the `CHECKS` of a script, and look that all of them ran."""
    names = [check.__name__ for check in checks]
    printed = run_on(devices, script(f"{module}.py"), *names)
    assert printed.split() == names


def run_named(checks, devices):
    """In such a script: run the checks that the command line names."""
    assert jax.device_count() == devices
    for check in checks:
        if check.__name__ in sys.argv[1:]:
            check()
            print(check.__name__)
