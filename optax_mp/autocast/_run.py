"""Run a jaxpr as planned: every equation is bound again, with the casts it needs.

A value is cast where it is used, and no cast is shared: a weight that is used twice is
cast twice, so that the gradients of its uses are summed in float32.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from optax_mp.autocast import _lattice, _plan, _rules
from optax_mp.autocast._changes import PureCall
from optax_mp.autocast._derivatives import custom_jvp, custom_vjp
from optax_mp.core._warnings import warn
from optax_mp.core.jax_api import _jaxpr
from optax_mp.core.jax_api._arrays import is_array
from optax_mp.core.jax_api._extend import ClosedJaxpr
from optax_mp.jaxprs import _control_flow, _tracing
from optax_mp.jaxprs._dependence import depending_outputs
from optax_mp.jaxprs._hidden import call_kind

_WITH_RULE = {"custom_jvp_call": custom_jvp, "custom_vjp_call": custom_vjp}


class Interpreter:
    """Plans and runs functions by one set of rules."""

    def __init__(self, rules: _rules.Rules) -> None:
        """Run by `rules`."""
        self._rules = rules
        self._planner = _plan.Planner(rules)
        self._low = rules.compute_dtype
        # JAX's caches compare jaxprs by identity. Without this cache, every eager call
        # of the function would compile its regions again.
        self._convert_cached = _tracing.cache_by_jaxpr(self._convert)

    def trace(
        self, call: PureCall
    ) -> tuple[_jaxpr.TracedCall, _plan.Plan, tuple[str, ...]]:
        """Return a traced call, the plan for it, and its warnings."""
        # Traced in each call, because values that it closes over may have changed.
        traced = _jaxpr.TracedCall.of(lambda args: call.fun(*args), call.args)
        jaxpr, _ = _jaxpr.open_jaxpr(traced.closed)
        plan = self._planner.plan(
            jaxpr, _lattice.argument_precisions(jaxpr.invars), None
        )
        sites = list(plan.sites(jaxpr))
        warnings = self._rules.warnings_of_names(site.equation for site in sites)
        return traced, plan, (*warnings, *_plan.warnings_of_unknown(sites))

    def run(
        self, jaxpr: _jaxpr.AnyJaxpr, plan: _plan.Plan, args: Sequence[Any]
    ) -> list[Any]:
        """Return the outputs of a jaxpr, in the precisions that the plan gives."""
        if not plan.is_changed:
            # As written: the result for a Python number keeps its weak type.
            return _jaxpr.evaluate(jaxpr, args)
        actions = iter(plan.actions)

        def run_next(equation: _jaxpr.Equation, inputs: list[Any]) -> Sequence[Any]:
            return self._run_equation(equation, next(actions), inputs)

        return _jaxpr.evaluate(jaxpr, args, run_next)

    def _run_equation(
        self, equation: _jaxpr.Equation, action: _plan.Action, inputs: Sequence[Any]
    ) -> Sequence[Any]:
        """Return the outputs of one equation, as its action says."""
        if action.how == "function":
            new = _rules.call_function(action.rule, self._low, equation, inputs)
            # Outputs that take no part in amp are as written.
            outs = tuple(x or _lattice.FULL for x in action.outputs)
            return self.cast_all(_jaxpr.bind(equation, *new), outs, equation.outvars)
        inputs = self.cast_all(inputs, action.inputs, equation.invars)
        if action.how == "same":
            return inputs
        if action.how == "bind":
            outputs = _jaxpr.bind(equation, inputs, action.params)
            return self.cast_all(outputs, action.outputs, equation.outvars)
        # All others are regions.
        if call_kind(equation) in _WITH_RULE:
            return self._run_with_rule(equation, action, inputs)

        def convert(region: _control_flow.Region, plan: _plan.Plan) -> ClosedJaxpr:
            inputs, outputs = region.read(action.inputs), region.take(action.outputs)
            return self._convert_cached(region.jaxpr, plan, inputs, outputs)

        pairs = list(
            zip(_control_flow.wiring_of(equation).regions, action.regions, strict=True)
        )
        return _control_flow.bind_with(
            equation, inputs, lambda: [convert(*pair) for pair in pairs]
        )

    def _convert(
        self,
        jaxpr: _jaxpr.AnyJaxpr,
        plan: _plan.Plan,
        inputs: _lattice.Precisions,
        outputs: _lattice.Precisions,
    ) -> ClosedJaxpr:
        """Return a jaxpr inside an equation, changed as its plan says.

        Args:
            jaxpr: the jaxpr.
            plan: its plan.
            inputs: the precisions of its inputs. They are cast inside to `plan.inputs`.
            outputs: the precisions that its outputs are cast to.
        """
        old, _ = _jaxpr.open_jaxpr(jaxpr)

        # A full value that is planned low, such as a constant of a loop, is cast in
        # every iteration.
        def run(*args: Any) -> list[Any]:
            values = self.cast_all(args, plan.inputs, old.invars)
            values = self.run(jaxpr, plan, values)
            return self.cast_all(values, outputs, old.outvars)

        avals = [
            _tracing.with_dtype(atom.aval, self._low)
            if precision == _lattice.LOW
            else atom.aval
            for atom, precision in zip(old.invars, inputs, strict=True)
        ]
        return _tracing.trace_jaxpr(run, avals)

    def _run_with_rule(
        self, equation: _jaxpr.Equation, action: _plan.Action, inputs: Sequence[Any]
    ) -> list[Any]:
        """Run a function that has a derivative rule; JAX runs the rule later."""
        # If the equation were bound again, it would keep its rule, which is written for
        # float32.
        (region,), (plan,) = _control_flow.wiring_of(equation).regions, action.regions

        def call(*args: Any) -> list[Any]:
            return self.run(region.jaxpr, plan, region.read(args))

        cast_outputs = partial(
            self.cast_all, precisions=action.outputs, atoms=equation.outvars
        )
        with_rule = _WITH_RULE[call_kind(equation)]
        interpret = partial(self._interpret, action.scope_rule)
        return with_rule(equation, call, cast_outputs, interpret)(*inputs)

    def _interpret(
        self, scope_rule: _rules.Rule | None, function: Any, args: Any, dtypes: Any
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
        avals = map(_tracing.with_dtype, map(jax.typeof, leaves), expected)
        trace = jax.make_jaxpr(function, return_shape=True)
        closed, returned = trace(*treedef.unflatten(avals))
        jaxpr, _ = _jaxpr.open_jaxpr(closed)
        # `full` is None for a value that takes no part in amp.
        precisions = tuple(
            full and (_lattice.LOW if x.dtype == self._low else _lattice.FULL)
            for full, x in zip(
                _lattice.full_precisions(jaxpr.invars), leaves, strict=True
            )
        )
        # Arguments of the whole function and readers of the outputs are not
        # known here.
        plan = self._planner.plan(jaxpr, precisions, scope_rule)
        for text in _plan.warnings_of_unknown(plan.sites(jaxpr)):
            warn(f"amp: {text}")
        values = self.run(closed, plan, leaves)
        before_last = len(jax.tree.leaves(args[:-1]))
        is_last = [i >= before_last for i in range(len(leaves))]
        depend = depending_outputs(closed, is_last)
        unflatten = jax.tree.structure(returned).unflatten
        return unflatten(values), unflatten(depend)

    def cast_all(
        self,
        values: Sequence[Any],
        precisions: _lattice.Precisions,
        atoms: Sequence[Any],
    ) -> list[Any]:
        """Return values in these precisions; those that are weak or None stay."""

        def cast_to(precision: _lattice.Precision, x: Any, atom: Any) -> Any:
            if isinstance(precision, _lattice.Weak | None):
                return x
            return _lattice.cast(
                x, self._low if precision == _lattice.LOW else atom.aval.dtype
            )

        return list(map(cast_to, precisions, values, atoms))
