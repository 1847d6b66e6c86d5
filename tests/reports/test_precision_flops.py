"""FLOPs of products, against XLA's cost analysis and against formulas."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from slow_cases import mostly_slow

from optax_mp import precision_report


def shapes(*each, dtype="float32"):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in each]


def flops(fun, *args):
    report = precision_report(fun, *args)
    return sum(each.flops for each in report.products)


def xla_flops(fun, *args):
    cost = jax.jit(fun).lower(*args).cost_analysis()
    return (cost[0] if isinstance(cost, list) else cost)["flops"]


def convolution(**settings):
    settings = {"window_strides": (1,), "padding": [(0, 0)], **settings}
    return lambda x, w: lax.conv_general_dilated(x, w, **settings)


def pullback(fun):
    """Return the gradients of `fun` alone, with respect to both of its arguments."""
    return lambda x, w, ct: jax.vjp(fun, x, w)[1](ct)


def nhwc(x, w):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (2, 1), "SAME", dimension_numbers=numbers)


SAME = {"padding": "SAME"}
MATRICES = {"matrices", "batches", "einsum"}
PRODUCTS = {
    "matrices": (jnp.matmul, (3, 4), (4, 5)),
    "batches": (jnp.matmul, (7, 3, 4), (7, 4, 5)),
    "einsum": (lambda x, y: jnp.einsum("abc,dcb->ad", x, y), (2, 3, 4), (5, 4, 3)),
    "valid": (convolution(), (2, 3, 9), (4, 3, 3)),
    "same": (convolution(**SAME), (2, 3, 9), (4, 3, 3)),
    "strided": (convolution(window_strides=(2,), **SAME), (2, 3, 9), (4, 3, 4)),
    "transposed": (
        convolution(lhs_dilation=(2,), padding=[(2, 2)]),
        (2, 3, 9),
        (4, 3, 3),
    ),
    "dilated": (convolution(rhs_dilation=(2,)), (2, 3, 9), (4, 3, 3)),
    "cropped": (convolution(padding=[(-1, 3)]), (2, 3, 9), (4, 3, 3)),
    "grouped": (convolution(feature_group_count=3), (2, 6, 9), (9, 2, 3)),
    "batch groups": (convolution(batch_group_count=2), (4, 3, 9), (6, 3, 3)),
    "two axes": (nhwc, (2, 8, 7, 3), (3, 2, 3, 5)),
}


@mostly_slow("name", PRODUCTS, lambda name: name in ("einsum", "strided", "two axes"))
@pytest.mark.parametrize("of_gradient", [False, True])
def test_flops_are_those_of_xla(name, of_gradient):
    fun, *sizes = PRODUCTS[name]
    args = shapes(*sizes)
    if of_gradient:
        fun, args = pullback(fun), [*args, jax.eval_shape(fun, *args)]
    excess = flops(fun, *args) / xla_flops(fun, *args)
    # XLA counts no padding, of which such small convolutions have much.
    assert excess == 1 or (1 < excess < 1.7 and name not in MATRICES)


BF16, F8 = "bfloat16", "float8_e4m3fn"


@pytest.mark.parametrize(
    ("left", "right", "dtype"),
    [
        *((x, x, x) for x in (BF16, "float16", F8, "int8", "complex64")),
        *((BF16, "float32", "float32"), (F8, "float8_e5m2", F8)),
        *((F8, BF16, BF16), ("int8", BF16, BF16)),
    ],
)
def test_the_dtype_of_a_product_is_that_of_its_wider_operand(left, right, dtype):
    args = [jax.ShapeDtypeStruct((4, 4), each) for each in (left, right)]
    result = "complex64" if left == "complex64" else "float32"

    def dot(x, y):
        numbers = (([1], [0]), ([], []))
        return lax.dot_general(x, y, numbers, preferred_element_type=result)

    product = only(dot, *args)
    assert product.dtype == dtype
    assert product.is_wide == (dtype in ("float32", "complex64"))
    assert product.is_wide or product.causes == ()


# What is multiplied, by the first word of an algorithm's name. Those of several products
# are as exact as float32, and those of 8 bits take operands as they are.
WORDS = {"F16": "float16", BF16: BF16, "BF16": BF16, "F32": "float32"}
WORDS |= {"TF32": "float32", "F64": "float64"}
PRESETS = {
    each.name: "float32" if "_X" in each.name else WORDS[each.name.split("_")[0]]
    for each in lax.DotAlgorithmPreset
    if "F8" not in each.name and each.name != "DEFAULT"
}
AS_THEY_ARE = [each for each in lax.DotAlgorithmPreset if each.name not in PRESETS]
HAND_MADE = {
    lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, jnp.float32): BF16,
    lax.DotAlgorithm(jnp.float16, jnp.float32, jnp.float32): "float32",
    lax.DotAlgorithm(
        jnp.bfloat16, jnp.bfloat16, jnp.float32, num_primitive_operations=3
    ): "float32",
}
ALGORITHMS = {lax.DotAlgorithmPreset[name]: dtype for name, dtype in PRESETS.items()}
ALGORITHMS |= HAND_MADE


def asking(precision):
    return lambda x, y: lax.dot(x, y, precision=precision)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
@pytest.mark.parametrize("operand", ["float32", BF16])
def test_an_algorithm_says_what_a_product_multiplies(algorithm, operand):
    product = only(asking(algorithm), *shapes((4, 4), (4, 4), dtype=operand))
    assert product.dtype == ALGORITHMS[algorithm]
    kinds = [cause.kind for cause in product.causes]
    if not product.is_wide:
        assert kinds == []
    elif operand == BF16:  # Nothing but the algorithm makes it float32.
        assert kinds == ["precision"]
        assert product.causes[0].name == f"precision={algorithm}"
        assert product.causes[0].line.startswith("test_precision_flops.py:")
    else:
        assert kinds == ["argument", "argument"]


@pytest.mark.parametrize("operand", ["float32", BF16])
@pytest.mark.parametrize("precision", [None, *lax.Precision, *AS_THEY_ARE], ids=str)
def test_without_an_algorithm_the_operands_say_it(precision, operand):
    args = shapes((4, 4), (4, 4), dtype=operand)
    assert only(asking(precision), *args).dtype == operand


def test_flops_of_a_ragged_dot_count_one_group_for_each_row():
    args = [*shapes((6, 4), (3, 4, 5)), jax.ShapeDtypeStruct((3,), "int32")]
    assert flops(lax.ragged_dot, *args) == 2 * 6 * 4 * 5
    # Each of both gradients costs as much.
    loss = lambda x, n: lax.ragged_dot(*x, n).sum()  # noqa: E731
    assert flops(loss, args[:2], args[2]) == 3 * 2 * 6 * 4 * 5


# What a row says of its product.


def only(fun, *args):
    (product,) = precision_report(fun, *args).products
    return product


def test_integers_are_neither_wide_nor_low():
    def fun(n, x, y):
        return n @ n, x @ x, y @ y

    n, x, y = (jnp.ones((4, 4), dtype) for dtype in ("int32", "bfloat16", "float32"))
    report = precision_report(fun, n, x, y)
    assert report.shares() == {"int32": 1 / 3, "bfloat16": 1 / 3, "float32": 1 / 3}
    assert [each.is_wide for each in report.products] == [False, False, True]
    assert report.low_share == 1 / 2
    assert precision_report(jnp.matmul, n, n).low_share == 1
