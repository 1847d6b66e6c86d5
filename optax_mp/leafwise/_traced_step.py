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
    is_traced_by_jit,
    looks_for_leaks,
)
from optax_mp._jax._block_operations import is_block_operation
from optax_mp._jax._by_platform import NAME, Rewrite, call_by_platform
from optax_mp._jax._jaxpr import Equation, bind, evaluate
from optax_mp._jax._memory import is_on_host
from optax_mp._jax._traced import TracedCall
from optax_mp._tree import is_array
from optax_mp.leafwise._ends import End, cut, is_packed
from optax_mp.leafwise._layout import Shardings
from optax_mp.leafwise._program import Program

Step = Callable[[Any, Any], tuple[Any, Any]]
NOT_PACKED = "nothing in few bits"
TRANSFORMED = "within `vmap` or `grad`"


def obstacle_of(leaves: Sequence[Any]) -> str | None:
    """Return why a step of these arrays is taken as it is; None if it may be cut."""
    if not any(is_array(x) and is_packed(x) for x in leaves):
        return NOT_PACKED
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
    """A step as one equation: a call of `jit`.

    Its inputs are the arrays that `jit` traces. Concrete arrays are its constants, so
    that a rule may look at them. JAX has all rules for a call of `jit`: it can be
    lowered, batched and differentiated without evaluating its equations again.

    Attributes:
        traced: the jaxpr with this equation.
        replaced: which output of the jaxpr takes the place of which input.
        known_shardings: of the inputs for which they are known.
    """

    traced: TracedCall
    replaced: dict[int, int]
    known_shardings: dict[int, NamedSharding]

    @classmethod
    def of(
        cls,
        step: Step,
        inputs: Any,
        kept: Any,
        shardings: Sequence[NamedSharding | None] = (),
    ) -> "TracedStep":
        """Trace `step(inputs, kept)`; see `run_step`."""
        traced = TracedCall.of(
            lambda both: step(*both), (inputs, kept), is_traced, jit_name=NAME
        )
        return cls(traced, traced.replaced(kept), traced.by_input(kept, shardings))

    @property
    def obstacle(self) -> str | None:
        """Why it is not cut, or None."""
        # An equation without a result, such as printing, would be lost.
        if any(map(_is_seen, self.traced.closed.effects)):
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
    def call(self) -> Equation:
        """The equation."""
        (call,) = self.traced.closed.jaxpr.eqns
        return call

    @cached_property
    def program(self) -> Program:
        """Its equations."""
        return Program.of(self.call.params["jaxpr"], is_block_operation)

    @cached_property
    def ends(self) -> list[End]:
        """The elementwise end of each leaf."""
        replaced = {}
        for output, read in self.replaced.items():
            new, old = self.output(output), self._input_places.get(read)
            if new is not None and old is not None and self._are_alike(new, old):
                replaced[new] = old
        return cut(self.program, replaced)

    @cached_property
    def shardings(self) -> Shardings:
        """The shardings of the program's inputs, where they are known."""
        places, shardings = self._input_places, self.known_shardings
        return {
            self.program.inputs[places[i]]: sharding
            for i, sharding in shardings.items()
            if i in places
        }

    def output(self, i: int) -> int | None:
        """Return which output of the program an output of the jaxpr is.

        Return None for an input that the step returns unchanged.
        """
        outvars: Any = self.traced.closed.jaxpr.outvars
        return self._output_places.get(id(outvars[i]))

    def args_of(self, end: End) -> list[Any]:
        """Return the values that an end reads; 0 for one that is not computed yet."""
        places, arrays = self._input_places, self.traced.arrays
        values = {self.program.inputs[at]: arrays[i] for i, at in places.items()}
        return [values.get(value, 0) for value in end.reads]

    @cached_property
    def _input_places(self) -> dict[int, int]:
        """Which input of the program each input of the jaxpr is."""
        number = {id(v): i for i, v in enumerate(self.traced.closed.jaxpr.invars)}
        places = enumerate(self.call.invars)
        return {number[id(v)]: at for at, v in places if id(v) in number}

    @cached_property
    def _output_places(self) -> dict[int, int]:
        return {id(var): i for i, var in enumerate(self.call.outvars)}

    def _are_alike(self, new: int, old: int) -> bool:
        """Return whether an output can be written where an input is."""
        avals = self.program.outputs[new].aval, self.program.inputs[old].aval
        return len({(aval.shape, aval.dtype) for aval in avals}) == 1


def _is_seen(effect: Any) -> bool:
    """Return whether an effect is more than to read the name of an axis of a mesh."""
    # By name, because this class is not in JAX's documented API.
    return type(effect).__name__ != "NamedAxisEffect"
