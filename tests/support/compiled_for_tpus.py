"""Compile steps with kernels for TPUs that are not here: each must have a kernel.

Run as a script, with the extra `accelerators`: `tests/engine/test_compiled.py` does.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optimizers import OPTIMIZERS, extra_arguments

import optax_mp

GENERATIONS = {"v4": "v4:2x2x1", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
SHAPE = (256, 512)


def compiled(name, topology):
    """Return the text of a compiled step of an optimizer with low-bit state."""
    low = optax_mp.low_bit_state(OPTIMIZERS[name](), min_size=1)
    tx = optax_mp.mixed_precision(low, storage=optax_mp.Split(8))
    tx = optax.with_extra_args_support(tx)
    devices = topologies.get_topology_desc(topology, "tpu").devices
    place = NamedSharding(Mesh(np.array(devices[:1]), ("one",)), PartitionSpec())

    def placed(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    params = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)}
    args = params, jax.eval_shape(tx.init, params), params

    @jax.jit
    def step(grads, state, params):
        extra = extra_arguments(name, grads)
        return optax_mp.take_step(tx, grads, state, params, **extra)

    return step.lower(*jax.tree.map(placed, args)).compile().as_text()


def main():
    """Print each optimizer or generation whose step has no kernel, or fails."""
    # dpsgd wants a gradient of each example.
    each = [(name, "v5e:2x2") for name in OPTIMIZERS if name != "dpsgd"]
    each += [("adamw", topology) for topology in GENERATIONS.values()]
    for name, topology in each:
        try:
            has_kernel = "tpu_custom_call" in compiled(name, topology)
        except Exception as error:
            print(name, topology, "fails:", f"{error}".splitlines()[0])
        else:
            print(name, topology, "kernel" if has_kernel else "no kernel", flush=True)


if __name__ == "__main__":
    main()
