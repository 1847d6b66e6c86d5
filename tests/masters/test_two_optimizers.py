"""Two losses over one torso, such as an actor and a critic: which ways train it.

Two optimizers with masters over the same 16-bit params undo each other. The ways that
the page of masters gives in their place are compared with the same in float32.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_mp

STEPS, RATE = 200, 1e-4
RNG = np.random.default_rng(0)
SHAPES = {"torso": (16, 16), "actor": (16, 4), "critic": (16, 1)}
START = {k: jnp.asarray(RNG.normal(size=s) / 10, "bfloat16") for k, s in SHAPES.items()}
WIDE = optax_mp.cast_floating(START, "float32")
X, TO_ACTOR, TO_CRITIC = (
    jnp.asarray(RNG.normal(size=s), jnp.float32) for s in ((64, 16), (16, 4), (16, 1))
)


def loss_of(head, target, params):
    params = optax_mp.cast_floating(params, jnp.float32)
    out = jnp.tanh(X @ params["torso"]) @ params[head]
    return jnp.mean((out - jnp.sin(X @ target)) ** 2)


ACTOR = jax.grad(partial(loss_of, "actor", TO_ACTOR))
CRITIC = jax.grad(partial(loss_of, "critic", TO_CRITIC))


def in_turn(make, params, read=lambda params, states: params, at=lambda params: params):
    """Take a step of each optimizer, one after the other; gradients `at` params."""
    txs = make(), make()

    @jax.jit
    def turn(carry, _):
        params, states = carry
        new = []
        for tx, state, gradient in zip(txs, states, (ACTOR, CRITIC), strict=True):
            updates, state = tx.update(gradient(at(params)), state, params)
            params = optax.apply_updates(params, updates)
            new.append(state)
        return (params, new), None

    carry = params, [tx.init(params) for tx in txs]
    return read(*jax.lax.scan(turn, carry, length=STEPS)[0])["torso"]


def of_sum(tx, params):
    """Take steps of one optimizer over the sum of the losses; return the masters."""

    @jax.jit
    def step(carry, _):
        params, state = carry
        grads = jax.tree.map(jnp.add, ACTOR(params), CRITIC(params))
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, state), _ = jax.lax.scan(step, (params, tx.init(params)), length=STEPS)
    return optax_mp.master_params(state, params)["torso"]


def adam():
    return optax.adam(RATE)


def parts(make):
    labels = {"torso": "actor", "actor": "actor", "critic": "critic"}
    return optax.partition({"actor": make(), "critic": make()}, labels)


def masters(**settings):
    return optax_mp.mixed_precision(adam(), **settings)


WAYS = {
    "one optimizer over the sum": (
        lambda: of_sum(masters(), START),
        lambda: of_sum(adam(), WIDE),
    ),
    "one optimizer for each param": (
        lambda: of_sum(parts(masters), START),
        lambda: of_sum(parts(adam), WIDE),
    ),
    "float32 weights, cast for the losses": (
        lambda: in_turn(adam, WIDE, at=optax_mp.get_policy("bf16").cast_to_compute),
        lambda: in_turn(adam, WIDE),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_that_hold(way):
    got, want = (train() for train in WAYS[way])
    moved = jnp.linalg.norm(want - WIDE["torso"])
    assert jnp.linalg.norm(got - want) < 0.02 * moved


@pytest.fixture(scope="module")
def in_float32():
    return in_turn(adam, WIDE)


@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [({}, 0, 0.6), ({"storage": optax_mp.Split(16)}, 0.99, 1.01)],
)
def test_two_optimizers_in_turn(settings, least, most, in_float32):
    """The default undoes half of the way; with `Split` only roundings are missed."""
    moved = in_float32 - WIDE["torso"]
    got = in_turn(partial(masters, **settings), START) - WIDE["torso"]
    assert least < jnp.vdot(got, moved) / jnp.vdot(moved, moved) < most


def test_masters_show_that_something_else_trains_the_params():
    """A few in a thousand are the roundings of one optimizer's 16-bit updates."""

    def share(params, states):
        masters = optax_mp.master_params(states[0], params)
        masters = optax_mp.cast_floating(masters, jnp.bfloat16)
        return jax.tree.map(lambda m, p: jnp.mean(m != p), masters, params)

    assert in_turn(masters, START, share) > 0.5
