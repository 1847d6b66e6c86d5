"""Gradient release in each form: of stacked layers the separate step, or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from form_runs import check_bits, check_types
from forms import forms_that, placed
from jax import lax
from steps import by_update

import optax_mp

LAYERS, WIDTH = 3, 16


def numbers(rng, *shape):
    """Return -1, 0 and 1: with few bits no product here is rounded."""
    return rng.integers(-1, 2, shape).astype(np.float32)


def layers_of(form):
    """Return stacked layers with codes in each, where a form has codes."""
    rng = np.random.default_rng(0)
    kernel = np.eye(WIDTH) * numbers(rng, LAYERS, WIDTH, WIDTH) / 2
    layers = {
        "kernel": jnp.asarray(kernel, form.dtype),
        "norm": jnp.ones((LAYERS, WIDTH)),
    }
    return placed(form, layers)


def loss(layers, rest, inputs):
    @jax.checkpoint
    def block(x, layer):
        x = x + x @ layer["kernel"].astype(x.dtype) * rest["gain"]
        return x * layer["norm"], None

    x, wanted = inputs
    x, _ = optax_mp.scan_layers(block, x, layers)
    return jnp.sum(x * wanted)


def separately(tx, max_norm):
    """Return what `release_gradients` does, with the gradients of all layers."""
    clip = optax.identity() if max_norm is None else optax.clip_by_global_norm(max_norm)

    def run(state, layers, rest, x):
        value, grads = optax_mp.value_and_grad(loss, (0, 1))(state, layers, rest, x)
        (of_layers, of_rest), _ = clip.update(grads, None)
        new = lax.map(lambda one: by_update(tx)(*one), (layers, state, of_layers))
        return value, of_rest, *new

    return run


def start_of(form):
    """Return the first state, layers, and the rest."""
    layers = layers_of(form)
    rest = placed(form, {"gain": jnp.float32(0.5)})
    return jax.vmap(form.tx.init)(layers), layers, rest


def is_refused(form):
    return form.scale is not None or form.on_host


# Scales times codes of 16 bits are rounded, and JAX 0.8 contracts these products.
@forms_that(
    lambda form: not is_refused(form) and form.name != "masters, 16 bits",
    lambda form: form.name == "5 bytes",
)
@pytest.mark.parametrize("max_norm", [None, 2.0**10])
def test_released_layers_take_the_separate_step(form, max_norm):
    """Also in two passes. No gradient has this norm: a factor below 1 would round."""
    state, layers, rest = start_of(form)
    inputs = numbers(np.random.default_rng(1), 2, 5, WIDTH)
    released = optax_mp.release_gradients(loss, form.tx, max_norm=max_norm)
    release, separate = map(jax.jit, (released, separately(form.tx, max_norm)))
    # From a state with moments, and layers that are as before.
    _, _, _, state = separate(state, layers, rest, -inputs[::-1])
    got = release(state, layers, rest, inputs)
    want = separate(state, layers, rest, inputs)
    check_types(form, "released", got[2:], (layers, state))
    check_bits(form, "released", got, want)


@pytest.mark.filterwarnings("ignore:release_gradients. .layers. at .* is float16")
@forms_that(is_refused, lambda form: True)
def test_release_refuses_what_is_around_all_params(form):
    state, layers, rest = start_of(form)
    step = optax_mp.release_gradients(loss, form.tx)
    what = "offload" if form.on_host else "a loss scale"
    with pytest.raises(ValueError, match=f"expected `tx` without .?{what}"):
        jax.eval_shape(step, state, layers, rest, jnp.ones((2, 5, WIDTH)))
