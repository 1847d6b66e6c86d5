"""Arrays over meshes of eight devices, sharded in several ways."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_mp

SPECS = {
    "rows": P(("a", "b")),
    "both": P("a", "b"),
    "last": P(None, None, "b"),
    "uneven": P("b"),
}
# The last has groups of 40 rows, several of which make a tile of a TPU.
SHAPES = {
    "rows": (256, 128),
    "both": (256, 512),
    "last": (3, 32, 512),
    "uneven": (320, 128),
}


def compact():
    """Return the form of 5.1 bytes per weight."""
    low = optax_mp.low_bit_state(optax.adamw(1e-2), min_size=1)
    return optax_mp.mixed_precision(low, storage=optax_mp.Split(8))


def mesh_of(kind):
    kinds = (jax.sharding.AxisType[kind],) * 2
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=kinds)


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=s), "bfloat16") for k, s in SHAPES.items()}


def shardings(mesh):
    return {k: NamedSharding(mesh, spec) for k, spec in SPECS.items()}
