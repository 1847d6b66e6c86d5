"""Run a jaxpr as planned: every equation is bound again, with the casts it needs.

A value is cast where it is used, and no cast is shared: a weight that is used twice is
cast twice, so that the gradients of its uses are summed in float32.

Loops that may never end under amp raise a warning: their condition reads values
computed low. A root finder iterates until its step is below a tolerance. Computed in 16
bits, the step may never be that small. A condition counts if it compares floats that
depend on the floats of the iteration before, through an operation that runs low. A
counter or a search for a token does not.
"""

from collections.abc import Sequence, Set
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from optax_mp._jax._control_flow import (
    ForwardResult,
    Region,
    bind_with,
    has_regions,
    wiring_of,
)
from optax_mp._jax._dataflow import depending_outputs, follow
from optax_mp._jax._jaxpr import (
    AnyJaxpr,
    ClosedJaxpr,
    Equation,
    TracedCall,
    bind,
    cache_by_jaxpr,
    evaluate,
    explain_carry_error,
    open_jaxpr,
    trace_jaxpr,
    with_dtype,
)
from optax_mp._jax._primitives import COMPARISONS
from optax_mp._warnings import warn
from optax_mp.autocast._changes import PureCall
from optax_mp.autocast._derivatives import custom_jvp, custom_vjp, product
from optax_mp.autocast._lattice import (
    FULL,
    LOW,
    Precision,
    Precisions,
    Weak,
    argument_precisions,
    cast,
    full_precisions,
)
from optax_mp.autocast._plan import Action, Plan, Planner, Site
from optax_mp.autocast._rules import LINEAR, Rule, Rules, call_function
from optax_mp.trees._tree import is_array, is_floating

_WITH_RULE = {"custom_jvp_call": custom_jvp, "custom_vjp_call": custom_vjp}


class Interpreter:
    """Plans and runs functions by one set of rules."""

    def __init__(self, rules: Rules) -> None:
        """Run by `rules`."""
        self._rules = rules
        self._planner = Planner(rules)
        self._low = rules.compute_dtype
        # JAX's caches compare jaxprs by identity. Without this cache, every eager call
        # of the function would compile its regions again.
        self._convert_cached = cache_by_jaxpr(self._convert)

    def trace(self, call: PureCall) -> tuple[TracedCall, Plan, tuple[str, ...]]:
        """Return a traced call, the plan for it, and warnings of probable mistakes."""
        # Traced in each call, because values that it closes over may have changed.
        with explain_carry_error("amp"):
            traced = TracedCall.of(lambda args: call.fun(*args), call.args)
        jaxpr = traced.closed.jaxpr
        plan = self._planner.plan(jaxpr, argument_precisions(jaxpr.invars), None)
        sites = list(plan.sites(jaxpr))
        unknown = self._rules.warnings_of_names(x.equation for x in sites)
        return traced, plan, loop_warnings(sites, self._low) + unknown

    def run(self, jaxpr: AnyJaxpr, plan: Plan, args: Sequence[Any]) -> list[Any]:
        """Return the outputs of a jaxpr, in the precisions that the plan gives."""
        if not plan.is_changed:
            # As written: the result for a Python number keeps its weak type.
            return evaluate(jaxpr, args)
        actions = iter(plan.actions)

        def run_next(equation: Equation, inputs: list[Any]) -> Sequence[Any]:
            return self._run_equation(equation, next(actions), inputs)

        return evaluate(jaxpr, args, run_next)

    def _run_equation(
        self, equation: Equation, action: Action, inputs: Sequence[Any]
    ) -> Sequence[Any]:
        """Return the outputs of one equation, as its action says."""
        if action.how == "function":
            new = call_function(action.rule, self._low, equation, inputs)
            # Outputs that take no part in amp are as written.
            outs = tuple(x or FULL for x in action.outputs)
            return self.cast_all(bind(equation, *new), outs, equation.outvars)
        inputs = self.cast_all(inputs, action.inputs, equation.invars)
        match action.how:
            case "same":
                return inputs
            case "bind":
                outputs = bind(equation, inputs, action.params)
                return self.cast_all(outputs, action.outputs, equation.outvars)
            case "low_f32":
                return [product(equation, inputs, self._low)]
        # All others are regions.
        if equation.primitive.name in _WITH_RULE:
            return self._run_with_rule(equation, action, inputs)

        def convert(region: Region, plan: Plan) -> ClosedJaxpr:
            inputs, outputs = region.read(action.inputs), region.take(action.outputs)
            return self._convert_cached(region.jaxpr, plan, inputs, outputs)

        pairs = list(zip(wiring_of(equation).regions, action.regions, strict=True))
        return bind_with(equation, inputs, lambda: [convert(*pair) for pair in pairs])

    def _convert(
        self, jaxpr: AnyJaxpr, plan: Plan, inputs: Precisions, outputs: Precisions
    ) -> ClosedJaxpr:
        """Return a jaxpr inside an equation, changed as its plan says.

        Args:
            jaxpr: the jaxpr.
            plan: its plan.
            inputs: the precisions of its inputs. They are cast inside to `plan.inputs`.
            outputs: the precisions that its outputs are cast to.
        """
        old, _ = open_jaxpr(jaxpr)

        # A full value that is planned low, such as a constant of a loop, is cast in
        # every iteration.
        def run(*args: Any) -> list[Any]:
            values = self.cast_all(args, plan.inputs, old.invars)
            values = self.run(jaxpr, plan, values)
            return self.cast_all(values, outputs, old.outvars)

        avals = [
            with_dtype(atom.aval, self._low) if precision == LOW else atom.aval
            for atom, precision in zip(old.invars, inputs, strict=True)
        ]
        return trace_jaxpr(run, avals)

    def _run_with_rule(
        self, equation: Equation, action: Action, inputs: Sequence[Any]
    ) -> list[Any]:
        """Run a function that has a derivative rule, and later the rule."""
        # If the equation were bound again, it would keep its rule, which is written for
        # float32.
        (region,), (plan,) = wiring_of(equation).regions, action.regions

        def call(*args: Any) -> list[Any]:
            return self.run(region.jaxpr, plan, region.read(args))

        cast_outputs = partial(
            self.cast_all, precisions=action.outputs, atoms=equation.outvars
        )
        with_rule = _WITH_RULE[equation.primitive.name]
        scope_rule = action.scope_rule
        if with_rule is custom_jvp and scope_rule in (None, "low_f32"):
            scope_rule = LINEAR
        interpret = partial(self._interpret, scope_rule)
        return with_rule(equation, call, cast_outputs, interpret)(*inputs)

    def _interpret(
        self, scope_rule: Rule | None, function: Any, args: Any, dtypes: Any
    ) -> tuple[Any, Any]:
        """Run `function(*args)` as amp does, in a scope with this rule.

        Args:
            scope_rule: the rule.
            function: the function.
            args: its arguments. Each array is low, or has the dtype that the function
                expects.
            dtypes: these dtypes, in the same order.

        Returns:
            The function's result, and for each output whether it depends on the
            last of `args`.
        """
        leaves, treedef = jax.tree.flatten(args)
        expected = jax.tree.leaves(dtypes)
        pairs = zip(leaves, expected, strict=True)
        # Some are plain numbers, as the user wrote them.
        leaves = [x if is_array(x) else jnp.asarray(x, dtype) for x, dtype in pairs]
        # Traced with the dtypes that it expects; the plan knows which are low.
        avals = map(with_dtype, map(jax.typeof, leaves), expected)
        trace = jax.make_jaxpr(function, return_shape=True)
        closed, returned = trace(*treedef.unflatten(avals))
        jaxpr = closed.jaxpr
        # `full` is None for a value that takes no part in amp.
        precisions = tuple(
            full and (LOW if x.dtype == self._low else FULL)
            for full, x in zip(full_precisions(jaxpr.invars), leaves, strict=True)
        )
        # Neither arguments of the whole function nor readers of the outputs are
        # known here.
        plan = self._planner.plan(jaxpr, precisions, scope_rule)
        for text in loop_warnings(list(plan.sites(jaxpr)), self._low):
            warn(f"amp: {text}")
        values = self.run(closed, plan, leaves)
        before_last = len(jax.tree.leaves(args[:-1]))
        is_last = [i >= before_last for i in range(len(leaves))]
        depend = depending_outputs(closed, is_last)
        unflatten = jax.tree.structure(returned).unflatten
        return unflatten(values), unflatten(depend)

    def cast_all(
        self, values: Sequence[Any], precisions: Precisions, atoms: Sequence[Any]
    ) -> list[Any]:
        """Return values in these precisions; those that are weak or None stay."""

        def cast_to(precision: Precision, x: Any, atom: Any) -> Any:
            if isinstance(precision, Weak | None):
                return x
            return cast(x, self._low if precision == LOW else atom.aval.dtype)

        return list(map(cast_to, precisions, values, atoms))


# How a value depends on the floats that a loop carries; of several, the largest counts.
_NOT, _DEPENDS, _DEPENDS_BY_LOW = 0, 1, 2


def loop_warnings(sites: Sequence[Site], dtype: Any) -> tuple[str, ...]:
    """Return a warning for each loop whose condition reads values computed low."""
    epsilon = float(jnp.finfo(dtype).eps)
    low = {id(x.equation) for x in sites if x.action.ran_low}
    loops = (x for x in sites if low and x.equation.primitive.name == "while")
    # In a derivative rule, the line may not be known.
    lines = dict.fromkeys(x.line for x in loops if _compares_low(x.equation, low))
    return tuple(
        f"the while loop{f' at {line}' if line else ''} compares floats to decide "
        f"whether it goes on. Under amp these have the precision of {dtype.name}, "
        f"{epsilon:.1g}, so it may take many more iterations, or never end. Put it "
        "into `with optax_mp.amp_stop():`, or raise its tolerance."
        for line in lines
    )


def _compares_low(loop: Equation, low: Set[int]) -> bool:
    """Return whether a while loop goes on by floats that some equations compute."""
    carried = {i for _, i in wiring_of(loop).carry}
    start = [
        _DEPENDS if i in carried and is_floating(x.aval) else _NOT
        for i, x in enumerate(loop.invars)
    ]
    return _DEPENDS_BY_LOW in _through(loop, start, low).decisions


def _through(equation: Equation, inputs: Sequence[int], low: Set[int]) -> ForwardResult:
    """Follow dependences through an equation with regions."""

    def results(equation: Equation, inputs: list[int]) -> list[int]:
        if has_regions(equation):
            result = _through(equation, inputs, low)
            # An output also depends on the choice of a branch.
            return [max([x, *result.decisions]) for x in result.outputs]
        return [_result(equation, inputs, low, x) for x in equation.outvars]

    return wiring_of(equation).forward(
        inputs, lambda x, values: follow(x.jaxpr, values, results, lambda _: _NOT), max
    )


def _result(equation: Equation, inputs: list[int], low: Set[int], output: Any) -> int:
    """Return how an output of an equation without regions depends on such floats."""
    if equation.primitive.name not in COMPARISONS and not is_floating(output.aval):
        # An argmax, the order of a sort, or `is_finite` is no test against a tolerance.
        pairs = zip(inputs, equation.invars, strict=True)
        inputs = [x for x, atom in pairs if not is_floating(atom.aval)]
    depends = max(inputs, default=_NOT)
    return _DEPENDS_BY_LOW if depends and id(equation) in low else depends
