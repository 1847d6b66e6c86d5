"""What other scales of 8-bit operands would save: the errors of real products.

    python benchmarks eight_bits --only scales

`amp` has one scale per tensor, a power of two. Here the operands of all products of a
training step are rounded in other ways, too, and each product is compared with that of
the operands as they are. A scale per row is one for each row of the left operand and
for each column of the right, because only these can be taken out of the sum.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_mp._jax._contact import is_transposed
from optax_mp._jax._jaxpr import bind, evaluate

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


class Product(NamedTuple):
    """A product that ran.

    Attributes:
        equation: the equation.
        operands: what it multiplied.
        is_backward: whether it is of the backward pass.
    """

    equation: Any
    operands: Sequence[jax.Array]
    is_backward: bool


def products_of(fun: Callable[..., Any], *args: Any) -> list[Product]:
    """Return the products of `fun(*args)`."""
    found: list[Product] = []

    def run(equation: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        inner = equation.params.get("jaxpr")
        if equation.primitive.name == "jit":
            return evaluate(inner, inputs, run)
        if equation.primitive.name == "dot_general":
            found.append(Product(equation, inputs, is_transposed(equation)))
        return bind(equation, inputs)

    closed = jax.make_jaxpr(fun)(*args)
    evaluate(closed, jax.tree.leaves(args), run)
    return found


def rounded(x: Any, dtype: Any, axes: Sequence[int] | None, exact: bool) -> jax.Array:
    """Return an array rounded to 8 bits, with a scale over `axes` or over all.

    Args:
        x: the array.
        dtype: the 8-bit dtype.
        axes: the axes that share a scale; None for all.
        exact: whether the largest magnitude becomes the largest number of the dtype,
            instead of a power of two times that which is at most as large.
    """
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
    scale = float(jnp.finfo(dtype).max) / jnp.where(largest == 0, 1, largest)
    scale = scale if exact else jnp.exp2(jnp.floor(jnp.log2(scale)))
    return (x * scale).astype(dtype).astype(jnp.float32) / scale


def error_of(product: Product, per_row: Sequence[bool], exact: bool) -> float:
    """Return the error of a product of rounded operands, by norm."""
    contracted = product.equation.params["dimension_numbers"][0]
    # JAX writes the incoming gradient first.
    dtypes = (E5M2 if product.is_backward else E4M3), E4M3
    operands = [
        rounded(x, dtypes[i], contracted[i] if per_row[i] else None, exact)
        for i, x in enumerate(product.operands)
    ]
    got, want = (
        np.asarray(bind(product.equation, each)[0], np.float64)
        for each in (operands, product.operands)
    )
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


WAYS = {
    "per tensor, power of two (amp)": ((False, False), False),
    "per tensor, exact": ((False, False), True),
    "one per row": ((True, False), False),
    "both per row": ((True, True), False),
    "both per row, exact": ((True, True), True),
}


def table(products: Sequence[Product]) -> list[dict[str, Any]]:
    """Return the mean errors of products, forward and backward, for each way."""

    def rows() -> Iterator[dict[str, Any]]:
        for name, is_backward in (("forward", False), ("backward", True)):
            chosen = [x for x in products if x.is_backward == is_backward]
            means = {
                way: float(np.mean([error_of(x, *how) for x in chosen]))
                for way, how in WAYS.items()
            }
            yield {"products": f"{len(chosen)} {name}", **means}

    return list(rows())
