"""Steps with state in host memory beside the same without, for tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits

import optax_mp

needs_memories = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="before JAX 0.10"
)
# XLA for CPUs contracts a product and a sum in one program and not in another, by what
# it fuses: without fusions the same operations give the same bits.
# And that many small loops are compiled as they are.
UNFUSED = {"xla_disable_hlo_passes": "fusion", "xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):
    UNFUSED["xla_cpu_use_fusion_emitters"] = False
SHAPES = {"matrix": (96, 128), "row": (1000,), "small": (64,)}
HOST = "pinned_host"


ADAMW = optax.adamw(1e-2)


def masters(inner=ADAMW):
    return optax_mp.mixed_precision(inner)


def compact(inner=ADAMW):
    low = optax_mp.low_bit_state(inner, min_size=128)
    return optax_mp.mixed_precision(low, storage=optax_mp.Split(8))


def scaled(inner):
    return optax_mp.dynamic_loss_scale(inner, init_scale=4.0)


def hosted(inner):
    """Return `inner` with most of its state in host memory."""
    return optax_mp.offload(inner, min_size=256)


def random_params(dtype="bfloat16"):
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in SHAPES.items()}


def random_grads(params, step, bad=()):
    rng = np.random.default_rng(step + 1)
    factor = np.nan if step in bad else 1
    return jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=p.shape) * factor, p.dtype), params
    )


def train(
    tx, steps, *, bad=(), params=None, options=UNFUSED, state=None, extra=lambda g: {}
):
    """Return params and state after some steps, and all updates.

    `extra` gives the extra arguments of an update for its gradients.
    """
    params = random_params() if params is None else params
    state = jax.jit(tx.init)(params) if state is None else state

    @functools.partial(jax.jit, compiler_options=options)
    def update(grads, state, params):
        return tx.update(grads, state, params, **extra(grads))

    apply = jax.jit(optax.apply_updates)
    all_updates = []
    for step in range(steps):
        updates, state = update(random_grads(params, step, bad), state, params)
        params = apply(params, updates)
        all_updates.append(updates)
    return params, state, all_updates


def assert_same_training(make, steps=4, **settings):
    """Assert that `make(hosted)` trains as `make` of nothing does, to the bit."""
    want = train(make(lambda inner: inner), steps, **settings)
    got = train(make(hosted), steps, **settings)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert as_bits(got) == as_bits(want)
    return got


def kinds(tree):
    """Return the kinds of memory of the arrays of a tree."""
    return {jax.typeof(x).memory_space.name for x in jax.tree.leaves(tree)}
