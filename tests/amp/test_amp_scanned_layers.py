"""Layers in a scan, with bfloat16 params and float32 norms: the error, and both fixes."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from slow_cases import mostly_slow

import optax_mp

POLICY = optax_mp.get_policy("p=bf16", keep_f32=("*norm*",))
X = jax.random.normal(jax.random.key(0), (4, 8), jnp.bfloat16)
WIDTH, DEPTH = 8, 3


@functools.cache
def linen(dtype):
    """Return params and a loss of a Linen model with layers in `nn.scan`."""
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            y = nn.RMSNorm(dtype=dtype)(x)
            return x + nn.Dense(WIDTH, dtype=dtype)(y), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                Block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=DEPTH,
            )
            return layers()(x, None)[0]

    model = Net()
    pretrained = jax.jit(model.init)(jax.random.key(1), X.astype(jnp.float32))
    return pretrained, lambda params, x: jnp.mean(
        model.apply(params, x).astype(jnp.float32) ** 2
    )


def test_jax_names_the_carry_that_changes_its_dtype():
    params, loss = linen(None)
    params = POLICY.cast_to_param(params)
    message = r"(?s)^scan body function carry.*bfloat16\[4,8\]"
    with pytest.raises(TypeError, match=message):
        optax_mp.precision_report(optax_mp.amp(loss), params, X)
    # The carry begins as the input does: casting the params is not enough.
    params = optax_mp.cast_floating(params, jnp.float32)
    with pytest.raises(TypeError, match=message):
        optax_mp.amp(loss)(params, X)


@mostly_slow("fix", ["amp", "dtype"], lambda fix: fix == "amp")
def test_both_fixes_train_with_all_products_low(fix):
    params, loss = linen(None if fix == "amp" else jnp.bfloat16)
    if fix == "amp":
        as_written = loss
        loss = optax_mp.amp(
            lambda *args: as_written(*optax_mp.cast_floating(args, jnp.float32))
        )
    tx = optax_mp.mixed_precision(optax.adam(1e-2), param_dtype=POLICY)
    opt_state, params = tx.init(params), POLICY.cast_to_param(params)
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float32", "bfloat16"}
    assert optax_mp.precision_report(loss, params, X).low_share == 1

    def step(carry, _):
        params, opt_state = carry
        value, grads = jax.value_and_grad(loss)(params, X)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    train = jax.jit(lambda carry: jax.lax.scan(step, carry, None, 10)[1])
    losses = train((params, opt_state))
    # One that stands still has its first loss.
    assert losses[-1] < 0.8 * losses[0]
