"""What masters promise, of masters with codes and of params that are rounded at random."""

import itertools

import optax
import pytest
from promises import (
    ADAMW,
    by_jax,
    by_value_and_grad,
    check_a_python_float_is_a_param,
    check_a_skipped_step_moves_nothing,
    check_a_state_shares_no_buffer,
    check_infinite_masters_make_params_infinite,
    check_infinite_params_stay,
    check_integer_params_stay,
    check_params_are_read_where_no_masters_are,
    check_there_is_no_conditional,
    masked_params,
)
from slow_cases import mostly_slow

from optax_mp import Split, low_bit_state, mixed_precision, stochastic_rounding


def compact(inner):
    return mixed_precision(low_bit_state(inner, min_size=1), storage=Split(8))


@mostly_slow(
    ("form", "where", "jitted"),
    itertools.product(
        (compact, stochastic_rounding), ("link", "around"), (True, False)
    ),
    lambda form, where, jitted: where == "link" and jitted,
)
def test_in_a_skipped_step_nothing_moves(form, where, jitted):
    check_a_skipped_step_moves_nothing(form(ADAMW), where, jitted)


@pytest.mark.parametrize("form", [compact, stochastic_rounding])
def test_no_step_has_a_conditional(form):
    check_there_is_no_conditional(form(ADAMW))


@mostly_slow(
    ("form", "jitted", "dtype"),
    [
        (compact, True, "bfloat16"),
        (stochastic_rounding, True, "bfloat16"),
        (stochastic_rounding, True, "float16"),
        (stochastic_rounding, False, "bfloat16"),
    ],
    lambda form, jitted, dtype: form is compact,
)
def test_an_infinite_param_without_a_gradient_stays(form, jitted, dtype):
    grad_dtype = "float16" if dtype == "float16" else "float32"
    check_infinite_params_stay(form, jitted, dtype, grad_dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "jitted", "dtype"),
    [
        (compact, True, "float16"),
        (stochastic_rounding, True, "float16"),
        (stochastic_rounding, False, "bfloat16"),
    ],
)
def test_an_infinite_result_makes_its_param_infinite(form, jitted, dtype):
    check_infinite_masters_make_params_infinite(form, jitted, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("gradient", [by_value_and_grad, by_jax])
def test_integer_params_stay_in_everybodys_loop(gradient):
    check_integer_params_stay(stochastic_rounding(optax.adamw(0.1)), gradient)


@pytest.mark.slow
@pytest.mark.parametrize("is_jitted", [True, False])
def test_a_python_float_is_a_param_as_in_plain_optax(is_jitted):
    check_a_python_float_is_a_param(stochastic_rounding(optax.adamw(0.1)), is_jitted)


@pytest.mark.parametrize("form", [low_bit_state, stochastic_rounding])
def test_state_shares_no_buffer_with_params_or_itself(form):
    check_a_state_shares_no_buffer(form, masked_params("bfloat16"))


@pytest.mark.parametrize("form", [low_bit_state, stochastic_rounding])
def test_without_masters_the_params_are_returned_in_float32(form):
    check_params_are_read_where_no_masters_are(form(optax.adam(0.1)))
