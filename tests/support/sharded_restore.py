"""Checkpoints of eight devices; run as a script with eight forced host devices.

The arguments are the names of the checks to run.
"""

import functools
import pathlib
import tempfile

import jax
import numpy as np
import pytest
from comparison import as_bits
from forced_devices import run_named
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from trained_forms import start_of, template_of, train

import optax_mp

ocp = pytest.importorskip("orbax.checkpoint")

LAYOUTS = {
    "4x2": ((4, 2), ("data", "model"), P("data", "model")),
    "2x4": ((2, 4), ("data", "model"), P("data", "model")),
    "8": ((8,), ("data",), P("data")),
    "8 over columns": ((8,), ("model",), P(None, "model")),
    "1": ((1,), ("data",), P()),
}


def shardings(layout, tree):
    """Return a sharding for each leaf: leaves of the shape of `w` are sharded."""
    shape, names, spec = LAYOUTS[layout]
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    mesh = Mesh(devices, names)
    return jax.tree.map(
        lambda x: NamedSharding(mesh, spec if x.shape == (16, 32) else P()), tree
    )


def saved_on(layout, name, path):
    """Return a run that was saved on one mesh after six steps."""
    run = start_of(name)
    run = jax.device_put(run, shardings(layout, run))
    run = train(name, *run, range(6))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, run)
    return run


def comes_back_on(layout, name, path, run):
    template = template_of(name, functools.partial(shardings, layout))
    with ocp.StandardCheckpointer() as checkpointer:
        optax_mp.check_checkpoint(checkpointer.metadata(path), template)
        restored = checkpointer.restore(path, template)
    assert as_bits(restored) == as_bits(run)
    for leaf, want in zip(
        jax.tree.leaves(restored), jax.tree.leaves(template), strict=True
    ):
        assert leaf.sharding == want.sharding
    return restored


def goes_on_elsewhere(name, layouts):
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "checkpoint"
        run = saved_on("4x2", name, path)
        wanted = as_bits(train(name, *run, range(6, 9)))
        for layout in LAYOUTS:
            restored = comes_back_on(layout, name, path, run)
            if layout in layouts:
                assert as_bits(train(name, *restored, range(6, 9))) == wanted


def remainders_and_codes_go_on_another_mesh():
    goes_on_elsewhere("scaled 5.1 bytes", ["2x4"])


def float32_masters_go_on_every_mesh():
    goes_on_elsewhere("scaled full copy", LAYOUTS)


def from_one_device_to_eight_and_back():
    name = "split 16"
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "checkpoint"
        run = saved_on("1", name, path)
        comes_back_on("8", name, path, run)
        eight = pathlib.Path(directory) / "eight"
        run = saved_on("8", name, eight)
        comes_back_on("1", name, eight, run)


CHECKS = (
    remainders_and_codes_go_on_another_mesh,
    float32_masters_go_on_every_mesh,
    from_one_device_to_eight_and_back,
)

if __name__ == "__main__":
    run_named(CHECKS, 8)
