"""Split: a master as its param and a remainder, bit for bit, in every way it is used."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits
from reference import follow, join, remainder, rounded
from slow_cases import mostly_slow
from steps import by_update, take_steps

import optax_mp
from optax_mp.core._random_numbers import rounding_keys
from optax_mp.core.masters._storage import state_type

BFLOAT16 = jnp.dtype(jnp.bfloat16)
BOTH = pytest.mark.parametrize("bits", [16, 8])
EITHER_DTYPE = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
LAST = np.float32(
    3.3961774e38
)  # pattern 0x7F7F7FFF: the largest bfloat16 and half a unit
INFINITE = 0x7F80  # upper half of infinity; without the sign, larger ones are NaN


def mixed(inner, bits=16, **settings):
    return optax_mp.mixed_precision(
        inner, storage=optax_mp.Split(bits=bits), **settings
    )


def same_bits(a, b):
    return as_bits(jax.device_get(a)) == as_bits(jax.device_get(b))


@functools.partial(jax.jit, static_argnums=2)
def encode(master, param, bits):
    """Return what is kept beside a param."""
    stored = jnp.zeros(jnp.shape(param), f"int{bits}")
    state = state_type(optax_mp.Split(bits))(stored, ())
    return optax_mp.replace_master_params(state, param, master).master_params


@jax.jit
def decode(stored, param):
    """Return the master that a param and what is kept beside it are."""
    storage = optax_mp.Split(jnp.iinfo(stored.dtype).bits)
    return optax_mp.master_params(state_type(storage)(stored, ()), param)


@functools.partial(jax.jit, static_argnums=(1, 2))
def round_trip(master, dtype, bits):
    """Return the param of a master, what is kept beside it, and the master of both."""
    form = optax_mp.Split(bits)._format_of(jnp.zeros((), dtype))
    param = form.round(jnp.asarray(master))
    param = param.astype(dtype)
    stored = encode(master, param, bits)
    return param, stored, decode(stored, param)


@jax.jit
def are_lossless(uppers):
    """Return whether 16 bits keep all floats with these upper halves."""
    lowers = jnp.arange(2**16, dtype=jnp.uint16)
    as_integers = jax.lax.bitcast_convert_type
    patterns = (uppers.astype(jnp.uint32)[:, None] << 16) | lowers
    master = as_integers(patterns, jnp.float32)
    param, stored, back = round_trip(master, "bfloat16", 16)
    rounded_up = uppers[:, None] + (lowers >= 2**15).astype(jnp.uint16)
    # The remainder *is* the lower half, read as a signed number: 32768 under the next
    # bfloat16 fits, 32768 over this one would not.
    return (
        (as_integers(back, jnp.uint32) == patterns).all()
        & (stored == as_integers(lowers, jnp.int16)).all()
        & (as_integers(param, jnp.uint16) == rounded_up).all()
    )


def assert_lossless(uppers):
    uppers = uppers[(uppers & 0x7FFF) < INFINITE]
    # The largest bfloat16 has no upper neighbour: see the test of masters above it.
    uppers = uppers[(uppers & 0x7FFF) != INFINITE - 1]
    for chunk in np.array_split(uppers, -(-len(uppers) // 60)):
        assert are_lossless(chunk)


def edges():
    mantissas = np.array([0, 127], np.uint16)
    signs_and_exponents = np.arange(2**9, dtype=np.uint16)[:, None]
    return (signs_and_exponents << 7 | mantissas).ravel()


ALL = np.arange(2**16, dtype=np.uint16)


def test_16_bits_are_lossless_at_the_edges_of_every_exponent():
    """All lower halves: subnormals, both zeros and ties among them."""
    assert_lossless(edges())


@pytest.mark.slow
def test_16_bits_are_lossless_for_all_floats():
    assert_lossless(ALL)


def random_masters(dtype, size=300_000):
    """Return floats of all sizes that `dtype` has, some halfway between two params."""
    rng = np.random.default_rng(0)
    if dtype == "bfloat16":
        patterns = rng.integers(0, 2**32, size, dtype=np.uint32)
        patterns[:1000] = patterns[:1000] & 0xFFFF0000 | 0x8000
        master = patterns.view(np.float32)
        return master[np.abs(master) <= LAST]
    master = (rng.normal(size=size) * 2.0 ** rng.integers(-40, 17, size)).astype("f4")
    lower = rounded(np.clip(master[:1000], -1e4, 1e4), dtype)
    upper = np.nextafter(lower, np.float16(np.inf))
    master[:1000] = (lower.astype("f4") + upper.astype("f4")) / 2
    return master[np.abs(master) < 65520]


@BOTH
@EITHER_DTYPE
def test_params_and_remainders_are_those_of_the_reference(dtype, bits):
    master = random_masters(dtype)
    param, stored, back = map(np.asarray, round_trip(master, dtype, bits))
    assert same_bits(param, follow(master, dtype, bits))
    assert stored.dtype == f"int{bits}"
    assert same_bits(stored, remainder(master, param, bits))
    assert stored.min() == -(2 ** (bits - 1))  # of ties, which are among these
    np.testing.assert_array_equal(back, join(param, stored))
    if dtype == "bfloat16" and bits == 16:
        assert same_bits(back, master)


def test_16_bits_of_float16_are_exact_from_2_to_the_minus_14():
    exponents = np.arange(-14, 16)[:, None].astype(np.uint32)
    mantissas = np.arange(0, 2**23, 199, dtype=np.uint32)
    master = ((exponents + 127) << 23 | mantissas).view(np.float32).ravel()
    master = np.concatenate([master[master < 65520], random_masters("float16")])
    master = np.concatenate([master, -master])
    _, _, back = round_trip(master, "float16", 16)
    back, small = np.asarray(back), np.abs(master) < 2.0**-14
    assert small.any()
    np.testing.assert_array_equal(back[~small], master[~small])
    assert np.abs(back - master)[small].max() <= 2.0**-40


@BOTH
@EITHER_DTYPE
def test_an_infinite_master_has_an_infinite_param(dtype, bits):
    master = np.float32([np.inf, -np.inf])
    param, stored, back = map(np.asarray, round_trip(master, dtype, bits))
    np.testing.assert_array_equal(param.astype(np.float32), master)
    np.testing.assert_array_equal(stored, 0)
    np.testing.assert_array_equal(back, master)


@BOTH
@EITHER_DTYPE
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_param_set_to_zero_is_tiny_whatever_was_left_beside_it(dtype, bits, zero):
    """A remainder under zero would be a NaN pattern."""
    stored = np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).astype(f"int{bits}")
    param = jnp.full(stored.shape, zero, dtype)
    masters = np.asarray(decode(stored, param))
    assert np.isfinite(masters).all()
    half_a_unit = float(jnp.finfo(dtype).smallest_subnormal) / 2
    assert np.abs(masters.astype(np.float64)).max() <= half_a_unit


# Trajectories.

FULL = optax_mp.FullCopy()
SIXTEEN = optax_mp.Split(16)


def test_where_no_update_can_land_the_master_moves_with_the_param():
    """Just under a power of two to 2^-24 of it on the other side of zero."""
    weight = np.float32(2 - 2.0**-23)
    tx = mixed(optax.sgd(1.0), param_dtype=BFLOAT16)
    state = tx.init({"w": jnp.array([weight, weight])})
    params = {"w": jnp.full(2, 2.0, jnp.bfloat16)}
    grads = {"w": jnp.array([2.0, weight])}
    assert weight - np.float32(2) == np.float32(-(2.0**-23))
    # By no more than 2^-23 of what the param was.
    after, state = take_steps(tx, params, state, [grads])
    masters = np.asarray(optax_mp.master_params(state, after)["w"])
    np.testing.assert_array_equal(masters, 0)
    np.testing.assert_array_equal(np.asarray(after["w"], np.float32), 0)


def test_a_master_halfway_rounds_away_from_zero_and_stays():
    """With full copies the param goes to even."""
    halfway = np.float32([1 + 2.0**-8, -1 - 2.0**-8, 1 + 3 * 2.0**-8])
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    got = {}
    for storage in (FULL, SIXTEEN):
        tx = optax_mp.mixed_precision(optax.sgd(1.0), storage=storage)
        grads = {"w": jnp.asarray(1 - halfway)}
        after, state = take_steps(tx, params, tx.init(params), [grads])
        assert same_bits(optax_mp.master_params(state, after)["w"], halfway)
        got[storage] = np.asarray(after["w"], np.float32).tolist()
    assert got[FULL] == [1.0, -1.0, 1 + 2.0**-6]
    assert got[SIXTEEN] == [1 + 2.0**-7, -1 - 2.0**-7, 1 + 2.0**-6]


# What comes out, and what leaves there may be.


@BOTH
def test_updates_are_float32_whatever_gradients_are(bits):
    tx = mixed(optax.sgd(1e-2), bits)
    params = {"b": jnp.ones(3, jnp.bfloat16), "h": jnp.ones(3, jnp.float16)}
    grads = jax.tree.map(lambda p: jnp.ones(p.shape, "bfloat16"), params)
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    assert {u.dtype.name for u in updates.values()} == {"float32"}
    after = optax.apply_updates(params, updates)
    masters = optax_mp.master_params(state, after)
    for name, param in after.items():
        assert same_bits(param, follow(np.asarray(masters[name]), param.dtype, bits))


# Errors: each names the leaf or argument, what was expected, and the fix.

PARAMS = {"layer": {"w": jnp.ones(3, jnp.bfloat16)}, "norm": jnp.ones(2)}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)


@pytest.mark.parametrize("bits", [4, "16", None])
def test_bits_are_8_or_16(bits):
    with pytest.raises(
        ValueError, match=f"Split: .*`bits` to be 8 or 16, got {bits!r}"
    ):
        optax_mp.Split(bits=bits)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"master_dtype": jnp.float64},
            r"`master_dtype` to be float32 with the storage Split\(bits=16\), got "
            r"float64; use `optax_mp.FullCopy\(\)`",
        ),
        (
            {"master_dtype": "bf16"},
            r"`master_dtype` to be .* with the storage Split\(bits=16\), got bfloat16",
        ),
        (
            {"update_dtype": jnp.bfloat16},
            r"`update_dtype` to be float32 or None with the storage Split\(bits=16\), "
            r"got bfloat16; use `optax_mp.FullCopy",
        ),
        ({"update_dtype": "params"}, r"`update_dtype` to be float32 or .*, got params"),
    ],
)
def test_settings_that_do_not_go_with_split_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        mixed(optax.sgd(0.1), **settings)


@pytest.mark.parametrize(
    ("params", "settings", "message"),
    [
        (
            {"a": jnp.ones(2, jnp.bfloat16), "b": [jnp.ones(4, jnp.float8_e4m3fn)]},
            {},
            r"expected param \['b'\]\[0\] .float8_e4m3fn\[4\]. to be bfloat16 or float16 "
            r"in training .*, got float8_e4m3fn; use `optax_mp.FullCopy\(\)` for it",
        ),
        (
            {"a": jnp.ones(4)},
            {"param_dtype": "e5m2"},
            r"expected param \['a'\] .float32\[4\]. to be bfloat16 .*, got float8_e5m2",
        ),
    ],
)
def test_params_that_cannot_be_split_are_named(params, settings, message):
    with pytest.raises(ValueError, match="mixed_precision: " + message):
        mixed(optax.adam(0.1), **settings).init(params)


OWN_MASTERS = {
    "scalar": jnp.float32(0.5),
    "log_alpha": {"a": {"log": jnp.zeros(())}, "count": jnp.int32(1)},
    "complex": {"a": jnp.ones(2, jnp.complex64), "none": None},
}


@pytest.mark.filterwarnings("ignore:mixed_precision. the storage")
@pytest.mark.parametrize("name", OWN_MASTERS)
def test_params_that_are_their_own_masters_are_trained_as_with_full_copies(name):
    """One factory makes the optimizers of SAC's networks and of its log_alpha."""
    params = OWN_MASTERS[name]
    split, full = (
        optax_mp.dynamic_loss_scale(
            optax_mp.mixed_precision(optax.adam(0.1), storage=storage)
        )
        for storage in (SIXTEEN, FULL)
    )
    nothing = (
        r"Split\(bits=16\) stores nothing, because no param is bfloat16 or float16"
    )
    with pytest.warns(optax_mp.MixedPrecisionWarning, match=nothing) as caught:
        state = split.init(params)
    assert len(caught) == 1
    other = full.init(params)
    scale = optax_mp.loss_scale(state)
    grads = jax.tree.map(lambda x: jnp.ones_like(x) * scale, params)
    if name == "log_alpha":
        grads["count"] = None
    (have, state), (want, other) = (
        take_steps(tx, params, each, [grads])
        for tx, each in ((split, state), (full, other))
    )
    assert as_bits(have) == as_bits(want)
    assert as_bits(optax_mp.master_params(state, have)) == as_bits(want)
    assert jax.tree.leaves(state.inner_state.master_params) == []


@pytest.mark.parametrize(("made", "used"), [(FULL, SIXTEEN), (SIXTEEN, FULL)])
def test_a_state_of_another_storage_is_named(made, used):
    before = optax_mp.mixed_precision(optax.adam(1e-2), storage=made)
    tx = optax_mp.mixed_precision(optax.adam(1e-2), storage=used)
    state = before.init(PARAMS)
    message = (
        rf"expected a state made with {re.escape(str(used))}, got one made with "
        rf"{re.escape(str(made))}; .*`optax_mp.convert_opt_state`"
    )
    with pytest.raises(ValueError, match=message):
        jax.jit(tx.update)(GRADS, state, PARAMS)


A_FEW = pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 16), ("float16", 8)])


def from_patterns(*patterns):
    return np.array(patterns, np.uint32).view(np.float32)


@A_FEW
def test_nan_stays_nan_whatever_its_payload(dtype, bits):
    master = from_patterns(
        0x7FFFFFFF, 0x7F800001, 0x7FC00000, 0xFFFFFFFF, 0xFF800001, 0x7F80FFFF
    )
    param, _, back = map(np.asarray, round_trip(master, dtype, bits))
    assert np.isnan(param.astype(np.float32)).all()
    assert np.isnan(back).all()
    # And so it arrives in the params of a step.
    tx = mixed(optax.sgd(1.0), bits)
    params = {"w": jnp.ones(6, dtype)}
    params, state = take_steps(
        tx, params, tx.init(params), [{"w": jnp.asarray(master)}]
    )
    assert np.isnan(np.asarray(params["w"], np.float32)).all()
    assert np.isnan(optax_mp.master_params(state, params)["w"]).all()


# Rounding at random.

EIGHT = optax_mp.Split(8)
RATES = (1e-5, 3e-6, 1e-6, 3e-7)
WIDTH, STEPS = 1024, 2000


def adam_at_all_rates():
    """Return Adam with a learning rate for each row."""
    rates = np.repeat(np.float32(RATES), WIDTH).reshape(len(RATES), WIDTH)
    scale = lambda u, _: jax.tree.map(lambda x: -rates * x, u)  # noqa: E731
    return optax.chain(optax.scale_by_adam(), optax.stateless(scale))


def way_of_rows(tx, params, dtype):
    """Return how far the mean of each row goes in 2,000 steps, in float64."""

    @jax.jit
    def run(params):
        def step(carry, key):
            params, state = carry
            noise = 1 + jax.random.normal(key, (WIDTH,), dtype)
            like = lambda x: jnp.broadcast_to(noise, x.shape).astype(x.dtype)  # noqa: E731
            grads = jax.tree.map(like, params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        keys = jax.random.split(jax.random.key(0), STEPS)
        return jax.lax.scan(step, (params, tx.init(params)), keys)[0]

    after, state = run(params)
    if isinstance(state, optax_mp.MixedPrecisionState):
        after = optax_mp.master_params(state, after)
    ends = [jax.tree.map(lambda x: np.asarray(x, float), x) for x in (after, params)]
    return {name: (ends[0][name] - ends[1][name]).mean(1) for name in params}


@mostly_slow("dtype", ["bfloat16", "float16"], "bfloat16".__eq__)
def test_masters_go_the_way_of_float32_at_the_rates_of_fine_tuning(dtype):
    normal = 0.1 * np.random.default_rng(0).standard_normal(WIDTH)
    params = {"ones": np.ones(WIDTH), "normal": normal}
    params = {
        k: jnp.asarray(np.tile(x, (len(RATES), 1)), dtype) for k, x in params.items()
    }
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    adam = adam_at_all_rates()
    want = way_of_rows(adam, wide, dtype)
    split = optax_mp.mixed_precision(adam, storage=EIGHT)
    got = way_of_rows(split, params, dtype)
    for name in params:
        # The slowest row is a random walk of 2,000 roundings of 3e-7 to units of 2^-16:
        # in the mean of 1,024 masters 0.5% of its way.
        np.testing.assert_allclose(got[name] / want[name], 1, rtol=0.03)
    # And without masters ones stand still: half a unit is 2^-9. (Plain Adam in float16
    # becomes NaN, since its `eps` is 0 there.)
    if dtype == "bfloat16":
        assert (way_of_rows(adam, params, dtype)["ones"] == 0).all()


@functools.partial(jax.jit, static_argnums=0)
def advanced(storage, param, master, key):
    """Return (param, remainder, master) after a step to a master."""
    stored, landing = storage.advance(storage.encode(master, param), param, master, key)
    return landing, stored, storage.decode(stored, landing)


@EITHER_DTYPE
def test_a_master_becomes_a_neighbour_and_is_right_on_average(dtype):
    """Of 24 bits; 4000 roundings each. Masters at both sides of powers of two, and ties."""
    master = random_masters(dtype, 3000)[:512]
    powers = 2.0 ** np.arange(-8, 8)
    near = np.outer(powers, 1 + np.float32([-3e-5, -1e-6, 0, 1e-6, 3e-5])).ravel()
    master = np.concatenate([master, near, -near]).astype(np.float32)
    # Of normal numbers, of which a step may take any.
    master = master[np.abs(master) >= (2.0**-126 if dtype == "bfloat16" else 2.0**-24)]
    param = jnp.asarray(follow(master, dtype, 8))
    draw = jax.vmap(lambda step: advanced(EIGHT, param, master, key_of(step))[2])
    back = np.asarray(jax.jit(draw)(jnp.arange(4000)), np.float64)
    low, high = back.min(0), back.max(0)
    exponent = np.floor(np.log2(np.abs(master.astype(np.float64))))
    unit = 2.0 ** (exponent - 15)
    if dtype == "float16":  # a 256th of the last place, of the power of two above too
        unit = 2.0 ** (np.maximum(exponent, -14) - 10 - 8)
        unit *= 1 + (np.abs(as_floats(param)) >= 2.0 ** (exponent + 1))
    assert (low <= master).all() and (high >= master).all()
    assert ((back == low) | (back == high)).all() and (high - low <= unit).all()
    rest = (master - low) / np.where(high == low, 1, high - low)
    error = (np.sqrt(rest * (1 - rest) / 4000) + 1 / 4000) * unit
    assert (np.abs(back.mean(0) - master) <= 5 * error).all()


def key_of(step):
    return rounding_keys(1, step)[0]


@EITHER_DTYPE
def test_a_master_that_can_be_stored_never_moves(dtype):
    """Whatever is drawn: all remainders of params of every exponent and sign."""
    uppers = np.arange(0, 2**16, 61, dtype=np.uint16).view(jnp.dtype(dtype))
    sizes = np.abs(uppers.astype(np.float32))
    # CPUs flush smaller ones to zero.
    uppers = uppers[np.isfinite(sizes) & ((sizes == 0) | (sizes >= 2.0**-126))]
    stored = np.arange(-128, 128).astype(np.int8)[:, None]
    param = np.broadcast_to(uppers, (256, len(uppers)))
    master = np.asarray(decode(np.broadcast_to(stored, param.shape), param))
    is_own = as_floats(follow(master, dtype, 8)) == as_floats(param)
    assert is_own.mean() > 0.9  # others belong to a param beside it
    form = EIGHT._format_of(param)
    for number in (0.0, 0.5, 1 - 2.0**-24):
        numbers = np.full(master.shape, number, np.float32)
        drawn = np.asarray(jax.jit(form.round_at_random)(master, numbers))
        np.testing.assert_array_equal(drawn[is_own], master[is_own])
    landing, again, _ = advanced(EIGHT, param, master, key_of(0))
    np.testing.assert_array_equal(as_floats(landing)[is_own], as_floats(param)[is_own])
    expected = np.broadcast_to(stored, param.shape)
    # Nothing lies between zero and what is under it.
    if dtype == "bfloat16":
        expected = np.where(param == 0, np.maximum(expected, 0), expected)
    np.testing.assert_array_equal(np.asarray(again)[is_own], expected[is_own])


def as_floats(x):
    return np.asarray(x).astype(np.float32)


@EITHER_DTYPE
@BOTH
def test_no_rounding_leaves_the_finite_numbers_or_enters_them(dtype, bits):
    largest = [float(jnp.finfo(x).max) for x in ("float32", dtype)]
    odd = np.float32(
        [np.inf, -np.inf, np.nan, *largest, -largest[0], 65519.9, 1e-45, 0]
    )
    before = jnp.asarray(np.clip(odd, -largest[1], largest[1]), dtype)
    storage = optax_mp.Split(bits)
    for step in range(20 if bits == 8 else 1):
        key = key_of(step) if bits == 8 else None
        param, _, master = advanced(storage, before, odd, key)
        for x in (as_floats(param), np.asarray(master)):
            np.testing.assert_array_equal(np.isfinite(x), np.isfinite(odd))
        for i, value in ((3, largest[1]), (4, largest[1]), (5, -largest[1])):
            assert float(param[i]) == value
        assert float(param[0]) == -float(param[1]) == np.inf


def draws(tx, wrap=jax.jit):
    """Return params and state after three steps of other gradients."""
    rng = np.random.default_rng(0)
    params = jnp.asarray(rng.standard_normal((64, 16)), jnp.bfloat16)
    grads = jnp.asarray(rng.standard_normal((3, 64, 16)) / 64, jnp.float32)
    return wrap(by_update(tx)), params, wrap(tx.init)(params), grads


def eagerly(step, params, state, grads):
    for g in grads:
        params, state = step(params, state, g)
    return params, state


def test_two_leaves_and_two_steps_draw_other_numbers():
    start = jnp.ones(4096, jnp.bfloat16)
    params, tx = {"a": start, "b": start}, mixed(optax.sgd(1.0), 8)
    grads = jax.tree.map(lambda x: jnp.full(x.shape, 2.0**-17), params)
    _, first = take_steps(tx, params, tx.init(params), [grads])
    # From the same masters, at another step.
    later = tx.init(params)._replace(step_count=jnp.int32(1))
    _, other = take_steps(tx, params, later, [grads])
    rises = [np.asarray(x.master_params[k]) != 0 for x in (first, other) for k in "ab"]
    # By half a unit: each in half of the masters, and not the same. Five deviations.
    for i, x in enumerate(rises):
        assert abs(x.mean() - 0.5) < 5 * 0.5 / 64
        assert all(abs((x != y).mean() - 0.5) < 5 * 0.5 / 64 for y in rises[:i])


def test_reading_and_writing_masters_keeps_the_counter():
    step, params, state, grads = draws(mixed(optax.sgd(0.25), 8))
    params, state = eagerly(step, params, state, grads)
    loaded = params.astype(jnp.float32) + 2.0**-12
    loaded_params = jnp.asarray(follow(np.asarray(loaded), BFLOAT16, 8))
    written = optax_mp.replace_master_params(state, loaded_params, loaded)
    assert type(written) is type(state) and int(written.step_count) == 3
    masters = np.asarray(optax_mp.master_params(written, loaded_params))
    # To the nearest of 24 bits: within half a unit, 2^-16 of a value at most.
    np.testing.assert_allclose(masters, loaded, rtol=2.0**-16, atol=0)
    followed = optax_mp.follow_params(written, params)
    assert same_bits(followed, written)


def test_a_state_without_a_counter_is_refused():
    tx, params = mixed(optax.sgd(0.25), 8), jnp.ones(3, jnp.bfloat16)
    state = tx.init(params)._replace(step_count=None)
    with pytest.raises(
        ValueError, match=r"with `step_count`, since Split\(bits=8\) .*"
    ):
        tx.update(params, state, params)
    assert mixed(optax.sgd(0.25), 16).init(params).step_count is None
