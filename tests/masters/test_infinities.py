"""Infinite params, such as the mask of an attention, and infinite masters."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits, avals
from jax.sharding import Mesh
from own_storages import Negated, TwoBfloat16
from reference import rounded
from slow_cases import mostly_slow

import optax_mp

INF = np.inf
VALUES = [-INF, 1.5, 0.0, 2.0**-20, INF, -INF]
IS_INFINITE = np.isinf(VALUES)
adam = optax.adam(1e-2)
low_bit = functools.partial(optax_mp.low_bit_state, min_size=1)


def mixed(inner, **settings):
    return optax_mp.mixed_precision(inner, **settings)


def split(bits, inner):
    return mixed(inner, storage=optax_mp.Split(bits))


def linked(inner):
    return optax.chain(optax_mp.dynamic_loss_scale(), inner)


def sharded(inner):
    return optax_mp.zero1(inner, Mesh(np.array(jax.devices()[:1]), ("data",)), "data")


FORMS = {
    "full copies": mixed,
    "split 16": lambda inner: split(16, inner),
    "split 8": lambda inner: split(8, inner),
    "own storage": lambda inner: mixed(inner, storage=Negated()),
    "trees": lambda inner: mixed(inner, storage=TwoBfloat16()),
    "stochastic rounding": optax_mp.stochastic_rounding,
    "stochastic, low-bit": lambda inner: optax_mp.stochastic_rounding(low_bit(inner)),
    "low-bit": lambda inner: mixed(low_bit(inner)),
    "low-bit bfloat16": lambda inner: mixed(low_bit(inner, dtype="bfloat16")),
    "5.1 bytes": lambda inner: split(8, low_bit(inner)),
    "scaled": lambda inner: optax_mp.dynamic_loss_scale(mixed(inner)),
    "scaled split": lambda inner: optax_mp.static_loss_scale(split(16, inner), 8.0),
    "link": lambda inner: linked(mixed(inner)),
    "link, split": lambda inner: linked(split(8, inner)),
    "link, stochastic": lambda inner: linked(optax_mp.stochastic_rounding(inner)),
    "MultiSteps inside": lambda inner: mixed(optax.MultiSteps(inner, 2)),
    "MultiSteps around": lambda inner: optax.MultiSteps(split(16, inner), 2),
    "zero1": lambda inner: sharded(mixed(inner)),
    "zero1, split": lambda inner: sharded(split(16, inner)),
    "partition": lambda inner: optax.partition(
        {"a": mixed(inner), "b": split(16, inner)}, {"mask": "a", "w": "b"}
    ),
    "float32 updates": lambda inner: mixed(inner, update_dtype="float32"),
    "updates like params": lambda inner: mixed(inner, update_dtype="params"),
}
A_FEW = {"full copies", "5.1 bytes", "trees", "stochastic rounding", "link, split"}


def params_in(dtype, values=VALUES):
    mask = jnp.tile(jnp.array(values, dtype), (4, 1))
    return {"mask": mask, "w": jnp.linspace(-2, 2, 64).astype(dtype)}


def take_steps(tx, params, grads, *, steps=4, jitted=True):
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


RUNS = [(True, "bfloat16", "float32"), (True, "float16", "float16")]
RUNS += [(False, "bfloat16", "float32")]


@mostly_slow(
    ("form", "run"),
    itertools.product(FORMS, RUNS),
    lambda form, run: form == "link, split" and run == RUNS[0],
)
def test_an_infinite_param_without_a_gradient_stays(form, run):
    jitted, dtype, grad_dtype = run
    before = params_in(dtype)
    grads = {
        "mask": jnp.zeros((4, 6), grad_dtype),
        "w": jnp.full(64, 2.0**-4, grad_dtype),
    }
    params, state = take_steps(FORMS[form](adam), before, grads, jitted=jitted)
    assert as_bits(params["mask"]) == as_bits(before["mask"])
    assert (np.asarray(params["w"]) != np.asarray(before["w"])).all()
    # Neither a remainder nor a moment beside an infinity.
    for leaf in jax.tree.leaves(state):
        if leaf.shape == (4, 6) and jnp.issubdtype(leaf.dtype, jnp.integer):
            assert not np.asarray(leaf)[:, IS_INFINITE].any()
    if "stochastic" not in form:
        masters = optax_mp.master_params(state, params)
        np.testing.assert_array_equal(masters["mask"], np.float32(before["mask"]))


@mostly_slow(
    ("form", "jitted", "dtype"),
    # `optax.MultiSteps` multiplies the updates of other steps by 0, which makes them NaN.
    [
        (form, jitted, dtype)
        for form in FORMS
        for jitted, dtype in ((True, "float16"), (False, "bfloat16"))
        if form != "MultiSteps around"
    ],
    lambda form, jitted, dtype: form == "link, split" and jitted,
)
def test_an_infinite_master_makes_its_param_infinite(form, jitted, dtype):
    """As in float32 training; finite masters out of the dtype's range do not."""
    diverging = optax.sgd(1e38)
    before = params_in(dtype, [1.0] * 6)
    row = [100.0, -100.0, 2.0**-10, -(2.0**-10), 0.0, 0.0]
    grads = {"mask": jnp.tile(jnp.array(row), (4, 1)), "w": jnp.zeros(64)}
    params, state = take_steps(FORMS[form](diverging), before, grads, jitted=jitted)
    want = np.float32([-INF, INF, -4e35, 4e35, 1.0, 1.0])
    found = np.asarray(params["mask"], np.float32)
    is_finite = np.isfinite(want)
    np.testing.assert_array_equal(found[:, ~is_finite], [want[~is_finite]] * 4)
    assert np.isfinite(found[:, is_finite]).all()
    assert (np.sign(found) == np.sign(want)).all()
    if dtype == "float16":
        want = rounded(want, np.float16).astype(np.float32)
        np.testing.assert_array_equal(found, [want] * 4)
    if "stochastic" not in form:
        masters = np.asarray(optax_mp.master_params(state, params)["mask"])
        assert (np.isinf(masters) == ~is_finite).all()


@mostly_slow(
    ("dtype", "jitted"),
    itertools.product(["float8_e5m2", "float8_e4m3fn"], [True, False]),
    lambda dtype, jitted: jitted,
)
def test_float8_params_are_infinite_if_their_dtype_has_infinities(dtype, jitted):
    tx = mixed(optax.sgd(1e38), update_dtype="params")
    values = VALUES if dtype == "float8_e5m2" else [1.0] * 6
    params = params_in(dtype, values)
    grads = jax.tree.map(lambda p: jnp.zeros(p.shape), params)
    after, _ = take_steps(tx, params, grads, jitted=jitted)
    assert as_bits(after["mask"]) == as_bits(params["mask"])
    grads["mask"] += 100.0
    after, state = take_steps(tx, params_in(dtype, [1.0] * 6), grads, jitted=jitted)
    end = -INF if dtype == "float8_e5m2" else -448.0
    np.testing.assert_array_equal(np.asarray(after["mask"], np.float32), end)
    np.testing.assert_array_equal(state.master_params["mask"], -INF)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_infinite_float32_params_of_float64_masters_stay():
    params = params_in("float32")
    tx = mixed(adam, master_dtype="float64")
    grads = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    after, state = take_steps(tx, params, grads)
    assert as_bits(after["mask"]) == as_bits(params["mask"])
    assert state.master_params["mask"].dtype == jnp.float64
    np.testing.assert_array_equal(state.master_params["mask"], params["mask"])


RULES = {
    "decay": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "decay of 0": lambda: optax.adamw(1e-2, weight_decay=0.0),
    "decay of others": lambda: optax.adamw(1e-2, mask={"mask": False, "w": True}),
    "decayed gradients": lambda: optax.chain(optax.add_decayed_weights(0.1), adam),
    "trust ratio": lambda: optax.lamb(1e-2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), adam),
    "lion": lambda: optax.lion(1e-2),
}
# In which infinities stay.
STAY = {"decay of 0", "decay of others", "trust ratio", "clipped"}


@mostly_slow(
    ("rule", "bits"),
    itertools.product(RULES, [None, 16]),
    lambda rule, bits: rule in {"decay", "decay of others"} and bits is None,
)
def test_what_a_rule_makes_of_infinities_is_what_float32_training_has(rule, bits):
    """Weight decay, for one, makes them NaN: inf - rate * decay * inf."""
    inner = RULES[rule]()
    tx = mixed(inner) if bits is None else split(bits, inner)
    params = params_in("bfloat16")
    weights = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    grads = {"mask": jnp.zeros((4, 6)), "w": jnp.full(64, 2.0**-4)}
    params, state = take_steps(tx, params, grads)
    want, _ = take_steps(inner, weights, grads)
    masters = optax_mp.master_params(state, params)
    for name, master in masters.items():
        # XLA may contract the last multiplication with the addition.
        np.testing.assert_allclose(master, want[name], rtol=0, atol=2.0**-22)
    is_nan = np.isnan(np.asarray(want["mask"]))
    assert (np.isnan(np.asarray(params["mask"], np.float32)) == is_nan).all()
    assert is_nan[:, IS_INFINITE].all() if rule not in STAY else not is_nan.any()


# Edits from outside


@pytest.mark.parametrize("jitted", [True, False])
def test_a_param_that_is_set_to_infinity_stays_until_it_is_cast_anew(jitted):
    """Unless its master is NaN, which shows."""
    tx = mixed(optax.sgd(1.0))
    params = params_in("bfloat16", [1.0] * 6)
    state = tx.init(params)
    params["mask"] = params["mask"].at[:, :2].set(jnp.array([INF, -INF], jnp.bfloat16))
    grads = jax.tree.map(lambda p: jnp.zeros(p.shape), params)
    grads["mask"] = grads["mask"].at[3, :3].set(jnp.nan)
    update = jax.jit(tx.update) if jitted else tx.update
    updates, state = update(grads, state, params)
    after = np.asarray(optax.apply_updates(params, updates)["mask"], np.float32)
    np.testing.assert_array_equal(after[:3], [[INF, -INF, 1, 1, 1, 1]] * 3)
    np.testing.assert_array_equal(after[3], [np.nan] * 3 + [1] * 3)
    masters = optax_mp.master_params(state, params)
    anew = optax_mp.get_policy("bf16").cast_to_param(masters)["mask"]
    np.testing.assert_array_equal(np.asarray(anew, np.float32)[:3], 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "storage",
    [optax_mp.FullCopy(), optax_mp.Split(16), optax_mp.Split(8), TwoBfloat16()],
)
def test_infinite_masters_are_replaced_and_converted(storage):
    bare = optax.sgd(1e-2, momentum=0.9)
    tx = mixed(bare, storage=storage)
    params = params_in("bfloat16")
    masters = jax.tree.map(lambda p: p.astype(jnp.float32) * 1.0005, params)
    state = optax_mp.replace_master_params(tx.init(params), params, masters)
    want = np.asarray(masters["mask"])
    found = optax_mp.master_params(state, params)["mask"]
    np.testing.assert_allclose(found, want, rtol=2.0**-15)
    there = optax_mp.convert_opt_state(state, params, tx, mixed(bare))
    np.testing.assert_array_equal(there.master_params["mask"], found)
    back = optax_mp.convert_opt_state(there, params, mixed(bare), tx)
    assert as_bits(back) == as_bits(state)
    # From a run in float32, with an infinity among its weights.
    state = optax_mp.convert_opt_state(
        bare.init(masters),
        masters,
        bare,
        mixed(bare, storage=storage, param_dtype="bf16"),
    )
    params = optax_mp.get_policy("bf16").cast_to_param(masters)
    found = optax_mp.master_params(state, params)["mask"]
    np.testing.assert_allclose(found, want, rtol=2.0**-15)


@mostly_slow("bad", [INF, np.nan], lambda bad: bad == INF)
def test_a_finite_master_of_an_infinite_param_is_refused_where_both_are_the_master(bad):
    """`cast_floating` of 1e6 to float16 would be such a param."""
    params = params_in("float16", [1.0] * 6)
    state = split(16, adam).init(params)
    masters = {**params, "mask": jnp.full((4, 6), 1e6)}
    params["mask"] = jnp.full((4, 6), bad, jnp.float16)
    message = r"is not this master rounded, .*`new_params = policy.cast_to_param\(new_m"
    with pytest.raises(ValueError, match=message):
        optax_mp.replace_master_params(state, params, masters)
    params = optax_mp.get_policy("f16").cast_to_param(masters)
    state = optax_mp.replace_master_params(state, params, masters)
    found = optax_mp.master_params(state, params)["mask"]
    np.testing.assert_allclose(found, 65520, atol=1)


def test_policies_keep_infinities():
    x = jnp.array([INF, -INF, 1e30, jnp.nan])
    for name, end in (("f16", 65504.0), ("bf16", np.float32(jnp.bfloat16(1e30)))):
        found = optax_mp.get_policy(name).cast_to_param(x)
        np.testing.assert_array_equal(np.float32(found), [INF, -INF, end, np.nan])


# What it costs


@mostly_slow(
    "form",
    ["full copies", "stochastic rounding", "float32 updates", "updates like params"],
    lambda form: form == "full copies",
)
def test_a_step_needs_no_memory_beside_params_and_state(form):
    tx = FORMS[form](adam)
    params = {"w": jnp.ones((512, 512), jnp.bfloat16)}
    grads = {"w": jnp.ones((512, 512))}

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    compiled = (
        jax.jit(step, donate_argnums=(0, 1)).lower(params, state, grads).compile()
    )
    # Not even of a bool for each weight.
    assert compiled.memory_analysis().temp_size_in_bytes < params["w"].size / 4


# A model


@pytest.mark.slow
def test_an_equinox_module_with_a_mask_of_minus_infinity_trains():
    eqx = pytest.importorskip("equinox")

    class Attention(eqx.Module):
        query: jax.Array
        value: jax.Array
        mask: jax.Array  # not trained, but one of the leaves

        def __call__(self, x):
            scores = x @ self.query @ x.T + jax.lax.stop_gradient(self.mask)
            return jax.nn.softmax(scores) @ x @ self.value

    keys = jax.random.split(jax.random.key(0), 3)
    model = Attention(
        query=jax.random.normal(keys[0], (8, 8)) / 8,
        value=jax.random.normal(keys[1], (8, 8)) / 8,
        mask=jnp.where(jnp.tri(6, dtype=bool), 0.0, -INF),
    )
    x = jax.random.normal(keys[2], (6, 8))

    def loss(model):
        return jnp.mean((model(x) - x[::-1]) ** 2)

    def train(tx, model):
        state = tx.init(eqx.filter(model, eqx.is_inexact_array))

        @eqx.filter_jit
        def step(model, state):
            value, grads = optax_mp.value_and_grad(loss)(state, model)
            params = eqx.filter(model, eqx.is_inexact_array)
            updates, state = tx.update(grads, state, params)
            return eqx.apply_updates(model, updates), state, value

        losses = []
        for _ in range(20):
            model, state, value = step(model, state)
            losses.append(float(value))
        return model, losses

    _, want = train(optax.adam(1e-2), model)
    low = optax_mp.cast_floating(model, "bfloat16")
    tx = optax_mp.mixed_precision(optax.adam(1e-2), update_dtype="params")
    trained, losses = train(tx, low)
    assert as_bits(trained.mask) == as_bits(low.mask)
    assert want[-1] < 0.9 * want[0]
    np.testing.assert_allclose(losses, want, rtol=0.02)
