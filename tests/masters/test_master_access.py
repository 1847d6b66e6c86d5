"""master_params and replace_master_params through any nesting."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits, avals

import optax_mp

PARAMS = {
    "a": jnp.full(3, 1.25, jnp.bfloat16),
    "b": {"own": jnp.full(2, 3.0), "low": jnp.full((), 0.5, jnp.bfloat16)},
    "i": jnp.arange(2),
}
LOADED = {
    "a": jnp.array([1.001, 2.002, 3.003]),
    "b": {"own": jnp.ones(2), "low": jnp.float32(0.7)},
    "i": jnp.arange(2),
}
# The loaded weights in the dtypes of the params, which `replace_master_params` wants.
CAST = jax.tree.map(lambda x, p: x.astype(p.dtype), LOADED, PARAMS)
LABELS = {"a": "x", "b": "y", "i": "y"}


tx = optax_mp.mixed_precision(optax.adam(1e-2))
NESTINGS = {
    "alone": lambda: tx,
    "inject": lambda: optax.inject_hyperparams(
        lambda learning_rate: optax_mp.mixed_precision(optax.adam(learning_rate))
    )(learning_rate=0.1),
    "partition": lambda: optax.partition({"x": tx, "y": tx}, LABELS),
    "deep": lambda: optax.apply_if_finite(
        optax.chain(optax.MultiSteps(tx, 2).gradient_transformation()), 2
    ),
    "in a tuple of two": lambda: optax.chain(
        optax.masked(tx, {"a": True, "b": False, "i": False}),
        optax.masked(tx, {"a": False, "b": True, "i": False}),
    ),
}


@pytest.mark.parametrize("nesting", NESTINGS)
def test_masters_are_found_and_replaced(nesting):
    state = NESTINGS[nesting]().init(PARAMS)
    masters = optax_mp.master_params(state, PARAMS)
    assert masters["a"].dtype == masters["b"]["low"].dtype == jnp.float32
    assert as_bits(masters["b"]["own"]) == as_bits(PARAMS["b"]["own"])
    assert as_bits(masters["i"]) == as_bits(PARAMS["i"])
    np.testing.assert_array_equal(masters["a"], 1.25)

    replaced = optax_mp.replace_master_params(state, CAST, LOADED)
    assert avals(replaced) == avals(state)
    after = optax_mp.master_params(replaced, CAST)
    assert as_bits(after["a"]) == as_bits(LOADED["a"])
    assert as_bits(after["b"]["low"]) == as_bits(LOADED["b"]["low"])
    assert as_bits(after["b"]["own"]) == as_bits(CAST["b"]["own"])
    # Nothing else in the state has moved.
    back = optax_mp.replace_master_params(replaced, PARAMS, masters)
    assert as_bits(back) == as_bits(state)


def test_masters_are_replaced_under_strict_promotion():
    """Outside of `jit`, where they are compared with the params."""
    tx = optax_mp.mixed_precision(optax.sgd(0.1), storage=optax_mp.Split(16))
    with jax.numpy_dtype_promotion("strict"):
        state = optax_mp.replace_master_params(tx.init(PARAMS), CAST, LOADED)
        masters = optax_mp.master_params(state, CAST)
    np.testing.assert_array_equal(masters["a"], LOADED["a"])


@pytest.mark.parametrize("is_scaled", [True, False])
def test_without_masters_the_params_are_returned_in_float32(is_scaled):
    tx = optax.adam(0.1)
    tx = optax_mp.dynamic_loss_scale(tx) if is_scaled else tx
    arrays = PARAMS | {"half": jnp.float16(0.1)}
    state = tx.init(arrays)
    found = optax_mp.master_params(state, arrays | {"none": None, "text": "a name"})
    assert (found.pop("none"), found.pop("text")) == (None, "a name")
    want = optax_mp.cast_floating(arrays, jnp.float32)
    assert as_bits(found) == as_bits(want)
    assert as_bits(optax_mp.follow_params(state, arrays)) == as_bits(state)


def test_without_masters_wider_params_stay(x64):
    params = {"a": jnp.float64(0.1), "b": jnp.bfloat16(0.1), "c": jnp.complex64(1j)}
    found = optax_mp.master_params((), params)
    names = {name: value.dtype.name for name, value in found.items()}
    assert names == {"a": "float64", "b": "float32", "c": "complex64"}


STATE = tx.init(PARAMS)
ADAM_STATE = optax.adam(1e-2).init(PARAMS)
ONE, NO_FIT = (
    {"a": PARAMS["a"]},
    r"\['a'\] to be a floating array of the shape of .*\[3\], ",
)
REFUSED = {
    "not the params": (
        STATE,
        PARAMS,
        LOADED,
        r"at \['a'\] to round to the param, as Full",
    ),
    "no masters": (ADAM_STATE, PARAMS, PARAMS, "without a MixedPrecisionState"),
    "another model": (STATE, PARAMS, ONE, r"`new_master` and .*\['b'\]\['low'\]"),
    "no array": (STATE, PARAMS, LOADED | {"a": None}, NO_FIT + "got NoneType"),
    "integers": (STATE, PARAMS, LOADED | {"a": jnp.arange(3)}, NO_FIT + "got int32"),
    "a shape": (STATE, PARAMS, LOADED | {"a": jnp.ones(4)}, NO_FIT + "got float32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_masters_that_do_not_fit_are_refused(case):
    *args, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        optax_mp.replace_master_params(*args)


def test_params_of_another_model_are_an_error():
    message = r"the masters in `opt_state` and `params` must have the same structure"
    with pytest.raises(ValueError, match=message):
        optax_mp.master_params(STATE, ONE)


def test_a_state_without_a_storage_is_an_error():
    state = optax_mp.MixedPrecisionState({"w": jnp.ones(2)}, ())
    message = "does not say which storage made it; .*`state._replace|made with None"
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    tx = optax_mp.mixed_precision(optax.sgd(0.1))
    for function in (
        lambda: optax_mp.master_params(state, params),
        lambda: optax_mp.replace_master_params(state, params, params),
        lambda: tx.update(params, state, params),
    ):
        with pytest.raises(ValueError, match=message):
            function()


@pytest.mark.parametrize("bits", ["full", "none"])
def test_what_reads_weights_returns_arrays_of_its_own(bits):
    """Params and state may be donated to the next step, and these are still there."""
    params = jax.tree.map(jnp.copy, PARAMS) | {"key": jax.random.key(0)}
    tx = optax_mp.mixed_precision(optax.sgd(0.1)) if bits == "full" else optax.sgd(0.1)
    tx = optax_mp.dynamic_loss_scale(tx)
    state = tx.init(params)
    policy = optax_mp.get_policy("bf16", keep_f32=("*own",))
    read = (
        optax_mp.master_params(state, params),
        policy.cast_to_param(params),
        optax_mp.loss_scale(state),
    )
    for array in jax.tree.leaves((params, state)):
        array.delete()
    assert not any(array.is_deleted() for array in jax.tree.leaves(read))
