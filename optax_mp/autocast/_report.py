"""amp_report: the precision of each operation and why, and the error of the outputs.

Equal operations of one source line are one row. A loop or a branch has no row, but the
operations inside have. For the error, the function runs as written and as planned.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from optax_mp._table import Report, Table
from optax_mp.autocast import _plan, _rules
from optax_mp.autocast._changes import pure_call
from optax_mp.autocast._lattice import LOW, takes_part
from optax_mp.autocast._run import Interpreter
from optax_mp.core.jax_api import _jaxpr
from optax_mp.jaxprs._control_flow import inner_jaxprs
from optax_mp.jaxprs._primitives import is_product


@dataclass(frozen=True)
class AmpOperation:
    """How one operation at one source line ran.

    Attributes:
        primitive: its name.
        line: where it is written.
        ran: `"low"`, `"f32"`, `"as_written"`, or `"function"` if the rule is one.
        why: the reason: `"rule"`, `"scope"`, `"inputs"` (one is float32, or none is),
            `"literal"` (the compute dtype cannot hold it), `"sink"` (everything that
            reads it computes in float32), `"precision"`, `"parameters"` or `"cast"` (as
            the user wrote it), or `"unknown"` (amp does not know the operation, which
            has products inside).
        count: the number of such equations; the body of a loop counts once.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> optax_mp.amp_report(jnp.exp, jnp.zeros(3)).operations[0].why
        'rule'
    """

    primitive: str
    line: str
    ran: str
    why: str
    count: int


@dataclass(frozen=True)
class AmpReport(Report):
    """What `amp_report` found. Printed, it is a table.

    Attributes:
        operations: how each operation ran, in the order of the function.
        error: the relative error of the function's outputs, compared with float32; NaN
            if it was not measured, because the function has side effects.
        warnings: of names in the rules that occur nowhere, and of operations that amp
            does not know.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> report = optax_mp.amp_report(lambda x: x @ x - 0.5, jnp.eye(3) / 3)
        >>> sorted({each.ran for each in report.operations}), report.error < 0.01
        (['low'], True)
        >>> print(str(report).split(";")[0].splitlines()[-1])
        operations: 2 low
    """

    operations: tuple[AmpOperation, ...]
    error: float
    warnings: tuple[str, ...] = ()

    def _parts(self) -> list[str | Table]:
        """Return a table of the operations, and a summary."""
        titles = ("primitive", "line", "ran", "why", "count")
        cells = [tuple(map(str, astuple(x))) for x in self.operations]
        counts = Counter(x.ran for x in self.operations for _ in range(x.count))
        ran = ", ".join(f"{count} {ran}" for ran, count in counts.most_common())
        error = "-" if math.isnan(self.error) else f"{self.error:.1e}"
        return [
            Table([titles, *cells], left=4),
            f"operations: {ran}; error of the outputs {error}",
            *(f"Warning: {warning}" for warning in self.warnings),
        ]


def amp_report(
    fun: Callable[..., Any],
    *args: Any,
    compute_dtype: DTypeLike = jnp.bfloat16,
    rules: Mapping[Any, _rules.Rule] = _rules.default_amp_rules,
    **kwargs: Any,
) -> AmpReport:
    """Compare a function as written with the same under `amp`, on these arguments.

    The report says how each operation ran and why, and the error of the outputs. If
    the error is too large, put operations into `amp_stop` and compare again. For the
    backward pass, report on `jax.grad(fun)`.

    The function runs both ways, in one program of `jax.jit`. A function with side
    effects, such as a callback, is not run, and its error is not measured. Products
    inside an equation that runs as written, such as a linear solver, are also listed.
    `precision_report(amp(fun), *args)` says which share of the products' FLOPs runs
    low.

    Args:
        fun: the function as written, not `amp(fun)`.
        *args: its arguments.
        compute_dtype: the dtype of matrix products, bfloat16 or float16.
        rules: how each operation runs: a mapping from primitives and names of scopes to
            words or functions, as `amp` takes it.
        **kwargs: its keyword arguments.

    Returns:
        The report.

    Raises:
        TypeError: if `fun` is not callable, or `rules` is not a mapping.
        ValueError: if `compute_dtype` is not a 16-bit float, or if a rule is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> x = jnp.linspace(0.0, 1.0, 64).reshape(8, 8)
        >>> report = optax_mp.amp_report(lambda x: jnp.exp(x @ x).sum(), x)
        >>> [(each.primitive, each.ran) for each in report.operations]
        [('dot_general', 'low'), ('exp', 'f32'), ('reduce_sum', 'f32')]
        >>> report.error < 0.01
        True
    """
    interpreter = Interpreter(_rules.Rules(rules, compute_dtype))
    call = pure_call(fun, args, kwargs, "amp_report")
    traced, plan, warnings = interpreter.trace(call)
    counts = Counter(
        (site.equation.primitive.name, site.line, _ran(site.action), site.action.why)
        for site in _decided(traced.closed, plan)
    )
    operations = tuple(AmpOperation(*key, count) for key, count in counts.items())
    if traced.closed.effects:
        return AmpReport(operations, math.nan, warnings)

    def both(arrays: Any) -> Any:
        low = interpreter.run(traced.closed, plan, arrays)
        return _jaxpr.evaluate(traced.closed, arrays), low

    # On CPU XLA would leave out casts to 16 bits and back, and with them the errors.
    options: Any = {"xla_allow_excess_precision": False}
    full, low = jax.jit(both, compiler_options=options)(traced.arrays)
    error = max(map(_error, full, low), default=0.0)
    return AmpReport(operations, error, warnings)


def _decided(jaxpr: _jaxpr.AnyJaxpr, plan: _plan.Plan) -> Iterator[_plan.Site]:
    """Yield the equations that amp decides on, and products in those it leaves."""
    for site in plan.sites(jaxpr):
        action = site.action
        takes = any(map(takes_part, (*site.equation.invars, *site.equation.outvars)))
        if takes and not action.regions and action.how != "same":
            yield site
            yield from _products_within(site)


def _products_within(site: _plan.Site) -> Iterator[_plan.Site]:
    """Yield the products inside an equation that runs as written as a whole.

    For example, those of a linear solver, a kernel, or a loop in `amp_stop`.
    """
    action = _plan.Action("bind", (), (), "as_written", site.action.why)
    for jaxpr in inner_jaxprs(site.equation):
        for equation in _jaxpr.open_jaxpr(jaxpr)[0].eqns:
            inner = _plan.Site(equation, action, (site.equation, *site.around))
            if is_product(equation):
                yield inner
            yield from _products_within(inner)


def _ran(action: _plan.Action) -> str:
    """Return how an operation ran, in the words of `AmpOperation`."""
    if action.how == "function":
        return action.how
    if LOW in action.inputs:
        return "low"
    return "as_written" if action.rule == "as_written" else "f32"


def _error(full: Any, low: Any) -> float:
    """Return the norm of the difference over the norm, where the value is finite."""
    if not jnp.issubdtype(full.dtype, jnp.inexact):
        return 0.0
    # Values that are infinite or NaN as written, such as in a mask, have no error.
    is_finite = np.isfinite(full)
    full, low = (np.asarray(x)[is_finite].astype(np.complex128) for x in (full, low))
    # NaN only under amp is an infinite error: NaN would mean "not measured".
    error, norm = float(np.linalg.norm(low - full)), float(np.linalg.norm(full))
    if math.isnan(error) or not norm:
        return math.inf if error else 0.0
    return error / norm
