"""A step, traced once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding

from optax_mp._jax._arrays import (
    compiles,
    is_traced,
    looks_for_leaks,
)
from optax_mp._jax._by_platform import NAME, Rewrite, call_by_platform
from optax_mp._jax._contact import is_seen, is_traced_by_jit
from optax_mp._jax._jaxpr import Equation, bind, evaluate
from optax_mp._jax._memory import is_on_host
from optax_mp._jax._traced import TracedCall, is_output
from optax_mp._quantized import holds_packed
from optax_mp.leafwise._ends import End, cut
from optax_mp.leafwise._layout import Shardings
from optax_mp.leafwise._program import Program, Value

Step = Callable[[Any, Any], tuple[Any, Any]]
NOT_PACKED = "nothing in few bits"
TRANSFORMED = "within `vmap` or `grad`"


def obstacle_of(state: Any, arguments: Any) -> str | None:
    """Return why a step is taken as it is; None if it may be cut.

    Args:
        state: of the optimizer.
        arguments: of the step.
    """
    if not holds_packed(state):
        return NOT_PACKED
    leaves = jax.tree.leaves(arguments)
    if not any(map(is_traced, leaves)) or not compiles():
        return "not within `jit`"
    if is_transformed(leaves):
        return TRANSFORMED
    if any(map(is_on_host, leaves)):
        return "state in host memory"
    if looks_for_leaks():
        return "JAX looks for leaked tracers"
    return None


def is_transformed(leaves: Sequence[Any]) -> bool:
    """Return whether arrays are traced by another transformation than `jit`.

    There, arrays may have concrete values, which a step may look at.
    """
    return any(is_traced(x) and not is_traced_by_jit(x) for x in leaves)


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A step, and its equations.

    Attributes:
        traced: its jaxpr.
        kept: the last part of its argument, which the last part of its result replaces.
        known_shardings: of the leaves of `kept`, or of the first ones; None where they
            are not known.
    """

    traced: TracedCall
    kept: Any
    known_shardings: Sequence[NamedSharding | None] = ()

    @classmethod
    def as_call(
        cls,
        step: Step,
        inputs: Any,
        kept: Any,
        shardings: Sequence[NamedSharding | None] = (),
    ) -> "TracedStep":
        """Trace `step(inputs, kept)` as one equation: a call of `jit`; see `run_step`.

        Its inputs are the arrays that `jit` traces. Concrete arrays are its constants,
        so that a rule may look at them. JAX has all rules for a call of `jit`: it can
        be lowered, batched and differentiated without evaluating its equations again.
        """
        traced = TracedCall.of(
            lambda both: step(*both), (inputs, kept), is_traced, jit_name=NAME
        )
        return cls(traced, kept, shardings)

    @property
    def obstacle(self) -> str | None:
        """Why it is not cut, or None."""
        # An equation without a result, such as printing, would be lost.
        if any(map(is_seen, self.traced.closed.effects)):
            return "the update has effects"
        sizes = (n for x in self.traced.arrays for n in jax.typeof(x).shape)
        if not all(isinstance(n, int) for n in sizes):
            return "sizes known later only"
        return None

    def run(self, rewrite: Rewrite | None) -> Any:
        """Return the result of the step.

        Args:
            rewrite: see `call_by_platform`; None for the step as it is.
        """

        def run_call(call: Equation, inputs: list[Any]) -> list[Any]:
            if rewrite is None:
                return bind(call, inputs)
            return call_by_platform(call, inputs, rewrite)

        traced = self.traced
        return traced.unflatten(evaluate(traced.closed, traced.arrays, run_call))

    @cached_property
    def program(self) -> Program:
        """Its equations."""
        return Program.of(self.traced.closed)

    @cached_property
    def values(self) -> dict[Value, Any]:
        """The arrays that are known before the step."""
        program, arrays = self.program, self.traced.arrays
        return dict(zip(program.inputs, arrays, strict=True)) | program.constants

    @cached_property
    def call_values(self) -> tuple[list[Value], list[Any]]:
        """The values that the call reads, and those that it returns."""
        # It may read the constants of the jaxpr as well, and does not return inputs.
        jaxpr: Any = self.traced.closed.jaxpr
        (call,), program = jaxpr.eqns, self.program
        read = dict(zip(jaxpr.invars, program.inputs, strict=True))
        read.update(zip(jaxpr.constvars, program.constants, strict=False))
        made = dict(zip(map(id, jaxpr.outvars), program.outputs, strict=True))
        return [read[v] for v in call.invars], [made[id(v)] for v in call.outvars]

    @cached_property
    def replaced(self) -> dict[Value, Value]:
        """Which input of the program an output takes the place of.

        There are none if the structure of what is kept changes.
        """
        structure = jax.tree.structure(self.kept)
        if jax.tree.structure(self.traced.unflatten_outputs()[1]) != structure:
            return {}
        first = len(self.traced.outputs) - structure.num_leaves
        old = dict(enumerate(self._kept_inputs, start=first))
        places = (i for i, x in enumerate(self.traced.outputs) if is_output(x))
        both = zip(self.program.outputs, map(old.get, places), strict=True)
        return {new: x for new, x in both if x is not None and isinstance(new, Value)}

    @cached_property
    def ends(self) -> list[End]:
        """The elementwise end of each leaf."""
        return cut(self.program, self.replaced)

    @cached_property
    def shardings(self) -> Shardings:
        """The shardings of the program's inputs, where they are known."""
        both = zip(self._kept_inputs, self.known_shardings, strict=False)
        return {x: s for x, s in both if x is not None and s is not None}

    @cached_property
    def _kept_inputs(self) -> list[Value | None]:
        """For each leaf of `kept` the input of the program that it is, if it is one."""
        inputs = dict(zip(self.traced.places, self.program.inputs, strict=True))
        end = self.traced.leaf_count
        first = end - jax.tree.structure(self.kept).num_leaves
        return list(map(inputs.get, range(first, end)))
