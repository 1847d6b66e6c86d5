"""Split: a master as its param and a remainder, bit for bit, in every way it is used."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits, avals
from reference import follow, join, remainder, rounded, settle

import optax_mp
from optax_mp.masters._state import state_type

BFLOAT16 = jnp.dtype(jnp.bfloat16)
BOTH = pytest.mark.parametrize("bits", [16, 8])
A_FEW = pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 16), ("float16", 8)])
EITHER_DTYPE = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
LAST = np.float32(
    3.3961774e38
)  # pattern 0x7F7F7FFF: the largest bfloat16 and half a unit
INFINITE = 0x7F80  # upper half of infinity; without the sign, larger ones are NaN


def mixed(inner, bits=16, **settings):
    return optax_mp.mixed_precision(
        inner, storage=optax_mp.Split(bits=bits), **settings
    )


def from_patterns(*patterns):
    return np.array(patterns, np.uint32).view(np.float32)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


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
    param = optax_mp.Split(bits)._round(jnp.asarray(master), jnp.dtype(dtype))
    param = param.astype(dtype)
    stored = encode(master, param, bits)
    return param, stored, decode(stored, param)


@functools.partial(jax.jit, static_argnums=1)
def of_upper_halves(uppers, bits):
    """Return the round trip of the floats with these upper halves, and the patterns."""
    lowers = jnp.arange(2**16, dtype=jnp.uint32)
    patterns = (uppers.astype(jnp.uint32)[:, None] << 16) | lowers
    master = jax.lax.bitcast_convert_type(patterns, jnp.float32)
    param, stored, back = round_trip(master, "bfloat16", bits)
    as_integers = jax.lax.bitcast_convert_type
    param = as_integers(param, jnp.uint16)
    return param, stored, as_integers(back, jnp.uint32), patterns


def in_chunks(uppers):
    uppers = uppers[(uppers & 0x7FFF) < INFINITE]
    # The largest bfloat16 has no upper neighbour: see the test of masters above it.
    uppers = uppers[(uppers & 0x7FFF) != INFINITE - 1]
    return np.array_split(uppers, -(-len(uppers) // 60))


def assert_lossless(uppers):
    lowers = np.arange(2**16, dtype=np.uint16)
    rounds_up = (lowers >= 2**15).astype(np.uint16)
    for chunk in in_chunks(uppers):
        param, stored, back, patterns = of_upper_halves(chunk, 16)
        assert bool((back == patterns).all())
        # The remainder *is* the lower half, read as a signed number: 32768 under the
        # next bfloat16 fits, 32768 over this one would not.
        assert (np.asarray(stored) == lowers.view(np.int16)).all()
        assert (np.asarray(param) == chunk[:, None] + rounds_up).all()


def assert_within_24_bits(uppers):
    for chunk in in_chunks(uppers):
        param, stored, back, patterns = of_upper_halves(chunk, 8)
        # Of 2^23 patterns in a power of two: 128 is 2^-16, 1/256 of half a unit.
        error = jnp.abs(back.astype(jnp.int32) - patterns.astype(jnp.int32)).max()
        assert int(error) <= 128
        assert ((np.asarray(back) & 0xFF) == 0).all()


def edges():
    mantissas = np.array([0, 1, 63, 64, 126, 127], np.uint16)
    signs_and_exponents = np.arange(2**9, dtype=np.uint16)[:, None]
    return (signs_and_exponents << 7 | mantissas).ravel()


ALL = np.arange(2**16, dtype=np.uint16)


def test_16_bits_are_lossless_at_the_edges_of_every_exponent():
    """All lower halves: subnormals, both zeros and ties among them."""
    assert_lossless(edges())


def test_weights_given_to_init_keep_subnormals():
    patterns = np.arange(1, 2**23, 129, dtype=np.uint32)
    weights = {
        "w": jnp.asarray(np.concatenate([patterns, patterns | 2**31])).view("f4")
    }
    tx = mixed(optax.sgd(1.0), 16, param_dtype="bfloat16")
    params = optax_mp.cast_floating(weights, "bfloat16")
    found = optax_mp.master_params(tx.init(weights), params)["w"]
    apart = found.view("i4") - weights["w"].view("i4")
    # Ties of the cast to even leave a remainder of 32768, one more than int16 has.
    assert set(np.unique(apart)) <= {0, -1}
    assert np.count_nonzero(apart) < 10


@pytest.mark.slow
def test_16_bits_are_lossless_for_all_floats():
    assert_lossless(ALL)


@pytest.mark.slow
def test_8_bits_keep_24_of_a_third_of_all_floats():
    assert_within_24_bits(ALL[::3])


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
    np.testing.assert_array_equal(back, join(param, stored))
    if dtype == "bfloat16" and bits == 16:
        assert same_bits(back, master)


@BOTH
@EITHER_DTYPE
def test_a_foreign_param_keeps_what_is_nearest_to_the_master(dtype, bits):
    master = random_masters(dtype)
    param = np.random.default_rng(1).permutation(follow(master, dtype, bits))
    stored = encode(master, param, bits)
    assert same_bits(stored, remainder(master, param, bits))
    back = np.asarray(decode(stored, param))
    np.testing.assert_array_equal(back, join(param, np.asarray(stored)))


def test_8_bits_are_within_2_to_the_minus_16_of_every_mantissa():
    master = (np.arange(2**23, dtype=np.uint32) + (127 << 23)).view(np.float32)
    _, _, back = round_trip(master, "bfloat16", 8)
    assert np.max(np.abs(np.asarray(back) - master) / master) <= 2.0**-16


@BOTH
@EITHER_DTYPE
def test_what_is_kept_once_is_kept_for_ever(dtype, bits):
    """Every param with every (or of 16 bits: many a) remainder."""
    params = ALL.view(jnp.dtype(dtype))
    params = params[np.isfinite(params.astype(np.float32))]
    kept = np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).astype(f"int{bits}")
    if dtype == "float16":
        kept = kept[1:]  # where ties go to even, either of two params keeps them
    if bits == 16:
        kept = np.concatenate([kept[:3], kept[::1021], kept[-3:], [0, 1, -1]])
        kept = kept.astype(np.int16)

    @jax.jit
    def decoded_twice(params):
        params = jnp.broadcast_to(params[:, None], (params.size, kept.size))
        once = decode(jnp.broadcast_to(kept, params.shape), params)
        _, _, twice = round_trip(once, dtype, bits)
        pattern = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.int32)
        return (pattern(once) == pattern(twice)).all(), jnp.isfinite(once).all()

    for chunk in np.array_split(params, 8):
        same, finite = decoded_twice(chunk)
        # Of float16, -0.0 and no remainder are 0.0, at once.
        assert bool(same) and bool(finite)


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


def test_8_bits_of_float16_are_within_a_256th_of_a_unit():
    master = random_masters("float16")
    param, _, back = map(np.asarray, round_trip(master, "float16", 8))
    size = np.maximum(np.abs(param.astype(np.float64)), 2.0**-14)
    last_place = np.ldexp(1.0, np.frexp(size)[1] - 11)
    assert (np.abs(back - master.astype(np.float64)) <= last_place / 256).all()


@BOTH
def test_masters_over_the_largest_param_are_kept_as_the_largest(bits):
    huge = from_patterns(0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF)
    for master in (huge, -huge):
        param, _, back = map(np.asarray, round_trip(master, "bfloat16", bits))
        want = np.copysign(np.float32(3.3895314e38), master)
        np.testing.assert_array_equal(param.astype(np.float32), want)
        last = from_patterns({16: 0x7F7F7FFF, 8: 0x7F7F7F00}[bits])
        np.testing.assert_array_equal(np.abs(back), np.broadcast_to(last, 3))
        assert (np.abs(back / master) > 1 - 2.0**-7).all()


@BOTH
def test_float16_masters_over_the_range_are_kept_as_its_end(bits):
    master = np.float32([65519, 65520, 1e6, 3e38])
    param, _, back = map(np.asarray, round_trip(master, "float16", bits))
    np.testing.assert_array_equal(param, np.float16(65504))
    want = np.minimum(master, 65520)
    np.testing.assert_allclose(back, want, rtol=0, atol=32 / 2**bits)


@BOTH
@EITHER_DTYPE
def test_an_infinite_master_has_an_infinite_param(dtype, bits):
    master = np.float32([np.inf, -np.inf])
    param, stored, back = map(np.asarray, round_trip(master, dtype, bits))
    np.testing.assert_array_equal(param.astype(np.float32), master)
    np.testing.assert_array_equal(stored, 0)
    np.testing.assert_array_equal(back, master)


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
    updates, state = tx.update({"w": jnp.asarray(master)}, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    assert np.isnan(np.asarray(params["w"], np.float32)).all()
    assert np.isnan(optax_mp.master_params(state, params)["w"]).all()


@A_FEW
def test_an_infinite_param_is_its_own_master(dtype, bits):
    tx = mixed(optax.sgd(0.1), bits)
    params = {"w": jnp.array([1.001, 3.7], dtype)}
    state = optax_mp.replace_master_params(
        tx.init(params), params, {"w": params["w"].astype(jnp.float32) * 1.0001}
    )
    assert (np.asarray(state.master_params["w"]) != 0).all()
    infinite = {"w": jnp.array([np.inf, -np.inf], dtype)}
    masters = optax_mp.master_params(state, infinite)
    np.testing.assert_array_equal(masters["w"], [np.inf, -np.inf])
    for tree in (infinite, {"w": jnp.array([np.inf, -np.inf])}):
        state = mixed(optax.sgd(0.1), bits, param_dtype=dtype).init(tree)
        masters = optax_mp.master_params(state, infinite)
        np.testing.assert_array_equal(masters["w"], [np.inf, -np.inf])


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


def fused(tx):
    """Update and apply in one program."""

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def in_two_programs(tx):
    update, apply = jax.jit(tx.update), jax.jit(optax.apply_updates)

    def step(params, state, grads):
        updates, state = update(grads, state, params)
        return apply(params, updates), state

    return step


def eager(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def start(size, seed=0):
    """Return float32 weights, of sizes from 2^-30 to 4."""
    rng = np.random.default_rng(seed)
    sizes = 2.0 ** rng.uniform(-30, 1, size)
    return (rng.normal(size=size) * sizes).astype(np.float32)


def runs(inner, programs, weights, gradients):
    """Run FullCopy and Split on the same gradients, equal at every step.

    Return the last masters, and where a step could not land: see `settle`.
    """
    carries, steps = [], []
    params = {"w": jnp.asarray(weights).astype(BFLOAT16)}
    for storage in (FULL, SIXTEEN):
        tx = optax_mp.mixed_precision(inner, param_dtype=BFLOAT16, storage=storage)
        steps.append(programs(tx))
        carries.append((params, tx.init({"w": jnp.asarray(weights)})))
    stray = np.zeros(weights.shape, bool)
    for grad in gradients:
        before = np.asarray(carries[1][0]["w"])
        carries = [
            step(*c, {"w": grad}) for step, c in zip(steps, carries, strict=True)
        ]
        (_, full), (params, split) = carries
        master = np.asarray(full.master_params["w"])
        ours = np.asarray(optax_mp.master_params(split, params)["w"])
        param = np.asarray(params["w"])
        if same_bits(ours, master):
            assert same_bits(param, follow(master, BFLOAT16, 16))
            continue
        want_param, want = settle(master, before, 16)
        assert same_bits(ours[~stray], want[~stray])
        assert same_bits(param[~stray], want_param[~stray])
        assert same_bits(param, follow(ours, BFLOAT16, 16))
        miss = np.abs(want - master.astype(np.float64))[~stray]
        bound = 2.0**-23 * np.abs(before.astype(np.float64))[~stray]
        assert (miss <= bound).all()
        stray |= want != master
    assert same_bits(full.inner_state, split.inner_state)
    return master, stray


def noise(size, steps):
    """Return gradients of both signs and sizes from 1e-4 to 100."""
    rng = np.random.default_rng(7)
    for _ in range(steps):
        sizes = np.exp2(rng.uniform(-13, 7))
        yield (rng.normal(size=size) * sizes).astype(np.float32)


RULES = {
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "sgd with momentum": optax.sgd(1e-4, momentum=0.9),
    "lion": optax.lion(1e-3, weight_decay=0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["adamw", "sgd with momentum", "lion"])
def test_1000_steps_are_bit_equal_to_those_of_full_copies(rule):
    weights = start(2000)
    last, stray = runs(RULES[rule], fused, weights, noise(2000, 1000))
    # Where XLA makes one rounding of `weight - rate * step`, a weight that crosses zero
    # can come closer to it than a float32 update of its param.
    assert stray.mean() <= (0 if rule == "adamw" else 0.01)
    assert 0.2 < np.mean(np.sign(last) != np.sign(weights)) < 0.8
    assert np.isfinite(last).all()


@pytest.mark.slow
@pytest.mark.parametrize("programs", [in_two_programs, eager])
@pytest.mark.parametrize("rule", ["adamw", "sgd with momentum", "lion"])
def test_however_the_step_is_compiled_it_is_bit_equal_to_full_copies(rule, programs):
    _, stray = runs(RULES[rule], programs, start(500), noise(500, 30))
    assert stray.mean() <= 0.01


def shrinking(steps, size, flip):
    """Yield the factors that make weights tiny and large again, by turns."""
    rng = np.random.default_rng(3)
    for step in range(steps):
        exponents = rng.uniform(10, 30, size) * (-1) ** (step + 1)
        signs = rng.choice([-1, 1], size) if flip else 1
        yield signs * 2.0**exponents


def count_of_strays(programs, bits, dtype, steps=20, size=5000):
    """Drive weights across zero; return how often the master had to move."""
    tx = mixed(optax.sgd(1.0), bits)
    step = programs(tx)
    param = follow((start(size) * 2.0**8).astype(np.float32), dtype, bits)
    params, state = {"w": jnp.asarray(param)}, tx.init({"w": jnp.asarray(param)})
    missed = 0
    for factor in shrinking(steps, size, flip=True):
        master = np.asarray(optax_mp.master_params(state, params)["w"])
        before = np.asarray(params["w"])
        grad = (master - (master * factor).astype(np.float32)).astype(np.float32)
        wanted = master - grad
        if dtype == "float16":
            wanted = np.clip(wanted, -65504, 65504)
            grad = (master - wanted).astype(np.float32)
            wanted = master - grad
        params, state = step(params, state, {"w": jnp.asarray(grad)})
        want_param, want_master = settle(wanted, before, bits)
        ours = np.asarray(optax_mp.master_params(state, params)["w"])
        np.testing.assert_array_equal(ours, want_master)
        np.testing.assert_array_equal(params["w"], want_param)
        kept = follow(wanted, dtype, bits)
        exact = join(kept, remainder(wanted, kept, bits)).astype(np.float64)
        off = np.abs(ours - exact)
        assert (off <= 2.0**-23 * np.abs(before.astype(np.float64))).all()
        missed += np.count_nonzero(off)
    return missed


@BOTH
@EITHER_DTYPE
@pytest.mark.parametrize("programs", [fused, slow(in_two_programs)])
def test_steps_across_zero_land_where_a_float32_update_can(programs, dtype, bits):
    missed = count_of_strays(programs, bits, dtype)
    # Of float16, whose smallest are 2^-24, most land.
    assert missed > 0 or dtype == "float16"


def test_where_no_update_can_land_the_master_moves_with_the_param():
    """Just under a power of two to 2^-24 of it on the other side of zero."""
    weight = np.float32(2 - 2.0**-23)
    tx = mixed(optax.sgd(1.0), param_dtype=BFLOAT16)
    state = tx.init({"w": jnp.array([weight, weight])})
    params = {"w": jnp.full(2, 2.0, jnp.bfloat16)}
    grads = {"w": jnp.array([2.0, weight])}
    assert weight - np.float32(2) == np.float32(-(2.0**-23))
    for step in (fused(tx), in_two_programs(tx), eager(tx)):
        after, after_state = step(params, state, grads)
        masters = np.asarray(optax_mp.master_params(after_state, after)["w"])
        np.testing.assert_array_equal(masters, 0)
        np.testing.assert_array_equal(np.asarray(after["w"], np.float32), 0)
        # By no more than 2^-23 of what the param was.
        assert abs(masters[0] - -(2.0**-23)) <= 2.0**-23 * 2.0


@pytest.mark.slow
@BOTH
def test_any_step_leaves_param_and_master_that_belong_together(bits):
    """Weights and steps that have nothing to do with each other."""
    rng = np.random.default_rng(5)
    size = 50_000
    weights = rng.normal(size=size) * 2.0 ** rng.integers(-40, 40, size)
    weights = weights.astype(np.float32)
    before = follow(weights, BFLOAT16, bits)
    relative = 2.0 ** rng.integers(-40, 4, size)
    target = (before.astype("f4") * relative * rng.normal(size=size)).astype("f4")
    replace = optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda grads, state, params: (
            jax.tree.map(lambda g, p: g - p, grads, params),
            state,
        ),
    )
    tx = mixed(replace, bits)
    params = {"w": jnp.asarray(before)}
    state = optax_mp.replace_master_params(
        tx.init(params),
        params,
        {"w": jnp.asarray(weights)},
    )
    master = np.asarray(optax_mp.master_params(state, params)["w"])
    wanted = master + (target - master)
    for step in (fused(tx), in_two_programs(tx)):
        after, after_state = step(params, state, {"w": jnp.asarray(target)})
        ours = np.asarray(optax_mp.master_params(after_state, after)["w"])
        want_param, want_master = settle(wanted, before, bits)
        np.testing.assert_array_equal(after["w"], want_param)
        np.testing.assert_array_equal(ours, want_master)
        assert same_bits(after["w"], follow(ours, BFLOAT16, bits))
        miss = np.abs(ours.astype(np.float64) - wanted)
        step_of_8 = 0 if bits == 16 else 2.0**-16 * np.abs(wanted)
        allowed = 2.0**-23 * np.abs(before.astype(np.float64)) + step_of_8
        assert (miss <= allowed).all()


def test_a_master_halfway_rounds_away_from_zero_and_stays():
    """With full copies the param goes to even."""
    halfway = np.float32([1 + 2.0**-8, -1 - 2.0**-8, 1 + 3 * 2.0**-8])
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    got = {}
    for storage in (FULL, SIXTEEN):
        tx = optax_mp.mixed_precision(optax.sgd(1.0), storage=storage)
        grads = {"w": jnp.asarray(1 - halfway)}
        after, state = fused(tx)(params, tx.init(params), grads)
        assert same_bits(optax_mp.master_params(state, after)["w"], halfway)
        got[storage] = np.asarray(after["w"], np.float32).tolist()
    assert got[FULL] == [1.0, -1.0, 1 + 2.0**-6]
    assert got[SIXTEEN] == [1 + 2.0**-7, -1 - 2.0**-7, 1 + 2.0**-6]


def test_a_weight_halfway_at_init_is_a_float32_nearer_its_param():
    halfway = np.float32([1 + 2.0**-8, 1 + 3 * 2.0**-8])
    tx = mixed(optax.sgd(1.0), param_dtype=BFLOAT16)
    state = tx.init({"w": jnp.asarray(halfway)})
    params = {"w": jnp.asarray(halfway).astype(jnp.bfloat16)}
    masters = np.asarray(optax_mp.master_params(state, params)["w"])
    np.testing.assert_array_equal(
        masters, [np.nextafter(halfway[0], np.float32(0)), halfway[1]]
    )


def test_init_and_inner_see_the_master_that_is_kept():
    """Not the weight, which 24 bits do not hold: the first step would differ."""
    keeps = optax.GradientTransformation(
        lambda params: params, lambda grads, state, params: (grads, state)
    )
    weights = {"w": jnp.asarray(start(1000))}
    tx = mixed(keeps, 8, param_dtype=BFLOAT16)
    state = tx.init(weights)
    params = optax_mp.cast_floating(weights, BFLOAT16)
    masters = optax_mp.master_params(state, params)
    assert same_bits(state.inner_state, masters)
    # Twice the error of a step: the params were not rounded from 24 bits.
    np.testing.assert_allclose(masters["w"], weights["w"], rtol=2.0**-15)
    assert not same_bits(masters, weights)


# What comes out, and what leaves there may be.


@BOTH
@pytest.mark.parametrize(
    ("grad_dtype", "update_dtype"),
    [("bfloat16", None), ("float16", None), ("float32", None), ("bfloat16", "f32")],
)
def test_updates_are_float32_whatever_gradients_are(bits, grad_dtype, update_dtype):
    tx = mixed(optax.sgd(1e-2), bits, update_dtype=update_dtype)
    params = {"b": jnp.ones(3, jnp.bfloat16), "h": jnp.ones(3, jnp.float16)}
    grads = jax.tree.map(lambda p: jnp.ones(p.shape, grad_dtype), params)
    for update in (tx.update, jax.jit(tx.update)):
        updates, state = update(grads, tx.init(params), params)
        assert {u.dtype.name for u in updates.values()} == {"float32"}
        after = optax.apply_updates(params, updates)
        masters = optax_mp.master_params(state, after)
        for name, param in after.items():
            want = follow(np.asarray(masters[name]), param.dtype, bits)
            assert same_bits(param, want)


# Params edited outside of the optimizer.


@A_FEW
def test_an_edited_param_is_the_new_master(dtype, bits):
    """But for the remainder: half a unit in its last place at most."""
    tx = mixed(optax.sgd(1.0), bits, param_dtype=dtype)
    weights = {"w": jnp.asarray(start(1000))}
    state = tx.init(weights)
    edited = rounded(start(1000, seed=1), dtype)
    edited[:10] = 0
    params = {"w": jnp.asarray(edited)}
    masters = np.asarray(optax_mp.master_params(state, params)["w"], np.float64)
    if dtype == "bfloat16":
        half_a_unit = np.abs(edited.astype(np.float64)) * 2.0**-8 + 2.0**-134
    else:
        size = np.maximum(np.abs(edited.astype(np.float64)), 2.0**-14)
        half_a_unit = np.ldexp(1.0, np.frexp(size)[1] - 12)
    assert (np.abs(masters - edited.astype(np.float64)) <= half_a_unit).all()
    # The next step starts there.
    grads = {"w": jnp.zeros(1000)}
    after, state = fused(tx)(params, state, grads)
    moved = np.abs(np.asarray(after["w"], np.float64) - edited.astype(np.float64))
    assert (moved <= 2 * half_a_unit).all()
    assert np.mean(moved == 0) > 0.99


@pytest.mark.parametrize("bits", [slow(16), 8])
def test_replaced_masters_are_kept_as_far_as_the_params_are_theirs(bits):
    weights = start(1000)
    params = {"w": jnp.asarray(follow(weights, BFLOAT16, bits))}
    tx = optax.chain(optax.clip(1.0), mixed(optax.adam(1e-2), bits))
    state = tx.init(params)
    new = {"w": jnp.asarray(weights)}
    replaced = optax_mp.replace_master_params(state, params, new)
    assert avals(replaced) == avals(state)
    masters = optax_mp.master_params(replaced, params)
    assert masters["w"].dtype == jnp.float32
    if bits == 16:
        assert same_bits(masters, new)
    np.testing.assert_allclose(masters["w"], weights, rtol=2.0**-16)
    jitted = jax.jit(optax_mp.replace_master_params)(state, params, new)
    assert same_bits(jitted, replaced)
    # Without a param that is theirs, which jit cannot say, half a unit is what fits.
    far = {"w": jnp.full(1000, 5.0)}
    message = (
        rf"`new_master` at \['w'\] is float32\[1000\], and the param "
        rf"bfloat16\[1000\] in `params` is not this master rounded, as Split"
        rf"\(bits={bits}\) requires: .* Cast first"
    )
    with pytest.raises(ValueError, match=message):
        optax_mp.replace_master_params(state, params, far)
    cast = optax_mp.cast_floating(far, BFLOAT16)
    replaced = optax_mp.replace_master_params(state, cast, far)
    assert same_bits(optax_mp.master_params(replaced, cast), far)
    replaced = jax.jit(optax_mp.replace_master_params)(state, params, far)
    masters = np.asarray(optax_mp.master_params(replaced, params)["w"], np.float64)
    apart = np.abs(masters - np.asarray(params["w"], np.float64))
    assert (apart <= np.abs(np.asarray(params["w"], np.float64)) * 2.0**-8).all()


# Skipped steps.


def spoil(grads):
    return jax.tree.map(lambda g: g.at[..., :1].set(jnp.inf), grads)


def scaled_wrapper(bits):
    tx = mixed(optax.sgd(1e-2, momentum=0.9), bits)
    return optax_mp.dynamic_loss_scale(tx, init_scale=4.0)


def scaled_link(bits):
    tx = mixed(optax.sgd(1e-2, momentum=0.9), bits)
    return optax.chain(optax_mp.dynamic_loss_scale(init_scale=4.0), tx)


def masters_state(state):
    found = jax.tree.leaves(
        state, is_leaf=lambda x: isinstance(x, optax_mp.MixedPrecisionState)
    )
    return [x for x in found if isinstance(x, optax_mp.MixedPrecisionState)]


@pytest.mark.parametrize(
    ("build", "programs", "bits"),
    [
        slow(scaled_wrapper, fused, 16),
        slow(scaled_link, eager, 16),
        slow(scaled_wrapper, eager, 16),
        slow(scaled_link, fused, 16),
        slow(scaled_wrapper, fused, 8),
        slow(scaled_link, fused, 8),
    ],
)
def test_a_skipped_step_moves_no_bit(build, programs, bits):
    """Not even of a remainder that belongs to no param any more."""
    tx = build(bits)
    weights = start(200)
    params = {
        "w": jnp.asarray(follow(weights, BFLOAT16, bits)),
        "h": jnp.ones(3, jnp.float16),
        "own": jnp.ones(2),
    }
    state = optax_mp.replace_master_params(
        tx.init(params), params, dict(params, w=jnp.asarray(weights))
    )
    step = programs(tx)
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.5), params)
    params, state = step(params, state, grads)
    # Set to zero with remainders of both signs beside them, and to infinity.
    edit = jnp.array([0.0, -0.0, 0.0, -0.0, jnp.inf, -jnp.inf, jnp.nan], jnp.bfloat16)
    params["w"] = params["w"].at[:7].set(edit)
    before = as_bits((params, masters_state(state)))
    for _ in range(2):
        after, state = step(params, state, spoil(grads))
        assert as_bits((after, masters_state(state))) == before
        assert int(optax.tree.get(state, "total_skipped_count")) > 0
    clean = {"w": params["w"].at[4:7].set(1.0)}
    params, state = step(params | clean, state, grads)
    assert as_bits(masters_state(state)) != before
    masters = optax_mp.master_params(state, params)
    assert bool(optax_mp.all_finite((params, masters)))


# Errors: each names the leaf or argument, what was expected, and the fix.

PARAMS = {"layer": {"w": jnp.ones(3, jnp.bfloat16)}, "norm": jnp.ones(2)}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)
W = r"\['layer'\]\['w'\]"


@pytest.mark.parametrize("bits", [4, 32, 0, "16", 12, None, 7.5])
def test_bits_are_8_or_16(bits):
    with pytest.raises(ValueError, match=f"Split: `bits` is {bits!r}, expected 8 or"):
        optax_mp.Split(bits=bits)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"master_dtype": jnp.float64},
            r"`master_dtype` is float64, which the storage Split\(bits=16\) does not "
            r"keep; expected float32, or use `optax_mp.FullCopy\(\)`",
        ),
        (
            {"master_dtype": "bf16"},
            r"`master_dtype` is bfloat16, which the storage Split\(bits=16\) does not",
        ),
        (
            {"update_dtype": jnp.bfloat16},
            r"`update_dtype` is bfloat16, expected float32 or None with the storage "
            r"Split\(bits=16\), which needs exact updates",
        ),
        ({"update_dtype": "params"}, r"`update_dtype` is params, expected float32 or"),
    ],
)
def test_settings_that_do_not_go_with_split_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        mixed(optax.sgd(0.1), **settings)


@pytest.mark.parametrize(
    ("params", "settings", "message"),
    [
        (
            {"a": {"b": jnp.ones((2, 3))}, "c": jnp.ones(2)},
            {},
            r"the storage Split\(bits=16\) needs params of bfloat16 or float16, found "
            r"none \(param \['a'\]\['b'\] is float32\[2,3\]\). Cast the params with "
            "`optax_mp.cast_floating`, or pass `param_dtype`",
        ),
        (
            {"a": jnp.ones(2, jnp.complex64), "i": jnp.arange(2)},
            {},
            r".* needs params of bfloat16 or float16, .*\['a'\] is complex64\[2\]",
        ),
        (
            {"a": jnp.ones(2, jnp.bfloat16), "b": [jnp.ones(4, jnp.float8_e4m3fn)]},
            {},
            r"param \['b'\]\[0\] is float8_e4m3fn\[4\], in training float8_e4m3fn, "
            r"expected bfloat16 or float16 .*use `optax_mp.FullCopy\(\)` for it",
        ),
        (
            {"a": jnp.ones(4)},
            {"param_dtype": "e5m2"},
            r"param \['a'\] is float32\[4\], in training float8_e5m2, expected bfloat16",
        ),
    ],
)
def test_params_that_cannot_be_split_are_named(params, settings, message):
    for init in (mixed(optax.adam(0.1), **settings).init, None):
        init = init or jax.jit(mixed(optax.adam(0.1), **settings).init)
        with pytest.raises(ValueError, match="mixed_precision: " + message):
            init(params)


@pytest.mark.parametrize("made", [FULL, SIXTEEN, optax_mp.Split(8)])
@pytest.mark.parametrize("used", [FULL, SIXTEEN, optax_mp.Split(8)])
def test_a_state_of_another_storage_is_named(made, used):
    before = optax_mp.mixed_precision(optax.adam(1e-2), storage=made)
    tx = optax_mp.mixed_precision(optax.adam(1e-2), storage=used)
    state = before.init(PARAMS)
    if made == used:
        tx.update(GRADS, state, PARAMS)
        return
    message = (
        rf"the state was made with the storage {re.escape(str(made))}, expected "
        rf"{re.escape(str(used))}, .*`optax_mp.convert_opt_state`"
    )
    for update in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ValueError, match=message):
            update(GRADS, state, PARAMS)


def test_splits_are_equal_by_value_and_say_what_they_are():
    assert optax_mp.Split() == optax_mp.Split(bits=16) != optax_mp.Split(bits=8)
    assert hash(optax_mp.Split(8)) == hash(optax_mp.Split(bits=8))
    assert repr(optax_mp.Split(8)) == "Split(bits=8)"
