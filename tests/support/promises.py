"""What all forms promise, each promise written once: tests of several folders call it.

A form is a function of an optimizer, or an optimizer with masters, codes, or rounding
at random. Tests of the core call a promise with masters and loss scales, those of
another part with the forms of that part.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from comparison import as_bits, avals
from programs import operations
from reference import rounded
from steps import by_update

import optax_mp

# Infinite params


INF = np.inf
INFINITE = [-INF, 1.5, 0.0, 2.0**-20, INF, -INF]
ADAM, ADAMW = optax.adam(1e-2), optax.adamw(1e-2, weight_decay=0.1)


def masked_params(dtype, values=INFINITE):
    """Return params with a mask: four lines of these values."""
    mask = jnp.tile(jnp.array(values, dtype), (4, 1))
    return {"mask": mask, "w": jnp.linspace(-2, 2, 64).astype(dtype)}


def take_same_steps(tx, params, grads, *, steps=4, jitted=True):
    """Return params and state after steps with the same gradients."""
    state = tx.init(params)
    update = jax.jit(tx.update) if jitted else tx.update
    for _ in range(steps):
        scale = optax_mp.loss_scale(state)
        scaled = jax.tree.map(lambda g, s=scale: g * s.astype(g.dtype), grads)
        updates, new_state = update(scaled, state, params)
        assert avals(new_state) == avals(state)
        params, state = optax.apply_updates(params, updates), new_state
    return params, state


def check_infinite_params_stay(form, jitted, dtype, grad_dtype):
    """An infinite param without a gradient, in steps that move the others."""
    before = masked_params(dtype)
    grads = {
        "mask": jnp.zeros((4, 6), grad_dtype),
        "w": jnp.full(64, 2.0**-4, grad_dtype),
    }
    params, state = take_same_steps(form(ADAM), before, grads, jitted=jitted)
    assert as_bits(params["mask"]) == as_bits(before["mask"])
    assert (np.asarray(params["w"]) != np.asarray(before["w"])).all()
    # Neither a remainder nor a moment beside an infinity.
    for leaf in jax.tree.leaves(state):
        if leaf.shape == (4, 6) and jnp.issubdtype(leaf.dtype, jnp.integer):
            assert not np.asarray(leaf)[:, np.isinf(INFINITE)].any()
    masters = optax_mp.master_params(state, params)
    np.testing.assert_array_equal(masters["mask"], np.float32(before["mask"]))


def check_infinite_masters_make_params_infinite(form, jitted, dtype):
    """As in float32 training; finite masters out of the dtype's range do not."""
    before = masked_params(dtype, [1.0] * 6)
    row = [100.0, -100.0, 2.0**-10, -(2.0**-10), 0.0, 0.0]
    grads = {"mask": jnp.tile(jnp.array(row), (4, 1)), "w": jnp.zeros(64)}
    diverging = form(optax.sgd(1e38))
    params, state = take_same_steps(diverging, before, grads, jitted=jitted)
    want = np.float32([-INF, INF, -4e35, 4e35, 1.0, 1.0])
    found = np.asarray(params["mask"], np.float32)
    is_finite = np.isfinite(want)
    np.testing.assert_array_equal(found[:, ~is_finite], [want[~is_finite]] * 4)
    assert np.isfinite(found[:, is_finite]).all()
    assert (np.sign(found) == np.sign(want)).all()
    if dtype == "float16":
        want = rounded(want, np.float16).astype(np.float32)
        np.testing.assert_array_equal(found, [want] * 4)
    masters = np.asarray(optax_mp.master_params(state, params)["mask"])
    assert (np.isinf(masters) == ~is_finite).all()


# Skipped steps


WEIGHTS = {
    "w": jnp.linspace(-2, 2, 12).reshape(3, 4).astype(jnp.bfloat16),
    "scale": jnp.full((), -0.0, jnp.bfloat16),
    "norm": jnp.linspace(0.5, 1, 4),
}


def scaled_gradients(params, scale, bad=None):
    rng = np.random.default_rng(0)
    grads = {
        name: rng.standard_normal(p.shape).astype(np.float32) * float(scale)
        for name, p in params.items()
    }
    if bad is not None:
        grads["norm"][-1] = bad
    return jax.tree.map(jnp.asarray, grads)


def check_a_skipped_step_moves_nothing(tx, where, jitted, params=WEIGHTS):
    """After a good step, behind a link or inside of ("around") a loss scale."""
    scale = optax_mp.dynamic_loss_scale
    tx = optax.chain(scale(), tx) if where == "link" else scale(tx)
    update = jax.jit(tx.update) if jitted else tx.update
    apply = jax.jit(optax.apply_updates)
    state = jax.jit(tx.init)(params)
    grads = scaled_gradients(params, optax_mp.loss_scale(state))
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
    bad = np.nan if jitted else np.inf
    grads = scaled_gradients(params, optax_mp.loss_scale(state), bad)
    updates, after = update(grads, state, params)
    assert as_bits(apply(params, updates)) == as_bits(params)
    kept = (x[1:] if where == "link" else x.inner_state for x in (after, state))
    assert as_bits(next(kept)) == as_bits(next(kept))
    assert optax_mp.loss_scale(after) == optax_mp.loss_scale(state) / 2


def check_there_is_no_conditional(tx, params=WEIGHTS):
    """A step that may be skipped is computed, and its results are chosen."""
    tx = optax.chain(optax_mp.dynamic_loss_scale(), tx)
    grads = jax.tree.map(lambda p: jnp.ones(p.shape), params)
    state = jax.eval_shape(tx.init, params)
    jaxpr = jax.make_jaxpr(tx.update)(grads, state, params)
    found = {each.name for each in operations(jaxpr)}
    assert found and found.isdisjoint({"cond", "while", "switch"})


# Params that are no floating arrays


OF_ALL_KINDS = {
    "w": jnp.ones((64, 96), jnp.bfloat16),
    "b": -jnp.zeros(3, jnp.bfloat16),
    "steps": jnp.arange(3),
    "mask": jnp.array([True, False]),
    "absent": None,
}


def loss_of_all_kinds(params, x):
    return jnp.sum((x @ params["w"] + params["b"].sum()) * params["mask"][0])


def by_value_and_grad(state, params, x):
    return optax_mp.value_and_grad(loss_of_all_kinds)(state, params, x)[1]


def by_jax(state, params, x):
    del state
    return jax.grad(loss_of_all_kinds, allow_int=True)(params, x)


def check_integer_params_stay(tx, gradient):
    """In everybody's loop, with gradients of None or of float0."""
    params = OF_ALL_KINDS
    state = tx.init(params)

    @jax.jit
    def step(state, params, x):
        return by_update(tx)(params, state, gradient(state, params, x))

    new, after = step(state, params, jnp.ones((2, 64), jnp.bfloat16))
    assert avals((new, after)) == avals((params, state))
    kept = ("steps", "mask", "absent")
    assert as_bits([new[k] for k in kept]) == as_bits([params[k] for k in kept])
    assert (new["w"] != params["w"]).all()


def check_a_python_float_is_a_param(tx, is_jitted):
    """As it is one in plain optax. The rule of `tx` is `optax.adamw(0.1)`."""

    def train(tx, dtype):
        params = {"t": 1.5, "w": jnp.ones(2, dtype)}
        state = tx.init(params)
        kinds = avals(state)
        step = jax.jit(by_update(tx)) if is_jitted else by_update(tx)
        gradient = optax_mp.value_and_grad(lambda p: p["t"] ** 2 + 0 * p["w"].sum())
        for _ in range(3):
            params, state = step(params, state, gradient(state, params)[1])
        return params["t"], avals(state) == kinds

    want, _ = train(optax.adamw(0.1), jnp.float32)
    got, is_stable = train(tx, jnp.bfloat16)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert is_stable  # optax's own moments start with weak types
    np.testing.assert_allclose(want, 1.2, atol=0.01)


# Arrays of a state, and what is read from it


def _keeps_params():
    return optax.GradientTransformation(
        lambda params: (params, params, jax.tree.map(jnp.asarray, params)),
        lambda updates, state, params=None: (updates, state),
    )


def check_a_state_shares_no_buffer(form, params):
    """With params or with itself, whatever the rule does: both may be donated."""
    tx = form(_keeps_params())
    for state in (tx.init(params), jax.jit(tx.init)(params)):
        leaves = jax.tree.leaves((params, state))
        pointers = [leaf.unsafe_buffer_pointer() for leaf in leaves]
        assert len(set(pointers)) == len(pointers)


def check_params_are_read_where_no_masters_are(tx):
    """Then `master_params` returns params in float32, and what is no array as it is."""
    arrays = {
        "w": jnp.full((64, 96), 1.25, jnp.bfloat16),
        "own": jnp.full(2, 3.0),
        "i": jnp.arange(2),
        "half": jnp.float16(0.1),
    }
    params = arrays | {"none": None, "text": "a name"}
    state = tx.init(arrays)
    found = optax_mp.master_params(state, params)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    want = {k: np.asarray(x, np.float32) for k, x in arrays.items() if k != "i"}
    want["i"] = arrays["i"]
    assert as_bits({k: found[k] for k in arrays}) == as_bits(want)
    assert found["text"] == "a name"
    jitted = jax.jit(optax_mp.master_params)(state, arrays)
    assert as_bits(jitted) == as_bits(want)
    followed = optax_mp.follow_params(state, arrays)
    assert as_bits(followed) == as_bits(state)
