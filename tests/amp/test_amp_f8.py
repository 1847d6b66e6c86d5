"""amp with 8-bit products: where they are, in what, and what a report says of them."""

import jax
import jax.numpy as jnp
import pytest
from amp_cases import CASES, error, normal, objective, operations, products
from jax import lax
from slow_cases import mostly_slow

import optax_mp
from optax_mp.autocast import _eight_bits

F8 = "float8_e4m3fn"
W, X = normal(256, 256) / 16, normal(256, 256, seed=1)
DTYPES_8_BIT = {"float8_e4m3fn", "float8_e5m2"}

# As of a ragged product alone, which stays in 16 bits.
no_product_in_8_bits = pytest.mark.filterwarnings(
    "ignore:amp. expected matrix products in float8:UserWarning"
)


def in_8_bits(fun, **settings):
    return optax_mp.amp(fun, compute_dtype=F8, **settings)


def dtypes_of_products(fun, *args):
    """Return the dtypes of the operands of all products."""
    found = operations(jax.make_jaxpr(fun)(*args))
    return [
        tuple(atom.aval.dtype.name for atom in each.equation.invars)
        for each in found
        if each.equation.primitive.name == "dot_general"
    ]


def eight_bit_products(fun, *args):
    found = dtypes_of_products(fun, *args)
    return sum(DTYPES_8_BIT.issuperset(dtypes) for dtypes in found), len(found)


@pytest.fixture(autouse=True)
def half_the_smallest(monkeypatch):
    """Let smaller products run in 8 bits, so that tests are quick."""
    monkeypatch.setattr(_eight_bits, "SMALLEST", _eight_bits.SMALLEST // 2)


@pytest.fixture
def any_shape(half_the_smallest, monkeypatch):
    """Let small products run in 8 bits."""
    monkeypatch.setattr(_eight_bits, "SMALLEST", 1)
    monkeypatch.setattr(_eight_bits, "MULTIPLE", 1)


UNUSED = "ignore:amp. expected matrix products in float8_e4m3fn"

# Which products


def test_a_product_and_those_of_its_gradient_have_operands_in_8_bits():
    fun = in_8_bits(lambda x, w: jnp.sum(jnp.tanh(x @ w)))
    assert dtypes_of_products(fun, X, W) == [(F8, F8)]
    forward, *backward = dtypes_of_products(jax.grad(fun, (0, 1)), X, W)
    assert forward == (F8, F8)
    assert [set(each) for each in backward] == [{F8, "float8_e5m2"}] * 2


@pytest.mark.filterwarnings(UNUSED)
@pytest.mark.parametrize(
    ("rows", "inner", "columns", "is_8_bit"),
    [
        (256, 256, 256, True),
        (272, 512, 1024, True),
        (240, 256, 256, False),
        (256, 240, 256, False),
        (256, 256, 240, False),
        (264, 256, 256, False),
        (256, 0, 256, False),
    ],
)
def test_small_and_odd_shapes_stay_in_16_bits(rows, inner, columns, is_8_bit):
    x, w = jnp.zeros((rows, inner)), jnp.zeros((inner, columns))
    assert eight_bit_products(in_8_bits(jnp.matmul), x, w) == (is_8_bit, 1)


@pytest.mark.filterwarnings(UNUSED)
def test_the_smallest_size_is_512(monkeypatch):
    monkeypatch.undo()
    x = jnp.zeros((512, 512))
    assert eight_bit_products(in_8_bits(jnp.matmul), x, x) == (1, 1)
    for y in (x[:496], x[:, :496]):
        assert eight_bit_products(in_8_bits(jnp.matmul), y, x[: y.shape[1]]) == (0, 1)


def outer(x, w):
    with jax.named_scope("outer"):
        return inner(x, w) @ w


@jax.named_scope("inner")
def inner(x, w):
    return jnp.tanh(x @ w)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"dot_general": "f8"}, 2),
        ({lax.dot_general_p: "f8"}, 2),
        ({"inner": "f8"}, 1),
        ({"outer": "f8"}, 2),
        ({"dot_general": "f8", "inner": "not_f8"}, 1),
        ({"dot_general": "f8", "inner": "low"}, 1),
        ({"dot_general": "f8", "inner": "f32"}, 1),
        ({"outer": "not_f8", "inner": "f8"}, 0),
        ({"outer": "f8", "inner": "as_written"}, 1),
        ({"dot_general": "not_f8"}, 0),
        ({}, 0),
    ],
)
def test_words_go_by_operation_and_scope_with_the_outermost_first(rules, expected):
    fun = optax_mp.amp(outer, rules=optax_mp.default_amp_rules | rules)
    assert eight_bit_products(fun, X, W) == (expected, 2)


@pytest.mark.filterwarnings(UNUSED)
def test_amp_stop_and_precision_keep_a_product_out():
    def fun(x, w):
        with optax_mp.amp_stop():
            x = x @ w
        return jnp.matmul(x, w, precision="highest")

    assert eight_bit_products(in_8_bits(fun), X, W) == (0, 2)
    half = jnp.asarray(X, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16)
    assert eight_bit_products(in_8_bits(fun), *half) == (0, 2)


def test_a_call_without_any_product_in_8_bits_warns():
    text = "expected matrix products in float8_e4m3fn, .*got none .1 because of their"
    with pytest.warns(optax_mp.MixedPrecisionWarning, match=text):
        in_8_bits(jnp.matmul)(X[:8], W)
    report = optax_mp.amp_report(jnp.matmul, X[:8], W, compute_dtype=F8)
    assert "Warning: expected matrix products in float8_e4m3fn" in str(report)


# Bad input


@pytest.mark.parametrize("dtype", ["float8_e4m3", "float8_e5m2fnuz", "float8_e3m4"])
def test_other_8_bit_dtypes_are_refused(dtype):
    if not hasattr(jnp, dtype):
        pytest.skip(f"this JAX has no {dtype}")
    match = rf"`compute_dtype` to be .*float8_e4m3fn and float8_e5m2, got {dtype}"
    with pytest.raises(ValueError, match=match):
        optax_mp.amp(jnp.matmul, compute_dtype=getattr(jnp, dtype))


@pytest.mark.parametrize(
    "name",
    ["tanh", "conv_general_dilated", "ragged_dot_general", "bias_add", "amp_default"],
)
@pytest.mark.parametrize("word", ["f8", "not_f8"])
def test_a_word_on_an_operation_that_is_no_matrix_product_is_refused(name, word):
    match = f"expected the rule '{word}' for 'dot_general' .*, got it for '{name}'"
    with pytest.raises(ValueError, match=match):
        optax_mp.amp(jnp.sin, rules=optax_mp.default_amp_rules | {name: word})


# Functions and transformations of every kind

WITH_PRODUCTS = [name for name, case in CASES.items() if name != "callbacks_in_scan"]
DEFAULT_CASES = {"scan_over_layers", "sharded"}
NUMBERS = DEFAULT_CASES | {"attention", "conv_net", "ragged_dot", "remat_in_scan"}
NUMBERS |= {"while_loop", "cond", "custom_vjp", "custom_jvp", "vmap", "pallas"}


@no_product_in_8_bits
@mostly_slow("name", sorted(NUMBERS), lambda name: name in DEFAULT_CASES)
def test_every_kind_of_function_keeps_its_dtypes_and_errs_little(name, any_shape):
    fun, arguments = objective(CASES[name].fun), CASES[name].arguments

    def run(fun):
        return jax.jit(jax.value_and_grad(fun, has_aux=True))(*arguments)

    (_, got), got_gradient = run(in_8_bits(fun))
    (_, want), want_gradient = run(fun)
    got, want = (
        jax.tree.leaves(x) for x in ((got, got_gradient), (want, want_gradient))
    )
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want]
    for a, b in zip(got, want, strict=True):
        # A relu may pass what it stopped.
        assert error(a, b) < 0.4


@no_product_in_8_bits
@mostly_slow("name", WITH_PRODUCTS, lambda name: name in DEFAULT_CASES)
def test_free_products_are_in_8_bits_in_every_kind_of_function(name, any_shape):
    case = CASES[name]

    def low_and_8_bit(fun):
        found = products(jax.make_jaxpr(fun)(*case.arguments))
        low, eight = (
            sum(
                each.equation.primitive.name == "dot_general"
                and {x.aval.dtype.name for x in each.equation.invars} <= dtypes
                for each in found
            )
            for dtypes in ({"bfloat16"}, DTYPES_8_BIT)
        )
        return low, eight

    for program in (
        lambda fun: fun,
        lambda fun: jax.grad(objective(fun), has_aux=True),
    ):
        in_16, _ = low_and_8_bit(program(optax_mp.amp(case.fun)))
        left, in_8 = low_and_8_bit(program(in_8_bits(case.fun)))
        # JAX may transpose the rule of a custom_jvp, but not a rounding in it.
        assert left == 0 or name == "custom_jvp"
        # Under remat there may be one more, whose result nothing reads.
        assert in_8 >= in_16 or name == "custom_jvp"


# Reports


def two_layers(params, x):
    x = x @ params["first"]
    x = jnp.tanh(x)
    return jnp.sum(jax.nn.log_softmax(x @ params["last"]))


LAYERS = {"first": W, "last": W[:, :16]}


def test_a_report_counts_8_bit_products_and_says_why_others_are_not():
    report = optax_mp.amp_report(two_layers, LAYERS, X, compute_dtype=F8)
    ran = {
        (each.ran, each.why)
        for each in report.operations
        if each.primitive == "dot_general"
    }
    assert ran == {("f8", "rule"), ("low", "shape")}
    assert "1 f8; " in str(report)
