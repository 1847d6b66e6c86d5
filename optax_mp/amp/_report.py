"""amp_report: what ran in which precision, why, and what error that adds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_mp._jax._source import is_transposed
from optax_mp._table import align_columns
from optax_mp._warnings import warn
from optax_mp.amp._changes import pure_call
from optax_mp.amp._loop_conditions import loop_warnings, ran_low
from optax_mp.amp._narrow_rules import Measured, NarrowRules, narrow_rules
from optax_mp.amp._plan import Action
from optax_mp.amp._rules import Rule, Rules, default_amp_rules
from optax_mp.amp._run import Interpreter
from optax_mp.amp._shadow import shadow_errors
from optax_mp.amp._sites import Site, sites_of


@dataclass(frozen=True)
class AmpOperation:
    """What became of one operation at one source line.

    Attributes:
        primitive: its name.
        line: where it is written.
        ran: `"low"`, `"f8"` (a product in 8 bits), `"f32"` or `"as_written"`.
        why: what decided: `"rule"`, `"scope"`, `"inputs"` (one is float32, or none is),
            `"literal"` (the compute dtype cannot hold it), `"sink"` (everything that
            reads it computes in float32), `"fix-point"` (a loop's carry that is low
            only before the first iteration, or only after one), `"shape"` (8 bits
            would not pay), `"precision"`, `"parameters"` or `"cast"` (as the user
            wrote it).
        count: the number of such equations; the body of a loop counts once.
        own_error: the relative error, by norm, that the operation adds to exact inputs;
            the largest of all such equations, or NaN if it was not measured.
        error: the relative error of its result, that of its inputs included.
        flops: the floating-point operations of matrix products and convolutions, in all
            iterations of a scan, and in one of a while loop; 0 for other operations.

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
    flops: float = 0


@dataclass(frozen=True)
class AmpReport:
    """What `amp_report` found. Printed, it is a table with the largest errors first.

    Attributes:
        operations: what became of each operation, in the order of the function.
        error: the relative error of the function's outputs, compared with float32.
        base_rules: the rules of this run.
        warnings: what may harm without an error: loops whose condition reads values of
            the compute dtype, such as Newton's method with a small tolerance.

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
    warnings: tuple[str, ...] = ()
    _measured: tuple[Measured, ...] = field(default=(), repr=False)

    @property
    def low_share(self) -> float:
        """The share of the FLOPs of products that run in 16 bits or in 8.

        1 if there is no product.
        """
        return self._share(("low", "f8"), 1.0)

    @property
    def f8_share(self) -> float:
        """The share of the FLOPs of products that run in 8 bits."""
        return self._share(("f8",), 0.0)

    def _share(self, ran: Sequence[str], without_products: float) -> float:
        total = sum(each.flops for each in self.operations)
        part = sum(each.flops for each in self.operations if each.ran in ran)
        return part / total if total else without_products

    def rules(self, above: float) -> dict[Any, Rule]:
        """Return the rules of this run, with float32 for operations that err more.

        A product that errs more in 8 bits goes to 16, by the word `"not_f8"`. If it
        errs more there, too, a report with the new rules says so.

        A new rule names a source line, so it is for this version of the code. The line
        of a library's layer stands for all layers of that kind. If others of them err
        less, the rule names the scope as well, or the line that calls the layer. If
        that does not tell them apart, or no product is left in 16 bits, this warns.
        Where no line is known, a rule names the primitive.

        Args:
            above: the largest `own_error` that an operation may add.
        """
        found = narrow_rules(self._measured, above)
        self._warn_of_cost(found, above)
        words = {
            name: "f32" if name in found.wide else "not_f8" for name in found.names
        }
        return {**self.base_rules, **words}

    def _warn_of_cost(self, found: NarrowRules, above: float) -> None:
        """Warn of rules that take more out of 16 bits than what errs more."""
        total = sum(each.flops for each in self.operations)
        if not total or not self.low_share or (found.kept and not found.innocent):
            return
        wide = [
            f"{name!r} stands for {erring} that err more and {count} that do not"
            for name, (erring, count) in found.innocent.items()
        ]
        fix = (
            "give these layers a jax.named_scope each, or put amp_stop around those "
            "that are to stay in float32"
            if wide
            else "a larger `above` leaves more in 16 bits"
        )
        shares = (
            f"with float32 for what errs more than {above:g}, {found.kept / total:.0%} "
            f"of the FLOPs of products run in 16 bits, {self.low_share:.0%} without it"
        )
        text = "; ".join((shares, *wide, fix))
        warn(f"AmpReport.rules: {text}.")

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
        counts = {"f8": 0, "low": 0, "f32": 0, "as_written": 0}
        for row in rows:
            counts[row.ran] += row.count
        total = ", ".join(
            f"{count} {ran}" for ran, count in counts.items() if count or ran != "f8"
        )
        total += f"; error of the outputs {_format_error(self.error)}"
        if any(row.flops for row in rows):
            in_8_bits = f", {self.f8_share:.0%} f8" if counts["f8"] else ""
            total += f"; products: {self.low_share:.0%} low{in_8_bits}"
        return "\n".join(
            [
                *align_columns(cells, left=4),
                total,
                *(f"Warning: {warning}" for warning in self.warnings),
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
    once, as written. Operations inside a `shard_map` are listed but not measured, and
    so are the products inside what amp leaves as written, such as a linear solver.

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
    checked_rules = Rules(rules, compute_dtype)
    interpreter = Interpreter(checked_rules)
    call = pure_call(fun, args, kwargs)
    traced, plan = interpreter.trace(call.fun, call.args, {})
    errors, error = shadow_errors(interpreter, traced, plan)
    sites = list(sites_of(traced.closed, plan))
    operations = [_operation(site, errors) for site in sites]
    measured = tuple(map(_measured, operations, sites))
    found = loop_warnings(traced.closed, plan, checked_rules.compute_dtype)
    return AmpReport(_merge(operations), error, rules, found, measured)


def _operation(site: Site, errors: Mapping[int, tuple[float, float]]) -> AmpOperation:
    not_measured = float("nan"), float("nan")
    return AmpOperation(
        site.equation.primitive.name,
        site.line,
        _how_it_ran(site.action),
        site.action.why,
        1,
        *errors.get(id(site.action), not_measured),
        site.flops,
    )


def _measured(operation: AmpOperation, site: Site) -> Measured:
    return Measured(
        operation.primitive,
        operation.line,
        site.places,
        is_transposed(site.equation),
        operation.own_error,
        operation.flops if operation.ran in ("low", "f8") else 0,
        operation.ran == "f8",
    )


def _how_it_ran(action: Action) -> str:
    if action.how == "f8":
        return "f8"
    if ran_low(action):
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
                flops=same.flops + each.flops,
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
