"""precision_report: in which precision products run, and what made them float32."""

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from optax_mp._table import Report, Table, grouped, percent
from optax_mp.autocast._changes import pure_call
from optax_mp.core._dtypes import is_inexact
from optax_mp.core.jax_api import _jaxpr
from optax_mp.core.jax_api._extend import ClosedJaxpr
from optax_mp.jaxprs._search import any_equation
from optax_mp.jaxprs._source import is_transposed
from optax_mp.reports import _precision_walk

_MOST_ROWS = 12  # of a table; the report itself holds all
_ADVICE = """
To change that, `optax_mp.amp(fun)` runs products in bfloat16 (except those with \
`precision=`, in `amp_stop`, or of complex or sparse operands).
Or pass an argument in bfloat16, make an array with `dtype=x.dtype`, write a Python \
number for a NumPy one, cast back before the product, or set the `dtype` of a layer."""


@dataclass(frozen=True)
class PrecisionReport(Report):
    """What `precision_report` found. Printed, it is a verdict, a table and advice.

    Attributes:
        products: each matrix product and convolution, in the order of the program.
        notes: remarks on the counts: loops, operations whose products are not counted,
            and why there is no gradient.

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

    products: tuple[_precision_walk.PrecisionProduct, ...]
    notes: tuple[str, ...]

    @property
    def low_share(self) -> float:
        """The share of floating products' FLOPs that are narrower than float32.

        Products of integers are not counted here, but in `shares`. The share is 1
        without floating products.
        """
        total = _flops(x for x in self.products if jnp.issubdtype(x.dtype, jnp.inexact))
        return 1 - _flops(self.wide_products) / total if total else 1.0

    @property
    def wide_products(self) -> tuple[_precision_walk.PrecisionProduct, ...]:
        """The products in float32 or wider."""
        return tuple(x for x in self.products if x.is_wide)

    def shares(self) -> dict[str, float]:
        """Return the share of each dtype in the FLOPs of products, largest first."""
        total = _flops(self.products) or 1
        groups = _group(self.products, lambda x: x.dtype)
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

    def _parts(self) -> list[str | Table]:
        """Return the verdict, the notes, the float32 products and the advice."""
        notes = [f"note: {note}" for note in self.notes]
        parts: list[str | Table] = [self.summary(), *notes]
        return [*parts, "", *self._table(), _ADVICE] if self.wide_products else parts

    def _table(self) -> list[str | Table]:
        """Return a table of float32 products, most FLOPs first.

        A row has the products of one line, and those of their gradients.
        """
        total = _flops(self.products) or 1
        groups = _group(
            self.wide_products, lambda x: (x.line or x.primitive, _pattern(x))
        )
        cells = [("float32 at", "because of", "shapes", "runs", "FLOPs", "share")]
        for (place, _), group in groups[:_MOST_ROWS]:
            runs, flops = sum(x.count for x in group), _flops(group)
            amounts = str(runs), f"{flops:.3g}", f"{percent(flops / total)}%"
            shapes = " ".join(str(list(shape)) for shape in group[0].shapes[:2])
            cells.append((place, _label(group), shapes, *amounts))
        left_out = len(groups) - _MOST_ROWS
        more = [f"... and {left_out} more"] if left_out > 0 else []
        return [Table(cells, left=3), *more]


def precision_report(
    fun: Callable[..., Any], *args: Any, **kwargs: Any
) -> PrecisionReport:
    """Say in which precision a function's matrix products run, and why, before it runs.

    JAX promotes: where a 16-bit value meets a float32 one, everything that follows is
    float32, without a warning. The report traces the function, with `amp` or without,
    and counts the FLOPs of matrix products and convolutions in each dtype. For each
    product in float32 it names the first place on the way where a 16-bit value became
    float32, the cause, and the fix. Later places are not named: fix the first, and
    report again.

    If the function is a loss, which returns a scalar or a tuple such as `(loss, aux)`,
    the report includes its gradient with respect to the first argument with floating
    arrays. A function that computes a gradient itself, such as a training step, is
    reported unchanged. For other gradients pass `jax.grad(fun, argnums)`.

    Args:
        fun: any function that JAX can trace, such as a loss, or a whole training step.
        *args: its arguments. Arrays may be `jax.ShapeDtypeStruct`; other values are
            passed on.
        **kwargs: its keyword arguments.

    Returns:
        The report. Printed, it begins with a verdict; `.summary()` is that line.

    Raises:
        TypeError: if `fun` is not callable.
        Exception: what JAX raises, if it cannot trace `fun`, such as a scan over
            bfloat16 layers with float32 norms, which changes the dtype of its carry.

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
    """
    jaxpr, names, notes = _trace(fun, args, kwargs)
    pairs = zip(jaxpr.jaxpr.invars, names, strict=True)
    inputs = [
        _precision_walk.cause_of_input(var, "argument", name) for var, name in pairs
    ]
    walk = _precision_walk.Walk()
    _, products = walk.follow(jaxpr, inputs)
    return PrecisionReport(tuple(products), (*notes, *walk.notes))


def _group(
    products: Iterable[_precision_walk.PrecisionProduct],
    key: Callable[[_precision_walk.PrecisionProduct], Any],
) -> list[tuple[Any, list[_precision_walk.PrecisionProduct]]]:
    """Return products in groups, the group of most FLOPs first."""
    groups = grouped(products, key).items()
    return sorted(groups, key=lambda pair: -_flops(pair[1]))


def _flops(products: Iterable[_precision_walk.PrecisionProduct]) -> int:
    return sum(x.flops for x in products)


def _causes(product: _precision_walk.PrecisionProduct) -> str:
    return " and ".join(map(str, product.causes)) or "what is not known"


def _pattern(product: _precision_walk.PrecisionProduct) -> str:
    """Return the causes of a product, with stars for the numbers of layers."""
    text = re.sub(r"_\d+(?=['/])", "_*", _causes(product))
    return re.sub(r"\[('?)\d+\1\]", "[*]", text)


def _label(group: list[_precision_walk.PrecisionProduct]) -> str:
    """Return the causes of a group of one pattern."""
    is_one = len(set(map(_causes, group))) == 1
    return (_causes if is_one else _pattern)(group[0])


def _trace(
    fun: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[ClosedJaxpr, list[str], list[str]]:
    """Trace a function, with its gradient if it is a loss.

    Returns:
        The jaxpr, the name of each of its inputs, such as `params['w']`, and remarks.
    """
    leaves, _ = tree_flatten_with_path((args, kwargs))
    argument_names = _argument_names(fun, len(args))

    def run(both: Any) -> tuple[Any, Any]:
        call = pure_call(fun, *both, caller="precision_report")
        return call.fun(*call.args)

    traced = _jaxpr.TracedCall.of(run, (args, kwargs), _is_input)
    paths = [leaves[i][0] for i in traced.places]
    names = [_name_of(path, argument_names) for path in paths]
    floating = [i for i, x in enumerate(traced.arrays) if is_inexact(x)]
    # The place of the first argument with floating arrays, among all.
    chosen = [i for i in floating if paths[i][:2] == paths[floating[0]][:2]]
    outputs: Any = traced.unflatten_outputs()[0]
    first: Any = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
    is_loss = _jaxpr.is_output(first) and is_inexact(first) and not first.shape
    if not (is_loss and chosen) or any_equation(traced.closed, is_transposed):
        return traced.closed, names, []

    def loss(some: list[Any], arrays: list[Any]) -> tuple[Any, list[Any]]:
        replaced = dict(enumerate(arrays)) | dict(zip(chosen, some, strict=True))
        values = _jaxpr.evaluate(traced.closed, list(replaced.values()))
        return values[0], values

    def with_gradient(arrays: list[Any]) -> Any:
        gradient = jax.value_and_grad(loss, has_aux=True)
        return gradient([arrays[i] for i in chosen], arrays)

    try:
        return jax.make_jaxpr(with_gradient)(traced.arrays), names, []
    except Exception as error:  # whatever a derivative rule may raise
        reason = str(error).splitlines()[0]
        return traced.closed, names, [f"the forward pass alone, as JAX says: {reason}"]


def _is_input(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or _jaxpr.is_dynamic(leaf)


def _argument_names(fun: Callable[..., Any], count: int) -> list[str]:
    """Return the names of so many positional arguments."""
    try:
        declared = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        declared = []
    # Kinds are ordered: the names of single positional arguments come first.
    names = [x.name for x in declared if x.kind < x.VAR_POSITIONAL]
    rest = next((x.name for x in declared if x.kind == x.VAR_POSITIONAL), "args")
    return [*names, *(f"{rest}[{i}]" for i in range(count - len(names)))]


def _name_of(path: tuple[Any, ...], names: list[str]) -> str:
    """Return how to write an array at a path in `(args, kwargs)`."""
    place, argument, *rest = path
    name = argument.key if place.idx else names[argument.idx]
    return f"{name}{keystr(tuple(rest))}"
