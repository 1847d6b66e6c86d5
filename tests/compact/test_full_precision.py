"""Which arrays stay in full precision, whatever an optimizer is called."""

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


POSITIONS_AND_HISTORIES = {
    "madgrad": lambda: optax.contrib.madgrad(1e-2),
    "madgrad without momentum": lambda: optax.contrib.madgrad(1e-2, momentum=0.0),
    "madgrad, rewritten": lambda: madgrad(1e-2, 1.0),
    "madgrad, rewritten, with a traced factor": lambda: madgrad(1e-2, jnp.asarray(1.0)),
    "cocob": optax.contrib.cocob,
    "lbfgs": lambda: optax.lbfgs(1e-2, linesearch=None),
    "lbfgs with a line search": optax.lbfgs,
    "histories, rewritten": histories,
}
AROUND = {
    "nothing": lambda tx: tx,
    "a chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": False}),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
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


@pytest.mark.parametrize("name", POSITIONS_AND_HISTORIES)
def test_in_multi_steps_they_stay_too(name):
    if "line search" in name:
        pytest.skip("optax.MultiSteps passes no function on to `lax.cond`")
    tx = optax.MultiSteps(POSITIONS_AND_HISTORIES[name](), 2)
    assert codes_of(tx).keys() <= {"acc_grads['w']"}


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


@pytest.mark.parametrize(
    ("name", "place", "what"),
    [
        ("madgrad", r"float32\[20,12\] at .*x0\['w'\]", "starts as a copy of a param"),
        ("lbfgs", r"float32\[10,20,12\] at .*memory\['w'\]", "larger than any param"),
    ],
)
def test_in_doubt_init_raises_and_names_the_array(name, place, what):
    tx = low_bit_state(wants_more(POSITIONS_AND_HISTORIES[name]()), min_size=100)
    match = rf"low_bit_state: expected .* {place}.*{what}.*, got TypeError: .*tempera"
    with pytest.raises(ValueError, match=match):
        tx.init(example())
    # No array is in doubt where all are small.
    low_bit_state(wants_more(POSITIONS_AND_HISTORIES[name]())).init(example())
    # What the message says to do.
    part = optax.chain(
        low_bit_state(optax.trace(0.9), min_size=100),
        wants_more(POSITIONS_AND_HISTORIES[name]()),
    )
    part.init(example())


def test_an_update_that_cannot_be_traced_is_no_error_for_moments():
    tx = wants_more(optax.adam(1e-2))
    # Codes of which array must stay positive is unknown.
    with pytest.warns(optax_mp.MixedPrecisionWarning, match="bfloat16.*temperature"):
        assert list(codes_of(tx).values()) == ["bfloat16", "bfloat16"]


def test_signs_are_not_taken_from_a_made_up_loss():
    """Hutchinson's estimate of a Hessian may be negative, not that of a square."""

    def hutchinson(grads, state, params=None, *, obj_fn, **_):
        ones = jax.tree.map(jnp.ones_like, params)
        _, hessian = jax.jvp(jax.grad(obj_fn), (params,), (ones,))
        new = jax.tree.map(lambda h, x: 0.9 * h + 0.1 * x, state, hessian)
        return grads, new

    zeros = lambda params: jax.tree.map(jnp.zeros_like, params)  # noqa: E731
    tx = optax.GradientTransformationExtraArgs(zeros, hutchinson)
    assert set(codes_of(tx).values()) == {"int8"}
