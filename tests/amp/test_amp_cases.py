"""amp on every kind of function: dtypes, which operations are low, and numbers."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from amp_cases import (
    CASES,
    ROUNDING,
    SENSITIVE_IN_FLOAT16,
    UNTOUCHED,
    autocast,
    compiled,
    error,
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
# Functions that are also run by default, and not only traced.
RUN_BY_DEFAULT = "attention", "sharded", "custom_vjp"
# Operations of which a wrong derivative has the right dtypes. Those of loops and
# branches are in test_amp_transformations.py.
RUN_IF_SLOW = (
    "conv_net",
    "embedding",
    "ragged_dot",
    "cross_entropy",
    "remat_in_scan",
    "pallas",
    "fft",
    "sort_scatter_cumsum",
    "linear_solve",
)
# In float16, where few operations differ, those that have numbers or powers.
IN_FLOAT16 = "attention", "layer_norm", "rnn", "custom_vjp"
CHOICES = [(x, "bfloat16") for x in CASES] + [(x, "float16") for x in IN_FLOAT16]
each = mostly_slow(("name", "dtype"), CHOICES, lambda _, dtype: dtype == "bfloat16")


def gradient(fun):
    return jax.grad(fun, has_aux=True)


PROGRAMS = {
    "amp": lambda fun, dtype: autocast(fun, dtype),
    "grad(amp)": lambda fun, dtype: gradient(autocast(objective(fun), dtype)),
    "amp(grad)": lambda fun, dtype: autocast(gradient(objective(fun)), dtype),
}


@functools.cache
def traced(name, dtype, program):
    """Return the jaxpr of a program around a case, and what it returns."""
    fun = PROGRAMS[program](CASES[name].fun, dtype)
    return jax.make_jaxpr(fun, return_shape=True)(*CASES[name].arguments)


@each
def test_outputs_and_gradients_have_the_tree_shapes_and_dtypes_of_float32(name, dtype):
    fun, arguments, *_ = CASES[name]
    assert shapes(traced(name, dtype, "amp")[1]) == shapes(
        jax.eval_shape(fun, *arguments)
    )
    for program in ("grad(amp)", "amp(grad)"):
        gradients, _ = traced(name, dtype, program)[1]
        assert shapes(gradients) == shapes(arguments[0])


@each
def test_products_are_low(name, dtype):
    for program in PROGRAMS:
        found = products(traced(name, dtype, program)[0])
        high = [o for o in found if not runs_in(o, dtype)]
        expected = CASES[name].float32_products[program != "amp"]
        text = "\n".join(str(o.equation) for o in high)
        assert len(high) == expected, f"{program}: {text}"
        assert all(runs_in(o, jnp.float32) for o in high)
        assert len(found) > expected


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", ["highest_precision", "linear_solve"])
def test_products_with_highest_precision_stay_as_written(name, program):
    found = products(traced(name, "bfloat16", program)[0], highest=True)
    assert found
    assert all(runs_in(o, jnp.float32) for o in found)


@each
def test_no_sensitive_operation_reads_the_compute_dtype(name, dtype):
    for program in ("amp", "amp(grad)"):
        jaxpr, _ = traced(name, dtype, program)
        low = [o for o in operations(jaxpr) if is_sensitive(o, dtype)]
        text = "\n".join(f"{o.scopes}: {o.equation}" for o in low)
        assert not low, f"{program}: {text}"


@pytest.mark.parametrize(
    ("name", "dtype"),
    # bfloat16 has the range of float32.
    [
        (name, "float16" if name in SENSITIVE_IN_FLOAT16 else "bfloat16")
        for name in OPERATIONS
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


@pytest.mark.parametrize("program", ["grad(amp)", "amp(grad)"])
@pytest.mark.parametrize("name", ["custom_vjp", "custom_jvp"])
def test_a_derivative_rule_of_the_user_is_autocast(name, program):
    jaxpr, _ = traced(name, "bfloat16", program)
    inside = [o for o in operations(jaxpr) if "own_rule" in o.scopes]
    assert {"exp", "log1p"} <= {o.name for o in inside}
    assert not any(is_sensitive(o, "bfloat16") for o in inside)


@pytest.mark.parametrize("name", UNTOUCHED)
def test_a_function_with_nothing_to_change_is_left_alone(name):
    fun, arguments, *_ = UNTOUCHED[name]
    before, after = (
        # Derivative rules print as functions at an address.
        re.sub("<.*?>|0x[0-9a-f]+", "", str(jax.make_jaxpr(f)(*arguments)))
        for f in (fun, autocast(fun))
    )
    assert after == before


def test_the_result_for_a_python_number_follows_other_dtypes():
    result = jax.eval_shape(autocast(jnp.sin), 2.0)
    assert result.weak_type and result.dtype == jnp.float32


@mostly_slow(
    ("name", "dtype"),
    [(x, "bfloat16") for x in (*RUN_BY_DEFAULT, *RUN_IF_SLOW)]
    + [("layer_norm", "float16"), ("rnn", "float16")],
    lambda name, _: name in RUN_BY_DEFAULT,
)
def test_outputs_and_gradients_agree_with_float32(name, dtype):
    fun, arguments, _, *roundings = CASES[name]
    written = objective(fun)
    # One program, so that what both have in common is compiled once.
    programs = [
        jax.value_and_grad(f, has_aux=True) for f in (autocast(written, dtype), written)
    ]
    got, want = compiled(lambda *args: [f(*args) for f in programs], *arguments)(
        *arguments
    )
    (_, outputs), gradients = got
    (_, expected_outputs), expected_gradients = want
    assert shapes(outputs) == shapes(expected_outputs)
    for_outputs, for_gradients = (x * ROUNDING[dtype] for x in roundings)
    assert error(outputs, expected_outputs) < for_outputs
    assert error(gradients, expected_gradients) < for_gradients


def test_float64_products_are_low_and_return_float64(x64):
    fun, arguments, *_ = CASES["mlp"]
    arguments = jax.tree.map(lambda x: x.astype("float64"), arguments)
    scalar = autocast(lambda *args: jnp.sum(fun(*args)))
    jaxpr, (value, gradients) = jax.make_jaxpr(
        jax.value_and_grad(scalar), return_shape=True
    )(*arguments)
    assert all(runs_in(o, "bfloat16") for o in products(jaxpr))
    assert {x.dtype.name for x in jax.tree.leaves((value, gradients))} == {"float64"}
