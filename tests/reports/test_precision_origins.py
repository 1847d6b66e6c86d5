"""What made a product float32: the argument, constant or cast that started it."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from optax_mp import precision_report

LOW, FULL = jnp.bfloat16, jnp.float32
X = jax.ShapeDtypeStruct((8, 8), LOW)
F = jax.ShapeDtypeStruct((8, 8), FULL)
S = jax.ShapeDtypeStruct((8,), FULL)


def line_of(fun, text):
    """Return the place of the line of a function that holds `text`."""
    lines, start = inspect.getsourcelines(fun)
    (number,) = [i for i, line in enumerate(lines, start) if text in line]
    return f"test_precision_origins.py:{number}"


def cause_of(fun, *args, at=-1, **kwargs):
    """Return the first cause of a float32 product in the forward pass."""
    wide = precision_report(fun, *args, argnums=(), **kwargs).wide_products
    return wide[at].causes[0]


def names(fun, *args, **kwargs):
    report = precision_report(fun, *args, argnums=(), **kwargs)
    return [[each.name for each in x.causes] for x in report.wide_products]


# Arguments, by their paths


def test_an_argument_that_is_multiplied_itself():
    assert names(lambda w, x: x @ w, F, X) == [["w"]]


def test_a_float32_scale_makes_what_follows_float32():
    def fun(params, x):
        x = jnp.tanh(x @ params["in"])
        x = x * params["norm"]["scale"]
        x = jax.nn.gelu(x.T.reshape(8, 8))
        return x @ params["out"]

    params = {"in": X, "norm": {"scale": S}, "out": X}
    report = precision_report(fun, params, X, argnums=())
    assert [each.dtype for each in report.products] == ["bfloat16", "float32"]
    assert names(fun, params, X) == [["params['norm']['scale']"]]


def test_the_nearest_argument_comes_first():
    def fun(x, scale, bias, w):
        return (x @ w * scale + bias) @ w

    assert names(fun, F, S, S, X) == [["x"], ["bias", "scale", "x"]]


def test_both_operands_count():
    assert names(lambda a, b: a @ b, F, F) == [["a", "b"]]


def test_paths_are_those_of_the_arguments():
    def fun(first, *rest, key, **more):
        del first, key
        return rest[1]["a"][0] @ more["w"]

    given = (X, X, {"a": [F]})
    assert names(fun, *given, key=X, w=F) == [["rest[1]['a'][0]", "w"]]


def test_a_function_without_a_signature_has_numbered_arguments():
    class Call:
        __signature__ = "none that `inspect` can read"

        def __call__(self, *args):
            return args[0] @ args[1]

    assert names(Call(), F, X) == [["args[0]"]]


# What starts inside


def test_an_array_that_is_closed_over():
    mask = np.ones((8, 8), np.float32)
    cause = cause_of(lambda x: (x * mask) @ x, X)
    assert (cause.kind, cause.name) == ("constant", "float32[8,8]")


def test_a_cast():
    def fun(x):
        y = x.astype(jnp.float32)  # the cast
        return y @ y

    cause = cause_of(fun, X)
    assert (cause.kind, cause.name) == ("cast", "float32")
    assert (cause.line, cause.library_line) == (line_of(fun, "the cast"), "")
    assert str(cause) == f"a cast to float32 at {cause.line}"


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: jnp.asarray(x, jnp.float32),
        lambda x: jnp.float32(x),
        lambda x: lax.convert_element_type(x, jnp.float32),
        lambda x: jax.jit(lambda x: x.astype(jnp.float32))(x),
    ],
)
def test_each_way_to_cast_is_a_cast(cast):
    assert cause_of(lambda x: cast(x) @ x, X).kind == "cast"


def test_a_cast_that_meets_a_16_bit_value_is_the_cause():
    def fun(x, w):
        return x.astype(jnp.float32) @ w + jnp.einsum("ij,jk->ik", w, x * 2)

    assert cause_of(fun, X, X).kind == "cast"


def test_an_array_made_inside():
    def fun(x):
        places = jnp.arange(8.0)[:, None]  # made here
        return (x + places) @ x

    cause = cause_of(fun, X)
    assert (cause.kind, cause.name) == ("operation", "iota")
    assert cause.line == line_of(fun, "made here")


def test_a_cast_of_integers():
    def fun(n, x):
        return (x * n.astype(jnp.float32)) @ x

    assert cause_of(fun, jax.ShapeDtypeStruct((8,), jnp.int32), X).kind == "cast"


def test_a_numpy_number():
    cause = cause_of(lambda x: (x * np.float32(2)) @ x, X)
    assert (cause.kind, cause.name) == ("literal", "2.0")


def test_a_python_number_makes_nothing_float32():
    assert names(lambda x: jnp.where(x > 0, 2.0 * x + 1, -1e9) @ x, X) == []


def test_a_product_with_a_float32_result():
    def fun(x):
        y = jnp.matmul(x, x, preferred_element_type=jnp.float32)
        return jnp.tanh(y) @ x

    cause = cause_of(fun, X)
    assert (cause.kind, cause.name) == ("result", "float32")
    assert cause.line == line_of(fun, "matmul")


def test_a_layer_that_promotes_to_its_own_dtype():
    def promote(*arrays):  # as Flax's layers do
        return [jnp.asarray(x, jnp.float32) for x in arrays]

    def fun(x, w):
        x, w = promote(x, w)
        return x @ w

    assert cause_of(fun, X, X).kind == "promotion"


# Through jaxprs inside


def through(wrap):
    def fun(x, scale, w):
        return wrap(lambda x: x * scale)(x) @ w

    return names(fun, X, S, X)


@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        jax.checkpoint,
        jax.vmap,
        lambda f: lambda x: lax.cond(x[0, 0] > 0, f, lambda x: x.astype(FULL), x),
        lambda f: lambda x: lax.map(f, x),
        lambda f: lambda x: jax.named_call(f, name="layer")(x),
    ],
    ids=["jit", "remat", "vmap", "cond", "map", "named"],
)
def test_origins_go_through(wrap):
    found = through(wrap)
    assert [each[0] for each in found] == ["scale"]


@pytest.mark.parametrize("rule", [jax.custom_jvp, jax.custom_vjp])
def test_origins_go_through_functions_with_a_rule(rule):
    @rule
    def multiply(x, scale):
        return x * scale

    if rule is jax.custom_jvp:
        multiply.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    else:
        multiply.defvjp(lambda *args: (args[0], args), lambda args, gradient: args)
    fun = lambda x, scale, w: multiply(x, scale) @ w  # noqa: E731
    assert names(fun, X, S, X) == [["scale"]]


def test_a_carry_has_what_any_iteration_gives_it():
    def fun(x, scale, w):
        def body(carry, _):
            a, b = carry
            return (b.astype(a.dtype), (b * scale)), a @ w

        start = (x.astype(jnp.float32), x.astype(jnp.float32))
        return lax.scan(body, start, None, 3)

    causes = precision_report(fun, X, S, X).wide_products[0].causes
    assert {"scale", "float32"} == {each.name for each in causes}


def test_origins_go_through_a_while_loop():
    def fun(x, scale, w):
        step = lambda x: (x * scale) @ w  # noqa: E731
        return lax.while_loop(lambda x: x[0, 0] < 9, step, x.astype(jnp.float32))

    report = precision_report(fun, X, S, X, argnums=())
    assert report.wide_products[0].causes[0].name == "scale"


# The backward pass


def test_the_products_of_a_gradient_have_the_causes_of_the_forward_pass():
    def loss(params, x, y):
        h = x @ params["in"]
        h = (h * params["scale"]) @ params["out"]  # the wide one
        return jnp.mean((h - y) ** 2)

    params = {"in": X, "scale": S, "out": X}
    report = precision_report(loss, params, X, F)
    assert [each.is_backward for each in report.wide_products] == [False, True, True]
    for each in report.wide_products:
        assert each.line == line_of(loss, "the wide one")
        assert [x.name for x in each.causes] == ["params['scale']"]


def test_a_training_step_has_the_causes_of_its_loss():
    def loss(params, x, y):
        h = jnp.tanh(x @ params["in"]) * params["scale"]
        return jnp.mean((h @ params["out"] - y) ** 2)

    def step(params, x, y):
        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params, x, y))

    params = {"in": X, "scale": S, "out": X}
    for fun in (loss, step, jax.jit(step)):
        wide = precision_report(fun, params, X, F).wide_products
        causes = {tuple(x.name for x in each.causes) for each in wide}
        assert causes == {("params['scale']",)}


def test_the_gradient_of_a_float32_result_is_float32_because_of_it():
    def loss(w, x):
        return jnp.matmul(x, w, preferred_element_type=jnp.float32).sum()

    (product,) = precision_report(loss, X, X).wide_products
    assert product.is_backward and product.causes[0].kind == "result"


def test_a_rule_that_casts_is_the_cause_in_the_backward_pass():
    @jax.custom_vjp
    def double(x, w):
        return x @ w

    def backward(kept, gradient):
        x, w = (each.astype(jnp.float32) for each in kept)  # the cast
        gradient = gradient.astype(jnp.float32)
        return (gradient @ w.T).astype(LOW), (x.T @ gradient).astype(LOW)

    double.defvjp(lambda x, w: (x @ w, (x, w)), backward)
    report = precision_report(lambda x, w: double(x, w).sum(), X, X, argnums=(0, 1))
    assert [each.is_backward for each in report.wide_products] == [True, True]
    for each in report.wide_products:
        assert each.causes[0].kind == "cast"


# Where it is written


def test_a_function_of_jax_that_is_jitted_has_the_line_of_each_call():
    def fun(x):
        x = jnp.convolve(x[0], x[1], mode="same")  # first
        return jnp.convolve(x, x, mode="same")  # second

    report = precision_report(fun, F, argnums=())
    assert [each.line for each in report.products] == [
        line_of(fun, "first"),
        line_of(fun, "second"),
    ]


def test_a_jitted_function_of_a_user_has_its_own_line():
    @jax.jit
    def layer(x):
        return x @ x  # here

    report = precision_report(lambda x: layer(layer(x)), F, argnums=())
    line = line_of(layer.__wrapped__, "here")
    assert [each.line for each in report.products] == [line, line]
