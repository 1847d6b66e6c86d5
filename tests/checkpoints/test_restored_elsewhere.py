"""Checkpoints of sharded state, in host memory or not, restored onto other devices."""

import functools

import jax
import numpy as np
import optax
import pytest
from comparison import as_bits
from hosted_steps import UNFUSED, needs_memories
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_arrays import arrays, compact
from steps import by_update

import optax_mp

ocp = pytest.importorskip("orbax.checkpoint")
pytestmark = [needs_memories, pytest.mark.slow]

LAYOUTS = {
    "2x4": ((2, 4), {"rows": P(("a", "b")), "both": P("a", "b"), "uneven": P("b")}),
    "4x2": ((4, 2), {"rows": P("b"), "both": P(None, "a"), "last": P(None, "a")}),
    "1": ((1, 1), {}),
}


def shardings(layout):
    shape, specs = LAYOUTS[layout]
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    mesh = Mesh(devices, ("a", "b"))
    return {name: NamedSharding(mesh, specs.get(name, P())) for name in arrays(0)}


def start_on(layout, make):
    """Return a transformation, and params and state before the first step."""
    placed = shardings(layout)
    tx = make(placed)
    params = jax.device_put(arrays(0), placed)
    return tx, (params, tx.init(params))


@functools.cache
def step_on(layout, make):
    tx, _ = start_on(layout, make)
    return jax.jit(by_update(tx), compiler_options=UNFUSED)


def go_on(make, layout, run):
    """Return a run after three more steps."""
    grads = jax.device_put(arrays(1), shardings(layout))
    for _ in range(3):
        run = step_on(layout, make)(*run, grads)
    return run


def moved(path, run, layout, make):
    """Return a run that is saved, and restored onto another layout."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, run)
    _, template = start_on(layout, make)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(path, template)
    assert as_bits(restored) == as_bits(run)
    both = zip(jax.tree.leaves(restored), jax.tree.leaves(template), strict=True)
    for leaf, want in both:
        assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim)
        assert leaf.sharding.memory_kind == want.sharding.memory_kind
    return restored


def in_host_memory(placed):
    return optax_mp.offload(compact(), min_size=256)


def in_device_memory(placed):
    # Within `jit` a count is on all devices, as it is restored.
    tx = compact()
    return optax.GradientTransformationExtraArgs(jax.jit(tx.init), tx.update)


@pytest.mark.parametrize("make", [in_host_memory, in_device_memory])
def test_a_run_goes_on_elsewhere_and_back(make, tmp_path):
    run = go_on(make, "2x4", start_on("2x4", make)[1])
    want = as_bits(go_on(make, "2x4", run))
    for i, layout in enumerate(("4x2", "1", "2x4")):
        run = moved(tmp_path / str(i), run, layout, make)
        assert as_bits(go_on(make, layout, run)) == want
