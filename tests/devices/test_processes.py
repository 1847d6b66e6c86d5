"""Two real processes that train together, and `check_replicas`."""

import json
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forced_devices import run_on
from two_processes import BAD_STEPS, STEPS

import optax_mp

SCRIPT = pathlib.Path(__file__).parents[1] / "support" / "two_processes.py"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def reports():
    """Return what each of two processes says of each part."""
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", SCRIPT, str(rank), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = []
    for process in processes:
        printed, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        lines = [line for line in printed.splitlines() if line.startswith("{")]
        found.append({each["part"]: each for each in map(json.loads, lines)})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("part", ["jit", "zero1", "shard_map"])
def test_an_inf_on_one_rank_makes_both_skip(reports, part):
    first, second = (each[part] for each in reports)
    assert first["held"] == second["held"]
    assert first["held"] == [step in BAD_STEPS for step in range(STEPS)]
    assert first["scales"] == second["scales"]
    # Halved at each bad step, doubled after six good ones in a row.
    assert first["scales"] == [1024.0] * 5 + [512.0] * 6 + [256.0] * 6 + [512.0] * 3
    assert first["skipped"] == second["skipped"] == len(BAD_STEPS)
    assert first["finite"] and second["finite"]
    # The first leaf, which is finite on one of the two.
    assert first["nonfinite_index"] == second["nonfinite_index"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("part", ["jit", "zero1"])
def test_both_ranks_end_with_the_same_params(reports, part):
    first, second = (each[part]["params"] for each in reports)
    assert first == second


@pytest.mark.slow
def test_zero1_over_two_processes_is_bit_equal_and_half_the_state(reports):
    plain, sharded = reports[0]["jit"], reports[0]["zero1"]
    assert plain["params"] == sharded["params"]
    # But for what is one number: the scale, its counters, and that of adam.
    assert 0.5 <= sharded["state_bytes"] / plain["state_bytes"] < 0.51


@pytest.mark.slow
def test_a_rank_with_other_params_is_named_on_both(reports):
    first, second = (each["other params"]["messages"] for each in reports)
    assert first[:3] == second[:3]
    for message in first[:3]:
        assert "['w'], which is float16[32,32], on process 1 (device " in message
        assert "process 0" not in message and "['b']" not in message
    assert "processes [1] hold other leaves" in first[3]
    assert "This process has 1 arrays" in first[3]
    assert "This process has 2 arrays" in second[3]


# In one process.


def test_equal_replicas_pass():
    optax_mp.check_replicas(
        {
            "params": jnp.ones((3, 2), jnp.bfloat16),
            "numpy": np.zeros(4),
            "key": jax.random.key(0),
            "empty": jnp.zeros((0, 2)),
            "scalar": 1.0,
            "nothing": None,
        }
    )
    optax_mp.check_replicas({})


def test_replicas_under_jit_are_an_error():
    def step(params):
        optax_mp.check_replicas(params)
        return params

    with pytest.raises(TypeError, match=r"leaf \['w'\] is traced \(float32\[2\]\)"):
        jax.jit(step)({"w": jnp.ones(2)})


DEVICES = """
import jax, jax.numpy as jnp, numpy as np, optax_mp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))

def made(spec, odd=None):
    sharding = NamedSharding(mesh, spec)
    parts = []
    for i, (device, index) in enumerate(sharding.devices_indices_map((4, 2)).items()):
        part = np.arange(8, dtype=np.float32).reshape(4, 2)[index].copy()
        if i == odd:
            part[0, 0] += 1
        parts.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays((4, 2), sharding, parts)

for spec in (P(), P("x"), P("x", "y")):
    optax_mp.check_replicas([made(spec)])
    try:
        optax_mp.check_replicas([made(spec), made(spec, odd=2)])
        print("same")
    except ValueError as error:
        print(str(error).split(", expected")[0])
"""


@pytest.mark.slow
def test_a_device_with_other_bits_is_named():
    """Copies of an array, and copies of its shards; a shard of its own has none."""
    replicated, by_rows, alone = run_on(4, "-c", DEVICES).splitlines()
    differs = "check_replicas: copies differ: [1], which is float32[4,2], on "
    assert replicated == differs + "process 0 (device 2)"
    # Devices 2 and 3 hold the lower half; of as many, the first counts as right.
    assert by_rows == differs + "process 0 (device 3)"
    assert alone == "same"
