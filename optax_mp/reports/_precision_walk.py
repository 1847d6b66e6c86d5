"""The products of a function, and where a 16-bit value first became float32.

Each float32 value has one cause: the argument, constant, array or number that it comes
from. When it meets a 16-bit value, JAX makes that float32 as well. From there on the
cause has a line and a rank, which is its order in the program. A value with several
causes has the cause of the lowest rank, so later ones are not blamed.
"""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_mp.core._dtypes import bits
from optax_mp.core.jax_api import _jaxpr
from optax_mp.jaxprs import _control_flow, _hidden, _primitives, _search, _source

# Implicit casts: JAX's of promoted operands, and a library's of the inputs of a norm,
# which is cast back later.
_PROMOTION, _LAYER = IMPLICIT = "promotion", "layer"
# What can be float32 by itself, in order of blame.
_KINDS = "argument", "constant", "array", "number", "cast", "result", "precision"
_KINDS += IMPLICIT
# The rank of a cause that has made no 16-bit value float32.
NOT_YET = sys.maxsize


@dataclass(frozen=True)
class PrecisionCause:
    """What made a product float32.

    Attributes:
        kind: `"argument"`; `"constant"`, an array that the function closes over;
            `"array"`, one that it makes; `"number"`, such as `np.sqrt(32)`; `"cast"`;
            `"layer"`, a cast in a library of layers; `"result"`, of a product of
            16-bit operands; or `"precision"`, which the product itself asks for.
        name: the path of an argument; otherwise what it is.
        line: where it first made a 16-bit value float32; `""` if it made none.
        rank: how many such places come before.

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
    line: str = ""
    rank: int = NOT_YET

    def __str__(self) -> str:
        """Return what to call it in a table."""
        is_said = self.name.endswith(self.line)  # So does an array; or "" if unknown.
        return self.name if is_said else f"{self.name} at {self.line}"

    @property
    def order(self) -> tuple[bool, int, int]:
        """The smallest of several is to blame."""
        return self.kind in IMPLICIT, self.rank, _KINDS.index(self.kind)


_Cause = PrecisionCause | None
_Causes = list[_Cause]


@dataclass(frozen=True)
class PrecisionProduct:
    """A matrix product or convolution.

    Attributes:
        primitive: its name in JAX, such as `"dot_general"`.
        dtype: the dtype of its operands; of two dtypes, the wider. Or the dtype that
            its `precision=` rounds them to: `BF16_BF16_F32` multiplies bfloat16.
        shapes: of both operands and the result; in a `shard_map`, of a shard.
        flops: the FLOPs of all its runs, over all devices.
        count: how often it runs: the iterations of a scan, times the shards of a
            `shard_map`. A product in a `while` loop counts for one iteration, and one
            in a branch that has fewer FLOPs than another counts 0.
        is_backward: whether it is in the backward pass.
        line: the line of your program that it comes from, such as `"model.py:12"`.
        causes: if it is float32 or wider, what first made it wide; two if both operands
            are float32 by themselves.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> w, x = jnp.ones((4, 4)), jnp.ones((2, 4), jnp.bfloat16)
        >>> report = optax_mp.precision_report(lambda w, x: x @ w, w, x)
        >>> product = report.products[0]
        >>> product.dtype, product.shapes, product.flops
        ('float32', ((2, 4), (4, 4), (2, 4)), 64)
    """

    primitive: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    flops: int
    count: int
    is_backward: bool
    line: str
    causes: tuple[PrecisionCause, ...]

    @property
    def is_wide(self) -> bool:
        """Whether it is float32 or wider, or complex; products of integers are not."""
        return _is_wide(jnp.dtype(self.dtype))

    def times(self, count: int) -> "PrecisionProduct":
        """Return this product, run so many times as often."""
        return replace(self, count=count * self.count, flops=count * self.flops)


class Place(NamedTuple):
    """Where an equation is.

    Attributes:
        lines: where it is written.
        is_in_jax: whether it is in a function of JAX. That is traced once for all
            calls, so the lines inside belong to the first call.
        is_backward: whether it is in the backward pass.
    """

    lines: _source.SourceLines = _source.SourceLines()
    is_in_jax: bool = False
    is_backward: bool = False

    def of(self, equation: _jaxpr.Equation) -> "Place":
        """Return the place of an equation inside of one at this place."""
        lines = self.lines if self.is_in_jax else _source.source_lines(equation)
        is_backward = self.is_backward or _source.is_transposed(equation)
        return Place(lines if lines.user else self.lines, self.is_in_jax, is_backward)


_OUTSIDE = Place()
_Products = list[PrecisionProduct]


class Walk:
    """Follows causes through jaxprs, and finds the products on the way.

    Attributes:
        notes: remarks on the counts, each once.
    """

    def __init__(self) -> None:
        """Begin with nothing found."""
        self.notes: dict[str, None] = {}
        # A gradient is float32 because its value is, and has the same line.
        self._causes_by_lines: dict[
            _source.SourceLines, tuple[PrecisionCause, ...]
        ] = {}
        self._ranks: dict[Any, int] = {}

    def follow(
        self, jaxpr: _jaxpr.AnyJaxpr, causes: _Causes, around: Place = _OUTSIDE
    ) -> tuple[_Causes, _Products]:
        """Return the causes of the outputs of a jaxpr, and the products in it."""
        jaxpr, consts = _jaxpr.open_jaxpr(jaxpr)
        known: dict[Any, Any] = dict(zip(jaxpr.invars, causes, strict=True))
        for var in jaxpr.constvars if consts else ():
            known[var] = cause_of_input(var, "constant", "a constant")

        def read(atom: Any) -> _Cause:
            return (
                _cause_of_literal(atom) if _jaxpr.is_literal(atom) else known.get(atom)
            )

        products: _Products = []
        for equation in _search.live_equations(jaxpr):
            inputs = list(map(read, equation.invars))
            place = around.of(equation)
            if _control_flow.has_regions(equation):
                outputs, inside = self._follow_regions(equation, inputs, place)
                products += inside
            else:
                cause = self._cause_of(equation, inputs, place)
                outputs = [cause if _has_wide(x) else None for x in equation.outvars]
                if _primitives.is_product(equation):
                    products.append(self._product(equation, inputs, place, cause))
            known.update(zip(equation.outvars, outputs, strict=True))
        return list(map(read, jaxpr.outvars)), products

    def _cause_of(
        self, equation: _jaxpr.Equation, inputs: _Causes, place: Place
    ) -> _Cause:
        """Return the cause of a float32 value that is computed from these."""
        lines = place.lines
        if _control_flow.hides_product(equation):
            hidden = f"not looked into: {_hidden.name_of(equation)} {lines.user}"
            self.notes[hidden.rstrip()] = None
        read = equation.invars if _primitives.is_product(equation) else []
        if not any(map(_has_wide, (*equation.outvars, *read))):
            return None
        rank = self._ranks.setdefault((id(equation), lines), len(self._ranks))
        causes = [x for x in inputs if x is not None]
        # `jnp.zeros` is an array made of a number.
        is_array = equation.primitive.name == "broadcast_in_dim"
        if not causes or (is_array and _jaxpr.is_literal(equation.invars[0])):
            return _start(equation, lines, rank)
        return _first_of(causes, equation, lines.user, rank)

    def _product(
        self, equation: _jaxpr.Equation, inputs: _Causes, place: Place, cause: _Cause
    ) -> PrecisionProduct:
        avals = [*_primitives.operands(equation), equation.outvars[0].aval]
        dtype = _primitives.product_dtype(equation)
        found = [cause]
        if _is_wide(dtype) and not any(_is_wide(aval.dtype) for aval in avals[:2]):
            asked = f"precision={equation.params['precision']}"
            found = [PrecisionCause("precision", asked, place.lines.user)]
        elif cause and cause.rank == NOT_YET:  # Then both operands must change.
            found = dict.fromkeys(
                inputs[i] for i in _primitives.operand_indices(equation)
            )
        causes = tuple(x for x in found if x is not None)
        if place.is_backward:
            causes = self._causes_by_lines.get(place.lines, causes)
        elif causes:
            self._causes_by_lines.setdefault(place.lines, causes)
        return PrecisionProduct(
            equation.primitive.name,
            dtype.name,
            tuple(tuple(aval.shape) for aval in avals),
            _primitives.flops_of(equation),
            count=1,
            is_backward=place.is_backward,
            line=place.lines.user,
            causes=causes if _is_wide(dtype) else (),
        )

    def _follow_regions(
        self, equation: _jaxpr.Equation, inputs: _Causes, place: Place
    ) -> tuple[_Causes, _Products]:
        wiring = _control_flow.wiring_of(equation)
        if equation.primitive.name == "jit":
            is_in_jax = place.is_in_jax or _source.is_function_of_jax(
                wiring.regions[0].jaxpr
            )
            place = place._replace(is_in_jax=is_in_jax)
        groups: dict[int, _Products] = {}

        def through(region: _control_flow.Region, causes: Any) -> _Causes:
            # In a loop, the last visit is the one that knows most.
            outputs, groups[id(region)] = self.follow(region.jaxpr, causes, place)
            return outputs

        outputs = wiring.forward(inputs, through, _join).outputs
        if wiring.deciding:  # XLA's cost analysis also counts the costliest branch.
            costliest = max(groups, key=lambda x: sum(y.flops for y in groups[x]))
            for x in groups.keys() - {costliest}:
                groups[x] = [each.times(0) for each in groups[x]]
        count = _control_flow.run_count(equation)
        if count is None and any(groups.values()):
            self.notes["products in a `while` loop count for one iteration"] = None
        count = 1 if count is None else count
        return outputs, [x.times(count) for group in groups.values() for x in group]


def cause_of_input(var: Any, kind: str, name: str) -> _Cause:
    """Return the cause of an argument or a constant, or None if it is not float32."""
    return PrecisionCause(kind, name) if _has_wide(var) else None


def _cause_of_literal(atom: Any) -> _Cause:
    # A Python number takes the dtype of what it meets: it is weakly typed.
    if not _has_wide(atom) or atom.aval.weak_type:
        return None
    return PrecisionCause("number", f"the number {np.asarray(atom.val).item():.7g}")


def _join(causes: Sequence[_Cause]) -> _Cause:
    """Return the cause of a value that may be any of several."""
    known = [cause for cause in causes if cause is not None]
    return min(known, key=lambda cause: cause.order, default=None)


def _first_of(
    causes: list[PrecisionCause], equation: _jaxpr.Equation, line: str, rank: int
) -> PrecisionCause:
    """Return the cause of what an equation computes from values with causes."""
    first = min(causes, key=lambda cause: cause.order)
    implicit = [x for x in causes if x.kind in IMPLICIT]
    if first.rank < NOT_YET and first not in implicit:
        return first
    sources = [x for x in causes if x not in implicit]
    layers = [x for x in implicit if x.kind == _LAYER]
    if layers:  # The epsilon of a norm is not why it does not cast back.
        implicit = layers
        sources = [x for x in sources if x.kind in ("argument", "constant")]
    if sources:
        source = min(sources, key=lambda cause: cause.order)
        is_meeting = implicit or any(map(_has_narrow, equation.invars))
        return replace(source, line=line, rank=rank) if is_meeting else source
    # An operand that is passed on unchanged is still under way.
    if (
        implicit[0].kind == _PROMOTION
        and equation.primitive.name not in _primitives.REPEATS
    ):
        return replace(implicit[0], kind="cast")  # Nothing else asked for it.
    return implicit[0]


def _start(equation: _jaxpr.Equation, lines: _source.SourceLines, rank: int) -> _Cause:
    """Return the cause of a float32 value that is computed from none."""
    var = equation.outvars[0]
    if not any(map(_has_narrow, equation.invars)):
        where = f"made at {lines.user}" if lines.user else "of the gradient"
        is_weak = getattr(var.aval, "weak_type", False)
        return None if is_weak else PrecisionCause("array", f"an array {where}")
    kind, text = "cast", f"a cast to {var.aval.dtype}"
    is_cast = equation.primitive.name == "convert_element_type"
    if _primitives.is_product(equation):
        a, b = (aval.dtype.name for aval in _primitives.operands(equation))
        met = f"of {a} with {b}" if a != b else f"with result {var.aval.dtype}"
        kind, text = "result", f"a product {met}"
    # In the backward pass JAX knows only the lines of the forward pass.
    elif is_cast and not _source.is_transposed(equation):
        kind = _PROMOTION if _source.is_promotion(equation) else kind
        kind = _LAYER if lines.library else kind
    return PrecisionCause(kind, text, lines.user, rank)


@functools.cache
def _is_wide(dtype: Any) -> bool:
    """Return whether a dtype is float32 or wider; complex64 is."""
    return jnp.issubdtype(dtype, jnp.inexact) and bits(dtype) >= 32  # noqa: PLR2004


def _has_wide(atom: Any) -> bool:
    return _is_wide(getattr(atom.aval, "dtype", bool))


def _has_narrow(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", bool)
    return jnp.issubdtype(dtype, jnp.floating) and not _is_wide(dtype)
