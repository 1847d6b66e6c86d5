"""Unmodified models of each framework under `amp`: as good as float32, in 16 bits."""

import functools

import jax
import numpy as np
import optax
import pytest
import small_models
from amp_cases import products, runs_in, shapes
from comparison import as_bits
from jax import lax
from slow_cases import mostly_slow

import optax_mp

LEARNING_RATE = 1e-2


# One with a loss scale, all others without.
SCALED = ("nnx_convolutions", "float16")
COMBINATIONS = [(f"{x}_transformer", "bfloat16") for x in ("linen", "equinox", "haiku")]
COMBINATIONS.append(SCALED)
every_pair = mostly_slow(
    ("model", "half"), COMBINATIONS, lambda model, _: model == "linen_transformer"
)


@functools.cache
def problem_of(model):
    return getattr(small_models, model)()


def autocast(fun, dtype):
    """Return the function under amp; in float32, the function."""
    return fun if dtype == "float32" else optax_mp.amp(fun, compute_dtype=dtype)


def trained(problem, tx, loss, params):
    """Return the losses of all steps, and what params, state and optimizer became."""
    loss_and_grads = optax_mp.value_and_grad(loss, has_aux=True)

    def step(carry, batch):
        params, state, opt_state = carry
        (value, state), grads = loss_and_grads(opt_state, params, state, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), state, opt_state), value

    @jax.jit
    def run(carry):
        return lax.scan(step, carry, problem.batches)

    carry, losses = run((params, problem.state, tx.init(problem.params)))
    return np.asarray(losses), *carry


@functools.cache
def training_of(model, dtype):
    problem, tx = problem_of(model), optax.adam(LEARNING_RATE)
    if dtype == "float16":
        tx = optax_mp.dynamic_loss_scale(tx)
    return trained(problem, tx, autocast(problem.loss, dtype), problem.params)


# How far the mean of the last ten losses may be from float32's. Roundings average out:
# these runs end within 8e-4. Losses in bfloat16 are rounded themselves, by up to this.
AS_WELL = 2.0**-8


def last(losses):
    return losses[-10:].astype(np.float32).mean()


def first_batch(problem):
    return jax.tree.map(lambda x: x[0], problem.batches)


def state_after_a_step(problem, dtype):
    loss = autocast(problem.loss, dtype)
    # Not with the loss, so that XLA leaves out what only the loss needs.
    step = jax.jit(lambda *args: loss(*args)[1])
    return step(problem.params, problem.state, first_batch(problem))


@functools.cache
def traced(model, dtype):
    """Return the jaxpr of a loss with its gradient, and what it returns."""
    problem = problem_of(model)
    fun = jax.value_and_grad(autocast(problem.loss, dtype), has_aux=True)
    args = problem.params, problem.state, first_batch(problem)
    return jax.make_jaxpr(fun, return_shape=True)(*args)


# Training


@pytest.mark.slow
@pytest.mark.parametrize(("model", "half"), COMBINATIONS)
def test_a_model_under_amp_trains_as_in_float32_and_keeps_dtypes(model, half):
    problem = problem_of(model)
    full = training_of(model, "float32")[0]
    # Else a model that stands still would pass: these end at 0.50 to 0.79 of their start.
    assert last(full) < 0.85 * full[:3].mean()
    losses, params, state, opt_state = training_of(model, half)
    assert last(losses) == pytest.approx(last(full), rel=AS_WELL)
    assert shapes((params, state)) == shapes((problem.params, problem.state))
    assert optax_mp.all_finite((params, state))
    assert half == "bfloat16" or opt_state.total_skipped_count <= 3


@pytest.mark.slow
def test_masters_and_bfloat16_params_under_amp_train_as_in_float32():
    """Of integer inputs, so that products are bfloat16 as written."""
    model = "linen_transformer"
    problem = problem_of(model)
    tx = optax_mp.mixed_precision(optax.adam(LEARNING_RATE), param_dtype="bf16")
    params = optax_mp.cast_floating(problem.params, "bf16")
    losses, params, *_ = trained(problem, tx, optax_mp.amp(problem.loss), params)
    full = training_of(model, "float32")[0]
    assert last(losses) == pytest.approx(last(full), rel=AS_WELL)
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"bfloat16"}


# Precision


@every_pair
def test_every_product_is_low_and_results_come_in_the_dtypes_of_float32(model, half):
    (low, got), (full, want) = (traced(model, dtype) for dtype in (half, "float32"))
    found, written = products(low), products(full)
    assert len(found) == len(written) >= 5
    assert all(runs_in(each, "float32") for each in written)
    assert all(runs_in(each, half) for each in found)
    assert shapes(got) == shapes(want)


@pytest.mark.slow
def test_batch_statistics_are_those_of_float32():
    problem = problem_of("nnx_convolutions")
    got, want = (state_after_a_step(problem, dtype) for dtype in ("bf16", "float32"))
    assert as_bits(want) != as_bits(problem.state)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # Half a unit of bfloat16's last place, of the values that they are made of.
        np.testing.assert_allclose(x, y, rtol=2**-8, atol=2**-8 * np.abs(y).max())
