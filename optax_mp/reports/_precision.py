"""precision_report: in which precision products run, and what makes them float32."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from optax_mp._jax._jaxpr import is_literal
from optax_mp._jax._products import operands
from optax_mp._jax._source import source_lines
from optax_mp.reports._precision_origins import (
    Origin,
    Value,
    is_wide_value,
    sort_origins,
)
from optax_mp.reports._precision_products import is_wide, product_dtype
from optax_mp.reports._precision_rows import PrecisionCause, PrecisionProduct
from optax_mp.reports._precision_text import (
    advice_of,
    describe_shares,
    shares_of,
    table_of,
)
from optax_mp.reports._precision_trace import Argnums, Trace, trace
from optax_mp.reports._precision_walk import FoundProduct, Surroundings, Walk

T = TypeVar("T")


@dataclass(frozen=True)
class PrecisionReport:
    """What `precision_report` found. Printed, it is a table with advice.

    Attributes:
        products: each matrix product and convolution, forward pass first.
        kept_bytes: the bytes that the forward pass keeps for the backward pass, by
            dtype; not counted are the arguments and constants themselves. XLA may keep
            less, if it fuses operations or computes some again.
        notes: remarks on the counts: loops, branches, and operations whose products
            are not counted.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> def loss(params, x):
        ...     return jnp.sum((x * params["norm"]) @ params["w"])
        >>> params = {"norm": jnp.ones(8), "w": jnp.ones((8, 8), jnp.bfloat16)}
        >>> x = jnp.ones((4, 8), jnp.bfloat16)
        >>> report = optax_mp.precision_report(loss, params, x)
        >>> report.low_share, report.shares()
        (0.0, {'float32': 1.0})
        >>> print(report.summary()[:47])
        FLOPs of products: 100% in float32; 3 of 3 prod
        >>> optax_mp.precision_report(optax_mp.amp(loss), params, x).low_share
        1.0
    """

    products: tuple[PrecisionProduct, ...]
    kept_bytes: dict[str, int]
    notes: tuple[str, ...]

    @property
    def low_share(self) -> float:
        """The share of floating products' FLOPs that are narrower than float32.

        Products of integers do not count, neither as wide nor as low; `shares` has
        them. It is 1 without floating products.
        """
        floating = [each for each in self.products if each.is_floating]
        total = sum(each.flops for each in floating)
        wide = sum(each.flops for each in self.wide_products)
        return 1 - wide / total if total else 1.0

    @property
    def wide_products(self) -> tuple[PrecisionProduct, ...]:
        """The products in float32 or wider."""
        return tuple(each for each in self.products if each.is_wide)

    def shares(self) -> dict[str, float]:
        """Return the share of each dtype in the FLOPs of products, largest first."""
        return shares_of(self.products)

    def advice(self) -> list[str]:
        """Return what to change so that products run in 16 bits."""
        return advice_of(self.products)

    def summary(self) -> str:
        """Return the report in one line."""
        return describe_shares(self.products)

    def __str__(self) -> str:
        """Return the table, the notes and the advice."""
        lines = table_of(self.products, self.kept_bytes)
        lines += [f"note: {note}" for note in self.notes]
        advice = self.advice()
        if advice:
            lines += ["", "To change that:", *(f"- {each}." for each in advice)]
        return "\n".join(lines)


def precision_report(
    fun: Callable[..., Any],
    *args: Any,
    argnums: Argnums = None,
    **kwargs: Any,
) -> PrecisionReport:
    """Say in which precision a function's matrix products run, and why, before it runs.

    JAX promotes: where a 16-bit value meets a float32 one, everything that follows is
    float32, without a warning. The report traces the function and its gradient, with
    `amp` or without, and counts the FLOPs of matrix products and convolutions in each
    dtype. For each product in float32 it names the argument, constant or cast that made
    it so, and says what to change. Nothing is computed, so shapes are enough.

    Args:
        fun: any function that JAX can trace, such as a loss, or a whole training step.
        *args: its arguments. Arrays may be `jax.ShapeDtypeStruct`; what is no array
            is passed on as it is.
        argnums: the arguments to differentiate, by position, as in `jax.grad`; `()` for
            the forward pass alone. By default the first with floating arrays; or none,
            if `fun` computes a gradient itself and returns more than one number, as a
            training step does. If `fun` returns a tuple that begins with a scalar, such
            as `(loss, aux)`, only that scalar is differentiated; otherwise all floating
            outputs are.
        **kwargs: its keyword arguments.

    Returns:
        The report. Printed, it is a table; `.summary()` is one line.

    Raises:
        TypeError: if `fun` is not callable.
        ValueError: if `argnums` names no argument with floating arrays.
        Exception: what JAX raises, if it cannot trace or differentiate `fun`.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> def loss(params, x):
        ...     y = jnp.tanh(x @ params["in"])
        ...     y = (y * params["norm"]) @ params["out"]
        ...     return jnp.mean(y.astype(jnp.float32) ** 2)
        >>> shapes = {"in": (64, 256), "norm": (256,), "out": (256, 64)}
        >>> policy = optax_mp.get_policy("p=bf16", keep_f32=("*norm*",))
        >>> zeros = lambda: {name: jnp.zeros(shapes[name]) for name in shapes}
        >>> params = jax.eval_shape(lambda: policy.cast_to_param(zeros()))
        >>> x = jax.ShapeDtypeStruct((32, 64), jnp.bfloat16)
        >>> report = optax_mp.precision_report(loss, params, x)
        >>> {name: round(share, 2) for name, share in report.shares().items()}
        {'float32': 0.6, 'bfloat16': 0.4}
        >>> [str(each.causes[0]) for each in report.wide_products]
        ["params['norm']", "params['norm']", "params['norm']"]
        >>> report.advice()[0][:17]
        'wrap the function'
    """
    if not callable(fun):
        raise TypeError(
            f"precision_report: `fun` is {fun!r}, expected a function; call it as "
            "precision_report(fun, *args)."
        )
    traced = trace(fun, args, kwargs, argnums)
    walk = Walk()
    found = _find_products(traced, walk)
    return PrecisionReport(
        products=tuple(map(_row, found)),
        kept_bytes=_kept_bytes(traced),
        notes=tuple(_notes(found, walk)),
    )


def _find_products(traced: Trace, walk: Walk) -> list[FoundProduct]:
    """Return the products of the forward and the backward pass."""
    invars = traced.forward.jaxpr.invars
    inputs = [
        _input("argument", path, var)
        for path, var in zip(traced.paths, invars, strict=True)
    ]
    outputs, found = walk.follow(traced.forward, inputs, Surroundings())
    if traced.backward is None:
        return found
    kept = outputs[traced.output_count :]
    gradients = [
        _input("gradient", path, var)
        for path, var in zip(
            traced.gradient_paths,
            traced.backward.jaxpr.invars[len(kept) :],
            strict=True,
        )
    ]
    around = Surroundings(is_backward=True)
    return found + walk.follow(traced.backward, [*kept, *gradients], around)[1]


def _input(kind: str, path: str, var: Any) -> Value:
    is_gradient = kind == "gradient"
    origins = (Origin(kind, path, is_effect=is_gradient),) if is_wide_value(var) else ()
    return Value(origins, var, is_computed=False, is_gradient=is_gradient)


def _row(found: FoundProduct) -> PrecisionProduct:
    avals = [*operands(found.equation), found.equation.outvars[0].aval]
    dtype, lines = product_dtype(found.equation), source_lines(found.at)
    rule, why = found.amp_rule
    return PrecisionProduct(
        primitive=found.equation.primitive.name,
        dtype=dtype.name,
        dtypes=_three(aval.dtype.name for aval in avals),
        shapes=_three(tuple(aval.shape) for aval in avals),
        flops=found.flops,
        count=found.count,
        is_backward=found.is_backward,
        line=lines.user,
        library_line=lines.library,
        causes=tuple(map(_cause, sort_origins(found.origins))),
        kept_by=why if is_wide(dtype) and rule != "low" else "",
    )


def _three(values: Iterable[T]) -> tuple[T, T, T]:
    left, right, result = values
    return left, right, result


def _cause(origin: Origin) -> PrecisionCause:
    return PrecisionCause(origin.kind, origin.name, *origin.lines)


def _kept_bytes(traced: Trace) -> dict[str, int]:
    """Return the bytes that are kept for the backward pass, by dtype."""
    jaxpr: Any = traced.forward.jaxpr
    # An array may be kept under several names, but once.
    kept = dict.fromkeys(
        atom for atom in jaxpr.outvars[traced.output_count :] if not is_literal(atom)
    )
    given = {*jaxpr.invars, *jaxpr.constvars}
    found: dict[str, int] = {}
    for atom in kept:
        if atom not in given:
            count = math.prod(atom.aval.shape) * atom.aval.dtype.itemsize
            name = str(atom.aval.dtype)
            found[name] = found.get(name, 0) + count
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _notes(found: Iterable[FoundProduct], walk: Walk) -> Iterator[str]:
    """Yield remarks on the counts."""
    found = list(found)
    in_while = sum(each.is_in_while for each in found)
    if in_while:
        yield (
            f"products in a `while` loop: {in_while}, counted for one iteration, "
            "because their number is unknown"
        )
    uncounted = sum(each.count == 0 for each in found)
    if uncounted:
        yield (
            f"products that count 0: {uncounted}, in branches with fewer FLOPs than "
            "another, or loops without iterations"
        )
    lines = Counter(
        (equation.primitive.name, source_lines(at).user)
        for equation, at in walk.unseen.values()
    )
    for (name, line), count in lines.items():
        place = f" at {line}" if line else ""
        times = f", {count} times" if count > 1 else ""
        yield f"not looked into: {name}{place}{times}"
