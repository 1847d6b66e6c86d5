"""amp_report: which operation ran in which precision, why, and with which error.

The function runs as written, operation by operation. Beside each one that amp changes,
the same runs as planned on the same inputs: the difference is the error that it adds.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from optax_mp._jax._control_flow import wiring_of
from optax_mp._jax._jaxpr import (
    AnyJaxpr,
    Equation,
    bind,
    evaluate,
    jaxprs_within,
    open_jaxpr,
)
from optax_mp._jax._primitives import PRODUCTS, is_product
from optax_mp._jax._traced import TracedCall
from optax_mp._table import Report, Table
from optax_mp.autocast._changes import pure_call
from optax_mp.autocast._lattice import takes_part
from optax_mp.autocast._plan import Action, Plan, Site
from optax_mp.autocast._rules import Rule, Rules, default_amp_rules
from optax_mp.autocast._run import Interpreter

_NOT_MEASURED = math.nan


@dataclass(frozen=True)
class AmpOperation:
    """How one operation at one source line ran.

    Attributes:
        primitive: its name.
        line: where it is written.
        ran: `"low"`, `"f8"` (a product in 8 bits), `"f32"` or `"as_written"`;
            `"function"` if the rule is one; `"mixed"` for a loop, branch or
            `shard_map`, whose operations are also listed.
        why: the reason: `"rule"`, `"scope"`, `"inputs"` (one is float32, or none is),
            `"literal"` (the compute dtype cannot hold it), `"sink"` (everything that
            reads it computes in float32), `"shape"` (8 bits would not pay),
            `"precision"`, `"parameters"`, `"cast"` (as the user wrote it) or `"inside"`
            (of a mixed one, the operations inside).
        count: the number of such equations; the body of a loop counts once.
        own_error: the relative error, by norm, that the operation adds to exact inputs;
            the largest of all such equations. NaN inside of a mixed one, which is
            measured as a whole.

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
    own_error: float


@dataclass(frozen=True)
class AmpReport(Report):
    """What `amp_report` found. Printed, it is a table with the largest errors first.

    Attributes:
        operations: how each operation ran, in the order of the function.
        error: the relative error of the function's outputs, compared with float32; NaN
            if it was not measured, because the function has side effects.
        warnings: of loops whose condition reads values of the compute dtype, such as
            Newton's method with a small tolerance, and of calls for 8-bit products in
            which no product runs in 8 bits.

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
        """Return a table of what adds an error, and of products that are not low."""
        shown = [x for x in self.operations if x.own_error > 0 or _is_wide_product(x)]
        cells = [("primitive", "line", "ran", "why", "count", "own error")]
        for x in sorted(shown, key=lambda x: -np.nan_to_num(x.own_error, nan=-1)):
            error = _format(x.own_error)
            cells.append((x.primitive, x.line, x.ran, x.why, str(x.count), error))
        counts: Counter[str] = Counter()
        for x in self.operations:
            counts[x.ran] += x.count
        ran = ", ".join(f"{count} {ran}" for ran, count in counts.most_common())
        return [
            *([Table(cells, left=4, long=1, width=56)] if shown else []),
            f"operations: {ran}; error of the outputs {_format(self.error)}",
            *(f"Warning: {warning}" for warning in self.warnings),
        ]


def _is_wide_product(operation: AmpOperation) -> bool:
    return operation.primitive in PRODUCTS and operation.ran not in ("low", "f8")


def _format(error: float) -> str:
    return "-" if math.isnan(error) else f"{error:.1e}"


def amp_report(
    fun: Callable[..., Any],
    *args: Any,
    compute_dtype: DTypeLike = jnp.bfloat16,
    rules: Mapping[Any, Rule] = default_amp_rules,
    **kwargs: Any,
) -> AmpReport:
    """Compare a function as written with the same under `amp`, on these arguments.

    The report says for each operation how it ran, why, and which relative error it
    adds. Put operations with large errors into `amp_stop`. For the backward pass,
    report on `jax.grad(fun)`.

    It takes several times the memory and time of the function, whose operations run one
    by one, as without `jax.jit`. A function with side effects, such as a callback, runs
    once, as written, and the error of its outputs is not measured. A loop, a branch and
    a `shard_map` are measured as a whole: for errors inside, report on their function.
    Products inside an equation that runs as written, such as a linear solver, are
    listed as well. `precision_report(amp(fun), *args)` says which share of the
    products' FLOPs runs low.

    Args:
        fun: the function as written, not `amp(fun)`.
        *args: its arguments.
        compute_dtype: as in `amp`.
        rules: as in `amp`.
        **kwargs: its keyword arguments.

    Returns:
        The report.

    Raises:
        TypeError: as `amp`.
        ValueError: as `amp`, when called.

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
    checked_rules = Rules(rules, compute_dtype)
    interpreter = Interpreter(checked_rules)
    call = pure_call(fun, args, kwargs, "amp_report")
    traced, plan = interpreter.trace(call)
    errors, error = _measure(interpreter, traced, plan)
    # Equal operations of one line are one row.
    rows: dict[tuple[str, str, str, str], list[float]] = {}
    for site in _decided(traced.closed, plan):
        key = (site.equation.primitive.name, site.line, _ran(site), site.action.why)
        rows.setdefault(key, []).append(errors.get(id(site.action), _NOT_MEASURED))
    operations = tuple(
        AmpOperation(*key, len(found), float(np.fmax.reduce(found)))
        for key, found in rows.items()
    )
    return AmpReport(operations, error, interpreter.warnings(traced, plan))


def _decided(jaxpr: AnyJaxpr, plan: Plan) -> Iterator[Site]:
    """Yield the equations that amp decides on, and products in those it leaves."""
    for site in plan.sites(jaxpr):
        equation, action = site.equation, site.action
        # Only a whole equation with changes inside is an operation of its own.
        is_opened = action.regions and not (action.is_changed and _is_whole(equation))
        takes = any(map(takes_part, (*equation.invars, *equation.outvars)))
        if takes and not is_opened and action.how != "same":
            yield site
            yield from () if action.regions else _products_within(site)


def _products_within(site: Site) -> Iterator[Site]:
    """Yield the products inside an equation that is bound whole: as written.

    Such are products of a linear solver, of a kernel, and of a loop in `amp_stop`.
    """
    action = Action("bind", (), (), "as_written", site.action.why)
    for jaxpr in jaxprs_within(site.equation):
        for equation in open_jaxpr(jaxpr)[0].eqns:
            inner = Site(equation, action, (site.equation, *site.around))
            if is_product(equation):
                yield inner
            yield from _products_within(inner)


def _is_whole(equation: Equation) -> bool:
    """Return whether an equation with regions does more than to call one of them."""
    wiring = wiring_of(equation)
    return wiring.repeats or bool(wiring.deciding) or wiring.is_sharded


def _ran(site: Site) -> str:
    """Return how an operation ran, in the words of `AmpOperation`."""
    action = site.action
    if action.regions:
        return "mixed"
    if action.how == "function":
        return action.how
    if action.ran_low:
        return "f8" if action.how == "f8" else "low"
    return "as_written" if action.rule == "as_written" else "f32"


def _measure(
    interpreter: Interpreter, traced: TracedCall, plan: Plan
) -> tuple[dict[int, float], float]:
    """Return the error of each action of a plan, by its id, and of the outputs."""
    errors: dict[int, float] = {}

    def run(jaxpr: AnyJaxpr, plan: Plan, inputs: Sequence[Any]) -> list[Any]:
        actions = iter(plan.actions)

        def run_next(equation: Equation, inputs: list[Any]) -> Sequence[Any]:
            action = next(actions)
            if action.regions and not _is_whole(equation):
                (region,), (inner,) = wiring_of(equation).regions, action.regions
                return run(region.jaxpr, inner, region.read(inputs))
            full = bind(equation, inputs)
            # An equation with effects, such as a callback, must run once: as written.
            low = full
            if action.is_changed and not equation.effects:
                low = interpreter.run_equation(equation, action, inputs)
            # An action may be here already: a jaxpr can be called in several places.
            before = errors.get(id(action), 0.0)
            errors[id(action)] = max(before, *map(_error, full, low), 0.0)
            return full

        return evaluate(jaxpr, inputs, run_next)

    full = run(traced.closed, plan, traced.arrays)
    if traced.closed.effects:
        return errors, _NOT_MEASURED
    # On CPU XLA would leave out casts to 16 bits and back, and with them the errors.
    options: Any = {"xla_allow_excess_precision": False}
    run_low = partial(interpreter.run, traced.closed, plan)
    low = jax.jit(run_low, compiler_options=options)(traced.arrays)
    return errors, max(map(_error, full, low), default=0.0)


def _error(full: Any, low: Any) -> float:
    """Return the norm of the difference over the norm, where the value is finite."""
    if full is low or not jnp.issubdtype(full.dtype, jnp.inexact):
        return 0.0
    wide = np.complex128 if jnp.iscomplexobj(full) else np.float64
    full, low = (np.asarray(x).astype(wide).ravel() for x in (full, low))
    # Values that are infinite or NaN as written, such as in a mask, have no error.
    is_finite = np.isfinite(full)
    full, low = full[is_finite], low[is_finite]
    # NaN only under amp is an infinite error: NaN would mean "not measured".
    error, norm = float(np.linalg.norm(low - full)), float(np.linalg.norm(full))
    if math.isnan(error) or not norm:
        return math.inf if error else 0.0
    return error / norm
