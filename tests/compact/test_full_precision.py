"""Which arrays are quantized, in which codes, and which stay: whatever they are called."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from low_bit_examples import example, kinds

import optax_mp
from optax_mp import low_bit_state


def codes_of(tx):
    """Return the dtype of the codes of each quantized array, by its path."""
    low = low_bit_state(tx, min_size=100)
    return kinds(jax.eval_shape(low.init, example()))


# The same methods in other words: dicts, loops over lists, another order.


def madgrad(learning_rate, decay):
    """Return MADGRAD with a factor before its sums, which may be 1."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return {"start": params, "sums": (zeros, zeros), "k": jnp.zeros((), jnp.int32)}

    def update(grads, state, params):
        factor = learning_rate * jnp.sqrt(state["k"] + 1.0)
        first, second = state["sums"]
        first = jax.tree.map(lambda s, g: decay * s + factor * g, first, grads)
        second = jax.tree.map(lambda s, g: decay * s + factor * g * g, second, grads)
        new = jax.tree.map(
            lambda x, s, v: x - s / (jnp.cbrt(v) + 1e-6), state["start"], first, second
        )
        state = {"start": state["start"], "sums": (first, second), "k": state["k"] + 1}
        return jax.tree.map(jnp.subtract, new, params), state

    return optax.GradientTransformation(init, update)


def histories(memory=3):
    """Step by the mean of the last gradients, rolled along an axis."""

    def init(params):
        return jax.tree.map(lambda x: jnp.stack([0 * x] * memory), params)

    def update(grads, state, params=None):
        push = lambda h, g: jnp.concatenate([g[None], h[:-1]])  # noqa: E731
        state = jax.tree.map(push, state, grads)
        return jax.tree.map(lambda h: -0.1 * h.mean(0), state), state

    return optax.GradientTransformation(init, update)


def average_of_weights(decay):
    """Pull the weights to their moving average."""

    def update(updates, state, params):
        average = lambda x, p: decay * x + (1 - decay) * p  # noqa: E731
        state = jax.tree.map(average, state, params)
        return jax.tree.map(lambda x, p: 0.1 * (x - p), state, params), state

    return optax.GradientTransformation(lambda params: params, update)


POSITIONS_AND_HISTORIES = {
    "madgrad": lambda: optax.contrib.madgrad(1e-2),
    "madgrad without momentum": lambda: optax.contrib.madgrad(1e-2, momentum=0.0),
    "madgrad, rewritten": lambda: madgrad(1e-2, 1.0),
    "cocob": optax.contrib.cocob,
    "lbfgs": lambda: optax.lbfgs(1e-2, linesearch=None),
    "lbfgs with a line search": optax.lbfgs,
    "histories, rewritten": histories,
    "an average of weights": lambda: average_of_weights(0.9),
}
AROUND = {
    "nothing": lambda tx: tx,
    "a chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": False}),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "a jit": lambda tx: optax.GradientTransformationExtraArgs(
        tx.init, jax.jit(optax.with_extra_args_support(tx).update)
    ),
    "a loss scale": lambda tx: optax_mp.dynamic_loss_scale(tx),
    "mixed_precision": lambda tx: optax_mp.mixed_precision(tx),
}


@pytest.mark.parametrize(
    ("name", "around"),
    [
        (name, around)
        for name in POSITIONS_AND_HISTORIES
        for around in AROUND
        if around == "nothing" or name == "madgrad, rewritten"
    ],
)
def test_positions_and_histories_stay(name, around):
    tx = AROUND[around](POSITIONS_AND_HISTORIES[name]())
    assert codes_of(tx) == {}


def decay_to_the_start(rate):
    def update(updates, state, params):
        pull = lambda u, p, start: u + rate * (p - start)  # noqa: E731
        return jax.tree.map(pull, updates, params, state), state

    return optax.GradientTransformation(lambda params: params, update)


MOMENTS = {
    "adam pulled to the start": (
        lambda: optax.chain(decay_to_the_start(0.1), optax.adam(1e-2)),
        {"mu['w']", "nu['w']"},
    ),
    "adagrad pulled to the start, in doubt": (
        lambda: optax.chain(decay_to_the_start(0.1), optax.adagrad(1e-2)),
        set(),
    ),
    "madgrad that forgets": (
        lambda: madgrad(1e-2, 0.9),
        {"inner_state['sums'][0]['w']", "inner_state['sums'][1]['w']"},
    ),
    "groups": (
        lambda: optax.partition(
            {"a": optax.contrib.madgrad(1e-2), "b": optax.adam(1e-2)},
            {"w": "b", "b": "a"},
        ),
        {"mu['w']", "nu['w']"},
    ),
    "averages of averages": (
        lambda: optax.chain(optax.trace(0.9), optax.ema(0.9), optax.sgd(1e-2)),
        {"trace['w']", "ema['w']"},
    ),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_moments_beside_them_are_quantized(name):
    make, want = MOMENTS[name]
    assert codes_of(make()).keys() == want


def wants_more(tx):
    """Return `tx` with an update that needs an argument that only its caller knows."""

    def update(grads, state, params=None, *, temperature, **extra):
        return tx.update(grads, state, params)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def test_without_a_trace_all_stays_and_a_warning_says_why():
    tx = wants_more(optax.adam(1e-2))
    message = "nothing is stored in codes, .* TypeError: .*'temperature'. Give its"
    with pytest.warns(optax_mp.MixedPrecisionWarning, match=message):
        assert codes_of(tx) == {}
    # No warning where all arrays are small, nor for a part that can be traced.
    low_bit_state(tx).init(example())
    part = optax.chain(low_bit_state(optax.trace(0.9), min_size=100), tx)
    assert kinds(part.init(example())) == {"trace['w']": "int8"}


SQUARES = {
    "x * x": lambda g: g * g,
    "square": jnp.square,
    "power": lambda g: jnp.power(g, 2.0),
    "einsum": lambda g: jnp.einsum("ij,ij->ij", g, g),
}
AVERAGES = {
    "an average": lambda v, s, b2: b2 * v + (1 - b2) * s,
    "a step": lambda v, s, b2: v + (1 - b2) * (s - v),
    "a step the other way": lambda v, s, b2: v - (1 - b2) * (v - s),
    "a sum": lambda v, s, b2: v + s,
}
ROOTS = {
    "sqrt": lambda mu, nu: mu / (jnp.sqrt(nu) + 1e-8),
    "rsqrt of a corrected sum": lambda mu, nu: mu * jax.lax.rsqrt(nu / 0.9 + 1e-8),
    "a power": lambda mu, nu: mu * (0.5 * nu + 1e-8) ** -0.25,
    "in a branch": lambda mu, nu: jax.lax.cond(
        mu[0, 0] > 0, lambda: mu / jnp.sqrt(nu), lambda: mu
    ),
    "beside squares of the first": lambda mu, nu: (
        mu / jnp.sqrt(nu + mu**2 + mu * mu + jnp.abs(mu) + mu**2.0)
    ),
}
WRITTEN = [
    *((square, "an average", "sqrt", 0.99) for square in SQUARES),
    *(("x * x", average, "sqrt", 0.99) for average in AVERAGES),
    *(("x * x", "an average", root, 0.99) for root in ROOTS),
    ("x * x", "an average", "sqrt", "traced"),
]


@pytest.mark.parametrize(("square", "average", "root", "b2"), WRITTEN)
def test_what_a_root_is_taken_of_is_unsigned_however_it_is_written(
    square, average, root, b2
):
    def init(params):
        state = jnp.zeros_like(params), jnp.zeros_like(params)
        return (*state, jnp.float32(0.99)) if b2 == "traced" else state

    def update(grads, state, params=None):
        mean, moment, *rest = state
        moment = AVERAGES[average](moment, SQUARES[square](grads), (*rest, b2)[0])
        mean = 0.9 * mean + 0.1 * grads
        return ROOTS[root](mean, moment), (mean, moment, *rest)

    tx = low_bit_state(optax.GradientTransformation(init, update))
    leaves = jax.tree.leaves(jax.eval_shape(tx.init, jnp.zeros((64, 128))))
    assert [x.dtype.name for x in leaves if x.size == 8192] == ["int8", "uint8"]


def through(function):
    """Return a rule whose updates are a function of a momentum."""

    def update(updates, state, params=None):
        state = jax.tree.map(lambda g, m: 0.9 * m + g, updates, state)
        return jax.tree.map(function, state), state

    zeros = lambda params: jax.tree.map(jnp.zeros_like, params)  # noqa: E731
    return optax.GradientTransformation(zeros, update)


IN_16_BITS = {
    "a product": lambda m: m @ m.T @ m,
    "a product in a loop": lambda m: jax.lax.fori_loop(0, 2, lambda _, x: x @ m, m),
    "a factorization": lambda m: jnp.linalg.qr(m)[0],
    "a solver": lambda m: jnp.linalg.solve(jnp.eye(16) + m, m),
}
IN_8_BITS = {
    "an inner product": lambda m: m / jnp.sqrt(1e-6 + jnp.vdot(m, m)),
    "itself": lambda m: m / 2,
}


@pytest.mark.parametrize("case", IN_16_BITS | IN_8_BITS)
def test_what_reaches_a_product_or_a_factorization_has_16_bits(case):
    tx = low_bit_state(through((IN_16_BITS | IN_8_BITS)[case]), min_size=1)
    state = jax.eval_shape(tx.init, {"w": jnp.ones((16, 16))}).inner_state
    assert state["w"].codes.dtype == ("int16" if case in IN_16_BITS else "int8")


def test_decays_may_be_numbers_of_the_state():
    """As `optax.inject_hyperparams` keeps them."""
    adamw = optax.inject_hyperparams(optax.adamw)(1e-3)
    assert codes_of(adamw) == {"mu['w']": "int8", "nu['w']": "uint8"}
    sgd = optax.inject_hyperparams(optax.sgd)(1e-3, momentum=0.9)
    assert codes_of(sgd) == {"trace['w']": "int8"}
    # The rate is below 1 as well.
    assert codes_of(optax.inject_hyperparams(optax.contrib.madgrad)(1e-3)) == {}


def test_a_maximum_with_a_constant_is_no_sign():
    """As in Sophia's estimate of a Hessian, which may be negative."""

    def update(grads, state, params=None):
        state = jax.tree.map(lambda h, g: 0.9 * h + 0.1 * g, state, grads)
        root = lambda g, h: g / jnp.sqrt(jnp.maximum(h, 1e-8))  # noqa: E731
        return jax.tree.map(root, grads, state), state

    zeros = lambda params: jax.tree.map(jnp.zeros_like, params)  # noqa: E731
    tx = optax.GradientTransformation(zeros, update)
    assert set(codes_of(tx).values()) == {"int8"}
    assert codes_of(optax.amsgrad(1e-3))["nu_max['w']"] == "uint8"


def test_a_difference_under_a_root_stays_with_both_of_its_arrays():
    """Each in codes, it would become negative where gradients are nearly constant."""
    centered = optax.rmsprop(1e-3, centered=True, momentum=0.9)
    assert codes_of(centered) == {"trace['w']": "int8"}
    assert codes_of(optax.scale_by_stddev()) == {}
    # What is subtracted here is of this step.
    assert codes_of(optax.yogi(1e-3)).keys() == {"mu['w']", "nu['w']"}
    tx, params = low_bit_state(centered, min_size=100), example()
    state = tx.init(params)
    for _ in range(20):
        updates, state = jax.jit(tx.update)(params, state, params)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(updates))
