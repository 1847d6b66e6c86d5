"""Mistakes of users, across all rooms: each has an error or a warning that names it."""

import warnings
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from slow_cases import mostly_slow

import optax_mp

Warned = optax_mp.MixedPrecisionWarning
BF16, F16 = jnp.bfloat16, jnp.float16
PARAMS = {"w": jnp.ones((4, 4), BF16), "b": jnp.zeros(4, BF16)}
WIDE = optax_mp.cast_floating(PARAMS, "float32")
HALF = optax_mp.cast_floating(PARAMS, "float16")
GRADS = jax.tree.map(jnp.ones_like, PARAMS)
X = jnp.ones((2, 4))


def loss(params, x, weight=1.0):
    return weight * jnp.mean((x @ params["w"] + params["b"]) ** 2)


ADAM = optax.adam(1e-3)
MASTERS = optax_mp.mixed_precision(ADAM)
SCALED = optax_mp.dynamic_loss_scale(MASTERS)
STATE = jax.jit(MASTERS.init)(PARAMS)
SCALED_STATE = jax.jit(SCALED.init)(PARAMS)
GRADIENT = optax_mp.value_and_grad(loss)


# Eager and under jit: what a test gives is either traced or closed over.


def call(function, args, jitted):
    """Call `function(*args)`; under jit, with the arrays among `args` traced."""
    if not jitted:
        return function(*args)
    dynamic, static = eqx.partition(args, eqx.is_array)
    # Traced and not run: tracing already raises the error.
    return jax.eval_shape(lambda x: function(*eqx.combine(x, static)), dynamic)


JITTED = pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
IS_DICT = r"^value_and_grad: `opt_state` is a dict of \['b'\] bfloat16\[4\], \['w'\] "
NO_STATE = {
    "params, state": (
        (PARAMS, STATE, X),
        "expected the state first, got a MixedPrecisionState of .*, which is an optim"
        r".* as `params` and a dict of .* as `opt_state`; call `f\(opt_state, params, ",
    ),
    "the optimizer": (
        (SCALED, PARAMS, X),
        "expected `opt_state` to be .*, got a Transformation, the optimizer itself; "
        r"pass what `tx.init\(params\)` returned",
    ),
    "a loss scale": (
        (optax_mp.DynamicLossScale(8.0), PARAMS, X),
        "`opt_state` to be .*, got a DynamicLossScale; .*dynamic_scale_value_and_grad",
    ),
    "integers": (
        (STATE, X.astype(int), PARAMS),
        r"floating arrays in .* to differentiate, got int32\[2,4\]; .*by `argnums`",
    ),
}


@JITTED
@pytest.mark.parametrize("mistake", NO_STATE)
def test_value_and_grad_names_what_stands_in_the_place_of_the_state(mistake, jitted):
    args, message = NO_STATE[mistake]
    with pytest.raises(TypeError, match=message):
        call(GRADIENT, args, jitted)


def test_value_and_grad_warns_of_what_can_hardly_be_a_state():
    message = IS_DICT + ".*in which nothing looks like an opt"
    with pytest.warns(Warned, match=message):
        optax_mp.value_and_grad(lambda x: x.sum())(PARAMS, X)
    with pytest.warns(Warned, match=message), pytest.raises(TypeError, match="missing"):
        GRADIENT(PARAMS, X)


# Swapped, missing and wrong arguments of the other functions.

scale = optax_mp.DynamicLossScale(8.0)
SPLIT = optax_mp.mixed_precision(ADAM, storage=optax_mp.Split())
IS_OPTIMIZER = "`opt_state` to be .*, got a Transformation, the optimizer itself"
STATE_SECOND = "got a MixedPrecisionState of .*, which is an optimizer state, as `param"
MISPLACED = {
    "scale_loss(state, loss)": (
        lambda: optax_mp.scale_loss(SCALED_STATE, jnp.float32(1)),
        ValueError, r"the loss to be .*, got a LossScaleState of .*; .*call `scale_loss\(loss, opt_state\)`",
    ),
    "scale_loss(loss, tx)": (
        lambda: optax_mp.scale_loss(jnp.float32(1), SCALED), TypeError, IS_OPTIMIZER,
    ),
    "check_loss_scale(state, grads)": (
        lambda: optax_mp.check_loss_scale(SCALED_STATE, GRADS),
        TypeError, "`max_skipped` to be a number of steps .*`grads=grads`.*, got dict",
    ),
    "check_loss_scale under jit": (
        lambda: jax.jit(optax_mp.check_loss_scale)(SCALED_STATE),
        TypeError, "concrete loss scale, got a traced one; call it outside jit",
    ),
    "master_params(params, state)": (
        lambda: optax_mp.master_params(PARAMS, STATE),
        TypeError, f"{STATE_SECOND}.*call `master_params.opt_state, params.`",
    ),
    "memory_report(params, state)": (
        lambda: optax_mp.memory_report(PARAMS, STATE),
        TypeError, f"{STATE_SECOND}.*call `memory_report.opt_state, params.`",
    ),
    "memory_report(state, state)": (
        lambda: optax_mp.memory_report(STATE, STATE),
        ValueError, "`params` to .*, got a MixedPrecisionState of .*, which is a state",
    ),
    "convert_opt_state(params, state)": (
        lambda: optax_mp.convert_opt_state(PARAMS, STATE, MASTERS, SPLIT),
        TypeError, f"{STATE_SECOND}.*call `convert_opt_state.opt_state, params, from_tx",
    ),
    "convert_opt_state, from_tx and to_tx": (
        lambda: optax_mp.convert_opt_state(STATE, PARAMS, SPLIT, MASTERS),
        ValueError, r"with masters in Split.*, got masters in FullCopy\(\)",
    ),
    "gradient_range_report(loss_scale=state)": (
        lambda: optax_mp.gradient_range_report(GRADS, loss_scale=SCALED_STATE),
        TypeError, "`loss_scale` to be a positive finite .*, got LossScaleState",
    ),
    "gradient_range_report(loss_scale=a traced array)": (
        lambda: jax.eval_shape(
            lambda x: optax_mp.gradient_range_report(GRADS, loss_scale=x), jnp.ones(2)
        ),
        TypeError, r"`loss_scale` to be a positive finite .*, got float32\[2\]",
    ),
    "select_tree(a, b, pred)": (
        lambda: optax_mp.select_tree(PARAMS, GRADS, jnp.array(True)),
        TypeError, r"`pred` to be .*, got a dict of .*call `select_tree\(pred, on_true, on_false",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISPLACED)
def test_an_argument_in_the_wrong_place_is_named(mistake):
    make, kind, message = MISPLACED[mistake]
    with pytest.raises(kind, match=message) as caught:
        make()
    assert str(caught.value).startswith(mistake.partition("(")[0].split()[0].strip(","))


# tx.init and tx.update.


# Made in the tests: while a link exists, other tests would look for its mark.
FORMS = {
    "mixed_precision": lambda tx=ADAM: optax_mp.mixed_precision(tx),
    "dynamic_loss_scale": lambda tx=ADAM: optax_mp.dynamic_loss_scale(
        optax_mp.mixed_precision(tx)
    ),
    "static_loss_scale": lambda tx=ADAM: optax_mp.static_loss_scale(tx),
    "stochastic_rounding": lambda tx=ADAM: optax_mp.stochastic_rounding(tx),
    "low_bit_state": lambda tx=ADAM: optax_mp.low_bit_state(tx),
    "zero1": lambda tx=ADAM: optax_mp.zero1(
        optax_mp.mixed_precision(tx), jax.make_mesh((1,), ("data",)), "data"
    ),
    "Split(16)": lambda tx=ADAM: optax_mp.mixed_precision(
        tx, storage=optax_mp.Split(16)
    ),
    "Split(8)": lambda tx=ADAM: optax_mp.mixed_precision(tx, storage=optax_mp.Split(8)),
    "a link": lambda tx=ADAM: optax.chain(
        optax_mp.dynamic_loss_scale(), optax_mp.mixed_precision(tx)
    ),
}
BY_DEFAULT = {"mixed_precision", "dynamic_loss_scale"}
FORM = mostly_slow("form", FORMS, lambda form: form in BY_DEFAULT)


def in_forms(name, cases):
    """Parametrise over cases of (form, `name`), by default eager and under jit."""
    return mostly_slow(
        ("form", name, "jitted"),
        [
            (*case, jitted)
            for case in cases
            for jitted in (False, True)
            if jitted or case[0] in BY_DEFAULT
        ],
        lambda form, *_: form in BY_DEFAULT,
    )


@FORM
def test_init_refuses_an_optimizer(form):
    message = "`params` to be the params of a model, got a .*Transformation"
    with pytest.raises(TypeError, match=message):
        FORMS[form]().init(MASTERS)


class Net(NamedTuple):
    w: jax.Array
    activation: object


@mostly_slow(
    ("form", "leaf"),
    [(form, "relu") for form in FORMS]
    + [("mixed_precision", leaf) for leaf in (jax.nn.relu, object())],
    lambda form, leaf: form in BY_DEFAULT and leaf == "relu",
)
def test_init_refuses_what_cannot_be_trained(form, leaf):
    message = r"param \.activation to be an array or a number, got .*; take it out"
    with pytest.raises(TypeError, match=message):
        FORMS[form]().init(Net(X, leaf))


ORDERS = ["params, grads, state", "state, grads, params", "grads, params, state"]


@in_forms(
    "order",
    [(x, y) for x in FORMS for y in ORDERS if x in BY_DEFAULT or y == ORDERS[0]],
)
def test_update_names_a_state_in_another_place(form, order, jitted):
    tx = FORMS[form]()
    given = {"params": PARAMS, "grads": GRADS, "state": tx.init(PARAMS)}
    args = [given[name] for name in order.split(", ")]
    message = "`state` to be .*a dict of .*call `tx.update.grads, state, p|inner state"
    if form == "a link":  # a chain of optax's, which looks at the number of states
        message += "|number of updates and states|`state` to be the LossS.* got a str"
    with pytest.raises((TypeError, ValueError), match=message):
        call(tx.update, args, jitted)


@in_forms(
    "before",
    [(form, (4,)) for form in FORMS]
    + [(form, before) for form in sorted(BY_DEFAULT) for before in ((8, 4), (2, 4, 4))],
)
def test_a_shape_that_changed_since_init_is_named(form, before, jitted):
    tx = FORMS[form]()
    state = tx.init(PARAMS | {"w": jnp.ones(before, BF16)})
    # Named here, or by JAX where two arrays do not broadcast.
    message = r"expected.*\['w'\].*shape|\['w'\].* as in |incompatible shapes"
    with pytest.raises((ValueError, TypeError), match=message):
        call(tx.update, (GRADS, state, PARAMS), jitted)


@JITTED
@mostly_slow("form", sorted(FORMS.keys() - {"low_bit_state"}), BY_DEFAULT.__contains__)
def test_update_without_params_says_so(form, jitted):
    tx = optax.with_extra_args_support(FORMS[form]())
    if form == "static_loss_scale":
        tx.update(GRADS, tx.init(PARAMS))  # adam needs none
        return
    with pytest.raises(ValueError, match=r"got None; call `tx.update\(grads, state, "):
        call(tx.update, (GRADS, tx.init(PARAMS)), jitted)


@in_forms(
    "spoil",
    [
        (form, spoil)
        for form in FORMS
        for spoil in ("None", "missing", "extra", "shape", "one number", "integers")
        if form in BY_DEFAULT or spoil == "shape"
    ],
)
def test_update_names_a_gradient_that_is_none_of_the_param(form, spoil, jitted):
    of_b = r"gradient of \['b'\] to be "
    grads, message = {
        "None": (GRADS | {"b": None}, r"tree\['b'\]|\['b'\], got None for the param"),
        "missing": ({"w": GRADS["w"]}, r"leaf \['b'\] .* is only in `params`"),
        "extra": (GRADS | {"c": X}, r"leaf \['c'\] .* is only in the gradients"),
        "shape": (GRADS | {"b": jnp.ones(3, BF16)}, of_b + r"of the .*, got \w+\[3\]"),
        "one number": (GRADS | {"b": jnp.ones((), BF16)}, of_b + r".*, got \w+\[\]"),
        "integers": (GRADS | {"b": jnp.ones(4, int)}, of_b + r"floating, got int32"),
    }[spoil]
    tx = FORMS[form]()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mixed_prec.*got None|stochastic.*got None")
        with pytest.raises((TypeError, ValueError), match=message):
            call(tx.update, (grads, tx.init(PARAMS), PARAMS), jitted)


OTHERS = {
    "sgd": optax.sgd(0.1),
    "a chain": optax.chain(optax.clip(1.0), ADAM),
}


@in_forms(
    "other",
    [("dynamic_loss_scale", x) for x in OTHERS]
    + [(x, "a chain") for x in ("stochastic_rounding", "low_bit_state", "Split(8)")],
)
def test_the_state_of_another_optimizer_is_an_error(form, other, jitted):
    """Of optax or JAX, where they see it."""
    state = FORMS[form](OTHERS[other]).init(PARAMS)
    with pytest.raises((ValueError, TypeError, AttributeError)):
        call(FORMS[form]().update, (GRADS, state, PARAMS), jitted)


# float16 without a loss scale.


def gradient_of(fun, state, params=HALF, jitted=False):
    gradient = optax_mp.value_and_grad(fun)
    return call(gradient, (state, params, X), jitted)


amp16 = optax_mp.amp(loss, compute_dtype=F16)
UNSCALED = {
    "params": (loss, HALF),
    "amp": (amp16, WIDE),
    # A function of its own at each call: JAX keeps what it traced.
    "amp in a loop": (
        lambda p, x: jax.lax.scan(lambda c, _: (c + amp16(p, x), None), 0.0, None, 2)[
            0
        ],
        WIDE,
    ),
}
NO_SCALE = "gradients are computed in float16, and `opt_state` holds no loss scale"


@JITTED
@pytest.mark.parametrize("case", UNSCALED)
def test_float16_without_a_loss_scale_is_a_warning(case, jitted):
    fun, params = UNSCALED[case]
    with pytest.warns(Warned, match=NO_SCALE) as caught:
        gradient_of(fun, MASTERS.init(params), params, jitted)
    assert len(caught) == 1
    # It points to the line of the user, also out of JAX's tracing.
    assert caught[0].filename == __file__


by_hand = optax_mp.DynamicLossScale(8.0)
RIGHT = {
    "a dynamic scale": (loss, SCALED.init(HALF), HALF),
    "a static scale": (loss, optax_mp.static_loss_scale(MASTERS).init(HALF), HALF),
    "a link": (loss, FORMS["a link"]().init(HALF), HALF),
    "by a value": (lambda p, x: by_hand.scale(loss(p, x)), STATE, HALF),
    "bfloat16": (loss, STATE, PARAMS),
    "float16 elsewhere": (lambda p, x: loss(WIDE, x) * p["w"].sum(), STATE, PARAMS),
    "casts of the user": (
        lambda p, x: loss(optax_mp.cast_floating(p, F16), x), ADAM.init(WIDE), WIDE,
    ),
}  # fmt: skip


@JITTED
@pytest.mark.parametrize("case", RIGHT)
def test_no_warning_where_the_loss_is_scaled(case, jitted):
    fun, state, params = RIGHT[case]
    gradient = optax_mp.value_and_grad(fun)
    for _ in range(2):  # the second call finds what was jitted inside in JAX's cache
        call(gradient, (state, params, X), jitted)


def test_no_warning_at_the_second_call_of_a_loss_that_is_jitted_and_scales_itself():
    scaled = jax.jit(lambda p, x: by_hand.scale(loss(p, x)))
    gradient = optax_mp.value_and_grad(scaled)
    for _ in range(2):  # the second call does not run it again
        gradient(STATE, HALF, X)


FLOAT16 = {
    "mixed_precision": MASTERS,
    "Split(16)": SPLIT,
    "stochastic_rounding": FORMS["stochastic_rounding"](),
    "in a chain": optax.chain(optax.clip(1.0), MASTERS),
}


@JITTED
@mostly_slow("form", FLOAT16, lambda form: form == "mixed_precision")
def test_float16_gradients_that_reach_masters_are_a_warning(form, jitted):
    tx = FLOAT16[form]
    grads = jax.grad(loss)(HALF, X.astype(F16))
    message = (
        r"^\w+: the gradient of \['b'\] is float16\[4\], in which values below 6e-8 "
        "become 0; put `dynamic_loss_scale` around the optimizer"
    )
    with pytest.warns(Warned, match=message) as caught:
        call(tx.update, (grads, tx.init(HALF), HALF), jitted)
    assert len(caught) == 1


@pytest.mark.filterwarnings("error")
@mostly_slow("unscale", ["ours", "value", "float32"], lambda unscale: unscale == "ours")
def test_gradients_that_are_unscaled_in_float32_are_no_warning(unscale):
    tx, state = (SCALED, SCALED.init(HALF)) if unscale == "ours" else (MASTERS, STATE)
    grads = jax.grad(lambda p: by_hand.scale(loss(p, X.astype(F16))))(HALF)
    if unscale == "value":
        grads = by_hand.unscale(grads)
    if unscale == "float32":
        grads = jax.tree.map(lambda g: g.astype("float32") / 8, grads)
    tx.update(grads, tx.init(HALF), HALF)


# Orders of transforms that fail.

WRAPPERS = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
}
ASKED = {
    "value_and_grad": lambda state: GRADIENT(state, PARAMS, X),
    "scale_loss": lambda state: optax_mp.scale_loss(jnp.float32(1), state),
    "loss_scale": optax_mp.loss_scale,
    "check_loss_scale": optax_mp.check_loss_scale,
    "master_params": lambda state: optax_mp.master_params(state, PARAMS),
}


@JITTED
@pytest.mark.parametrize(
    ("wrapper", "asked"),
    [("apply_if_finite", "value_and_grad"), *(("MultiSteps", x) for x in ASKED)],
)
@pytest.mark.parametrize("tx", [SCALED, optax_mp.static_loss_scale(ADAM)])
def test_a_wrapper_around_a_loss_scale_is_an_error(wrapper, asked, tx, jitted):
    state = WRAPPERS[wrapper](tx).init(PARAMS)
    name = wrapper.partition(" ")[0]
    message = rf"^{asked}: expected `optax.{name}` inside of `dyn.*`, got .* of"
    with pytest.raises(ValueError, match=message):
        call(ASKED[asked], (state,), jitted and asked != "check_loss_scale")


@pytest.mark.parametrize("before", [
    MASTERS,
    optax_mp.with_average(MASTERS, 0.9),
    optax_mp.with_average(optax.chain(optax.clip(1.0), MASTERS), 0.9),
])  # fmt: skip
def test_a_loss_scale_after_the_masters_is_an_error(before):
    tx = optax.chain(before, optax_mp.dynamic_loss_scale())
    message = (
        "loss scale before `mixed_precision`, got it after, in the chain opt_state"
    )
    with pytest.raises(ValueError, match=message):
        GRADIENT(tx.init(PARAMS), PARAMS, X)


class MultiStepsState(NamedTuple):
    """A state of a user's, with the name of one of optax."""

    total: jax.Array


class LossScaleState(NamedTuple):
    total: jax.Array


@pytest.mark.parametrize("kind", [MultiStepsState, LossScaleState])
def test_a_state_of_a_user_may_have_any_name(kind):
    rule = optax.GradientTransformation(
        lambda params: kind(jnp.int32(0)),
        lambda grads, state, params=None: (grads, kind(state.total + 1)),
    )
    tx = optax_mp.dynamic_loss_scale(optax.chain(rule, MASTERS))
    _, grads = GRADIENT(tx.init(PARAMS), PARAMS, X)
    _, state = tx.update(grads, tx.init(PARAMS), PARAMS)
    optax_mp.check_loss_scale(state)
    assert optax_mp.metrics(state)["finite_count"] == 1


ORDERS_THAT_WORK = {
    "monitor, link": lambda: optax.chain(
        optax.monitor({}), optax_mp.dynamic_loss_scale(), MASTERS
    ),
    "masters, monitor": lambda: optax.chain(MASTERS, optax.monitor({})),
    "masked, masked": lambda: optax.chain(
        optax.masked(MASTERS, {"w": True, "b": False}),
        optax.masked(optax.set_to_zero(), {"w": False, "b": True}),
    ),
    "clip, masters": lambda: optax.chain(optax.clip(1.0), MASTERS),
    "link, clip, masters": lambda: optax.chain(
        optax_mp.dynamic_loss_scale(), optax.clip(1.0), MASTERS
    ),
    "scaled MultiSteps": lambda: optax_mp.dynamic_loss_scale(optax.MultiSteps(ADAM, 2)),
    "link, apply_if_finite": lambda: optax.chain(
        optax_mp.dynamic_loss_scale(), optax.apply_if_finite(MASTERS, 3)
    ),
    "masters of a loss scale": lambda: optax_mp.mixed_precision(
        optax_mp.dynamic_loss_scale(ADAM)
    ),
}


@pytest.mark.parametrize("order", ORDERS_THAT_WORK)
def test_orders_that_work_give_no_warning(order):
    GRADIENT(ORDERS_THAT_WORK[order]().init(PARAMS), PARAMS, X)


# keep_f32.

MODEL = {"layers": {"0": {"norm": {"scale": jnp.ones(2)}, "kernel": jnp.ones((2, 2))}}}
UNMATCHED = {
    "dots": ("layers.0.norm.scale", "'layers/0/norm/scale'"),
    "one part": ("norm", "'layers/0/norm/scale'"),
    "another name": ("*/kernels", "'layers/0/kernel'"),
}


@JITTED
@pytest.mark.parametrize("case", UNMATCHED)
def test_a_pattern_that_matches_nothing_is_a_warning(case, jitted):
    pattern, nearest = UNMATCHED[case]
    policy = optax_mp.get_policy("bf16", keep_f32=(pattern,))
    tx = optax_mp.mixed_precision(ADAM, param_dtype=policy)
    for name, cast in {
        "mixed_precision": tx.init, "Policy.cast_to_param": policy.cast_to_param,
    }.items():  # fmt: skip
        message = f"^{name}: the pattern .* in `keep_f32` .*nearest paths are {nearest}"
        with pytest.warns(Warned, match=message):
            call(cast, (MODEL,), jitted)


# A loss that is scaled twice.


def test_a_loss_that_is_scaled_twice_is_a_warning():
    def twice(p):
        return optax_mp.scale_loss(jnp.sum(p["w"]), SCALED_STATE)

    with pytest.warns(Warned, match="^value_and_grad: the function scales its loss, "):
        optax_mp.value_and_grad(twice)(SCALED_STATE, HALF)

    # Gradients within a loss, of another optimizer, are another loss.
    def inner(p):
        return jnp.sum(p["w"].astype(jnp.float32) ** 2)

    def outer(p):
        return optax_mp.value_and_grad(inner)(SCALED_STATE, p)[0]

    optax_mp.value_and_grad(outer)(SCALED_STATE, HALF)


# States that are right, and look like a mistake; and that look right, and are not.


@pytest.mark.parametrize("read", [
    lambda state: optax_mp.master_params(state, PARAMS), optax_mp.metrics,
    optax_mp.loss_scale, lambda state: GRADIENT(state, PARAMS, X),
])  # fmt: skip
def test_a_state_that_lost_its_classes_is_an_error(read):
    """As a checkpoint that is restored without a template: masters were not found."""
    saved = flax_like(SCALED.init(PARAMS))
    with pytest.raises(ValueError, match="restore the checkpoint into `tx.init.params"):
        read(saved)


def flax_like(state):
    """Return a state as dicts alone."""
    if hasattr(state, "_asdict"):
        return {name: flax_like(each) for name, each in state._asdict().items()}
    if isinstance(state, tuple):
        return {str(i): flax_like(each) for i, each in enumerate(state)}
    return state


def test_params_may_have_the_names_of_fields():
    names = ("inner_state", "hysteresis_left", "skipped_count", "master_params")
    for params in (dict.fromkeys(names[:2], X), dict.fromkeys(names[1:], X)):
        for tx in (optax.adam(0.1), SCALED, MASTERS):
            state = tx.init(params)
            assert optax_mp.metrics(state)["step_count"] == 0
            assert optax_mp.loss_scale(state) >= 1
            assert optax_mp.master_params(state, params)["hysteresis_left"] is not X


def test_each_pattern_that_matches_nothing_is_a_warning_of_its_own():
    policy = optax_mp.get_policy("bf16", keep_f32=("*Norm*", "*bias", "*/b"))
    tx = optax_mp.mixed_precision(ADAM, param_dtype=policy)
    for cast in (policy.cast_to_param, tx.init):
        with pytest.warns(Warned) as caught:
            cast(MODEL)
        patterns = [str(each.message).split("'")[1] for each in caught]
        assert patterns == ["*bias", "*/b"]
