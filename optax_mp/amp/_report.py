"""amp_report: what ran in which precision, why, and what error that adds."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_mp._jax._control_flow import wiring_of
from optax_mp._jax._jaxpr import AnyJaxpr, Equation, open_jaxpr, source_line
from optax_mp._table import align_columns
from optax_mp.amp._plan import Action, Plan
from optax_mp.amp._precision import LOW, takes_part
from optax_mp.amp._rules import Rule, Rules, default_amp_rules
from optax_mp.amp._run import Interpreter
from optax_mp.amp._shadow import shadow_errors


@dataclass(frozen=True)
class AmpOperation:
    """What became of one operation at one source line.

    Attributes:
        primitive: its name.
        line: where it is written.
        ran: `"low"`, `"f32"` or `"as_written"`.
        why: what decided: `"rule"`, `"scope"`, `"inputs"` (one is float32, or none is),
            `"literal"` (the compute dtype cannot hold it), `"sink"` (everything that
            reads it computes in float32), `"fix-point"` (a loop's carry that is low
            only before the first iteration, or only after one), `"precision"`,
            `"parameters"` or `"cast"` (as the user wrote it).
        count: the number of such equations; the body of a loop counts once.
        own_error: the relative error, by norm, that the operation adds to exact inputs;
            the largest of all such equations, or NaN if it was not measured.
        error: the relative error of its result, that of its inputs included.

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
    error: float


@dataclass(frozen=True)
class AmpReport:
    """What `amp_report` found. Printed, it is a table with the largest errors first.

    Attributes:
        operations: what became of each operation, in the order of the function.
        error: the relative error of the function's outputs, compared with float32.
        base_rules: the rules of this run.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> report = optax_mp.amp_report(lambda x: x @ x - 0.5, jnp.eye(3) / 3)
        >>> sorted({each.ran for each in report.operations}), report.error < 0.01
        (['low'], True)
        >>> print(str(report).splitlines()[-1][:30])
        2 low, 0 f32, 0 as_written; er
    """

    operations: tuple[AmpOperation, ...]
    error: float
    base_rules: Mapping[Any, Rule]

    def rules(self, above: float) -> dict[Any, Rule]:
        """Return the rules of this run, with float32 for operations that err more.

        A new rule names a source line, so it is for this version of the code. Where no
        line is known, as in a library's functions, it names the primitive.

        Args:
            above: the largest `own_error` that an operation may add.
        """
        worst = [each for each in self.operations if each.own_error > above]
        names = sorted({each.line or each.primitive for each in worst})
        return {**self.base_rules, **dict.fromkeys(names, "f32")}

    def by_primitive(self) -> tuple[AmpOperation, ...]:
        """Return the operations, merged over all lines of the source."""
        return _merge(replace(each, line="") for each in self.operations)

    def __str__(self) -> str:
        """Return the table."""
        rows = sorted(self.operations, key=_own_error, reverse=True)
        cells = [("primitive", "line", "ran", "why", "count", "own error", "error")]
        cells += [
            (x.primitive, x.line, x.ran, x.why, str(x.count))
            + (_format_error(x.own_error), _format_error(x.error))
            for x in rows
        ]
        counts = {"low": 0, "f32": 0, "as_written": 0}
        for row in rows:
            counts[row.ran] += row.count
        total = ", ".join(f"{count} {ran}" for ran, count in counts.items())
        return "\n".join(
            [
                *align_columns(cells, left=4),
                f"{total}; error of the outputs {_format_error(self.error)}",
            ]
        )


def amp_report(
    fun: Callable[..., Any],
    *args: Any,
    compute_dtype: DTypeLike = jnp.bfloat16,
    rules: Mapping[Any, Rule] = default_amp_rules,
    **kwargs: Any,
) -> AmpReport:
    """Compare a function as written with the same under `amp`, on these arguments.

    The report says for each operation how it ran, why, and its relative error, and so
    which operations to put into `amp_stop`. For the backward pass, report on
    `jax.grad(fun)`.

    Every value is computed both ways in one run, which takes several times the memory
    and time of the function. An operation with side effects, such as a callback, runs
    once, as written. Operations inside a `shard_map` are listed but not measured.

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
    if not callable(fun):
        raise TypeError(
            f"amp_report: `fun` is {fun!r}, expected a function; call it as "
            "amp_report(fun, *args)."
        )
    interpreter = Interpreter(Rules(rules, compute_dtype))
    traced, plan = interpreter.trace(fun, args, kwargs)
    errors, error = shadow_errors(interpreter, traced, plan)
    operations = (
        AmpOperation(
            equation.primitive.name,
            line,
            _how_it_ran(action),
            action.why,
            1,
            *errors.get(id(action), (float("nan"), float("nan"))),
        )
        for equation, action, line in _operations(traced.closed, plan, "")
    )
    return AmpReport(_merge(operations), error, rules)


def _operations(
    jaxpr: AnyJaxpr, plan: Plan, around: str
) -> Iterator[tuple[Equation, Action, str]]:
    """Yield the equations that amp decides on, their actions, and their lines.

    An equation without a line of its own, as in a function of JAX, has that `around`.
    """
    for equation, action in zip(open_jaxpr(jaxpr)[0].eqns, plan.actions, strict=True):
        line = source_line(equation) or around
        if action.regions:
            regions = wiring_of(equation).regions
            for region, each in zip(regions, action.regions, strict=True):
                yield from _operations(region.jaxpr, each.plan, line)
        # An equation with regions is itself listed only if it casts its carry.
        if action.how == "same" or (action.regions and action.why != "fix-point"):
            continue
        if any(map(takes_part, (*equation.invars, *equation.outvars))):
            yield equation, action, line


def _how_it_ran(action: Action) -> str:
    if LOW in action.inputs or (action.how == "function" and LOW in action.outputs):
        return "low"
    return "as_written" if action.rule == "as_written" else "f32"


def _merge(operations: Any) -> tuple[AmpOperation, ...]:
    """Return operations, with those merged that differ only in their errors."""
    merged: dict[tuple[str, ...], AmpOperation] = {}
    for each in operations:
        key = (each.primitive, each.line, each.ran, each.why)
        if key in merged:
            same = merged[key]
            each = replace(
                each,
                count=same.count + each.count,
                own_error=_larger(same.own_error, each.own_error),
                error=_larger(same.error, each.error),
            )
        merged[key] = each
    return tuple(merged.values())


def _larger(a: float, b: float) -> float:
    """Return the larger error; NaN means not measured."""
    return b if a != a else a if b != b else max(a, b)


def _own_error(operation: AmpOperation) -> float:
    return operation.own_error if operation.own_error == operation.own_error else -1.0


def _format_error(error: float) -> str:
    return "-" if error != error else f"{error:.1e}"
