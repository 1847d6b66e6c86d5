"""mixed_precision: what lands in the params, what is stored, and what is an error."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from buffers import check_no_buffer_is_shared, keeps_params
from comparison import as_bits, avals
from reference import rounded, smallest_landing

import optax_mp

MIXED = {
    "bf16": jnp.ones((2, 3), jnp.bfloat16),
    "f16": jnp.ones(3, jnp.float16),
    "f32": jnp.ones(4),
    "complex": jnp.ones(2, jnp.complex64),
    "int": jnp.arange(3),
    "bool": jnp.array([True, False]),
    "key": jax.random.key(0),
    "none": None,
    "masked": optax.MaskedNode(),
    "number": 1.5,
    "empty": jnp.zeros((0, 2), jnp.bfloat16),
    "scalar": jnp.ones((), jnp.bfloat16),
}


def mixed_gradients():
    """Return what `jax.grad(..., allow_int=True)` and Equinox give for `MIXED`."""
    grads = {k: v for k, v in MIXED.items() if hasattr(v, "dtype")}
    grads = {
        k: jnp.full(v.shape, 0.5, v.dtype)
        if jnp.issubdtype(v.dtype, jnp.inexact)
        else np.zeros(v.shape, jax.dtypes.float0)
        for k, v in grads.items()
    }
    hidden = {"none": None, "masked": optax.MaskedNode()}
    return grads | hidden | {"number": jnp.float32(0.5)}


def sgd_to(target, param, **settings):
    """Return (param, master) after one float32-gradient step from `param` to there."""
    tx = optax_mp.mixed_precision(optax.sgd(1.0), **settings)
    params = {"w": param}

    @jax.jit
    def step(params, state, target):
        grads = {"w": state.master_params["w"] - target}
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = step(params, tx.init(params), target)
    return params["w"], state.master_params["w"]


def test_small_updates_add_up_where_naive_bf16_stands_still():
    def train(tx):
        params = {"w": jnp.ones(4, jnp.bfloat16)}
        grads = {"w": jnp.full(4, 0.001, jnp.bfloat16)}

        def step(carry, _):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), length=1000)
        return params["w"]

    np.testing.assert_array_equal(train(optax.sgd(1.0)), 1.0)
    step = float(jnp.bfloat16(0.001))
    # The sum of 1000 float32 steps, near 0: relative to where it started.
    np.testing.assert_allclose(
        train(optax_mp.mixed_precision(optax.sgd(1.0))), 1 - 1000 * step, atol=1e-4
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_params_land_on_the_rounded_master_from_anywhere(dtype):
    """From any param, to any master."""
    rng = np.random.default_rng(0)
    largest = float(jnp.finfo(dtype).max) * 0.49
    size = 50_000
    exponents = (-12, 4) if dtype == "float16" else (-60, 60)

    def draw():
        x = rng.normal(size=size) * 2.0 ** rng.integers(*exponents, size)
        return np.clip(x, -largest, largest).astype(np.float32)

    param, target = rounded(draw(), dtype), draw()
    param[:500], target[500:1000] = 0, 0
    got, master = map(np.asarray, sgd_to(target, jnp.asarray(param)))
    want = rounded(master, dtype)
    exact = (want == 0) | (np.abs(want) >= smallest_landing(param))
    assert 0.3 < exact.mean()
    np.testing.assert_array_equal(got[exact], want[exact])
    miss = np.abs(got.astype(np.float64) - want.astype(np.float64))
    assert (miss <= 2.0**-23 * np.abs(param.astype(np.float64))).all()


@pytest.mark.parametrize(
    ("grad_dtype", "update_dtype", "want"),
    [
        ("float32", None, "float32"),
        ("float16", None, "float16"),
        ("bfloat16", "f32", "float32"),
        ("float32", "params", "bfloat16"),
        ("float32", jnp.float16, "float16"),
    ],
)
def test_dtype_of_updates(grad_dtype, update_dtype, want):
    tx = optax_mp.mixed_precision(optax.sgd(1e-2), update_dtype=update_dtype)
    params = {"w": jnp.ones(3, jnp.bfloat16), "own": jnp.ones(3)}
    params["eight"] = jnp.ones(3, jnp.float8_e5m2)
    grads = jax.tree.map(lambda p: jnp.ones(p.shape, grad_dtype), params)
    updates = jax.eval_shape(lambda g: tx.update(g, tx.init(params), params)[0], grads)
    assert updates["w"].dtype == want
    # A leaf that is its own master loses nothing to a narrower `update_dtype`.
    assert updates["own"].dtype == (grad_dtype if update_dtype is None else "float32")
    assert updates["eight"].dtype == {"params": "float8_e5m2"}.get(update_dtype, want)


def test_float64_masters_of_float32_params_have_exact_updates(x64):
    tx = optax_mp.mixed_precision(optax.sgd(0.1), "float64", update_dtype="float64")
    params = {"w": jnp.ones(3, jnp.float32)}
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["w"].dtype == jnp.float64
    after = optax.apply_updates(params, updates)
    assert as_bits(after["w"]) == as_bits(jnp.full(3, 0.9, jnp.float32))


def test_leaves_without_a_master_pass_through():
    tx = optax_mp.mixed_precision(optax.adamw(1e-2), storage=optax_mp.Split(16))
    state = tx.init(MIXED)
    held = {k for k, v in state.master_params.items() if hasattr(v, "dtype")}
    assert held == {"bf16", "f16", "empty", "scalar"}
    moments = jax.tree.leaves(state.inner_state[0].mu)
    assert len(moments) == len(held) + len({"f32", "complex", "number"})
    grads = mixed_gradients()
    updates, after = tx.update(grads, state, MIXED)
    for name in ("int", "bool"):
        assert as_bits(updates[name]) == as_bits(jnp.zeros_like(MIXED[name]))
    assert updates["key"] is grads["key"]
    for name in ("none", "masked"):
        assert updates[name] == grads[name]
    bare = optax.adamw(1e-2)
    own = {k: MIXED[k] for k in ("f32", "complex", "number")}
    own_grads = {k: grads[k] for k in own}
    want, _ = bare.update(own_grads, bare.init(own), own)
    assert as_bits({k: updates[k] for k in own}) == as_bits(want)
    assert avals(after) == avals(state)


def test_an_all_float32_model_costs_nothing():
    params = {"a": jnp.ones(3), "b": [jnp.ones((2, 2))]}
    bare = optax.adamw(1e-2)
    tx = optax_mp.mixed_precision(bare)
    assert jax.tree.leaves(tx.init(params).master_params) == []
    assert as_bits(tx.init(params).inner_state) == as_bits(bare.init(params))
    want = jax.make_jaxpr(bare.update)(params, bare.init(params), params)
    got = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
    # One more says that params are their masters.
    assert len(got.eqns) == len(want.eqns) + 1


def test_state_shares_no_buffer_with_params_or_itself():
    pretrained = {"low": jnp.ones(8), "own": jnp.ones(8)}
    tx = optax_mp.mixed_precision(keeps_params(), param_dtype="bf16")
    check_no_buffer_is_shared("param_dtype", tx, pretrained)


def test_params_that_were_cast_before_init_are_warned_of():
    weights = {"kernel": jnp.ones(2), "norm": jnp.ones(2)}
    policy = optax_mp.get_policy("p=bf16", keep_f32=("norm",))
    tx = optax_mp.mixed_precision(optax.sgd(0.1), param_dtype=policy)
    cast = policy.cast_to_param(weights)
    tx.init(weights)
    tx.init(weights | {"half": cast["kernel"]})
    message = r"\['kernel'\] is bfloat16\[2\] at `init`, .* begin from rounded weights"
    with pytest.warns(optax_mp.MixedPrecisionWarning, match=message):
        tx.init(cast)
    # A template may be made from such params.
    jax.eval_shape(tx.init, cast)


PRETRAINED = {"kernel": jnp.array([1.001, -0.3337]), "norm": {"scale": jnp.ones(2)}}


@pytest.mark.parametrize(
    "param_dtype",
    [
        optax_mp.get_policy("p=bf16", keep_f32=("norm/*",)),
        lambda path, leaf: None if path.startswith("norm") else "bf16",
        lambda path, leaf: jnp.float32 if "scale" in path else jnp.bfloat16,
    ],
)
def test_masters_keep_the_bits_of_float32_weights(param_dtype):
    tx = optax_mp.mixed_precision(optax.adam(1e-3), param_dtype=param_dtype)
    state = tx.init(PRETRAINED)
    assert as_bits(state.master_params["kernel"]) == as_bits(PRETRAINED["kernel"])
    assert state.master_params["norm"]["scale"] == optax.MaskedNode()
    params = dict(PRETRAINED, kernel=PRETRAINED["kernel"].astype(jnp.bfloat16))
    bare = optax.adam(1e-3)
    want, _ = bare.update(PRETRAINED, bare.init(PRETRAINED), PRETRAINED)
    want = optax.apply_updates(PRETRAINED, want)
    updates, state = tx.update(PRETRAINED, state, params)
    masters = optax_mp.master_params(state, optax.apply_updates(params, updates))
    assert as_bits(masters) == as_bits(want)


FLOAT64 = {
    "master_dtype": {"master_dtype": jnp.float64},
    "update_dtype": {"update_dtype": "float64"},
    r"param_dtype` for \['w'\]": {"param_dtype": np.float64},
}


@pytest.mark.parametrize("name", FLOAT64)
def test_float64_without_x64_is_an_error_at_init_and_update(name):
    tx = optax_mp.mixed_precision(optax.sgd(0.1), **FLOAT64[name])
    start = {"w": jnp.ones(3), "own": jnp.ones(3, jnp.complex64)}
    message = (
        rf"^mixed_precision: `{name}`? is float64, but JAX's 64-bit types are off; turn "
        r"them on first, with "
        r"`jax.config.update\(.jax_enable_x64., True\)`, or pass float32."
    )
    with pytest.raises(ValueError, match=message):
        tx.init(start)
    state = optax_mp.mixed_precision(optax.sgd(0.1)).init(start)
    with pytest.raises(ValueError, match=message):
        jax.jit(tx.update)(start, state, start)


# Errors: each names the leaf or argument, what was expected, and the fix.

PARAMS = {"layer": {"w": jnp.ones(3, jnp.bfloat16)}, "norm": jnp.ones(2)}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)


def with_leaf(tree, value):
    return {"layer": {"w": value}, "norm": tree["norm"]}


def update_error(*, grads=GRADS, params=PARAMS, state=None, **settings):
    tx = optax_mp.mixed_precision(optax.adam(1e-2), **settings)
    state = tx.init(PARAMS) if state is None else state
    with pytest.raises((ValueError, TypeError)) as caught:
        tx.update(grads, state, params)
    return f"{caught.type.__name__}: {caught.value}".split("\n")[0]


W = r"\['layer'\]\['w'\]"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"params": with_leaf(PARAMS, jnp.ones(3))},
            rf"ValueError: .* param {W} in a dtype narrower than its float32 master, "
            r".*got float32\[3\]; cast it back.*`equinox.apply_updates` promoted it",
        ),
        (
            {"params": dict(PARAMS, norm=jnp.ones(2, jnp.bfloat16))},
            r"ValueError: .* param \['norm'\] .*, got bfloat16\[2\], for which the state "
            r"holds no master; .*`param_dtype`",
        ),
        (
            {"params": with_leaf(PARAMS, jnp.ones((3, 1), jnp.bfloat16))},
            rf"ValueError: .*{W} to .* shape of its master float32\[3\], got bfloat16\[3,1\]",
        ),
        (
            {"params": with_leaf(PARAMS, jnp.ones(3, jnp.int32))},
            rf"ValueError: .* {W} to be .* its master float32\[3\], got int32\[3\]; ",
        ),
        (
            {"params": with_leaf(PARAMS, jnp.ones(3, jnp.float16)), "param_dtype": "bf16"},
            rf"ValueError: .*{W} in bfloat16, as `param_dtype` says, got float16\[3\]; ",
        ),
        (
            {"grads": with_leaf(GRADS, jnp.ones(3, jnp.complex64))},
            rf"TypeError: .* gradient of {W} to be floating, got complex64\[3\] for the param",
        ),
        (
            {"grads": with_leaf(GRADS, {"a": jnp.ones(3)})},
            rf"ValueError: .*the gradients at {W} to be a leaf, got a dict",
        ),
        (
            {"params": PARAMS | {"more": jnp.ones(1)}},
            r"ValueError: .*the masters in the state and `params` must have the same "
            r"structure, but leaf \['more'\] \(float32\[1\]\) is only in `params`",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(given, message):
    got = update_error(**given)
    assert re.search(message, got), got


def test_an_integer_param_with_a_gradient_is_named():
    params = {"i": jnp.arange(3)}
    tx = optax_mp.mixed_precision(optax.adam(1e-2))
    message = r"gradient of \['i'\] to be None, got float32\[3\] for the param int32"
    with pytest.raises(TypeError, match=message):
        tx.update({"i": jnp.ones(3)}, tx.init(params), params)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"master_dtype": jnp.int32}, "`master_dtype` to be .*, got int32"),
        ({"master_dtype": "f33"}, "`master_dtype` to be a flo.*, got 'f33'"),
        ({"update_dtype": "param"}, 'if not None or "params", to be .*param'),
        ({"update_dtype": jnp.int8}, 'if not None or "params", to be .*, got int8'),
        ({"param_dtype": jnp.int8}, "`param_dtype` to be a float.*, got int8"),
        ({"param_dtype": "half precision"}, "`param_dtype` to be .*, got 'half prec"),
    ],
)
def test_wrong_settings_are_named_before_anything_runs(settings, message):
    with pytest.raises(ValueError, match=message):
        optax_mp.mixed_precision(optax.sgd(0.1), **settings)


@pytest.mark.parametrize(
    ("master_dtype", "param_dtype"),
    [("bfloat16", "bfloat16"), ("float16", "bfloat16"), ("float8_e5m2", "float16")],
)
def test_masters_as_narrow_as_all_params_are_an_error(master_dtype, param_dtype):
    """The second argument is taken for the dtype of params."""
    tx = optax_mp.mixed_precision(optax.sgd(1.0), master_dtype)
    params = {"n": jnp.int32(1), "norm": jnp.ones(4), "w": jnp.ones(4, param_dtype)}
    of_w = {"n": False, "norm": False, "w": True}
    wide = optax_mp.cast_floating(params, jnp.float32)
    declared = optax_mp.get_policy(param_dtype, keep_f32=("norm",))
    by_policy = optax_mp.mixed_precision(
        optax.sgd(1.0), master_dtype, param_dtype=declared
    )
    ways = (
        lambda: tx.init(params),
        lambda: jax.eval_shape(tx.init, params),
        lambda: optax.masked(tx, of_w).init(params),
        lambda: by_policy.init(wide),
        lambda: tx.update(params | {"n": None}, tx.init(wide), params),  # cast later
    )
    message = rf"`master_dtype`, .* wider .*got {master_dtype} for \['w'\] in {param_dtype}.* `param_dtype="
    for way in ways:
        with pytest.raises(ValueError, match=message):
            way()
    labels = {"n": "rest", "norm": "norm", "w": "rest"}
    masters = optax_mp.mixed_precision(optax.sgd(1.0))
    optax.partition({"rest": masters, "norm": tx}, labels).init(params)
    assert tx.init({"n": jnp.int32(1)}).master_params["n"] == optax.MaskedNode()
    # A param in 8 bits has a master of 16, and one of 16 bits is its own.
    if master_dtype != "float8_e5m2":
        state = tx.init(params | {"low": jnp.ones(4, "float8_e4m3fn")})
        assert state.master_params["low"].dtype == master_dtype
        assert state.master_params["w"] == optax.MaskedNode()


def test_weakly_typed_params_keep_the_state_stable():
    params = {"weak": jnp.asarray(1.0), "w": jnp.ones(2, jnp.bfloat16)}
    assert params["weak"].weak_type
    tx = optax_mp.mixed_precision(optax.adam(1e-2))
    state = tx.init(params)
    grads = {"weak": jnp.float32(1), "w": jnp.ones(2)}
    _, after = tx.update(grads, state, params)
    assert avals(after) == avals(state)


def test_an_update_makes_no_array_of_zeros():
    """XLA would merge it with the zeros from which a scan sums float32 gradients."""
    params = {"w": jax.ShapeDtypeStruct((48, 40), jnp.bfloat16)}
    grads = {"w": jax.ShapeDtypeStruct((48, 40), jnp.float32)}
    tx = optax_mp.mixed_precision(optax.sgd(1e-3))
    jaxpr = jax.make_jaxpr(tx.update)(grads, tx.init(params), params)
    assert "broadcast_in_dim 0.0:" not in re.sub(r"\[[^]]*\]|\s+", " ", f"{jaxpr}")
