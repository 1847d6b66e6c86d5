"""Errors for the numbers that a loss scale is made with."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_mp

NAN, INF = float("nan"), float("inf")
POSITIVE = "a positive finite float32"
WHOLE = "an integer greater than 0"


def value(**settings):
    return optax_mp.DynamicLossScale(8.0, **settings)


DYNAMIC = optax_mp.dynamic_loss_scale
# Every way to give a scale: caller, name of the argument, function.
SCALES = [
    ("static_loss_scale", "scale", optax_mp.static_loss_scale),
    ("StaticLossScale", "loss_scale", optax_mp.StaticLossScale),
    ("DynamicLossScale", "loss_scale", optax_mp.DynamicLossScale),
    ("DynamicLossScale", "min_loss_scale", value),
    *(
        ("dynamic_loss_scale", name, DYNAMIC)
        for name in ("init_scale", "min_scale", "max_scale")
    ),
]
NUMBERS = [
    *SCALES,
    *(
        ("dynamic_loss_scale", name, DYNAMIC)
        for name in ("growth_interval", "growth_factor", "backoff_factor", "hysteresis")
    ),
    *(("DynamicLossScale", name, value) for name in ("counter", "period", "factor")),
]


@pytest.mark.parametrize(("caller", "name", "make"), SCALES)
@pytest.mark.parametrize("bad", [0, 0.0, -1.0, NAN, INF, -INF, 1e39, 1e-39])
def test_a_scale_that_is_no_normal_float32_is_named(caller, name, make, bad):
    with pytest.raises(
        ValueError, match=f"^{caller}: expected `{name}` to be {POSITIVE}"
    ):
        make(**{name: bad})


NO_NUMBERS = {
    "string": "8.0",
    "None": None,
    "array": np.array([2.0, 4.0]),
    "list": [2.0],
    "complex": 2j,
}


@pytest.mark.parametrize("bad", NO_NUMBERS)
@pytest.mark.parametrize(("caller", "name", "make"), NUMBERS)
def test_what_is_no_number_is_named(caller, name, make, bad):
    with pytest.raises(
        (ValueError, TypeError), match=f"{caller}: expected `{name}` to be "
    ):
        make(**{name: NO_NUMBERS[bad]})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(growth_interval=0), f"`growth_interval` to be {WHOLE}, got 0"),
        (dict(growth_interval=2.5), f"`growth_interval` to be {WHOLE}, got 2.5"),
        (dict(growth_interval=INF), f"`growth_interval` to be {WHOLE}, got inf"),
        (dict(hysteresis=0), f"`hysteresis` to be {WHOLE}, got 0"),
        (dict(growth_factor=1), "`growth_factor` to be a finite number greater than 1, got 1"),
        (dict(growth_factor=INF), "`growth_factor` to be a finite .*, got inf"),
        (dict(backoff_factor=1), "`backoff_factor` to be a number between 0 and 1, got 1"),
        (dict(backoff_factor=0), "`backoff_factor` to be a number between 0 and 1, got 0"),
        (
            dict(min_scale=4.0, max_scale=2.0),
            "`init_scale` .* `min_scale` 4.0 to `max_scale` 2.0, got 65536.0; change one of",
        ),
        (
            dict(init_scale=2.0**25),
            r"`init_scale` to be a scale from `min_scale` "
            r"6.1\S* to `max_scale` 16777216.0, got 33554432.0; change",
        ),
        (
            dict(init_scale=0.25, min_scale=0.5),
            "`init_scale` to be a scale from `min_scale` 0.5 to .*, got 0.25",
        ),
    ],
)  # fmt: skip
def test_a_setting_out_of_range_is_named(settings, message):
    with pytest.raises(ValueError, match=f"^dynamic_loss_scale: expected {message}"):
        optax_mp.dynamic_loss_scale(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(period=0), f"`period` to be {WHOLE}, got 0"),
        (dict(period=2.5), f"`period` to be {WHOLE}, got 2.5"),
        (dict(factor=1.0), "`factor` to be a finite number greater than 1, got 1.0"),
        (dict(factor=0.5), "`factor` to be a finite number greater than 1, got 0.5"),
    ],
)
def test_a_setting_of_a_value_out_of_range_is_named(settings, message):
    with pytest.raises(ValueError, match=f"^DynamicLossScale: expected {message}"):
        optax_mp.DynamicLossScale(8.0, **settings)


@pytest.mark.parametrize("factory", ["dynamic_loss_scale", "static_loss_scale"])
@pytest.mark.parametrize("inner", [0.1, "adam", optax.adam, 8])
def test_an_inner_that_is_no_transformation_is_named(factory, inner):
    expected = f"^{factory}: expected `inner` to be an optax gradient trans.*, got a "
    with pytest.raises(TypeError, match=expected):
        getattr(optax_mp, factory)(inner)


@pytest.mark.parametrize("factory", ["dynamic_loss_scale", "static_loss_scale"])
def test_a_state_of_another_optimizer_is_named(factory):
    tx = getattr(optax_mp, factory)(optax.sgd(0.1))
    with pytest.raises(
        TypeError, match=f"{factory}: expected `state` to be the LossS.*, got a "
    ):
        tx.update(jnp.ones(2), optax.sgd(0.1).init(jnp.ones(2)), jnp.ones(2))


@pytest.mark.parametrize(
    ("factory", "guess", "remedy"),
    [
        (DYNAMIC, "backoff", "pass `backoff_factor`"),
        (DYNAMIC, "growth", "pass `growth_factor`"),
        (DYNAMIC, "initial_scale", "pass `init_scale`"),
        (DYNAMIC, "enabled", "leave `dynamic_loss_scale` out where .* float16"),
        (DYNAMIC, "xyz", "pass one of these"),
        (optax_mp.static_loss_scale, "init_scale", "pass `scale`"),
    ],
)
def test_an_unknown_keyword_names_the_right_one(factory, guess, remedy):
    name = factory.__name__
    expected = (
        rf"^{name}: expected keywords among inner, .*, got `{guess}`; {remedy}\.$"
    )
    with pytest.raises(TypeError, match=expected):
        factory(optax.sgd(0.1), **{guess: 2.0})
