"""Products of 16-bit operands with float32 results: amp's word "low_f32"."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from amp_cases import normal, operations

import optax_mp

RULES = optax_mp.default_amp_rules | {"dot_general": "low_f32"}
X, W = normal(256, 32), normal(32, 16, seed=1) / 6


def amp(fun, rules=RULES, **settings):
    return optax_mp.amp(fun, rules=rules, **settings)


def dtypes_of_products(fun, *args):
    """Return the dtypes of operands and result of each product."""
    found = operations(jax.make_jaxpr(fun)(*args))
    return [
        tuple(
            x.aval.dtype.name for x in (*each.equation.invars, *each.equation.outvars)
        )
        for each in found
        if each.equation.primitive.name == "dot_general"
    ]


def layers(w, x):
    def layer(x, w):
        return jax.nn.gelu(x @ w), None

    return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_operands_have_16_bits_and_results_are_float32(dtype):
    def one(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    stack = jnp.stack([normal(32, 32, seed=i) / 6 for i in range(3)])
    for fun, w in ((one, W), (layers, stack)):
        fun = amp(fun, compute_dtype=dtype)
        for each in (fun, jax.grad(fun, (0, 1))):
            found = dtypes_of_products(each, w, X)
            assert set(found) == {(dtype, dtype, "float32")}
        assert len(found) == 3


def test_the_gradient_of_a_weight_is_summed_and_kept_in_float32():
    x = X.astype(jnp.bfloat16).astype(jnp.float32)
    weights = jnp.sign(normal(256, 16, seed=2))

    def fun(w, x):
        return jnp.sum((x @ w) * weights)

    exact = np.asarray(x, np.float64).T @ np.asarray(weights, np.float64)

    def error(rules):
        found = jax.jit(jax.grad(amp(fun, rules)))(W, x)
        assert found.dtype == jnp.float32
        return np.abs(found - exact).max() / np.abs(exact).max()

    assert error(RULES) < 1e-6
    assert error(optax_mp.default_amp_rules) > 1e-3


def test_what_the_backward_pass_keeps_has_16_bits():
    kept = jax.tree.leaves(jax.vjp(amp(lambda w, x: x @ w), W, X)[1])
    assert {x.dtype.name for x in kept if x.ndim} == {"bfloat16"}
    # Of an operand that is not differentiated, nothing needs the other.
    kept = jax.tree.leaves(jax.vjp(lambda w: amp(lambda w: X @ w)(w), W)[1])
    assert {x.shape for x in kept if x.ndim} == {X.shape}


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


def test_operands_in_16_bits_keep_their_gradients_dtype():
    fun = amp(lambda w, x: jnp.sum(jnp.tanh(x @ w.astype(jnp.float32))))
    grad = jax.grad(fun)(W.astype(jnp.bfloat16), X)
    assert grad.dtype == jnp.bfloat16


def test_it_can_be_differentiated_twice_and_inside_rules():
    fun = amp(lambda w: jnp.sum(jnp.tanh(X @ w)))
    twice = jax.grad(lambda w: jnp.sum(jax.grad(fun)(w) ** 2))(W)
    wanted = jax.grad(
        lambda w: jnp.sum(jax.grad(lambda w: jnp.sum(jnp.tanh(X @ w)))(w) ** 2)
    )(W)
    np.testing.assert_allclose(twice, wanted, atol=0.03 * float(jnp.abs(wanted).max()))

    @jax.custom_jvp
    def square(w):
        return X @ w @ w.T

    @square.defjvp
    def rule(primals, tangents):
        (w,), (t,) = primals, tangents
        return square(w), X @ t @ w.T + X @ w @ t.T

    grad = jax.grad(amp(lambda w: jnp.sum(jnp.tanh(square(w)))))(W)
    wanted = jax.grad(lambda w: jnp.sum(jnp.tanh(square(w))))(W)
    np.testing.assert_allclose(grad, wanted, atol=0.03 * float(jnp.abs(wanted).max()))
