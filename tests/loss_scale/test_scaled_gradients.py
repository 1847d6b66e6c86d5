"""Gradients of a scaled loss: for optax states, for values, and who watches them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits, avals
from jax import lax

import optax_mp

PARAMS = {"a": jnp.array([1.0, -2.0, 0.5]), "b": jnp.float32(3.0)}
LABELS = {"a": "x", "b": "y"}
HALVES = ["float16", "bfloat16"]


def scaler(scale=1024.0):
    return optax_mp.static_loss_scale(optax.adam(1e-2), scale)


def state_with(scale, params=PARAMS):
    return scaler(scale).init(params)


NO_SCALE = optax.adam(1e-2).init(PARAMS)


def quadratic(params):
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(params))


def assert_close_trees(got, want, rtol=0.0):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol)


# loss_scale


NESTINGS = {
    "alone": scaler,
    "a link": lambda: optax.chain(
        optax_mp.static_loss_scale(scale=1024.0), optax.adam(1e-2)
    ),
    "chain": lambda: optax.chain(optax.clip(1.0), scaler()),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(1.0)), ("s", scaler())),
    "MultiSteps": lambda: optax.MultiSteps(scaler(), 2),
    "masked": lambda: optax.masked(scaler(), {"a": True, "b": False}),
    "apply_if_finite": lambda: optax.apply_if_finite(scaler(), 2),
    "partition": lambda: optax.partition({"x": scaler(), "y": optax.sgd(0.1)}, LABELS),
    "inject_hyperparams": lambda: optax.inject_hyperparams(
        lambda learning_rate: optax_mp.static_loss_scale(
            optax.adam(learning_rate), 1024.0
        )
    )(learning_rate=0.1),
    "conditionally_mask": lambda: optax.conditionally_mask(scaler(), lambda i: i < 2),
    "mixed_precision": lambda: optax_mp.mixed_precision(scaler()),
    "deep": lambda: optax.chain(
        optax.apply_if_finite(
            optax.chain(optax.MultiSteps(scaler(), 2).gradient_transformation()), 2
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("nesting", NESTINGS)
def test_loss_scale_is_found_in(nesting):
    state = NESTINGS[nesting]().init(PARAMS)
    scale = optax_mp.loss_scale(state)
    assert scale == 1024
    assert (scale.dtype, scale.shape) == (jnp.float32, ())


@pytest.mark.parametrize("nesting", NESTINGS)
def test_scale_loss_and_value_and_grad_find_the_scale_in(nesting):
    state = NESTINGS[nesting]().init(PARAMS)
    assert optax_mp.scale_loss(jnp.float32(2), state) == 2048
    loss, grads = optax_mp.value_and_grad(quadratic)(state, PARAMS)
    assert loss == quadratic(PARAMS)
    assert_close_trees(grads, jax.tree.map(lambda x: 2048 * x, PARAMS))


def test_loss_scale_is_the_one_after_the_step():
    tx = optax.chain(optax_mp.dynamic_loss_scale(init_scale=8.0), optax.sgd(0.1))
    state = tx.update({"a": jnp.array([jnp.inf])}, tx.init({"a": jnp.ones(1)}))[1]
    assert optax_mp.loss_scale(state) == 4


@pytest.mark.parametrize("state", [NO_SCALE, (), None, {"a": jnp.ones(2)}])
def test_loss_scale_is_one_without_any(state):
    scale = optax_mp.loss_scale(state)
    assert scale == 1
    assert scale.dtype == jnp.float32


def test_loss_scale_under_jit_and_vmap():
    state = state_with(8.0)
    assert jax.jit(optax_mp.loss_scale)(state) == 8
    stack = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), state)
    assert jax.vmap(optax_mp.loss_scale)(stack).tolist() == [8, 16]


CALLS = {
    "loss_scale": optax_mp.loss_scale,
    "scale_loss": lambda s: optax_mp.scale_loss(jnp.float32(1), s),
    "value_and_grad": lambda s: optax_mp.value_and_grad(quadratic)(s, PARAMS),
    "check_loss_scale": optax_mp.check_loss_scale,
}


@pytest.mark.parametrize("call", CALLS)
def test_two_loss_scales_side_by_side_are_named(call):
    tx = optax.partition({"x": scaler(8.0), "y": scaler(4.0)}, LABELS)
    expected = (
        rf"^{call}: `opt_state` holds 2 loss scales, at opt_state\S*\['x'\]\S* and "
        r"opt_state\S*\['y'\]\S*, expected one"
    )
    with pytest.raises(ValueError, match=expected):
        CALLS[call](tx.init(PARAMS))


@pytest.mark.parametrize("call", CALLS)
def test_a_loss_scale_inside_another_is_named(call):
    tx = optax.chain(optax_mp.static_loss_scale(scaler(4.0), 8.0))
    expected = (
        rf"^{call}: `opt_state` holds 2 loss scales, at opt_state\[0\] and "
        r"opt_state\[0\].inner_state, expected one"
    )
    with pytest.raises(ValueError, match=expected):
        CALLS[call](tx.init(PARAMS))


# scale_loss


@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
def test_scale_loss_is_a_float32_product(dtype):
    loss = jnp.array(60000.0, dtype)
    scaled = optax_mp.scale_loss(loss, state_with(2.0**16))
    assert scaled.dtype == jnp.float32
    assert float(scaled) == float(loss) * 2.0**16


@pytest.mark.usefixtures("x64")
def test_scale_loss_keeps_float64():
    loss = jnp.float64(1 + 2.0**-40)
    scaled = optax_mp.scale_loss(loss, state_with(4.0))
    assert scaled.dtype == jnp.float64
    assert float(scaled) == 4 + 2.0**-38


def test_scale_loss_takes_a_python_float():
    assert float(optax_mp.scale_loss(3.0, state_with(8.0))) == 24


@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
def test_scale_loss_returns_the_loss_without_a_scale(dtype):
    loss = jnp.array(1.5, dtype)
    assert optax_mp.scale_loss(loss, NO_SCALE) is loss


def equations(fun, *args):
    return str(jax.make_jaxpr(fun)(*args).jaxpr)


def test_scale_loss_without_a_scale_adds_no_equation():
    plain = equations(jax.grad(quadratic), PARAMS)
    scaled = equations(
        jax.grad(lambda p: optax_mp.scale_loss(quadratic(p), NO_SCALE)), PARAMS
    )
    assert scaled == plain


def test_value_and_grad_without_a_scale_adds_no_equation():
    plain = equations(jax.value_and_grad(quadratic), PARAMS)
    ours = equations(lambda p: optax_mp.value_and_grad(quadratic)(NO_SCALE, p), PARAMS)
    assert ours == plain


def test_value_and_grad_without_a_scale_only_adds_casts_of_16_bit_gradients():
    half = optax_mp.cast_floating(PARAMS, "bfloat16")

    def primitives(fun):
        return [eqn.primitive.name for eqn in jax.make_jaxpr(fun)(half).jaxpr.eqns]

    plain = primitives(jax.value_and_grad(quadratic))
    ours = primitives(lambda p: optax_mp.value_and_grad(quadratic)(NO_SCALE, p))
    casts = ["convert_element_type"] * len(PARAMS)
    assert sorted(ours) == sorted(plain + casts)


def test_with_a_scale_there_are_equations_more():
    # So that the comparisons above can fail.
    plain = equations(jax.value_and_grad(quadratic), PARAMS)
    state = state_with(8.0)
    assert plain != equations(
        lambda p: optax_mp.value_and_grad(quadratic)(state, p), PARAMS
    )


BAD_LOSSES = {
    "vector": (lambda x: x, r"float32\[3\]"),
    "one element": (lambda x: x[:1], r"float32\[1\]"),
    "int": (lambda x: jnp.int32(3), r"int32\[\]"),
    "bool": (lambda x: x.sum() > 0, r"bool\[\]"),
    "complex": (lambda x: x.sum() * 1j, r"complex64\[\]"),
    "Python int": (lambda x: 3, "int"),
    "tuple": (lambda x: (x.sum(), x), "tuple"),
    "dict": (lambda x: {"loss": x.sum()}, "dict"),
    "None": (lambda x: None, "NoneType"),
    "string": (lambda x: "loss", "str"),
}
BAD_LOSS = pytest.mark.parametrize("name", BAD_LOSSES)
VECTOR = jnp.arange(3.0)


@BAD_LOSS
def test_scale_loss_names_a_loss_that_is_no_floating_scalar(name):
    make, shown = BAD_LOSSES[name]
    expected = f"^scale_loss: the loss is {shown}, expected a floating scalar"
    with pytest.raises(ValueError, match=expected):
        optax_mp.scale_loss(make(VECTOR), state_with(8.0))


@BAD_LOSS
@pytest.mark.parametrize("has_aux", [False, True])
def test_value_and_grad_names_a_loss_that_is_no_floating_scalar(name, has_aux):
    make, shown = BAD_LOSSES[name]
    expected = f"^value_and_grad: the loss is {shown}, expected a floating scalar"
    fun = (lambda x: (make(x), 1)) if has_aux else make
    with pytest.raises(ValueError, match=expected):
        optax_mp.value_and_grad(fun, has_aux=has_aux)(state_with(8.0), VECTOR)


@BAD_LOSS
@pytest.mark.parametrize(
    "function", ["dynamic_scale_grad", "dynamic_scale_value_and_grad"]
)
def test_dynamic_scale_names_a_loss_that_is_no_floating_scalar(function, name):
    make, shown = BAD_LOSSES[name]
    expected = f"^{function}: the loss is {shown}, expected a floating scalar"
    with pytest.raises(ValueError, match=expected):
        getattr(optax_mp, function)(make)(
            VECTOR, loss_scale=optax_mp.StaticLossScale(8.0)
        )


def test_has_aux_of_a_bare_loss_says_so():
    f = optax_mp.value_and_grad(lambda x: x.sum(), has_aux=True)
    with pytest.raises((TypeError, ValueError), match="value_and_grad: .*has_aux"):
        f(state_with(8.0), VECTOR)


# value_and_grad


def network(params, x):
    hidden = jnp.tanh(x @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"]) ** 2)


def network_params(dtype):
    rng = np.random.default_rng(0)
    shapes = {"in": (4, 8), "bias": (8,), "out": (8, 2)}
    return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}


reference_gradients = jax.jit(jax.value_and_grad(network))
BATCH = np.random.default_rng(1).normal(size=(16, 4))


@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
def test_gradients_are_float32_and_scaled(dtype):
    params, x = network_params(dtype), jnp.asarray(BATCH, dtype)
    f = jax.jit(optax_mp.value_and_grad(network))
    loss, grads = f(state_with(1024.0), params, x)
    wide = optax_mp.cast_floating(params, "float32")
    want_loss, want = reference_gradients(wide, x.astype(jnp.float32))

    assert loss.dtype == dtype
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))
    # The forward pass runs in `dtype`; some of its roundings add up.
    rtol = {"float32": 1e-6, "float16": 0.005, "bfloat16": 0.04}[dtype]
    np.testing.assert_allclose(loss, want_loss, rtol=rtol)
    for name, grad in grads.items():
        error = np.abs(grad / 1024 - want[name]).max()
        assert error <= rtol * np.abs(want[name]).max(), name


@pytest.mark.parametrize("dtype", HALVES)
def test_without_a_scale_gradients_are_those_of_jax_in_float32(dtype):
    params, x = network_params(dtype), jnp.asarray(BATCH, dtype)
    loss, grads = optax_mp.value_and_grad(network)(NO_SCALE, params, x)
    want_loss, want = jax.value_and_grad(network)(params, x)
    assert as_bits(loss) == as_bits(want_loss)
    assert as_bits(grads) == as_bits(optax_mp.cast_floating(want, "float32"))


def test_gradients_that_float16_loses_are_kept_by_the_scale():
    weight = jnp.ones(2, jnp.float16)

    def tiny(w):
        return jnp.sum(w * jnp.float16(2.0**-14)) * jnp.float16(2.0**-14)

    # Cotangents of 2^-28 underflow float16, whose smallest number is 2^-24.
    _, lost = optax_mp.value_and_grad(tiny)(NO_SCALE, weight)
    assert lost.tolist() == [0, 0]
    _, kept = optax_mp.value_and_grad(tiny)(state_with(2.0**12), weight)
    assert kept.tolist() == [2.0**-16] * 2


def test_a_float16_loss_past_65504_when_scaled_is_right():
    weight = jnp.array([200.0], jnp.float16)
    f = optax_mp.value_and_grad(lambda w: (w * w).sum())
    loss, grads = f(state_with(64.0), weight)
    assert float(loss) == 40000.0
    assert loss.dtype == jnp.float16
    assert grads.tolist() == [2 * 200 * 64.0]


def test_a_float16_loss_that_overflows_by_itself_is_reported_as_it_is():
    weight = jnp.array([300.0], jnp.float16)
    loss, _ = optax_mp.value_and_grad(lambda w: (w * w).sum())(state_with(2.0), weight)
    assert float(loss) == float("inf")
    wide = optax_mp.value_and_grad(lambda w: (w.astype(jnp.float32) ** 2).sum())
    loss, grads = wide(state_with(2.0), weight)
    assert float(loss) == 90000.0
    assert grads.tolist() == [1200.0]


def test_the_loss_at_the_largest_float16_is_finite():
    weight = jnp.array([1.0], jnp.float16)
    f = optax_mp.value_and_grad(lambda w: (w * jnp.float16(65504)).sum())
    loss, _ = f(state_with(2.0**16), weight)
    assert float(loss) == 65504.0
    assert float(optax_mp.scale_loss(loss, state_with(2.0**16))) == 65504.0 * 65536


def three(x, y, z):
    return jnp.sum(x * y**2 * z["w"])


@pytest.mark.parametrize("argnums", [0, 1, 2, -1, -3, (0,), (0, 1), (2, 0), [1, -1]])
def test_argnums_choose_as_for_jax(argnums):
    args = (jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0]), {"w": jnp.array([5.0, 6.0])})
    loss, grads = optax_mp.value_and_grad(three, argnums)(state_with(8.0), *args)
    listed = tuple(argnums) if isinstance(argnums, list) else argnums
    want_loss, want = jax.value_and_grad(three, listed)(*args)
    assert loss == want_loss
    assert type(grads) is type(want)
    # Powers of two scale without rounding.
    assert_close_trees(grads, jax.tree.map(lambda g: 8 * g, want))


def test_keyword_arguments_reach_the_function():
    def fun(w, *, power, offset=0.0):
        return jnp.sum(w**power) + offset

    loss, grads = optax_mp.value_and_grad(fun)(
        state_with(4.0), jnp.array([3.0]), power=2, offset=1.0
    )
    assert (float(loss), grads.tolist()) == (10.0, [24.0])


def test_aux_comes_back_unscaled_and_as_it_is():
    def fun(w):
        return jnp.sum(w**2), {"sum": jnp.sum(w), "name": "aux", "none": None}

    f = optax_mp.value_and_grad(fun, has_aux=True)
    (loss, aux), grads = f(state_with(4.0), jnp.array([3.0], jnp.float16))
    assert float(loss) == 9
    assert aux == {"sum": 3.0, "name": "aux", "none": None}
    assert aux["sum"].dtype == jnp.float16
    assert grads.tolist() == [24.0]


def test_a_nan_in_aux_leaves_the_gradients():
    f = optax_mp.value_and_grad(lambda w: (jnp.sum(w), jnp.log(-w)), has_aux=True)
    (_, aux), grads = f(state_with(4.0), jnp.ones(2))
    assert np.isnan(aux).all()
    assert grads.tolist() == [4, 4]


def test_leaves_that_are_no_floats_get_none():
    tree = {
        "w": jnp.array([2.0], jnp.bfloat16),
        "count": jnp.int32(3),
        "flag": jnp.array(True),
        "key": jax.random.key(0),
        "activation": jnp.tanh,
        "name": "layer",
        "python": 1e-5,
        "none": None,
    }

    def fun(tree):
        assert tree["name"] == "layer"
        return jnp.sum(tree["activation"](tree["w"]) * tree["count"])

    _, grads = optax_mp.value_and_grad(fun)(state_with(8.0), tree)
    others = {k: v for k, v in grads.items() if k != "w"}
    assert others == dict.fromkeys(others)
    assert others.keys() == tree.keys() - {"w"}
    assert grads["w"].dtype == jnp.float32


def test_an_argument_without_floats_has_no_gradient():
    f = optax_mp.value_and_grad(lambda n, w: jnp.sum(w) * n, argnums=(0, 1))
    _, grads = f(state_with(8.0), jnp.int32(3), jnp.ones(2))
    assert grads[0] is None
    assert grads[1].tolist() == [24, 24]


def test_numpy_arrays_are_differentiated():
    _, grads = optax_mp.value_and_grad(quadratic)(
        state_with(8.0), {"a": np.array([1.0, 2.0], np.float16)}
    )
    assert grads["a"].dtype == jnp.float32
    assert grads["a"].tolist() == [16, 32]


def test_a_python_float_is_differentiated_as_by_jax():
    _, grad = optax_mp.value_and_grad(lambda x: x**2)(state_with(8.0), 3.0)
    assert float(grad) == 48


def test_complex_leaves_are_differentiated_as_by_jax():
    w = jnp.array([1 + 2j, -3j], jnp.complex64)

    def fun(w):
        return jnp.sum(jnp.abs(w) ** 2)

    loss, grads = optax_mp.value_and_grad(fun)(state_with(8.0), w)
    want_loss, want = jax.value_and_grad(fun)(w)
    assert loss == want_loss
    assert grads.dtype == jnp.complex64
    np.testing.assert_array_equal(grads, 8 * want)


@pytest.mark.usefixtures("x64")
def test_float64_gradients_stay_float64():
    loss, grads = optax_mp.value_and_grad(jnp.sum)(
        state_with(8.0), jnp.ones(2, jnp.float64)
    )
    assert loss.dtype == grads.dtype == jnp.float64
    assert grads.tolist() == [8, 8]


def test_gradients_are_the_same_under_jit():
    params, x = network_params("float32"), jnp.asarray(BATCH, "float32")
    f = optax_mp.value_and_grad(network)
    eager, compiled = (g(state_with(8.0), params, x) for g in (f, jax.jit(f)))
    assert avals(compiled) == avals(eager)
    # XLA sums in another order when it compiles the whole.
    for got, want in zip(*map(jax.tree.leaves, (compiled, eager)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_gradients_under_vmap_use_the_scale_of_each():
    state = state_with(8.0)
    stack = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), state)
    w = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    loss, grads = jax.vmap(optax_mp.value_and_grad(quadratic))(stack, w)
    assert loss.tolist() == [5, 25]
    assert grads.tolist() == [[16, 32], [96, 128]]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_training_in_a_scan_equals_training_without_a_scale(dtype):
    x = jnp.asarray(BATCH, dtype)

    def train(scale):
        tx = optax_mp.static_loss_scale(
            optax_mp.mixed_precision(optax.sgd(0.1, momentum=0.9)), scale
        )
        params = network_params(dtype)

        def step(carry, _):
            params, state = carry
            loss, grads = optax_mp.value_and_grad(network)(state, params, x)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        carry = (params, tx.init(params))
        return jax.jit(lambda c: lax.scan(step, c, None, length=5))(carry)

    (_, state), losses = train(256.0)
    (_, _), plain = train(1.0)
    assert losses[-1] < losses[0]
    assert state.total_skipped_count == 0
    # A power of two changes no mantissa unless small cotangents round in float16.
    rtol = 2e-3 if dtype == "float16" else 1e-6
    np.testing.assert_allclose(
        losses.astype(jnp.float32), plain.astype(jnp.float32), rtol=rtol
    )


def test_value_and_grad_can_be_differentiated_through():
    def outer(w):
        _, grads = optax_mp.value_and_grad(lambda v: jnp.sum(v**3))(state_with(4.0), w)
        return jnp.sum(grads)

    np.testing.assert_allclose(jax.grad(outer)(jnp.array([2.0])), [4 * 6 * 2.0])


# Equinox


@pytest.fixture
def model():
    class Model(eqx.Module):
        linear: eqx.nn.Linear
        head: eqx.nn.MLP
        steps: jax.Array
        key: jax.Array
        eps: float
        name: str = eqx.field(static=True)

        def __call__(self, x):
            hidden = self.head.activation(self.linear(x))
            return self.head(hidden) * (1 + self.eps) + self.steps

    keys = jax.random.split(jax.random.key(0), 2)
    return Model(
        linear=eqx.nn.Linear(4, 4, key=keys[0]),
        head=eqx.nn.MLP(4, 1, 8, 1, activation=jax.nn.gelu, key=keys[1]),
        steps=jnp.int32(0),
        key=jax.random.key(7),
        eps=1e-5,
        name="net",
    )


def model_loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def test_gradients_of_an_equinox_module_are_those_of_equinox(model):
    x = jnp.asarray(BATCH, jnp.float32)
    f = eqx.filter_jit(optax_mp.value_and_grad(model_loss))
    loss, grads = f(state_with(16.0), model, x)
    want_loss, want = eqx.filter_jit(eqx.filter_value_and_grad(model_loss))(model, x)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    assert (grads.steps, grads.key, grads.eps) == (None, None, None)
    assert grads.head.activation is None
    assert grads.name == "net"
    got = jax.tree.map(lambda g: g / 16, eqx.filter(grads, eqx.is_array))
    assert_close_trees(got, eqx.filter(want, eqx.is_array), rtol=1e-4)


def test_an_equinox_module_trains_under_filter_jit(model):
    dtype = jnp.float16
    model = optax_mp.cast_floating(model, dtype)
    tx = optax_mp.dynamic_loss_scale(optax_mp.mixed_precision(optax.adam(1e-2)))
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    x = jnp.asarray(BATCH, dtype)

    @eqx.filter_jit
    def step(model, state, x):
        loss, grads = optax_mp.value_and_grad(model_loss)(state, model, x)
        weights = eqx.filter(model, eqx.is_inexact_array)
        updates, state = tx.update(grads, state, weights)
        weights = optax.apply_updates(weights, updates)
        return loss, eqx.combine(weights, model), state

    losses = []
    for _ in range(20):
        loss, model, state = step(model, state, x)
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 2
    assert model.linear.weight.dtype == dtype
    assert model.steps.dtype == jnp.int32
    assert model.head.activation is jax.nn.gelu


def test_dynamic_scale_grad_takes_an_equinox_module(model):
    x = jnp.asarray(BATCH, jnp.float32)
    f = optax_mp.dynamic_scale_grad(model_loss, redo_on_nan=2)
    scale = optax_mp.DynamicLossScale(16.0, period=5)
    new, grads = eqx.filter_jit(lambda m: f(m, x, loss_scale=scale))(model)
    want = eqx.filter_jit(eqx.filter_grad(model_loss))(model, x)
    assert grads.head.activation is None
    assert grads.steps is None
    assert new.counter == 1
    assert_close_trees(
        eqx.filter(grads, eqx.is_array), eqx.filter(want, eqx.is_array), rtol=1e-4
    )


# dynamic_scale_*


def overflowing(limit):
    """Return a loss whose float16 gradient overflows from a scale of `limit` on."""
    slope = 2.0**16 / limit

    def fun(w):
        return jnp.sum(w * jnp.float16(slope))

    return fun, slope


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("redo", "end", "finite"),
    [(0, 128, False), (1, 64, False), (2, 32, False), (3, 32, True), (9, 32, True)],
)
def test_the_batch_is_tried_again_up_to_redo_on_nan_times(redo, end, finite, jit):
    # Fails at 256, 128 and 64, holds at 32.
    fun, slope = overflowing(64.0)
    f = optax_mp.dynamic_scale_value_and_grad(fun, redo_on_nan=redo)
    call = jax.jit(lambda w, s: f(w, loss_scale=s)) if jit else None
    scale = optax_mp.DynamicLossScale(256.0)
    weight = jnp.ones(2, jnp.float16)
    new, (loss, grads) = call(weight, scale) if jit else f(weight, loss_scale=scale)
    assert float(new.loss_scale) == end
    assert float(loss) == 2 * slope
    assert bool(optax_mp.all_finite(grads)) is finite
    if finite:
        assert grads.tolist() == [slope] * 2
        assert new.counter == 1


@pytest.mark.parametrize("redo", [0, 1, 4])
def test_a_nan_that_stays_is_tried_exactly_redo_on_nan_times_more(redo):
    tries = []

    def fun(w):
        jax.debug.callback(lambda: tries.append(1))
        return jnp.sum(w) * jnp.nan

    f = optax_mp.dynamic_scale_grad(fun, redo_on_nan=redo)
    new, grads = f(jnp.ones(2), loss_scale=optax_mp.DynamicLossScale(1024.0))
    jax.effects_barrier()
    assert len(tries) == 1 + redo
    assert new.loss_scale == 1024 / 2 ** (1 + redo)
    assert np.isnan(grads).all()


@pytest.mark.parametrize("redo", [0, 4])
def test_a_finite_batch_is_tried_once(redo):
    tries = []

    def fun(w):
        jax.debug.callback(lambda: tries.append(1))
        return jnp.sum(w)

    f = optax_mp.dynamic_scale_grad(fun, redo_on_nan=redo)
    f(jnp.ones(2), loss_scale=optax_mp.DynamicLossScale(8.0))
    jax.effects_barrier()
    assert len(tries) == 1


@pytest.mark.parametrize("redo", [0, 3])
def test_a_nan_in_aux_does_not_shrink_the_scale(redo):
    f = optax_mp.dynamic_scale_value_and_grad(
        lambda w: (jnp.sum(w), jnp.log(-w)), has_aux=True, redo_on_nan=redo
    )
    scale = optax_mp.DynamicLossScale(8.0)
    new, ((loss, aux), grads) = f(jnp.ones(2), loss_scale=scale)
    assert np.isnan(aux).all()
    assert (float(new.loss_scale), int(new.counter)) == (8, 1)
    assert (float(loss), grads.tolist()) == (2, [1, 1])


def test_a_loss_that_is_not_finite_shrinks_the_scale():
    # The gradient is finite.
    f = optax_mp.dynamic_scale_grad(lambda w: jnp.sum(w) + jnp.inf)
    new, grads = f(jnp.ones(2), loss_scale=optax_mp.DynamicLossScale(8.0))
    assert grads.tolist() == [1, 1]
    assert new.loss_scale == 4


def test_a_gradient_that_is_not_finite_shrinks_the_scale():
    # sqrt is finite at 0, its slope is not.
    f = optax_mp.dynamic_scale_value_and_grad(lambda w: jnp.sum(jnp.sqrt(w)))
    new, (loss, _) = f(jnp.zeros(2), loss_scale=optax_mp.DynamicLossScale(8.0))
    assert loss == 0
    assert new.loss_scale == 4


@pytest.mark.parametrize("redo", [0, 2])
def test_gradients_of_a_growth_step_are_divided_by_the_scale_that_made_them(redo):
    f = optax_mp.dynamic_scale_grad(quadratic, redo_on_nan=redo)
    scale = optax_mp.DynamicLossScale(8.0, period=1)
    for _ in range(3):
        before = scale.loss_scale
        scale, grads = f(jnp.array([3.0]), loss_scale=scale)
        assert scale.loss_scale == 2 * before
        assert grads.tolist() == [6.0]


VALUES = {
    "none": optax_mp.NoOpLossScale(),
    "static": optax_mp.StaticLossScale(1024.0),
    "dynamic": optax_mp.DynamicLossScale(1024.0, period=3),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("redo", [0, 2])
@pytest.mark.parametrize("kind", VALUES)
def test_every_kind_of_loss_scale_gives_the_gradients_of_jax(kind, redo, jit):
    params, x = network_params("float32"), jnp.asarray(BATCH, jnp.float32)
    f = optax_mp.dynamic_scale_value_and_grad(network, redo_on_nan=redo)

    def call(params, x, scale):
        return f(params, x, loss_scale=scale)

    scale = VALUES[kind]
    new, (loss, grads) = (jax.jit(call) if jit else call)(params, x, scale)
    want_loss, want = reference_gradients(params, x)
    assert jax.tree.structure(new) == jax.tree.structure(scale)
    assert new.loss_scale == scale.loss_scale
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    for name, grad in grads.items():
        # Sums in another order where XLA fuses.
        np.testing.assert_allclose(grad, want[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
@pytest.mark.parametrize("kind", VALUES)
def test_gradients_from_any_dtype_are_float32(kind, dtype):
    params = {"w": jnp.array([1.5, -2.0], dtype)}
    _, grads = optax_mp.dynamic_scale_grad(quadratic)(params, loss_scale=VALUES[kind])
    assert grads["w"].dtype == jnp.float32
    assert grads["w"].tolist() == [3, -4]


@pytest.mark.parametrize("kind", ["none", "static"])
def test_a_scale_that_stays_comes_back_after_an_overflow(kind):
    f = optax_mp.dynamic_scale_grad(lambda w: jnp.sum(w) * jnp.nan, redo_on_nan=2)
    new, grads = f(jnp.ones(2), loss_scale=VALUES[kind])
    assert as_bits(new) == as_bits(VALUES[kind])
    assert np.isnan(grads).all()


@pytest.mark.parametrize("redo", [0, 2])
def test_gradients_of_leaves_that_are_no_floats_are_none(redo):
    tree = {"w": jnp.array([2.0]), "n": jnp.int32(3), "f": jnp.tanh, "s": "name"}
    f = optax_mp.dynamic_scale_grad(
        lambda t: jnp.sum(t["w"] * t["n"]), redo_on_nan=redo
    )
    _, grads = f(tree, loss_scale=optax_mp.DynamicLossScale(8.0))
    assert grads["w"].tolist() == [3.0]
    assert (grads["n"], grads["f"], grads["s"]) == (None, None, None)


@pytest.mark.parametrize("redo", [0, 2])
def test_other_arguments_and_keywords_reach_the_function(redo):
    def fun(w, x, *, power):
        return jnp.sum((w * x) ** power), "aux" if redo == 0 else x

    f = optax_mp.dynamic_scale_grad(fun, has_aux=True, redo_on_nan=redo)
    _, (grads, aux) = f(
        jnp.array([3.0]), 2.0, power=2, loss_scale=optax_mp.DynamicLossScale(8.0)
    )
    assert grads.tolist() == [24.0]
    assert aux == ("aux" if redo == 0 else 2.0)


def test_aux_of_the_last_try_comes_back():
    def fun(w):
        loss = jnp.sum(w * jnp.float16(1024))
        return loss, {"loss": loss, "name": jnp.int32(3)}

    f = optax_mp.dynamic_scale_value_and_grad(fun, has_aux=True, redo_on_nan=9)
    scale = optax_mp.DynamicLossScale(256.0)
    new, ((loss, aux), grads) = f(jnp.ones(1, jnp.float16), loss_scale=scale)
    assert new.loss_scale == 32
    assert (float(loss), float(aux["loss"]), int(aux["name"])) == (1024, 1024, 3)
    assert grads.tolist() == [1024.0]


def test_aux_that_is_no_array_works_with_retries_as_without():
    results = []
    for redo in (0, 2):
        f = optax_mp.dynamic_scale_value_and_grad(
            lambda w: (jnp.sum(w), {"name": "aux"}), has_aux=True, redo_on_nan=redo
        )
        _, ((_, aux), _) = f(jnp.ones(1), loss_scale=optax_mp.DynamicLossScale(8.0))
        results.append(aux)
    assert results == [{"name": "aux"}] * 2


def test_retries_stop_at_the_floor():
    f = optax_mp.dynamic_scale_grad(lambda w: jnp.sum(w) * jnp.nan, redo_on_nan=50)
    scale = optax_mp.DynamicLossScale(8.0, min_loss_scale=2.0**-3)
    new, _ = f(jnp.ones(1), loss_scale=scale)
    assert new.loss_scale == 2.0**-3
    assert new.min_loss_scale == 2.0**-3


def test_a_loop_in_a_scan_finds_its_scale_and_keeps_the_params_finite():
    fun, slope = overflowing(64.0)
    f = optax_mp.dynamic_scale_grad(fun)

    def step(carry, _):
        weight, scale = carry
        scale, grads = f(weight, loss_scale=scale)
        new = weight - (1e-4 * grads).astype(jnp.float16)
        weight = optax_mp.select_tree(optax_mp.all_finite(grads), new, weight)
        return (weight, scale), scale.loss_scale

    carry = (jnp.ones(2, jnp.float16), optax_mp.DynamicLossScale(256.0))
    (weight, _), scales = jax.jit(lambda c: lax.scan(step, c, None, length=5))(carry)
    assert scales.tolist() == [128, 64, 32, 32, 32]
    # Two steps were good.
    np.testing.assert_allclose(weight, 1 - 2 * 1e-4 * slope, rtol=2e-3)


@pytest.mark.parametrize("redo", [0, 3])
def test_a_stack_of_scales_under_vmap_is_tried_again_each_by_itself(redo):
    fun, slope = overflowing(64.0)
    f = optax_mp.dynamic_scale_grad(fun, redo_on_nan=redo)
    stack = jax.vmap(optax_mp.DynamicLossScale)(jnp.array([256.0, 32.0]))
    weights = jnp.ones((2, 1), jnp.float16)
    new, grads = jax.vmap(lambda w, s: f(w, loss_scale=s))(weights, stack)
    assert new.loss_scale.tolist() == [128 if redo == 0 else 32, 32]
    assert new.counter.tolist() == [0 if redo == 0 else 1, 1]
    assert grads[1].tolist() == [slope]


@pytest.mark.parametrize("bad", [-1, -10])
@pytest.mark.parametrize(
    "function", ["dynamic_scale_grad", "dynamic_scale_value_and_grad"]
)
def test_a_negative_redo_on_nan_is_named(function, bad):
    expected = f"{function}: `redo_on_nan` is {bad}, expected how often to try again"
    with pytest.raises(ValueError, match=f"^{expected}"):
        getattr(optax_mp, function)(quadratic, redo_on_nan=bad)


@pytest.mark.parametrize("bad", ["3", None, 1.5])
def test_a_redo_on_nan_that_is_no_integer_is_named(bad):
    with pytest.raises((ValueError, TypeError), match="`redo_on_nan` is "):
        optax_mp.dynamic_scale_value_and_grad(quadratic, redo_on_nan=bad)


@pytest.mark.parametrize("bad", [1024.0, None, jnp.float32(8)])
def test_a_loss_scale_that_is_no_value_is_named(bad):
    f = optax_mp.dynamic_scale_grad(quadratic)
    with pytest.raises(TypeError, match="dynamic_scale_grad: `loss_scale` is "):
        f(jnp.ones(2), loss_scale=bad)


# check_loss_scale


def skipped(times, tx=None, after_finite=0):
    """Return the state after so many good, then bad, steps, and the last gradients."""
    tx = tx or optax_mp.dynamic_loss_scale(optax.sgd(0.1), init_scale=1024.0)
    state = tx.init(PARAMS)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    update = jax.jit(tx.update)
    for _ in range(after_finite):
        state = update(grads, state, PARAMS)[1]
    grads = dict(grads, a=jnp.array([0.0, jnp.nan, 1.0])) if times else grads
    for _ in range(times):
        state = update(grads, state, PARAMS)[1]
    return state, grads


@pytest.mark.parametrize("times", [0, 1, 3])
def test_check_passes_up_to_max_skipped(times):
    state, grads = skipped(times)
    assert state.skipped_count == times
    assert optax_mp.check_loss_scale(state, max_skipped=3, grads=grads) is None


def test_check_raises_past_max_skipped_with_the_counters():
    state, _ = skipped(4)
    expected = (
        r"^check_loss_scale: 4 steps in a row .* \(allowed: 3; skipped since `init`: 4\), .* down to "
        r"64\. .*NaN or infinity of the model .* optax_mp.nonfinite_paths\(grads\)"
    )
    with pytest.raises(FloatingPointError, match=expected):
        optax_mp.check_loss_scale(state, max_skipped=3)


def test_check_tells_the_total_apart():
    state, _ = skipped(2)
    state = state._replace(total_skipped_count=jnp.int32(7))
    with pytest.raises(
        FloatingPointError, match="2 steps in a row.*allowed: 1; skipped .*: 7"
    ):
        optax_mp.check_loss_scale(state, max_skipped=1)


def test_check_allows_thirty_by_default():
    state, _ = skipped(1)
    optax_mp.check_loss_scale(state._replace(skipped_count=jnp.int32(30)))
    with pytest.raises(FloatingPointError, match=r"31 steps .*allowed: 30"):
        optax_mp.check_loss_scale(state._replace(skipped_count=jnp.int32(31)))


def test_thirty_skips_take_the_default_scale_to_its_floor():
    state, _ = skipped(30, optax_mp.dynamic_loss_scale(optax.sgd(0.1)))
    assert state.scale == 2.0**-14


def test_check_passes_after_a_finite_step():
    tx = optax_mp.dynamic_loss_scale(optax.sgd(0.1))
    state, _ = skipped(4, tx)
    state = tx.update(jax.tree.map(jnp.ones_like, PARAMS), state, PARAMS)[1]
    optax_mp.check_loss_scale(state, max_skipped=0)
    assert state.total_skipped_count == 4


def test_check_names_the_leaves_of_grads():
    state, grads = skipped(2)
    with pytest.raises(FloatingPointError, match=r"Leaves: \['a'\]\.$"):
        optax_mp.check_loss_scale(state, max_skipped=1, grads=grads)


def test_check_says_if_grads_are_finite():
    state, _ = skipped(2)
    with pytest.raises(FloatingPointError, match="Leaves: none in `grads`"):
        optax_mp.check_loss_scale(state, max_skipped=1, grads=PARAMS)


@pytest.mark.parametrize("state", [NO_SCALE, (), {"a": jnp.ones(2)}])
def test_check_without_a_loss_scale_says_so(state):
    expected = "^check_loss_scale: `opt_state` holds no loss scale, expected the state"
    with pytest.raises(ValueError, match=expected):
        optax_mp.check_loss_scale(state)


CHECKED = [n for n in NESTINGS if n not in ("apply_if_finite", "deep", "MultiSteps")]


@pytest.mark.parametrize("nesting", CHECKED)
def test_check_sees_the_skips_of(nesting):
    # Not those that hide a bad step from what they wrap, or see none yet.
    state, grads = skipped(2, NESTINGS[nesting]())
    optax_mp.check_loss_scale(state, max_skipped=2)
    with pytest.raises(FloatingPointError, match=r"2 steps .* down to 1024.*\['a'\]"):
        optax_mp.check_loss_scale(state, max_skipped=1, grads=grads)


@pytest.mark.parametrize("nesting", NESTINGS)
def test_check_finds_the_state_in(nesting):
    state, _ = skipped(0, NESTINGS[nesting](), after_finite=1)
    optax_mp.check_loss_scale(state, max_skipped=0)
    with pytest.raises(FloatingPointError, match="0 steps in a row"):
        optax_mp.check_loss_scale(state, max_skipped=-1)
