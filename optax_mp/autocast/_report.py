"""amp_report: what ran in which precision, why, and what error that adds."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_mp._jax._control_flow import wiring_of
from optax_mp._jax._jaxpr import AnyJaxpr, Equation, jaxprs_within, open_jaxpr
from optax_mp._jax._products import flops_of, is_product
from optax_mp._jax._source import source_line
from optax_mp._table import align_columns
from optax_mp.autocast._changes import pure_call
from optax_mp.autocast._lattice import takes_part
from optax_mp.autocast._loop_conditions import ran_low
from optax_mp.autocast._measure import measure_errors
from optax_mp.autocast._plan import Action, Plan
from optax_mp.autocast._rules import Rule, Rules, default_amp_rules
from optax_mp.autocast._run import Interpreter

# What the words of a report mean; those that occur are printed below the table.
_MEANINGS = {
    "scope": "the rule of a jax.named_scope, such as amp_stop",
    "inputs": "an input is float32 as amp runs it, or none is float32 as written",
    "literal": "the compute dtype cannot hold a number",
    "sink": "everything that reads it computes in float32",
    "fix-point": "a loop's carry that is low only before or only after an iteration",
    "shape": "too small for products in 8 bits to pay",
    "precision": "the product asks for its precision",
    "parameters": "its parameters fix its dtypes, or hold a function",
    "cast": "the function itself casts",
}


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
    flops: float = 0


@dataclass(frozen=True)
class AmpReport:
    """What `amp_report` found. Printed, it is a table with the largest errors first.

    Attributes:
        operations: what became of each operation, in the order of the function.
        error: the relative error of the function's outputs, compared with float32; NaN
            if it was not measured, because the function has side effects.
        warnings: what may harm without an error: loops whose condition reads values of
            the compute dtype, such as Newton's method with a small tolerance; that no
            product runs in 8 bits, where that was asked for.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> report = optax_mp.amp_report(lambda x: x @ x - 0.5, jnp.eye(3) / 3)
        >>> sorted({each.ran for each in report.operations}), report.error < 0.01
        (['low'], True)
        >>> print(str(report).splitlines()[-1])
        products, by FLOPs: 100% low
    """

    operations: tuple[AmpOperation, ...]
    error: float
    warnings: tuple[str, ...] = ()

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
        total = sum(x.flops for x in self.operations)
        part = sum(x.flops for x in self.operations if x.ran in ran)
        return part / total if total else without_products

    def by_primitive(self) -> tuple[AmpOperation, ...]:
        """Return the operations, merged over all lines of the source."""
        return _merge(replace(x, line="") for x in self.operations)

    def __str__(self) -> str:
        """Return the table.

        It shows what adds an error, and the products that do not run low. The other
        operations are counted.
        """
        rows = sorted(filter(_is_shown, self.operations), key=_rank, reverse=True)
        cells = [("primitive", "line", "ran", "why", "count", "own error")]
        cells += [
            (x.primitive, x.line, x.ran, x.why, str(x.count), _format(x.own_error))
            for x in rows
        ]
        whys = {x.why for x in rows}
        legend = [f"{why}: {text}" for why, text in _MEANINGS.items() if why in whys]
        table = align_columns(cells, left=4) if rows else []
        return "\n".join([*table, *legend, *self._summary()])

    def _summary(self) -> Iterator[str]:
        hidden = sum(x.count for x in self.operations if not _is_shown(x))
        if hidden:
            yield f"not shown: {hidden} operations that add no error"
        counts: Counter[str] = Counter()
        for x in self.operations:
            counts[x.ran] += x.count
        ran = ", ".join(f"{n} {x}" for x in _RAN if (n := counts[x]) or x != "f8")
        yield f"operations: {ran}; error of the outputs {_format(self.error)}"
        yield from (f"Warning: {warning}" for warning in self.warnings)
        if any(x.flops for x in self.operations):
            shares = {x: self._share((x,), 0.0) for x in _RAN}
            # Where 8 bits were asked for, 0% is worth saying.
            asked = {"f8"} if any(x.why == "shape" for x in self.operations) else set()
            parts = ", ".join(
                f"{y:.0%} {x}" for x, y in shares.items() if y or x in asked
            )
            yield f"products, by FLOPs: {parts}"


_RAN = ("f8", "low", "f32", "as_written")


def _is_shown(x: AmpOperation) -> bool:
    return x.own_error > 0 or bool(x.flops and x.ran not in ("low", "f8"))


def _rank(x: AmpOperation) -> float:
    return x.own_error if x.own_error == x.own_error else -1.0


def _format(error: float) -> str:
    return "-" if error != error else f"{error:.1e}"


def amp_report(
    fun: Callable[..., Any],
    *args: Any,
    compute_dtype: DTypeLike = jnp.bfloat16,
    rules: Mapping[Any, Rule] = default_amp_rules,
    **kwargs: Any,
) -> AmpReport:
    """Compare a function as written with the same under `amp`, on these arguments.

    The report says for each operation how it ran, why, and which relative error it
    adds, and so which operations to put into `amp_stop`. For the backward pass, report
    on `jax.grad(fun)`.

    It takes several times the memory and time of the function. A function with side
    effects, such as a callback, runs once, as written, and the error of its outputs is
    not measured. Operations inside a `shard_map` are listed but not measured, and so
    are the products inside what amp leaves as written, such as a linear solver.

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
    errors, error = measure_errors(interpreter, traced, plan)
    operations = (_operation(site, errors) for site in _sites(traced.closed, plan))
    return AmpReport(_merge(operations), error, interpreter.warnings(traced, plan))


class _Site(NamedTuple):
    """An equation that amp decides on.

    Attributes:
        equation: the equation.
        action: what becomes of it.
        line: its line, or that of the nearest equation around it that has one.
        runs: how often it runs; the body of a while loop counts once.
    """

    equation: Equation
    action: Action
    line: str
    runs: int


def _sites(
    jaxpr: AnyJaxpr, plan: Plan, line: str = "", runs: int = 1
) -> Iterator[_Site]:
    """Yield the equations that amp decides on, those in regions, too."""
    for equation, action in zip(open_jaxpr(jaxpr)[0].eqns, plan.actions, strict=True):
        # A function of JAX has lines of its own only where it is called.
        own_line = source_line(equation) or line
        if action.regions:
            repeats = runs * equation.params.get("length", 1)  # of a scan
            regions = wiring_of(equation).regions
            for region, inner in zip(regions, action.regions, strict=True):
                yield from _sites(region.jaxpr, inner.plan, own_line, repeats)
        # An equation with regions is itself listed only if it casts its carry.
        if action.how == "same" or (action.regions and action.why != "fix-point"):
            continue
        if any(map(takes_part, (*equation.invars, *equation.outvars))):
            yield _Site(equation, action, own_line, runs)
            if not action.regions:
                yield from _products_within(equation, action, own_line, runs)


def _products_within(
    equation: Equation, action: Action, line: str, runs: int
) -> Iterator[_Site]:
    """Yield the products inside an equation that is bound whole: as written.

    Such are those of a linear solver, of a kernel, and of what `amp_stop` leaves alone.
    """
    as_written = Action("bind", (), (), "as_written", action.why)
    repeats = runs * equation.params.get("length", 1)
    for jaxpr in jaxprs_within(equation):
        for inner in open_jaxpr(jaxpr)[0].eqns:
            own_line = source_line(inner) or line
            if is_product(inner):
                yield _Site(inner, as_written, own_line, repeats)
            yield from _products_within(inner, action, own_line, repeats)


def _operation(site: _Site, errors: Mapping[int, float]) -> AmpOperation:
    equation, action = site.equation, site.action
    return AmpOperation(
        equation.primitive.name,
        site.line,
        _how_it_ran(action),
        action.why,
        1,
        errors.get(id(action), float("nan")),
        site.runs * flops_of(equation) if is_product(equation) else 0,
    )


def _how_it_ran(action: Action) -> str:
    if action.how == "f8":
        return "f8"
    if ran_low(action):
        return "low"
    return "as_written" if action.rule == "as_written" else "f32"


def _merge(operations: Iterable[AmpOperation]) -> tuple[AmpOperation, ...]:
    """Return operations, with those merged that differ only in their errors."""
    merged: dict[tuple[str, ...], AmpOperation] = {}
    for x in operations:
        key = (x.primitive, x.line, x.ran, x.why)
        if same := merged.get(key):
            x = replace(
                x,
                count=same.count + x.count,
                own_error=max(same, x, key=_rank).own_error,
                flops=same.flops + x.flops,
            )
        merged[key] = x
    return tuple(merged.values())
