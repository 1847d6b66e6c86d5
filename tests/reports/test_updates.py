"""update_report against sums, casts and spacings of NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from slow_cases import mostly_slow

import optax_mp

DTYPES = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32"]
TINY = np.finfo(np.float32).tiny


def by_numpy(params, updates, dtype):
    """Return which elements move."""
    low, u = params.astype(dtype), updates.astype(np.float32)
    old = low.astype(np.float32)
    new = (old + u).astype(dtype).astype(np.float32)
    return new != old


def shares(report, path=None):
    return report.stalled(path), report.moved(path)


def expected(params, updates, dtype):
    moves = by_numpy(params, updates, dtype)
    other = updates.astype(np.float32) != 0
    return np.mean(~moves & other), np.mean(moves & other)


def numbers(dtype):
    """Return every number of a dtype between its extremes, or many, as float32."""
    size = 8 * jnp.dtype(dtype).itemsize
    if size == 32:
        bits = np.random.default_rng(0).integers(0, 2**32, 50_000, np.uint32)
    else:
        bits = np.arange(2**size, dtype=f"uint{size}")
    values = bits.view(jnp.dtype(dtype)).astype(np.float32)
    # Sums stay finite. XLA on CPU takes subnormal float32 for 0.
    largest = float(jnp.finfo(dtype).max) / 4
    return values[(np.abs(values) <= largest) & (np.abs(values) >= 2**30 * TINY)]


@mostly_slow("dtype", DTYPES, lambda dtype: dtype == "bfloat16")
@pytest.mark.parametrize("sign", [1, -1])
def test_updates_about_half_a_unit_are_told_apart_at_every_number(dtype, sign):
    params = numbers(dtype)
    half = np.spacing(np.abs(params.astype(jnp.dtype(dtype)))).astype(np.float32) / 2
    near = [half / 4, half / 2, np.nextafter(half, np.float32(0)), half]
    near += [np.nextafter(half, np.float32(np.inf)), 1.5 * half, 2 * half]
    for u in near:
        updates = np.float32(sign) * u
        low = params.astype(jnp.dtype(dtype))
        report = optax_mp.update_report(low, updates)
        assert shares(report) == expected(params, updates, jnp.dtype(dtype))
        assert report.zeros() == report.not_finite() == 0


@mostly_slow("dtype", ["float16", "float32"], lambda dtype: dtype == "float16")
def test_a_dtype_given_is_that_of_the_params(dtype):
    random = np.random.default_rng(1)
    params = random.normal(size=5000).astype(np.float32)
    updates = (params * np.exp2(random.uniform(-12, 1, 5000))).astype(np.float32)
    updates[:100] = 0
    report = jax.jit(
        lambda params, updates: optax_mp.update_report(params, updates, dtype=dtype)
    )(params, updates)
    assert shares(report) == expected(params, updates, jnp.dtype(dtype))
    assert report.zeros() == 0.02
    # As an optimizer gives them that sees 16-bit params.
    if dtype != "float32":
        low = params.astype(jnp.dtype(dtype))
        rounded = updates.astype(jnp.dtype(dtype))
        report = optax_mp.update_report(low, rounded)
        assert shares(report) == expected(params, rounded, jnp.dtype(dtype))


PARAMS = {
    "a": jnp.ones(4, jnp.bfloat16),
    "n": jnp.int32(1),
    "none": None,
    "w": jnp.ones(8),
}


def test_each_leaf_has_its_row_and_the_last_line_sums_up():
    updates = {"a": jnp.full(4, 1e-3), "n": None, "none": None, "w": jnp.full(8, 1e-3)}
    report = optax_mp.update_report(PARAMS, updates)
    assert report.paths == ("['a']", "['w']")
    assert report.stalled("['a']") == 1 and report.moved("['w']") == 1
    assert report.stalled() == 1 / 3
    lines = str(report).splitlines()
    assert lines[2].split() == ["['a']", "4", "0", "0", "100", "0"]
    assert lines[4].split() == ["all", "12", "0", "0", "33", "67"]
    assert lines[5:] == [
        "33% of the updates other than 0 do not move their param: lost without masters"
    ]
    still = optax_mp.update_report(PARAMS, jax.tree.map(jnp.zeros_like, PARAMS))
    assert str(still).splitlines()[5:] == [
        "no update is finite and other than 0",
        "masters keep what is 0 here; Split(8) and stochastic_rounding do on average",
    ]
    large = optax_mp.update_report(PARAMS["w"], PARAMS["w"])
    assert str(large).splitlines()[-1] == "every update other than 0 moves its param"


def test_bad_input_is_an_error_that_names_it():
    with pytest.raises(
        ValueError, match="`params` .*floating arrays .*, got a dict without"
    ):
        optax_mp.update_report({"n": jnp.arange(3)}, {"n": jnp.arange(3)})
    with pytest.raises(ValueError, match=r"update_report: `updates` and `params` must"):
        optax_mp.update_report({"a": jnp.ones(2)}, {"b": jnp.ones(2)})
    with pytest.raises(
        ValueError, match=r"the update of \['a'\] to .*, got float32\[3\]"
    ):
        optax_mp.update_report({"a": jnp.ones(2)}, {"a": jnp.ones(3)})
    with pytest.raises(ValueError, match="update_report: .*`dtype` to be .*, got int8"):
        optax_mp.update_report(jnp.ones(2), jnp.ones(2), dtype=jnp.int8)
    large = jax.ShapeDtypeStruct((2**17, 2**15), jnp.float32)
    with pytest.raises(ValueError, match=r"leaf .* float32\[131072,32768\]"):
        jax.eval_shape(optax_mp.update_report, large, large)


def test_reports_add_up():
    params = jnp.ones((5, 8), jnp.bfloat16)
    updates = jnp.full((5, 8), 1e-3).at[0].set(0)
    whole = optax_mp.update_report(params, updates)
    mapped = jax.vmap(optax_mp.update_report)(params, updates)
    assert shares(mapped) == shares(whole) == (0.8, 0)
    with pytest.raises(TypeError, match="UpdateReport: .*`counts`, got a traced"):
        jax.jit(lambda p, u: optax_mp.update_report(p, u).stalled())(params, updates)


@pytest.mark.parametrize("storage", [optax_mp.FullCopy(), optax_mp.Split(8)])
def test_masters_lose_no_update_and_the_report_tells_what_they_save(storage):
    params = {"w": jnp.linspace(0.5, 1.5, 64, dtype=jnp.bfloat16)}
    masked = {"w": optax.MaskedNode(), "v": jnp.ones(2)}
    assert optax_mp.update_report(params | {"v": jnp.ones(2)}, masked).paths == (
        "['v']",
    )
    grads = {"w": jnp.full(64, 0.1)}
    tx = optax_mp.mixed_precision(optax.sgd(1e-3), storage=storage)
    state = tx.init(params)
    for number in range(30):
        masters = optax_mp.master_params(state, params)
        updates, state = tx.update(grads, state, params)
        own = optax_mp.update_report(params, updates)
        params = optax.apply_updates(params, updates)
        change = jax.tree.map(
            jnp.subtract, optax_mp.master_params(state, params), masters
        )
        saved = optax_mp.update_report(masters, change, dtype="bfloat16")
        assert own.stalled() == 0 and own.zeros() + own.moved() == 1
        assert saved.stalled() == 1 or number
    assert own.zeros() > 0.5  # a master has not gone far enough
