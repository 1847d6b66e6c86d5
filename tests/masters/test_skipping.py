"""What a step that may be skipped hands on, and what its choice costs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_mp


@pytest.mark.parametrize(
    "around",
    [
        lambda rule: optax_mp.dynamic_loss_scale(optax_mp.mixed_precision(rule)),
        lambda rule: optax.chain(
            optax_mp.dynamic_loss_scale(), optax_mp.mixed_precision(rule)
        ),
    ],
)
def test_a_rule_gets_no_extra_argument_but_its_own(around):
    def update(updates, state, params=None, *, value):
        return jax.tree.map(lambda g: -g * value, updates), state

    rule = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    tx = around(rule)
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    grads = {"w": jnp.full(3, np.inf)}
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params, value=1.0)
    assert updates["w"].shape == (3,)


@pytest.mark.parametrize("grad_dtype", ["float32", "float16"])
@pytest.mark.parametrize("where", ["alone", "inside", "behind a link"])
def test_a_choice_copies_no_state(where, grad_dtype):
    """XLA for CPUs copies what a later choice would read again: 8 bytes a weight."""
    tx = {
        "alone": optax_mp.mixed_precision(optax.adamw(1e-2)),
        "inside": optax_mp.dynamic_loss_scale(
            optax_mp.mixed_precision(optax.adamw(1e-2))
        ),
        "behind a link": optax.chain(
            optax_mp.dynamic_loss_scale(), optax_mp.mixed_precision(optax.adamw(1e-2))
        ),
    }[where]
    params = {name: jnp.ones((256, 256), jnp.float16) for name in "ab"}
    grads = jax.tree.map(lambda p: p.astype(grad_dtype), params)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(step, donate_argnums=(0, 1))
    state = jax.eval_shape(tx.init, params)
    compiled = jitted.lower(params, state, grads).compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    # At most the flags of the check, a byte for each element of a leaf.
    assert temporaries < 1.1 * 2 * 256**2
