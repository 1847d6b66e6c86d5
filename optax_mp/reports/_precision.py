"""precision_report: in which precision products run, and what made them float32."""

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from optax_mp._jax._jaxpr import ClosedJaxpr
from optax_mp._jax._source import is_transposed
from optax_mp._jax._traced import is_dynamic
from optax_mp._table import align_columns, percent
from optax_mp._tree import is_inexact
from optax_mp.autocast._changes import pure_call
from optax_mp.reports._precision_walk import (
    PrecisionProduct,
    Walk,
    any_equation,
    cause_of_input,
)

Argnums = int | Sequence[int] | None

# By how much a table is cut. The report itself holds all.
_MOST_ROWS, _CAUSE_WIDTH = 12, 56
_ADVICE = (
    "wrap the function, or the part that has them: `optax_mp.amp(fun)` runs products "
    "in bfloat16 whatever made them float32, but for those with `precision=`, in "
    "`amp_stop`, and of complex or sparse operands",
    "or change what is named above: pass an argument in bfloat16, make an array with "
    "`dtype=x.dtype`, write a Python number for a NumPy one, cast back before the "
    "product, or set the `dtype` of a layer to bfloat16",
)


@dataclass(frozen=True)
class PrecisionReport:
    """What `precision_report` found. Printed, it is a verdict, a table and advice.

    Attributes:
        products: each matrix product and convolution, forward pass first.
        notes: remarks on the counts: loops, and operations whose products are not
            counted.

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
        >>> print(report.summary()[:50])
        0% of the FLOPs of products run below float32 (100
        >>> optax_mp.precision_report(optax_mp.amp(loss), params, x).low_share
        1.0
    """

    products: tuple[PrecisionProduct, ...]
    notes: tuple[str, ...]

    @property
    def low_share(self) -> float:
        """The share of floating products' FLOPs that are narrower than float32.

        Products of integers do not count, neither as wide nor as low; `shares` has
        them. It is 1 without floating products.
        """
        integer = [x for x in self.products if not jnp.issubdtype(x.dtype, jnp.inexact)]
        total = _flops(self.products) - _flops(integer)
        return 1 - _flops(self.wide_products) / total if total else 1.0

    @property
    def wide_products(self) -> tuple[PrecisionProduct, ...]:
        """The products in float32 or wider."""
        return tuple(each for each in self.products if each.is_wide)

    def shares(self) -> dict[str, float]:
        """Return the share of each dtype in the FLOPs of products, largest first."""
        total = sum(each.flops for each in self.products) or 1
        groups = _group(self.products, lambda each: each.dtype)
        return {dtype: _flops(group) / total for dtype, group in groups}

    def summary(self) -> str:
        """Return the verdict: how much is below float32, and what is first to blame."""
        if not self.products:
            return "no matrix products or convolutions"
        shares = ", ".join(f"{percent(x)}% {k}" for k, x in self.shares().items())
        line = f"{percent(self.low_share)}% of the FLOPs of products run below float32"
        causes = _group(self.wide_products, _pattern)
        more = f" and {len(causes) - 1} more" if causes[1:] else ""
        first = f"; float32 because of {_label(causes[0][1])}{more}" if causes else ""
        return f"{line} ({shares}){first}"

    def advice(self) -> list[str]:
        """Return what to change so that products run in 16 bits."""
        return list(_ADVICE) if self.wide_products else []

    def __str__(self) -> str:
        """Return the verdict, the float32 products, the notes and the advice."""
        lines = [self.summary(), *(f"note: {note}" for note in self.notes)]
        if self.wide_products:
            advice = [f"- {each}." for each in self.advice()]
            lines += ["", *self._table(), "", "To change that:", *advice]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        """Return a table of float32 products, most FLOPs first.

        The products of a line and those of their gradients are together in a row.
        """
        total = _flops(self.products) or 1
        groups = _group(
            self.wide_products,
            lambda each: (each.line or each.primitive, _pattern(each)),
        )
        cells = [("float32 at", "because of", "shapes", "runs", "FLOPs", "share")]
        for (place, _), group in groups[:_MOST_ROWS]:
            runs, flops = sum(each.count for each in group), _flops(group)
            amounts = str(runs), f"{flops:.3g}", f"{percent(flops / total)}%"
            shapes = " ".join(str(list(shape)) for shape in group[0].shapes[:2])
            cells.append((place, _label(group)[-_CAUSE_WIDTH:], shapes, *amounts))
        left_out = len(groups) - _MOST_ROWS
        more = [f"... and {left_out} more"] if left_out > 0 else []
        return [*align_columns(cells, left=3), *more]


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
    dtype. For each product in float32 it names the first place where a 16-bit value
    became float32 on the way to it, what made it so, and what to change. What comes
    later is not named: change the first, and report again.

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
        The report. Printed, it begins with a verdict; `.summary()` is that line.

    Raises:
        TypeError: if `fun` is not callable, or if a loop in it changes the dtype of its
            carry, as a scan over bfloat16 layers with float32 norms does.
        ValueError: if `argnums` names no argument with floating arrays, or if `fun`
            cannot be differentiated, as a `while` loop.
        Exception: what JAX raises, if it cannot trace `fun`.

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
        >>> [each.causes[0].name for each in report.wide_products]
        ["params['norm']", "params['norm']", "params['norm']"]
        >>> report.advice()[0][:17]
        'wrap the function'
    """
    if not callable(fun):
        raise TypeError(
            f"precision_report: `fun` is {fun!r}, expected a function; call it as "
            "precision_report(fun, *args)."
        )
    names, jaxpr = trace(fun, args, kwargs, argnums)
    inputs = [
        cause_of_input(var, "argument", name)
        for var, name in zip(jaxpr.jaxpr.invars, names, strict=True)
    ]
    walk = Walk()
    products = sorted(walk.follow(jaxpr, inputs)[1], key=lambda each: each.is_backward)
    return PrecisionReport(tuple(products), tuple(walk.notes))


def _group(
    products: Iterable[PrecisionProduct], key: Callable[[PrecisionProduct], Any]
) -> list[tuple[Any, list[PrecisionProduct]]]:
    """Return products in groups, the group of most FLOPs first."""
    groups: dict[Any, list[PrecisionProduct]] = {}
    for each in products:
        groups.setdefault(key(each), []).append(each)
    return sorted(groups.items(), key=lambda pair: -_flops(pair[1]))


def _flops(products: Iterable[PrecisionProduct]) -> int:
    return sum(each.flops for each in products)


def _causes(product: PrecisionProduct) -> str:
    return " and ".join(map(str, product.causes)) or "what is not known"


def _pattern(product: PrecisionProduct) -> str:
    """Return the causes of a product, with stars for the numbers of layers."""
    text = re.sub(r"_\d+(?=['/])", "_*", _causes(product))
    return re.sub(r"\[('?)\d+\1\]", "[*]", text)


def _label(group: list[PrecisionProduct]) -> str:
    """Return the causes of a group of one pattern."""
    is_one = len(set(map(_causes, group))) == 1
    return (_causes if is_one else _pattern)(group[0])


_FORWARD_ONLY = "for the forward pass alone pass argnums=()."


class _Input(NamedTuple):
    """An array among the arguments: which argument, how to write it, and the array."""

    position: int
    name: str
    value: Any


class _Call:
    """A call whose arrays are inputs, and all else is as it is."""

    def __init__(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Read the arguments of `fun(*args, **kwargs)`."""
        self.fun, self._bound = fun, _bind(fun, args, kwargs)
        self.leaves, self._treedef = tree_flatten_with_path(
            tuple(self._bound.arguments.values())
        )
        self.inputs = [self._input(*leaf) for leaf in self.leaves if _is_input(leaf[1])]

    def _input(self, path: Any, value: Any) -> _Input:
        position, name = path[0].idx, list(self._bound.arguments)[path[0].idx]
        kind = self._bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            position += path[1].idx
        return _Input(position, f"{name}{keystr(path[1:])}", value)

    def run(self, arrays: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return what the function returns for these arrays, and all arrays of that.

        A Flax NNX module changes in place: a training step may return nothing at all.
        """
        rest = iter(arrays)
        filled = [next(rest) if _is_input(x) else x for _, x in self.leaves]
        values = self._treedef.unflatten(filled)
        self._bound.arguments.update(zip(self._bound.arguments, values, strict=True))
        call = pure_call(self.fun, self._bound.args, self._bound.kwargs)
        outputs, changes = call.fun(*call.args)
        return outputs, _arrays((outputs, changes))


def trace(
    fun: Callable[..., Any], args: Any, kwargs: Any, argnums: Argnums
) -> tuple[list[str], ClosedJaxpr]:
    """Trace a function, with its gradient if it has one.

    Args:
        fun: the function.
        args: its arguments; arrays may be `jax.ShapeDtypeStruct`s.
        kwargs: its keyword arguments.
        argnums: as in `precision_report`.

    Returns:
        The name of each input of the jaxpr, such as `params['w']`, and the jaxpr.
    """
    call = _Call(fun, args, kwargs)
    chosen = _choose(call, argnums)
    names, values = [x.name for x in call.inputs], [x.value for x in call.inputs]
    at = [i for i, x in enumerate(call.inputs) if x.position in chosen]
    at = [i for i in at if is_inexact(values[i])]
    if argnums is None or not at:
        forward = _trace_forward(call, values)
        if not at or _computes_gradient(forward, [values[i].shape for i in at]):
            return names, forward
    try:
        return names, jax.make_jaxpr(lambda x: _run_with_gradient(call, at, x))(values)
    except Exception as error:
        # If it is the function that does not trace, this raises what JAX says of that.
        _trace_forward(call, values)
        raise ValueError(
            "precision_report: `fun` cannot be differentiated with respect to "
            f"{', '.join(names[i] for i in at)}, expected a function that `jax.grad` "
            f"takes; name other arguments by `argnums`, or {_FORWARD_ONLY} JAX says: "
            f"{error}"
        ) from error


def _trace_forward(call: _Call, values: list[Any]) -> ClosedJaxpr:
    try:
        return jax.make_jaxpr(lambda x: call.run(x)[1])(values)
    except TypeError as error:
        if "carry output must have equal types" not in str(error):
            raise
        raise TypeError(
            "precision_report: a loop in `fun` returns its carry in another dtype than "
            "it takes, as a scan over layers of bfloat16 params with float32 norms "
            "does, expected the same dtype; run `optax_mp.amp` over float32, as in "
            "`amp(lambda *args: fun(*cast_floating(args, jnp.float32)))`, set the "
            "`dtype` of the layers to bfloat16 where they cast back, or cast the carry "
            f"back. JAX says: {error}"
        ) from error


def _run_with_gradient(call: _Call, at: list[int], inputs: list[Any]) -> list[Any]:
    """Return what a call returns, and the gradients of some inputs."""

    def run(some: list[Any]) -> tuple[list[Any], list[Any]]:
        replaced = dict(zip(at, some, strict=True))
        outputs, arrays = call.run([replaced.get(i, x) for i, x in enumerate(inputs)])
        return _differentiated(outputs), arrays

    outputs, pull, arrays = jax.vjp(run, [inputs[i] for i in at], has_aux=True)
    ones = [jax.lax.full_like(x, 1) for x in outputs]
    return arrays + list(pull(ones)[0])


def _computes_gradient(traced: ClosedJaxpr, shapes: list[tuple[int, ...]]) -> bool:
    """Return whether a function is a training step, or returns gradients.

    Such a function has a backward pass inside. So has a loss of a gradient, but it
    returns one number, which is no gradient unless that is of one number, too.
    """
    is_number = [aval.shape for aval in traced.out_avals] == [()] != shapes
    return any_equation(traced, is_transposed) and not is_number


def _arrays(outputs: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(outputs) if is_dynamic(x)]


def _differentiated(outputs: Any) -> list[Any]:
    """Return the outputs to differentiate: a loss, or else all that are floating."""
    if isinstance(outputs, tuple) and len(outputs) > 1:
        first = outputs[0]
        if is_dynamic(first) and is_inexact(first) and not first.shape:
            return [first]  # What comes with a loss is auxiliary.
    return list(filter(is_inexact, _arrays(outputs)))


def _choose(call: _Call, argnums: Argnums) -> list[int]:
    """Return the positions of the arguments to differentiate."""
    floating = {x.position: x for x in call.inputs if is_inexact(x.value)}
    if argnums is None:
        return list(floating)[:1]
    count = len(call.leaves) and call.leaves[-1][0][0].idx + 1
    chosen = [argnums] if isinstance(argnums, int) else argnums
    positions = [x if x >= 0 else x + count for x in chosen]
    if set(positions) - set(floating):
        names = [f"{i} ({x.name.split('[')[0]})" for i, x in floating.items()]
        raise ValueError(
            f"precision_report: `argnums` is {argnums}, expected arguments with "
            f"floating arrays: {', '.join(names) or 'there are none'}; {_FORWARD_ONLY}"
        )
    return positions


def _is_input(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or is_dynamic(leaf)


def _bind(fun: Callable[..., Any], args: Any, kwargs: Any) -> inspect.BoundArguments:
    """Return arguments by their names, or by numbers if there is no signature."""
    try:
        return inspect.signature(fun).bind(*args, **kwargs)
    except (TypeError, ValueError):  # A call that does not fit fails by itself.
        anything = inspect.signature(lambda *args, **kwargs: None)
        return anything.bind(*args, **kwargs)
