"""low_bit_state around every optimizer: what it keeps, what it leaves, how it trains."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from comparison import as_bits, avals
from low_bit_examples import example, is_quantized, kinds, quantized_leaves
from optimizers import OPTIMIZERS, PER_EXAMPLE, extra_arguments
from reference import adamw_step, line_codes, line_scales, line_values
from slow_cases import mostly_slow

import optax_mp
from optax_mp import low_bit_state
from optax_mp.compact._codes import decode

# The table's adafactor has factors, which are too small to be that is quantized.
EVERY = OPTIMIZERS | {
    "adafactor,unfactored": lambda: optax.adafactor(1e-2, factored=False),
    "adafactor,with_momentum": lambda: optax.adafactor(
        1e-2, factored=False, momentum=0.9
    ),
    "adagrad": lambda: optax.adagrad(3e-2),
    "rmsprop,centered": lambda: optax.rmsprop(1e-2, centered=True, momentum=0.9),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
}
FORMS = {"8 bits": {}, "16 bits": {"bits": 16}}


def low_bit(name, **settings):
    return low_bit_state(EVERY[name](), min_size=100, **settings)


def objective(params):
    """Return least squares of which the least is not 0."""
    rng = np.random.default_rng(1)
    inputs = rng.standard_normal((256, 20)).astype(np.float32)
    weights = rng.standard_normal((20, 12)).astype(np.float32)
    noise = rng.standard_normal((256, 12)).astype(np.float32)
    targets = inputs @ weights + noise
    return jnp.mean((inputs @ params["w"] + params["b"] - targets) ** 2)


def gradients(name, params, noise):
    """Return the gradient with noise, as a batch has it."""
    grads = jax.tree.map(jnp.add, jax.grad(objective)(params), noise)
    if name in PER_EXAMPLE:
        return jax.tree.map(lambda g: jnp.stack([g, g]), grads)
    return grads


def noises(steps):
    rng = np.random.default_rng(2)
    return jax.tree.map(
        lambda p: rng.normal(0, 0.05, (steps, *p.shape)).astype(np.float32), example()
    )


def step_function(name, tx):
    tx = optax.with_extra_args_support(tx)

    def step(carry, noise):
        params, state = carry
        grads = gradients(name, params, noise)
        extra = extra_arguments(name, grads)
        if "obj_fn" in extra:
            extra["obj_fn"] = objective
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step


# Others have settled after 400 steps.
STEPS = {"simplified_ademamix": 1600}


def fitted(name, tx):
    """Return (loss, params) after some steps."""
    params = example()
    steps = STEPS.get(name, 400)
    step = step_function(name, tx)

    @jax.jit
    def run(params, noise):
        carry = (params, tx.init(params))
        (params, _), _ = jax.lax.scan(lambda c, n: (step(c, n), None), carry, noise)
        return objective(params), params

    loss, params = run(params, noises(steps))
    return float(loss), params


@functools.cache
def bare_loss(name):
    return fitted(name, EVERY[name]())[0]


# The codes of each quantized array: unsigned if it is under a root, signed if it decays,
# 16 bits if it reaches a product. All else stays in full precision.
CODES = {
    "mu:int8 nu:uint8": (
        "adamw acprop adabelief adam lamb mechanize nadam nadamw optimistic_adam "
        "optimistic_adam_v2 radam sam schedule_free split_real_and_imaginary yogi"
    ),
    "mu:int8 nu:int8": "adamax adamaxw sophia",
    "mu:int8 nu:uint8 nu_max:uint8": "amsgrad",
    "nu:uint8": "adopt rmsprop schedule_free_adamw",
    "mu:int8": "lion novograd",
    "mu:int16": "muon",
    "trace:int8": "sgd lars rmsprop,centered",
    "ema:int8": "signum",
    "nu:int8": "sm3",
    "v:uint8": "adafactor,unfactored",
    "v:uint8 ema:int8": "adafactor,with_momentum",
    "e_g:uint8 e_x:uint8": "adadelta",
    "sum_of_squares:uint8": "adagrad",
    "m:int8 v:int8 n:uint8": "adan",
    "m1:int8 m2:int8 nu:uint8": "ademamix",
    "m:int8 n:uint8": "simplified_ademamix",
    "exp_avg:int8 exp_avg_sq:uint8": "momo_adam",
    "exp_avg:int8 exp_avg_sq:uint8 grad_sum:int8": "dadapt_adamw prodigy",
    "": (
        "adafactor cocob dog dowg dpsgd fromage galore lbfgs madgrad momo noisy_sgd "
        "optimistic_gradient_descent polyak_sgd rprop schedule_free_sgd sign_sgd"
    ),
}
QUANTIZED = {
    name: dict(pair.split(":") for pair in codes.split())
    for codes, names in CODES.items()
    for name in names.split()
}


def test_the_table_has_every_optimizer():
    assert EVERY.keys() == QUANTIZED.keys()


@pytest.mark.parametrize("name", QUANTIZED)
def test_what_is_quantized_and_with_which_codes(name):
    params = example()
    state = jax.eval_shape(low_bit(name).init, params)
    assert kinds(state) == {f"{k}['w']": v for k, v in QUANTIZED[name].items()}
    bare = jax.eval_shape(EVERY[name]().init, params)
    # All else as it is.
    ours = jax.tree.leaves(state.inner_state, is_leaf=is_quantized)
    for leaf, plain in zip(ours, jax.tree.leaves(bare), strict=True):
        if is_quantized(leaf):
            assert leaf.codes.shape == plain.shape and plain.size >= 100
            assert leaf.scales.dtype == jnp.bfloat16
        else:
            assert avals(leaf) == avals(plain)


# By how much the loss may be off, where not 3%. What takes signs is chaotic: another
# code now and then is another path.
LOOSE = {
    "lion": 0.05,
    "signum": 0.05,
    "adadelta": 0.1,
    "simplified_ademamix": 0.1,
}
# The first of each choice of codes.
TRAINS = [(names.split()[0], "8 bits") for codes, names in CODES.items() if codes]
TRAINS += [("adamw", "16 bits")]


@mostly_slow(("name", "form"), TRAINS, lambda *case: case == ("adamw", "8 bits"))
def test_it_trains_as_the_bare_optimizer(name, form):
    loss, _ = fitted(name, low_bit(name, **FORMS[form]))
    limit = LOOSE.get(name, 0.03) if form == "8 bits" else 0.01
    assert abs(loss / bare_loss(name) - 1) <= limit


# Second moments that have signed codes, in lines whose gradients' sizes differ by 10^4.
@mostly_slow("name", ["adamax", "sophia"], "adamax".__eq__)
def test_small_second_moments_in_a_line_do_not_blow_the_step_up(name):
    rng = np.random.default_rng(1)
    sizes = np.geomspace(1e-4, 1, 32).astype(np.float32)
    largest = []
    for tx in (EVERY[name](), low_bit(name)):
        tx = optax.with_extra_args_support(tx)
        params = jnp.zeros((8, 32))
        state = tx.init(params)
        extra = extra_arguments(name, params)
        step = jax.jit(lambda g, s, p, tx=tx, extra=extra: tx.update(g, s, p, **extra))
        seen = 0.0
        for _ in range(40):
            grads = rng.standard_normal((8, 32)).astype(np.float32) * sizes
            updates, state = step(grads, state, params)
            params = optax.apply_updates(params, updates)
            seen = max(seen, float(jnp.abs(updates).max()))
        largest.append(seen)
    # A step of Adam is too large where the root of the moment is rounded down.
    assert largest[1] <= 3 * largest[0]


def test_a_moment_grows_and_fades_as_in_float32_only_if_rounded_at_random():
    """Over a thousand steps it changes by less than the distance of two codes."""
    b2, steps = 0.999, 3000
    grads = jnp.tile(jnp.asarray([1.0, 0.5, 0.25, 0.125]), 64)
    shares, truth = {}, 0.0
    for i in range(steps):
        _, truth, _ = adamw_step(float(i < steps / 3), 0.0, truth, 0.0, 1, 0.0, b2=b2)
    for seed in (None, 0):
        tx = low_bit_state(optax.adam(0.0, b2=b2), min_size=64, seed=seed)

        def step(state, i, tx=tx):
            return tx.update(grads * (i < steps / 3), state, jnp.zeros(256))[1], None

        run = jax.jit(lambda s, step=step: jax.lax.scan(step, s, jnp.arange(steps))[0])
        nu = decode(run(tx.init(jnp.zeros(256))).inner_state[0].nu)
        shares[seed] = np.asarray(nu / grads**2).reshape(64, 4).mean(0) / truth
    assert abs(truth - 0.0855) < 0.001 and (shares[None] > 2).all()
    # Codes are 3% to 8% apart: a random walk of such steps, of 64 values, drawn back by a
    # thousandth of the distance. The largest, which the scale follows, is one value.
    np.testing.assert_allclose(shares[0], 1, rtol=0.1)


def test_one_step_of_adamw_is_the_reference_encoded():
    """Decode, step, encode, in NumPy: rounded to nearest, every code."""
    tx = low_bit_state(optax.adamw(1e-2), min_size=1, seed=None)
    rng = np.random.default_rng(0)
    params = rng.standard_normal((40, 64)).astype(np.float32)
    state = tx.init(params)
    update = jax.jit(tx.update)
    mu = nu = np.zeros_like(params, np.float64)
    weight = params.astype(np.float64)
    for count in range(1, 6):
        grads = rng.standard_normal(params.shape).astype(np.float32)
        updates, state = update(grads, state, params)
        params = np.asarray(params + updates)
        mu, nu, weight = adamw_step(grads, mu, nu, weight, count, 1e-2)
        # Half a unit of weights below 4 for each of five steps.
        np.testing.assert_allclose(params, weight, rtol=0, atol=5 * 2.0**-23)
        kept = {"mu": "int8", "nu": "uint8"}
        values = {"mu": mu, "nu": nu}
        for field, dtype in kept.items():
            got = getattr(state.inner_state[0], field)
            scales = line_scales(values[field].astype(np.float32), (40, 1))
            want = line_codes(values[field], scales, dtype)
            assert as_bits(got.scales) == as_bits(scales)
            off = np.abs(np.asarray(got.codes, int) - want.astype(int))
            # Float32 against float64, of a value between two codes.
            assert off.max() <= 1 and off.mean() < 1e-3
            # On from what is kept, so that one such code is not carried along.
            values[field] = line_values(got.codes, scales, dtype)
        mu, nu = values["mu"], values["nu"]
        weight = params.astype(np.float64)


def test_small_leaves_counts_and_wide_ones_are_left():
    shapes = {"large": (64, 64), "small": (64, 63), "s": (), "none": (0, 3)}
    params = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}

    def quantized(**settings):
        tx = low_bit_state(optax.adam(1e-3), **settings)
        state = jax.eval_shape(tx.init, params)
        assert state.inner_state[0].count.dtype == jnp.int32
        return set(quantized_leaves(state))

    assert quantized() == {"mu['large']", "nu['large']"}
    assert quantized(min_size=10**9) == set()
    assert "mu['small']" in quantized(min_size=1)


def test_float64_state_is_left(x64):
    params = {"a": jnp.ones((64, 64)), "b": jnp.ones((64, 64), jnp.float32)}
    state = jax.eval_shape(low_bit_state(optax.adam(1e-3)).init, params)
    assert set(quantized_leaves(state)) == {"mu['b']", "nu['b']"}


def test_64_bit_types_change_no_bit_of_float32(x64):
    params = jnp.linspace(-1, 1, 4096, dtype="float32").reshape(64, 64)
    tx = low_bit_state(optax.adam(1e-3, b1=0.5, b2=0.5))

    def codes():
        _, state = jax.jit(lambda x: tx.update(x, tx.init(x), x))(params)
        assert not any(x.dtype.itemsize == 8 for x in jax.tree.leaves(state))
        return as_bits(state.inner_state[0].mu), as_bits(state.inner_state[0].nu)

    wide = codes()
    jax.config.update("jax_enable_x64", False)
    assert codes() == wide


def test_masters_inside_are_left():
    params = jnp.ones((64, 64), jnp.bfloat16)
    tx = low_bit_state(optax_mp.mixed_precision(optax.adam(1e-3)))
    state = jax.eval_shape(tx.init, params)
    assert set(quantized_leaves(state)) == {"mu", "nu"}
    assert state.inner_state.master_params.dtype == jnp.float32


def base(**settings):
    return low_bit_state(optax.adamw(1e-2), min_size=100, **settings)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"bits": 4}, r"low_bit_state: expected `bits` to be 8 or 16, got 4; pass"),
        ({"bits": True}, r"low_bit_state: expected `bits` to be .*, got True"),
        *(
            ({"min_size": x}, "`min_size` to be an integer.*, got ")
            for x in ("1", -1, True)
        ),
        *(
            ({"seed": x}, "`seed` to be an integer.*, got ")
            for x in (True, np.ones(()), np.arange(2), jax.random.key(0))
        ),
    ],
)
def test_bad_settings_are_refused(settings, match):
    with pytest.raises((TypeError, ValueError), match=match):
        low_bit_state(optax.adam(1e-3), **settings)


def test_what_is_no_transformation_is_refused():
    with pytest.raises(TypeError, match=r"low_bit_state: .*`inner` .*got a function"):
        low_bit_state(optax.adam)


@pytest.mark.parametrize("bare", [True, False])
def test_a_state_of_something_else_is_refused(bare):
    params = example()
    inner = optax.adamw(1e-2)
    state = inner.init(params) if bare else optax_mp.mixed_precision(inner).init(params)
    with pytest.raises(TypeError, match=r"to be the LowBitState.*convert_opt_state"):
        base().update(params, state, params)


def test_a_state_of_other_bits_is_refused():
    params = example()
    match = r"low_bit_state: .* made with 8, got .* 16; .*convert_opt_state"
    with pytest.raises(ValueError, match=match):
        base().update(params, base(bits=16).init(params), params)


@mostly_slow(
    ("name", "steps", "sign"),
    [("adamw", 500, 1.0), ("adamw", 2800, -1.0), ("sgd", 2800, 1.0)],
    lambda name, steps, sign: steps == 500,
)
def test_a_weight_without_gradients_stays_where_float32_leaves_it(name, steps, sign):
    """Rare tokens and dead units, beside a neighbour that always has a gradient."""
    inner = {"adamw": optax.adamw(1.0, weight_decay=0.0), "sgd": EVERY["sgd"]()}[name]
    first = np.abs(np.random.default_rng(3).standard_normal((20, 64, 64)))
    late = np.zeros((64, 64))
    late[:, ::32] = 1.0

    def weights(tx):
        def step(carry, i):
            grads = jnp.where(i < 20, jnp.asarray(first, jnp.float32)[i % 20], late)
            updates, state = tx.update(sign * grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        start = jnp.zeros((64, 64))
        run = jax.jit(lambda c: jax.lax.scan(step, c, jnp.arange(steps))[0][0])
        return np.asarray(run((start, tx.init(start))), np.float64)

    rate = {"adamw": 1.0, "sgd": 1e-2}[name]
    off = (weights(low_bit_state(inner)) - weights(inner))[late == 0] / rate
    assert abs(off.mean()) < 5 * off.std() / np.sqrt(off.size)


def test_small_columns_are_resolved_beside_large_ones():
    """Over four decades: they share their scales."""
    rng = np.random.default_rng(0)
    sizes = 10.0 ** (-4 * rng.random(256))
    noise = rng.standard_normal((30, 64, 256)) + rng.standard_normal((64, 256))
    grads = (sizes * noise).astype(np.float32)
    adam = optax.adam(1e-3)

    @functools.partial(jax.jit, static_argnums=0)
    def run(tx):
        def step(carry, grads):
            updates, state = tx.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        start = jnp.zeros((64, 256))
        return jax.lax.scan(step, (start, tx.init(start)), grads)[0][0]

    exact = run(adam)
    error = run(low_bit_state(adam)) - exact
    assert jnp.linalg.norm(error) / jnp.linalg.norm(exact) < 0.15


def test_updates_are_differentiated_as_without_codes():
    """By the gradients of the step. What codes hand on to the next step has no slope."""
    params, grads = jnp.ones((64, 64)), jnp.linspace(-1, 1, 4096).reshape(64, 64)

    def slope(tx):
        state = tx.init(params)
        moved = lambda g: tx.update(g, state, params)[0].sum()  # noqa: E731
        return jax.grad(moved)(grads)

    adam = optax.adam(1e-2)
    want = slope(adam)
    assert float(jnp.abs(want).max()) > 1e-9
    np.testing.assert_array_equal(slope(low_bit_state(adam)), want)
