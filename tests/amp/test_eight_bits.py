"""Products in 8 bits: their numbers, against NumPy and ml_dtypes."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from amp_cases import normal
from slow_cases import mostly_slow

import optax_mp
from optax_mp.autocast import _eight_bits

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
BF16 = ml_dtypes.bfloat16
FORMATS = {"float8_e4m3fn": E4M3, "float8_e5m2": E5M2}


@pytest.fixture(autouse=True)
def any_shape(monkeypatch):
    """Let small products run in 8 bits."""
    monkeypatch.setattr(_eight_bits, "SMALLEST", 1)
    monkeypatch.setattr(_eight_bits, "MULTIPLE", 1)


def rounded(x, dtype=E4M3):
    """Return an array rounded to 8 bits with a scale, in float64."""
    x = np.asarray(x).astype(np.float32)
    largest = np.abs(x[np.isfinite(x)]).max(initial=0).astype(np.float64)
    limit = float(ml_dtypes.finfo(dtype).max)
    power = np.floor(np.log2(limit / largest)) if largest else 0
    scale = 2.0 ** np.clip(power, -126, 126)
    # Exact: a power of two.
    return (x * np.float32(scale)).astype(dtype).astype(np.float64) / scale


def low(*shape, seed=0):
    return normal(*shape, seed=seed).astype(BF16)


def in_8_bits(fun, dtype="float8_e4m3fn"):
    return optax_mp.amp(fun, compute_dtype=dtype)


def assert_close(got, want, rel=2**-8):
    """Compare with sums in float64, rounded to bfloat16 once."""
    got, want = np.asarray(got, np.float64), np.asarray(want)
    np.testing.assert_allclose(got, want, rtol=rel, atol=1e-6 * np.abs(want).max())


# Rounding

SAMPLES = {
    "normal": normal(64, 16),
    "16 bits": low(64, 16),
    "wide": normal(64, 16) * np.exp(8 * normal(64, 16, seed=1)),
    "powers of two": np.float32(2.0) ** np.arange(-20, 20),
    "halfway": np.float32([448, 17, 19, 21, 23, 1.0625, 1.1875, 0.00146484375]),
    "largest": np.float32([3.4e38, -1.0, 1e30]),
    "smallest": np.float32([1.2e-38, -3e-38]),
    "zeros": np.zeros(5, np.float32),
    "one": np.float32([-3.0]),
}


@mostly_slow(
    ("sample", "name"),
    itertools.product(SAMPLES, FORMATS),
    lambda sample, name: name == "float8_e4m3fn",
)
def test_rounding_is_that_of_numpy_with_a_power_of_two(sample, name):
    x = SAMPLES[sample]
    if jax.__version_info__ < (0, 6) and sample in ("normal", "wide"):
        pytest.skip("XLA rounded float32 to 8 bits by way of float16")
    values, unit = _eight_bits.round_to(jnp.asarray(x), jnp.dtype(name))
    assert values.dtype == name
    assert np.frexp(np.float32(unit))[0] == 0.5
    got = np.asarray(values).astype(np.float64) * np.float64(unit)
    np.testing.assert_array_equal(got, rounded(x, FORMATS[name]))


# Products, forward and backward

SPECS = {
    "matrices": ("ij,jk->ik", (8, 16), (16, 4)),
    "odd": ("ij,jk->ik", (3, 7), (7, 5)),
    "one": ("ij,jk->ik", (1, 1), (1, 1)),
    "transposed": ("ji,kj->ik", (16, 8), (4, 16)),
    "vector": ("ij,j->i", (6, 5), (5,)),
    "inner": ("i,i->", (9,), (9,)),
    "outer": ("i,j->ij", (3,), (4,)),
    "batch": ("bij,bjk->bik", (3, 4, 5), (3, 5, 2)),
    "attention": ("bqhd,bkhd->bhqk", (2, 5, 3, 4), (2, 6, 3, 4)),
    "two contracted": ("bij,ijk->bk", (3, 4, 5), (4, 5, 6)),
}


@mostly_slow(
    ("spec", "jit"),
    itertools.product(SPECS, [False, True]),
    lambda spec, jit: jit and spec in ("matrices", "odd", "attention"),
)
def test_a_product_and_its_gradients_are_those_of_rounded_operands(spec, jit):
    form, left_shape, right_shape = SPECS[spec]
    inputs, output = form.split("->")
    a, b = inputs.split(",")
    left, right = low(*left_shape, seed=1), low(*right_shape, seed=2)

    def fun(left, right):
        return jnp.einsum(form, left, right)

    program = jax.jit(in_8_bits(fun)) if jit else in_8_bits(fun)
    args = left.astype(np.float32), right.astype(np.float32)
    got, pull = jax.vjp(program, *args)
    assert_close(got, np.einsum(form, rounded(left), rounded(right)))
    cotangent = low(*got.shape, seed=3)
    grad_left, grad_right = pull(jnp.asarray(cotangent, jnp.float32))
    g = rounded(cotangent, E5M2)
    assert_close(grad_left, np.einsum(f"{output},{b}->{a}", g, rounded(right)))
    assert_close(grad_right, np.einsum(f"{output},{a}->{b}", g, rounded(left)))
    assert grad_left.dtype == grad_right.dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_params_in_16_bits_are_multiplied_in_8(dtype):
    left, right = normal(4, 8).astype(dtype), normal(8, 4, seed=1).astype(dtype)
    got = in_8_bits(jnp.matmul)(left, right)
    assert got.dtype == dtype
    assert_close(got, rounded(left) @ rounded(right))
    wide = in_8_bits(lambda x, y: jnp.matmul(x, y, preferred_element_type="float32"))
    assert_close(wide(left, right), rounded(left) @ rounded(right), rel=1e-6)
    assert wide(left, right).dtype == jnp.float32
    grads = jax.grad(lambda *x: jnp.sum(in_8_bits(jnp.matmul)(*x)), (0, 1))(left, right)
    assert [x.dtype.name for x in grads] == [dtype, dtype]


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_reaches_the_result_and_the_gradients(bad):
    left, right = (x.astype(np.float32) for x in (low(4, 8), low(8, 4, seed=1)))
    left[1, 2] = bad
    value, pull = jax.vjp(in_8_bits(jnp.matmul), left, right)
    assert not np.isfinite(np.asarray(value)[1]).any()
    # The scale, and so the rest, is that of what is finite.
    expected = rounded(np.where(np.isfinite(left), left, 0)) @ rounded(right)
    assert_close(np.delete(value, 1, 0), np.delete(expected, 1, 0))
    grad_left, grad_right = pull(jnp.ones((4, 4)))
    assert np.isfinite(grad_left).all()
    assert not np.isfinite(np.asarray(grad_right)[2]).any()
    bad_gradient = jnp.ones((4, 4)).at[0, 0].set(bad)
    assert not np.isfinite(pull(bad_gradient)[0]).all()


def test_a_loss_scale_skips_the_step_of_an_overflow():
    tx = optax_mp.dynamic_loss_scale(optax.sgd(0.1))
    params = {"w": jnp.asarray(normal(8, 8))}
    state = tx.init(params)

    @in_8_bits
    def loss(params, x):
        return jnp.sum(x @ params["w"])

    for x, skipped in ((jnp.ones((4, 8)), 0), (jnp.full((4, 8), jnp.inf), 1)):
        _, grads = optax_mp.value_and_grad(loss)(state, params, x)
        _, state = tx.update(grads, state, params)
        assert state.total_skipped_count == skipped


# What is kept, and derivatives of other kinds


def kept(fun, *args):
    pull = jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args)
    return [x.dtype.name for x in jax.tree.leaves(pull) if x.ndim]


def test_only_8_bits_are_kept_for_the_backward_pass():
    w, x = normal(8, 8), normal(4, 8)
    assert set(kept(in_8_bits(jnp.matmul), x, w)) == {"float8_e4m3fn"}


@mostly_slow("dtype", ["bfloat16", "float16"], lambda dtype: dtype == "bfloat16")
def test_a_policy_of_checkpoint_that_keeps_products_keeps_these(dtype):
    rules = optax_mp.default_amp_rules | {"dot_general": "f8"}
    fun = optax_mp.amp(lambda w: jnp.tanh(w @ w), compute_dtype=dtype, rules=rules)
    policy = jax.checkpoint_policies.dots_saveable
    fun, w = jax.checkpoint(fun, policy=policy), jnp.asarray(normal(8, 8))

    def gradient(w):
        return jax.grad(lambda w: jnp.sum(fun(w)))(w)

    # One forward and two backward: none is computed again.
    assert str(jax.make_jaxpr(gradient)(w)).count("dot_general[") == 3
    wide = {"bfloat16": "bfloat16", "float16": "float32"}  # unscaled, it has no room
    assert set(kept(fun, w)) == {wide[dtype], "float32"}


SECOND_DERIVATIVES = {
    "jvp of grad": lambda f: lambda w: jax.jvp(jax.grad(f), (w,), (w,)),
    "grad of grad": lambda f: jax.grad(lambda w: jnp.sum(jax.grad(f)(w) ** 2)),
    "jacrev of jacrev": lambda f: jax.jacrev(jax.jacrev(f)),
}


@mostly_slow("name", SECOND_DERIVATIVES, lambda name: "of grad" in name)
def test_a_second_derivative_is_refused_with_what_to_do(name):
    fun = in_8_bits(lambda w: jnp.sum(jnp.tanh(w @ w)))
    with pytest.raises(NotImplementedError, match=r"expected one deriv.*'not_f8'"):
        SECOND_DERIVATIVES[name](fun)(normal(4, 4))


# Accuracy


@pytest.mark.parametrize(
    ("name", "share"),
    list(itertools.product(FORMATS, (0.0, 0.01))),
)
def test_the_error_of_a_product_is_that_of_one_rounding(name, share):
    random = np.random.default_rng(0)
    x, w = normal(128, 128), normal(128, 128, seed=1)
    x = np.where(random.random(x.shape) < share, 50 * x, x)  # outliers
    got = np.asarray(in_8_bits(jnp.matmul, name)(x, w))
    digits = {"float8_e4m3fn": 4, "float8_e5m2": 3}[name]
    assert np.linalg.norm(got - x @ w) < 2.0**-digits * np.linalg.norm(x @ w)
