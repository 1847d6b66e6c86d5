"""What the package claims of bits, small enough for an emulated CPU.

    python tests/support/bit_claims.py      # a line for each claim: holds, and a digest

Each claim compares with NumPy, with bare optax in one process, or with the arrays
before. Two CPUs whose digests are equal computed the same bits. `tests/arm.sh` runs
this file on an emulated ARM CPU, and for older x86 CPUs.
"""

import os
import warnings
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from reference import (
    LossScaleRule,
    follow,
    join,
    line_codes,
    line_scales,
    remainder,
    rounded,
)

import optax_mp

SHAPES = {"w": (128, 64), "b": (64,)}
FORMATS = (
    *("bfloat16", "float16", "float8_e4m3fn", "float8_e4m3", "float8_e5m2"),
    *("float8_e3m4", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"),
)
INNERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=32),
}


def arrays(seed, scale=1.0):
    """Return a float32 tree, the same on every machine."""
    random = np.random.default_rng(seed)
    return {
        name: np.float32(scale) * random.standard_normal(shape, np.float32)
        for name, shape in SHAPES.items()
    }


def equal(found, expected):
    """Raise unless two trees have the same bits."""
    both = (jax.tree.leaves(x) for x in (found, expected))
    for a, b in zip(*both, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes(), f"{(a != b).sum()} of {a.size} differ"


def rounding():
    """Params are masters rounded to nearest even, for all patterns of 16 bits."""
    halves = np.arange(2**16, dtype=np.uint32)
    points = [halves << 16, halves << 16 | 0x8000, halves << 16 | 0x7FFF]
    x = np.concatenate([*points, halves << 16 | 0x8001]).view(np.float32)
    # Subnormals are no promise, and NaN has many patterns.
    x = x[(np.abs(x) >= 2.0**-126) & np.isfinite(x)]
    made = []
    for dtype in map(jnp.dtype, FORMATS):
        # With `tests/conftest.py`'s settings XLA makes a NaN of -0.0 in "fnuz" formats, and
        # JAX 0.8 rounds to "e5m2" twice; as XLA ships, both are right.
        is_quick = "emitters" in os.environ.get("XLA_FLAGS", "")
        if is_quick and dtype.name.endswith(("fnuz", "e5m2")):
            continue
        param = jax.jit(lambda x, to=dtype: optax_mp.cast_floating(x, to))(x)
        inside = np.abs(x) <= float(ml_dtypes.finfo(dtype).max)
        found = np.asarray(param).astype(np.float32)
        expected = rounded(x, dtype).astype(np.float32)
        equal(found[inside], expected[inside])
        made.append(np.asarray(param).view(f"u{dtype.itemsize}")[inside])
    return made


def masters(inner):
    """Masters and states are bare optax's, and params are masters rounded."""
    weights, tx = arrays(0), optax_mp.mixed_precision(inner)
    params = optax_mp.cast_floating(weights, jnp.bfloat16)
    start = optax_mp.cast_floating(params, jnp.float32)
    state, bare_state, bare = tx.init(params), inner.init(start), start

    @jax.jit
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def bare_step(grads, state, params):
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for seed in range(3):
        grads = arrays(1 + seed, 0.1)
        params, state = step(grads, state, params)
        bare, bare_state = bare_step(grads, bare_state, bare)
    equal(state.inner_state, bare_state)
    equal(optax_mp.master_params(state, params), bare)
    equal(params, {k: rounded(x, "bfloat16") for k, x in jax.device_get(bare).items()})
    return state, params


def split(bits):
    """A master is its param and a remainder, as in NumPy."""
    patterns = np.random.default_rng(0).integers(0, 2**32, 2**16, np.uint32)
    master = patterns.view(np.float32)
    # Up to half a unit above the largest bfloat16, where params saturate.
    size = np.abs(master)
    master = master[(size >= 2.0**-126) & (size < np.float32(3.3961775e38))]
    tx = optax_mp.mixed_precision(optax.sgd(0.0), storage=optax_mp.Split(bits))
    param = follow(master, "bfloat16", bits)
    state = jax.jit(tx.init)(param)
    state = jax.jit(optax_mp.replace_master_params)(state, param, master)
    stored = np.asarray(state.master_params)
    equal(stored, remainder(master, param, bits))
    found = np.asarray(jax.jit(optax_mp.master_params)(state, param))
    equal(found, join(param, stored))
    if bits == 16:
        equal(found, master)
    return stored, found


def codes():
    """Codes and scales of a moment are NumPy's."""
    random = np.random.default_rng(5)
    x = random.standard_normal((256, 256), np.float32)
    x *= np.float32(2.0) ** -(np.arange(256, dtype=np.float32)[::-1] ** 0.5)
    tx = optax_mp.low_bit_state(optax.trace(0.9), min_size=1)
    zeros = np.zeros_like(x)
    _, state = jax.jit(tx.update)(x, tx.init(zeros), zeros)
    made = state.inner_state.trace
    scales = line_scales(x, (256, 1))
    equal(made.scales, scales)
    # Codes are rounded up or down at random, so that they are right on average.
    off = np.asarray(made.codes).astype(int) - line_codes(x, scales, "int8")
    assert np.abs(off).max() <= 1, f"off by {np.abs(off).max()}"
    return made


def random_rounding():
    """Stochastic rounding gives a neighbour, the same for a seed on every machine."""
    params = optax_mp.cast_floating(arrays(0), jnp.bfloat16)
    tx = optax_mp.stochastic_rounding(optax.sgd(1.0), seed=7)
    grads = arrays(1, 1e-3)
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    found = jax.device_get(jax.jit(optax.apply_updates)(params, updates))
    for name, param in jax.device_get(params).items():
        exact = param.astype(np.float32) - grads[name]
        below = exact.view(np.uint32) & 0xFFFF0000
        size = found[name].astype(np.float32).view(np.uint32)
        assert np.isin(size - below, (0, 0x10000)).all()
    return found, state


def loss_scale():
    """The scale moves by powers of two, and a skipped step keeps every bit."""
    tx = optax_mp.dynamic_loss_scale(
        optax_mp.mixed_precision(optax.adamw(1e-2)), growth_interval=3
    )
    params = optax_mp.cast_floating(arrays(0), jnp.float16)
    state, update, rule = tx.init(params), jax.jit(tx.update), LossScaleRule(2.0**16, 3)
    apply = jax.jit(optax.apply_updates)
    for number, is_finite in enumerate([1, 0, 1, 1, 1, 0, 0, 1]):
        grads = arrays(number, 100.0)
        if not is_finite:
            grads["b"][3] = np.inf
        before = jax.device_get((params, state.inner_state))
        updates, state = update(grads, state, params)
        params = apply(params, updates)
        rule.step("." if is_finite else "x")
        equal(state.scale, rule.scale)
        if not is_finite:
            equal((params, state.inner_state), before)
    return params, state


CLAIMS = {
    "rounding to 9 formats": rounding,
    **{f"masters, {name}": lambda of=of: masters(of()) for name, of in INNERS.items()},
    "Split(16)": lambda: split(16),
    "Split(8)": lambda: split(8),
    "codes, scales": codes,
    "stochastic rounding": random_rounding,
    "loss scale, skipped steps": loss_scale,
}


def digest(tree):
    """Return a short number of all bits of a tree."""
    sum_of_bits = 0
    for leaf in jax.tree.leaves(jax.device_get(tree)):
        sum_of_bits = zlib.crc32(np.asarray(leaf).tobytes(), sum_of_bits)
    return f"{sum_of_bits:08x}"


def main():
    """Print each claim."""
    warnings.simplefilter("ignore")  # nobody scaled these gradients
    for name, claim in CLAIMS.items():
        try:
            word = f"holds {digest(claim())}"
        except Exception as error:
            word = f"fails {type(error).__name__}: {str(error).splitlines()[0][:60]}"
        print(f"{name:28}{word}", flush=True)


if __name__ == "__main__":
    main()
