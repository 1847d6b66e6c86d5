"""Print the temporaries of a step, separate and released, in gradients of all layers.

Compiled for a TPU and a GPU that are not here. Run as a script, with the extra
`accelerators`: `tests/release/test_release.py` does.
"""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optax_mp

GPU = Path(__file__).parents[2] / "benchmarks" / "memory" / "h100.txtpb"
LAYERS, WIDTH, HIDDEN = 16, 1024, 4096
SHAPES = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
GRADIENTS = 2 * LAYERS * 2 * WIDTH * HIDDEN  # bytes
masters = optax_mp.mixed_precision
FORMS = {
    "masters": masters(optax.adamw(1e-3)),
    "compact": masters(
        optax_mp.low_bit_state(optax.adamw(1e-3)), storage=optax_mp.Split(8)
    ),
}


def loss(layers, rest, x):
    """Return a loss."""

    @jax.checkpoint
    def block(x, w):
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    x, _ = optax_mp.scan_layers(block, x * rest, layers)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def separate(tx):
    """Return the step with the gradients of all layers."""

    def step(opt_state, layers, rest, x):
        grads = jax.grad(loss)(layers, rest, x)
        updates, opt_state = tx.update(grads, opt_state, layers)
        return optax.apply_updates(layers, updates), opt_state

    return tx.init, step


def released(tx):
    """Return the step without."""
    return jax.vmap(tx.init), optax_mp.release_gradients(loss, tx)


def clipped(tx):
    """Return the step in two passes."""
    return jax.vmap(tx.init), optax_mp.release_gradients(loss, tx, max_norm=1.0)


def main():
    """Print a line for each target, form and way."""
    targets = {
        "v5e": topologies.get_topology_desc("v5e:2x2", "tpu"),
        "h100": topologies.get_topology_desc(
            platform="cuda", target_config=GPU.read_text(), topology="1x1x1"
        ),
    }
    for target, topology in targets.items():
        mesh = Mesh(np.array(topology.devices[:1]), ("one",))
        place = NamedSharding(mesh, PartitionSpec())
        for form, tx in FORMS.items():
            for way in (separate, released, clipped):
                share = temporaries(*way(tx), place) / GRADIENTS
                print(target, form, way.__name__, f"{share:.3f}", flush=True)


def temporaries(init, step, place):
    """Return the bytes of temporaries of a step."""
    layers = {
        name: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.bfloat16)
        for name, shape in SHAPES.items()
    }
    rest, x = (
        jax.ShapeDtypeStruct((*rows, WIDTH), jnp.bfloat16) for rows in ((), (256,))
    )
    args = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place),
        (jax.eval_shape(init, layers), layers, rest, x),
    )
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


if __name__ == "__main__":
    main()
