"""Errors for the numbers and keywords that a loss scale is made with."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_mp

NAN, INF = float("nan"), float("inf")
POSITIVE = "a positive finite float32"
WHOLE = "an integer greater than 0"
OVER_ONE = "a finite number greater than 1"
FACTORIES = [optax_mp.dynamic_loss_scale, optax_mp.static_loss_scale]


def dynamic_value(**settings):
    return optax_mp.DynamicLossScale(**{"loss_scale": 8.0} | settings)


def of(caller, names, expected, bad):
    """Return cases: caller, setting, what is expected, values that are refused."""
    return [(caller, name, expected, bad) for name in names.split()]


MAKERS = {
    "dynamic_loss_scale": optax_mp.dynamic_loss_scale,
    "static_loss_scale": optax_mp.static_loss_scale,
    "StaticLossScale": optax_mp.StaticLossScale,
    "DynamicLossScale": dynamic_value,
}
NO_SCALES = [0, -1.0, NAN, INF, -INF, 1e39, 1e-39]
NO_COUNTS, NO_GROWTHS, NO_SHARES = [0, 2.5, INF], [1, 0.5, INF], [1, 0]
NUMBERS = [
    *of("static_loss_scale", "scale", POSITIVE, NO_SCALES),
    *of("StaticLossScale", "loss_scale", POSITIVE, NO_SCALES),
    *of("DynamicLossScale", "loss_scale min_loss_scale", POSITIVE, NO_SCALES),
    *of("DynamicLossScale", "period", WHOLE, NO_COUNTS),
    *of("DynamicLossScale", "factor", OVER_ONE, NO_GROWTHS),
    *of("DynamicLossScale", "counter", "a number", []),
    *of("dynamic_loss_scale", "init_scale min_scale max_scale", POSITIVE, NO_SCALES),
    *of("dynamic_loss_scale", "growth_interval hysteresis", WHOLE, NO_COUNTS),
    *of("dynamic_loss_scale", "growth_factor", OVER_ONE, NO_GROWTHS),
    *of("dynamic_loss_scale", "backoff_factor", "a number between 0 and 1", NO_SHARES),
]
NO_NUMBERS = ["8.0", None, np.array([2.0, 4.0]), [2.0], 2j]


@pytest.mark.parametrize(("caller", "name", "expected", "bad"), NUMBERS)
def test_a_setting_out_of_range_or_no_number_is_named(caller, name, expected, bad):
    message = f"^{caller}: expected `{name}` to be {expected}"
    for value in bad:
        with pytest.raises(
            ValueError, match=f"{message}.*, got {re.escape(str(value))}"
        ):
            MAKERS[caller](**{name: value})
    for value in NO_NUMBERS:
        with pytest.raises(TypeError, match=message):
            MAKERS[caller](**{name: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(min_scale=4.0, max_scale=2.0), "4.0 to `max_scale` 2.0, got 65536.0; ch"),
        (dict(init_scale=2.0**25), r"6.1\S* to `max_scale` 16777216.0, got 33554432.0"),
        (dict(init_scale=0.25, min_scale=0.5), "0.5 to .*, got 0.25"),
    ],
)
def test_a_first_scale_out_of_its_bounds_is_named(settings, message):
    expected = "^dynamic_loss_scale: expected `init_scale` .* from `min_scale` "
    with pytest.raises(ValueError, match=expected + message):
        optax_mp.dynamic_loss_scale(**settings)


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_wrong_inner_or_state_is_named(factory):
    for inner in (0.1, "adam", optax.adam):
        expected = f"^{factory.__name__}: expected `inner` to be an optax gradient tran"
        with pytest.raises(TypeError, match=expected):
            factory(inner)
    expected = f"^{factory.__name__}: expected `state` to be the LossS.*, got a "
    with pytest.raises(TypeError, match=expected):
        factory(optax.sgd(0.1)).update(jnp.ones(2), optax.sgd(0.1).init(jnp.ones(2)))
