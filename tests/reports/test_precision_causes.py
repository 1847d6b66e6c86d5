"""The first place where a 16-bit value became float32 on the way to a product."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from optax_mp import gradient_range_report, precision_report

LOW, FULL = jnp.bfloat16, jnp.float32
X = jax.ShapeDtypeStruct((8, 8), LOW)
F = jax.ShapeDtypeStruct((8, 8), FULL)
S = jax.ShapeDtypeStruct((8,), FULL)
N = jax.ShapeDtypeStruct((8,), jnp.int32)
MASK = np.tri(8, dtype=bool)
KEY = jax.random.key(0)
TABLE = np.ones((8, 8), np.float32)


def line_of(fun, text):
    """Return the place of the line of a function that holds `text`."""
    lines, start = inspect.getsourcelines(fun)
    (number,) = [i for i, line in enumerate(lines, start) if text in line]
    return f"test_precision_causes.py:{number}"


def causes(fun, *args, **kwargs):
    """Return the kinds and names of the causes of each float32 product."""
    report = precision_report(fun, *args, **kwargs)
    return [[(x.kind, x.name) for x in each.causes] for each in report.wide_products]


def names(fun, *args, **kwargs):
    return [[name for _, name in each] for each in causes(fun, *args, **kwargs)]


# What is float32 by itself.


def attention(x):
    scores = jnp.where(MASK, (x @ x) / np.sqrt(32), -1e9)
    return jax.nn.softmax(scores) @ x


def square_of_a_rule(x):
    return jnp.matmul(x, x, preferred_element_type=FULL) @ x


MADE = "array", "an array made at test_precision_causes.py"
CAST = "cast", "a cast to float32"
SOURCES = {
    "an operand": (lambda s, x: x @ s, F, "argument", "s"),
    "a scale": (lambda x, s: (x * s) @ x, S, "argument", "s"),
    "a scale and numbers": (lambda x, s: (x * (s * 2.0 + 1.0)) @ x, S, "argument", "s"),
    "a constant": (lambda x: (x * TABLE) @ x, None, "constant", "a constant"),
    "a NumPy number": (attention, None, "number", "the number 5.656854"),
    "one inside where": (
        lambda x: jnp.where(MASK, x / np.float64(3), -1e9) @ x,
        *(None, "number", "the number 3"),
    ),
    "one of where": (
        lambda x: jnp.where(MASK, x, np.float32(-1e9)) @ x,
        *(None, "number", "the number -1e+09"),
    ),
    "zeros": (lambda x: (x + jnp.zeros(8)) @ x, None, *MADE),
    "zeros and a number": (lambda x: (x + (jnp.zeros(8) + 2.0)) @ x, None, *MADE),
    "a range": (lambda x: (x + jnp.arange(8.0)) @ x, None, *MADE),
    "one_hot": (lambda x, n: (x + jax.nn.one_hot(n, 8)) @ x, N, *MADE),
    "random": (lambda x: (x + jax.random.normal(KEY, (8,))) @ x, None, *MADE),
    "cast integers": (lambda x, n: (x * n.astype(FULL)) @ x, N, *MADE),
    "astype": (lambda x: x.astype(FULL) @ x, None, *CAST),
    "asarray": (lambda x: jnp.asarray(x, FULL) @ x, None, *CAST),
    "float32": (lambda x: jnp.float32(x) @ x, None, *CAST),
    "a cast in a jit": (jax.jit(lambda x: x.astype(FULL) @ x), None, *CAST),
    "a mean": (lambda x: (jnp.mean(x, dtype=FULL) * x) @ x, None, *CAST),
    "a result": (square_of_a_rule, None, "result", "a product with result float32"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_float32_by_itself_is_named(name):
    fun, other, kind, text = SOURCES[name]
    args = {None: (X,), F: (F, X)}.get(other, (X, other))
    (((found, said),),) = causes(fun, *args)
    assert found == kind and said.startswith(text)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.where(x > 0, 2.0 * x + 1, -1e9) @ x,
        lambda x: (x * jnp.mean(x)) @ x,
        lambda x: jax.nn.softmax(x) @ x,
        lambda x: (x.astype(FULL) * 2).astype(LOW) @ x,
        lambda x: (x * jnp.asarray(2.0)) @ x,
    ],
)
def test_python_numbers_and_what_is_cast_back_make_nothing_float32(fun):
    assert causes(fun, X) == []


# The first place counts, and nothing behind it.


def test_only_the_first_promotion_is_blamed():
    def fun(params, x):
        x = x * params[0]  # first
        for scale, w in zip(params[1:], [X] * 3, strict=True):
            x = (x * scale) @ x.astype(w.dtype)
        return x @ TABLE

    report = precision_report(fun, [S] * 4, X)
    assert len(report.wide_products) == 4
    for each in report.wide_products:
        ((name, line),) = [(cause.name, cause.line) for cause in each.causes]
        assert (name, line) == ("params[0]", line_of(fun, "first"))
        assert str(each.causes[0]) == f"params[0] at {line}"


def test_a_cast_before_a_float32_scale_is_first():
    assert names(lambda x, s: (x.astype(FULL) * s) @ x, X, S) == [["a cast to float32"]]


def test_the_place_of_a_number_is_that_of_the_promotion():
    ((cause,),) = [x.causes for x in precision_report(attention, X).wide_products[:1]]
    assert cause.line == line_of(attention, "np.sqrt")


def test_paths_are_those_of_the_arguments():
    def fun(first, *rest, key, **more):
        del first, key
        return rest[1]["a"][0] @ more["w"]

    found = names(fun, X, X, {"a": [F]}, key=X, w=F)
    assert found == [["rest[1]['a'][0]", "w"]]

    class Call:
        __signature__ = "none that `inspect` can read"

        def __call__(self, *args):
            return args[0] @ args[1]

    assert names(Call(), F, X) == [["args[0]"]]


# Through jaxprs inside.


@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        jax.checkpoint,
        jax.vmap,
        lambda f: lambda x: lax.cond(x[0, 0] > 0, f, lambda x: x * TABLE, x),
        lambda f: lambda x: lax.map(f, x),
        lambda f: lambda x: jax.named_call(f, name="layer")(x),
    ],
    ids=["jit", "remat", "vmap", "cond", "map", "named"],
)
def test_causes_go_through(wrap):
    def fun(x, scale, w):
        return wrap(lambda x: x * scale)(x) @ w

    assert names(fun, X, S, X) in ([["scale"]], [["a constant"]])


# The backward pass.


def loss(params, x, y):
    h = jnp.tanh(x @ params["in"]) * params["scale"]
    h = h @ params["out"]  # the wide one
    return jnp.mean((h - y) ** 2)


def step(params, x, y):
    return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params, x, y))


@pytest.mark.parametrize("fun", [loss, step, jax.jit(step)])
def test_the_products_of_a_gradient_have_the_causes_of_the_forward_pass(fun):
    params = {"in": X, "scale": S, "out": X}
    wide = precision_report(fun, params, X, F).wide_products
    assert sorted(each.is_backward for each in wide) == [False, True, True]
    for each in wide:
        assert each.line == line_of(loss, "the wide one")
        assert [x.name for x in each.causes] == ["params['scale']"]


def test_a_product_of_two_16_bit_dtypes_is_named_as_one():
    half = jax.ShapeDtypeStruct((8, 8), jnp.float16)
    (((kind, said),),) = causes(lambda x, y: (x @ y).astype(LOW) @ (x @ y), X, half)
    assert kind == "result" and said.startswith("a product of bfloat16 with float16")


def test_no_two_rows_of_a_table_look_alike():
    names = [f"{'encoder_' * n}layer" for n in range(1, 40, 13)]
    tail = "attention_of_many_words"
    params = {name: {tail: {tail: {"norm": jnp.ones(8)}}} for name in names}

    def fun(params, x):
        return [(x * params[name][tail][tail]["norm"]) @ x for name in names]

    table = str(precision_report(fun, params, X)).splitlines()
    cells = [
        re.split("  +", line) for line in table if line.startswith("test_precisio")
    ]
    assert len({label for _, label, *_ in cells}) == len(names)
    report = str(gradient_range_report(params)).splitlines()
    titles = {line.split("  ")[0] for line in report if "['norm']" in line}
    assert len(titles) == len(names)
