"""amp on every kind of function: dtypes, which operations are low, and numbers."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from amp_cases import (
    CASES,
    DERIVATIVES,
    ROUNDING,
    SENSITIVE_IN_FLOAT16,
    UNTOUCHED,
    autocast,
    compiled,
    error,
    in_both,
    is_sensitive,
    objective,
    operations,
    products,
    runs_in,
    shapes,
)
from jax import lax
from slow_cases import mostly_slow

UNARY = (
    "acos acosh asin asinh atan atanh cosh cumlogsumexp cumprod cumsum digamma erf_inv "
    "exp exp2 expm1 lgamma log log1p rsqrt sinh square tan"
)
OPERATIONS = {name: getattr(lax, name) for name in UNARY.split()} | {
    "div": lambda x: 1.0 / x,
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "pow": lambda x: lax.pow(x, 1.5),
    "reduce_prod": lambda x: jnp.prod(x, axis=0),
    "reduce_sum": lambda x: jnp.sum(x, axis=0),
    "reduce_window_sum": lambda x: lax.reduce_window(
        x, 0.0, lax.add, (2, 2), (1, 1), "VALID"
    ),
}
DTYPES = ["bfloat16", "float16"]
# Functions that are also run by default, and not only traced.
RUN_BY_DEFAULT = {"attention", "conv_net", "cond", "sharded", "custom_vjp", "pallas"}
# In float16, where few operations differ, those that have numbers or powers.
IN_FLOAT16 = {"attention", "layer_norm", "conv_net", "rnn", "custom_vjp", "custom_jvp"}
CHOICES = [(x, y) for x in CASES for y in DTYPES if y == "bfloat16" or x in IN_FLOAT16]
each = mostly_slow(("name", "dtype"), CHOICES, lambda _, dtype: dtype == "bfloat16")
run_in_both = mostly_slow(
    ("name", "dtype"),
    CHOICES,
    lambda name, dtype: name in RUN_BY_DEFAULT and dtype == "bfloat16",
)


def gradient(fun):
    return jax.grad(fun, has_aux=True)


PROGRAMS = {
    "amp": lambda fun, dtype: autocast(fun, dtype),
    "grad(amp)": lambda fun, dtype: gradient(autocast(objective(fun), dtype)),
    "amp(grad)": lambda fun, dtype: autocast(gradient(objective(fun)), dtype),
}
in_every_program = pytest.mark.parametrize("program", PROGRAMS)


@functools.cache
def traced(name, dtype, program):
    """Return the jaxpr of a program around a case, and what it returns."""
    fun = PROGRAMS[program](CASES[name].fun, dtype)
    return jax.make_jaxpr(fun, return_shape=True)(*CASES[name].arguments)


@functools.cache
def results(name, dtype=None):
    """Return the outputs of a case and its gradient, in float32 or by amp."""
    fun = objective(CASES[name].fun)
    fun = autocast(fun, dtype) if dtype else fun
    arguments = CASES[name].arguments
    program = jax.value_and_grad(fun, has_aux=True)
    (_, outputs), gradients = compiled(program, *arguments)(*arguments)
    return outputs, gradients


@each
def test_outputs_have_the_tree_shapes_and_dtypes_of_the_function(name, dtype):
    fun, arguments, *_ = CASES[name]
    assert shapes(traced(name, dtype, "amp")[1]) == shapes(
        jax.eval_shape(fun, *arguments)
    )


@pytest.mark.parametrize("program", ["grad(amp)", "amp(grad)"])
@each
def test_gradients_have_the_dtypes_of_the_params(name, dtype, program):
    gradients, _ = traced(name, dtype, program)[1]
    assert shapes(gradients) == shapes(CASES[name].arguments[0])


@in_every_program
@each
def test_products_are_low(name, dtype, program):
    found = products(traced(name, dtype, program)[0])
    high = [o for o in found if not runs_in(o, dtype)]
    expected = CASES[name].float32_products[program != "amp"]
    assert len(high) == expected, "\n".join(str(o.equation) for o in high)
    assert all(runs_in(o, jnp.float32) for o in high)
    assert len(found) > expected


@in_every_program
@in_both
@pytest.mark.parametrize("name", ["highest_precision", "linear_solve"])
def test_products_with_highest_precision_stay_as_written(name, dtype, program):
    found = products(traced(name, dtype, program)[0], highest=True)
    assert found
    assert all(runs_in(o, jnp.float32) for o in found)


@pytest.mark.parametrize("program", ["amp", "amp(grad)"])
@each
def test_no_sensitive_operation_reads_the_compute_dtype(name, dtype, program):
    jaxpr, _ = traced(name, dtype, program)
    low = [o for o in operations(jaxpr) if is_sensitive(o, dtype)]
    assert not low, "\n".join(f"{o.scopes}: {o.equation}" for o in low)


@pytest.mark.parametrize(
    ("name", "dtype"),
    # bfloat16 has the range of float32.
    [
        (name, dtype)
        for name in OPERATIONS
        for dtype in DTYPES
        if not (name in SENSITIVE_IN_FLOAT16 and dtype == "bfloat16")
    ],
)
def test_a_sensitive_operation_on_a_low_product_runs_in_float32(name, dtype):
    def fun(x, w):
        # The product at the end keeps the result from being wanted in float32.
        y = OPERATIONS[name](x @ w)
        return jnp.atleast_2d(y) @ jnp.ones((y.shape[-1], 3))

    jaxpr = jax.make_jaxpr(autocast(fun, dtype))(
        np.ones((4, 8), "f"), np.eye(8, dtype="f")
    )
    found = [o for o in operations(jaxpr) if o.name == name]
    assert found
    for o in found:
        assert set(map(jnp.dtype, o.inputs + o.outputs)) == {jnp.dtype("float32")}


@each
def test_only_derivatives_by_jax_read_the_compute_dtype_in_sensitive_operations(
    name, dtype
):
    jaxpr, _ = traced(name, dtype, "grad(amp)")
    differentiated = {
        o.name
        for o in operations(traced(name, dtype, "amp")[0])
        if any(d == dtype for d in o.inputs)
    }
    allowed = set().union(*(DERIVATIVES.get(n, ()) for n in differentiated))
    low = [
        o
        for o in operations(jaxpr)
        if is_sensitive(o, dtype)
        # The transpose of a broadcast is a sum.
        and not (o.name == "reduce_sum" and "transpose(" in o.scopes)
        and o.name not in allowed
    ]
    assert not low, "\n".join(f"{o.scopes}: {o.equation}" for o in low)


@pytest.mark.parametrize("program", ["grad(amp)", "amp(grad)"])
@in_both
@pytest.mark.parametrize("name", ["custom_vjp", "custom_jvp"])
def test_a_derivative_rule_of_the_user_is_autocast(name, dtype, program):
    jaxpr, _ = traced(name, dtype, program)
    inside = [o for o in operations(jaxpr) if "own_rule" in o.scopes]
    assert {"exp", "log1p"} <= {o.name for o in inside}
    assert not any(is_sensitive(o, dtype) for o in inside)


@in_both
@pytest.mark.parametrize("name", UNTOUCHED)
def test_a_function_with_nothing_to_change_is_left_alone(name, dtype):
    fun, arguments, *_ = UNTOUCHED[name]
    before, after = (
        # Derivative rules print as functions at an address.
        re.sub("<.*?>|0x[0-9a-f]+", "", str(jax.make_jaxpr(f)(*arguments)))
        for f in (fun, autocast(fun, dtype))
    )
    assert after == before


def test_the_result_for_a_python_number_follows_other_dtypes():
    result = autocast(jnp.sin, "bfloat16")(2.0)
    assert result.weak_type and (result * jnp.ones(3, "bfloat16")).dtype == "bfloat16"


@run_in_both
def test_outputs_agree_with_float32(name, dtype):
    allowed = CASES[name].output_roundings * ROUNDING[dtype]
    got, want = results(name, dtype)[0], results(name)[0]
    assert shapes(got) == shapes(want)
    assert error(got, want) < allowed


@run_in_both
def test_gradients_agree_with_float32(name, dtype):
    allowed = CASES[name].gradient_roundings * ROUNDING[dtype]
    assert error(results(name, dtype)[1], results(name)[1]) < allowed


@in_both
def test_float64_products_are_low_and_return_float64(x64, dtype):
    fun, arguments, *_ = CASES["mlp"]
    arguments = jax.tree.map(lambda x: x.astype("float64"), arguments)
    scalar = autocast(lambda *args: jnp.sum(fun(*args)), dtype)
    jaxpr, (value, gradients) = jax.make_jaxpr(
        jax.value_and_grad(scalar), return_shape=True
    )(*arguments)
    assert all(runs_in(o, dtype) for o in products(jaxpr))
    assert {x.dtype.name for x in jax.tree.leaves((value, gradients))} == {"float64"}
