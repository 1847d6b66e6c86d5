"""Products of 16-bit operands with float32 results: amp's word "low_f32"."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from amp_cases import normal, products

import optax_mp

RULES = optax_mp.default_amp_rules | {"dot_general": "low_f32"}
X, W = normal(256, 32), normal(32, 16, seed=1) / 6


def amp(fun, rules=RULES, **settings):
    return optax_mp.amp(fun, rules=rules, **settings)


def dtypes_of_products(fun, *args):
    """Return the dtypes of operands and result of each product."""
    found = products(jax.make_jaxpr(fun)(*args))
    return [tuple(map(str, (*x.inputs, *x.outputs))) for x in found]


def layers(w, x):
    def layer(x, w):
        return jax.nn.gelu(x @ w), None

    return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_operands_have_16_bits_and_results_are_float32(dtype):
    fun = amp(layers, compute_dtype=dtype)
    stack = np.stack([normal(32, 32, seed=i) / 6 for i in range(3)])
    for each, count in ((fun, 1), (jax.grad(fun, (0, 1)), 3)):
        found = dtypes_of_products(each, stack, X)
        assert found == [(dtype, dtype, "float32")] * count


def test_the_gradient_of_a_weight_is_summed_and_kept_in_float32():
    x = X.astype("bfloat16").astype("float32")
    weights = np.sign(normal(256, 16, seed=2))
    exact = x.astype("float64").T @ weights

    def error(rules):
        product = amp(jnp.matmul, rules)
        found = jax.jit(jax.grad(lambda w: jnp.sum(product(x, w) * weights)))(W)
        return np.abs(found - exact).max() / np.abs(exact).max()

    assert error(RULES) < 1e-6
    assert error(optax_mp.default_amp_rules) > 1e-3


def test_what_the_backward_pass_keeps_has_16_bits():
    def kept(fun, *args):
        pullback = jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args)
        return [(x.shape, str(x.dtype)) for x in jax.tree.leaves(pullback) if x.ndim]

    both = kept(amp(lambda w, x: x @ w), W, X)
    assert sorted(both) == sorted((x.shape, "bfloat16") for x in (X, W))
    # Of an operand that is not differentiated, nothing needs the other.
    assert kept(amp(lambda w: X @ w), W) == [(X.shape, "bfloat16")]


def test_it_is_for_products_of_a_scope_and_says_so_in_a_report():
    def fun(w, x):
        with jax.named_scope("last"):
            y = jnp.tanh(x @ w)
        return y @ w.T

    rules = optax_mp.default_amp_rules | {"last": "low_f32"}
    found = dtypes_of_products(amp(fun, rules), W, X)
    assert [result for _, _, result in found] == ["float32", "bfloat16"]
    report = optax_mp.amp_report(fun, W, X, rules=rules)
    ran = [x.ran for x in report.operations if x.primitive == "dot_general"]
    assert ran == ["low", "low"]
    with pytest.raises(ValueError, match="rule 'low_f32' for .*, got it for 'tanh'"):
        amp(fun, RULES | {"tanh": "low_f32"})


def test_another_rule_of_products_holds_in_a_derivative():
    fun = jax.custom_jvp(lambda w: jnp.tanh(X) @ w)
    fun.defjvps(lambda tangent, _, w: jnp.tanh(X) @ tangent)
    low = amp(fun, RULES | {"dot_general": "f32", "tanh": "low"})
    found = dtypes_of_products(jax.grad(lambda w: low(w).sum()), W)
    assert {dtype for dtypes in found for dtype in dtypes} == {"float32"}


def test_it_can_be_differentiated_twice_and_inside_rules():
    @jax.custom_jvp
    def square(w):
        return X @ w @ w.T

    @square.defjvp
    def rule(primals, tangents):
        (w,), (t,) = primals, tangents
        return square(w), X @ t @ w.T + X @ w @ t.T

    def twice(wrap, w):
        loss = wrap(lambda w: jnp.sum(jnp.tanh(square(w))))
        return jax.grad(lambda w: jnp.sum(jax.grad(loss)(w) ** 2))(w)

    got, want = jax.jit(lambda w: [twice(x, w) for x in (amp, lambda fun: fun)])(W)
    np.testing.assert_allclose(got, want, atol=0.03 * float(jnp.abs(want).max()))
    # Also of an operand in 16 bits.
    half = jax.eval_shape(lambda w: twice(amp, w), W.astype("bfloat16"))
    assert half.dtype == jnp.bfloat16
