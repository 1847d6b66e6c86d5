"""What `precision_report` returns: each product, and what makes it float32."""

from dataclasses import dataclass

import jax.numpy as jnp

from optax_mp.reports._precision_products import is_wide


@dataclass(frozen=True)
class PrecisionCause:
    """What makes a value float32.

    Attributes:
        kind: `"argument"`; `"constant"`, an array that the function closes over;
            `"operation"`, which makes a float32 array of none, such as `iota`;
            `"cast"`; `"result"`, of a product of 16-bit operands; `"literal"`, such as
            `np.float32(2)`; `"promotion"`, a cast that a layer with a `dtype` makes; or
            `"gradient"`, of a float32 output.
        name: the path of an argument or output; otherwise what it is.
        line: where it is written; `""` for an argument.
        library_line: the line in a library of layers that `line` calls, or `""`.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> w, x = jnp.ones((4, 4)), jnp.ones((2, 4), jnp.bfloat16)
        >>> report = optax_mp.precision_report(lambda w, x: x @ w, w, x)
        >>> cause = report.products[0].causes[0]
        >>> cause.kind, cause.name
        ('argument', 'w')
    """

    kind: str
    name: str
    line: str
    library_line: str

    def __str__(self) -> str:
        """Return what to call it in a table."""
        text = {
            "constant": f"a constant, {self.name}",
            "cast": f"a cast to {self.name}",
            "result": f"a product with a {self.name} result",
            "literal": f"the {self.name} number",
            "promotion": f"a layer of dtype {self.name}",
            "gradient": f"the gradient of {self.name or 'the output'}",
        }.get(self.kind, self.name)
        place = self.line and (self.library_line or self.line)
        return f"{text} at {place}" if place else text


@dataclass(frozen=True)
class PrecisionProduct:
    """A matrix product or convolution.

    Attributes:
        primitive: its name in JAX, such as `"dot_general"`.
        dtype: the dtype of its operands; of two dtypes, the wider.
        dtypes: the dtypes of both operands and of the result.
        shapes: their shapes; in a `shard_map`, of a shard.
        flops: the FLOPs of all its runs, over all devices.
        count: how often it runs: the iterations of a scan, times the shards of a
            `shard_map`. A product in a `while` loop counts for one iteration, and one
            in a branch that has fewer FLOPs than another counts 0.
        is_backward: whether it is in the backward pass.
        line: the line it comes from, such as `"model.py:12"`.
        library_line: the line in a library of layers (Flax, Equinox, Haiku, ...) that
            `line` calls, or `""`.
        causes: if it is float32 or wider, what makes it so, the most telling first.
        kept_by: `""` if `amp` would run it low, or does not need to; otherwise why it
            does not: `"precision"`, `"scope"`, `"parameters"`; `"inputs"`, for complex
            operands; or `"rule"`, for a sparse product.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> w, x = jnp.ones((4, 4)), jnp.ones((2, 4), jnp.bfloat16)
        >>> report = optax_mp.precision_report(lambda w, x: x @ w, w, x)
        >>> product = report.products[0]
        >>> product.dtype, product.dtypes, product.flops
        ('float32', ('bfloat16', 'float32', 'float32'), 64)
    """

    primitive: str
    dtype: str
    dtypes: tuple[str, str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    flops: int
    count: int
    is_backward: bool
    line: str
    library_line: str
    causes: tuple[PrecisionCause, ...]
    kept_by: str

    @property
    def is_wide(self) -> bool:
        """Whether it is float32 or wider, or complex; products of integers are not."""
        return is_wide(jnp.dtype(self.dtype))

    @property
    def is_floating(self) -> bool:
        """Whether it is of floating or complex numbers, not of integers."""
        return jnp.issubdtype(self.dtype, jnp.inexact)
