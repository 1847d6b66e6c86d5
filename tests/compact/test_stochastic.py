"""stochastic_rounding: 16-bit params that follow float32 on average."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits
from reference import rounded
from slow_cases import mostly_slow

from optax_mp import low_bit_state, stochastic_rounding


def trained(tx, params, grads, steps):
    @jax.jit
    def run(params):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), length=steps)[0]

    return run(params)


def test_a_thousand_small_updates_of_ones_add_up_to_zero():
    """The problem of the package: plain bfloat16 stays at 1.0 exactly."""
    count = 4096
    ones = jnp.ones(count, jnp.bfloat16)
    grads = jnp.full(count, 1e-3, jnp.float32)
    plain, _ = trained(optax.sgd(1.0), ones, grads.astype(jnp.bfloat16), 1000)
    assert (plain == 1).all()
    params, state = trained(stochastic_rounding(optax.sgd(1.0)), ones, grads, 1000)
    params = np.asarray(params, np.float64)
    # A step of u with units of q goes up a unit with probability u / q: a variance of
    # u q at most. q is under 2^-8, and u 0.001: over 1000 steps 0.0039, or less.
    deviation = np.sqrt(1000 * 1e-3 * 2.0**-8)
    assert abs(params.mean()) < 5 * deviation / np.sqrt(count)
    assert 0 < params.std() < deviation


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"), [("bfloat16", "float32"), ("float16", "params")]
)
def test_each_step_lands_on_a_neighbour_of_what_float32_has(dtype, grad_dtype):
    low = jnp.dtype(dtype)
    rng = np.random.default_rng(0)
    tx, bare = stochastic_rounding(optax.adam(1e-3)), optax.adam(1e-3)
    params = jnp.asarray(rng.standard_normal(2000), low)
    state = tx.init(params)
    bare_state = bare.init(params.astype(jnp.float32))
    step, bare_step = jax.jit(tx.update), jax.jit(bare.update)
    total, sides = 0.0, 0.0
    for _ in range(5):
        grads = rng.standard_normal(2000).astype(
            low if grad_dtype == "params" else np.float32
        )
        updates, state = step(grads, state, params)
        assert updates.dtype == jnp.float32
        before = params.astype(jnp.float32)
        change, bare_state = bare_step(grads.astype(np.float32), bare_state, before)
        target = np.asarray(before, np.float64) + np.asarray(change, np.float64)
        exact = np.asarray(before + updates)
        # On a 16-bit value: the cast of `apply_updates` does not round again.
        np.testing.assert_array_equal(exact, rounded(exact, low).astype(np.float32))
        params = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(np.asarray(params, np.float32), exact)
        size = np.maximum(np.abs(target), float(jnp.finfo(low).smallest_normal))
        unit = 2.0 ** np.floor(np.log2(size)) * float(jnp.finfo(low).eps)
        miss = (exact - target) / unit
        assert np.abs(miss).max() <= 1 + 1e-3
        total, sides = total + miss.sum(), sides + (miss**2).sum()
    # Unbiased: 5 standard errors.
    assert abs(total) < 5 * np.sqrt(sides)
    assert as_bits(state.inner_state[0].count) == as_bits(bare_state[0].count)


@pytest.mark.parametrize("named", [False, True])
def test_members_of_a_vmap_can_have_seeds_of_their_own(named):
    make = (
        functools.partial(low_bit_state, min_size=1) if named else stochastic_rounding
    )
    params = jnp.ones(64, "float32" if named else "bfloat16")
    grads = jnp.linspace(0.1, 1, 64)

    @jax.jit
    def train(seed):
        tx = make(optax.trace(0.9), seed=seed)
        updates, state = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates), state

    def member(seed):
        return train(jax.lax.axis_index("members") if named else seed)

    together = jax.vmap(member, axis_name="members")(jnp.arange(3))
    each = [as_bits(jax.tree.map(lambda x, i=i: x[i], together)) for i in range(3)]
    assert each == [as_bits(train(i)) for i in range(3)]
    assert each[0] != each[1] != each[2]


def test_extra_arguments_reach_the_inner_optimizer_in_float32():
    seen = {}

    def update(updates, state, params=None, **extra):
        seen.update(extra, updates=updates, params=params)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    tx = stochastic_rounding(inner)
    params = jnp.ones(3, jnp.bfloat16)
    tx.update(params, tx.init(params), params, value=1.0, grad=params)
    assert seen["value"] == 1.0
    assert {seen[k].dtype.name for k in ("grad", "updates", "params")} == {"float32"}


def test_another_state_is_refused():
    tx = stochastic_rounding(optax.adam(1.0))
    params = jnp.ones(3, jnp.bfloat16)
    with pytest.raises(TypeError, match=r"to be the StochasticRoundingState .*, got "):
        tx.update(params, optax.adam(1.0).init(params), params)


def test_8_bit_params_are_refused_by_name():
    params = {"a": {"b": jnp.ones(3, jnp.float8_e4m3fn)}}
    match = r"param \['a'\]\['b'\] in 16 bits or more, got float8_e4m3fn\[3\]"
    with pytest.raises(ValueError, match=match):
        stochastic_rounding(optax.adam(1.0)).init(params)


def slope_of_rate(make, dtype, is_scanned):
    """Return d loss after three steps / d learning rate, of a linear model."""
    rng = np.random.default_rng(0)
    x, y, w = (
        rng.normal(size=s).astype(np.float32) for s in ((64, 32), (64, 16), (32, 16))
    )

    def loss(w):
        return jnp.mean((x @ w.astype(jnp.float32) - y) ** 2)

    def after(rate):
        tx, start = make(rate), jnp.asarray(w / 6, dtype)

        def step(carry, _):
            w, state = carry
            grads = jax.grad(loss)(w).astype(jnp.float32)
            updates, state = tx.update(grads, state, w)
            return (optax.apply_updates(w, updates), state), None

        carry = start, tx.init(start)
        if is_scanned:
            return loss(jax.lax.scan(step, carry, length=3)[0][0])
        for _ in range(3):
            carry, _ = step(carry, None)
        return loss(carry[0])

    return float(jax.jit(jax.grad(after))(1e-2))


@mostly_slow(
    ("inner", "is_scanned"),
    [(optax.adam, False), (functools.partial(optax.sgd, momentum=0.9), True)],
    lambda inner, is_scanned: inner is optax.adam and not is_scanned,
)
def test_steps_are_differentiated_as_those_of_float32(inner, is_scanned):
    """Rounding is the identity for derivatives; codes hand on no slope at all."""
    want = slope_of_rate(inner, jnp.float32, is_scanned)
    assert abs(want) > 1
    for dtype in (jnp.bfloat16, jnp.float16):
        rounding = lambda rate: stochastic_rounding(inner(rate))  # noqa: E731
        found = slope_of_rate(rounding, dtype, is_scanned)
        # Gradients of a loss at weights that are rounded, by 2^-8 each to either side.
        np.testing.assert_allclose(found, want, rtol=2e-3)
    for bits in (8, 16):
        coded = lambda rate: low_bit_state(inner(rate), min_size=64, bits=bits)  # noqa: B023, E731
        found = slope_of_rate(coded, jnp.float32, is_scanned)
        # And at weights of steps that codes made, by 8% of a hundredth at most.
        np.testing.assert_allclose(found, want, rtol=2e-3)
