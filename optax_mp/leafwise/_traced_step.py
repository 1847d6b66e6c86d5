"""A step that was traced: once, whatever is done with it later."""

from collections.abc import Callable, Iterable, Sequence
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
from optax_mp._jax._traced import is_dynamic
from optax_mp._tree import is_array
from optax_mp.leafwise._ends import End, cut, is_packed
from optax_mp.leafwise._layout import Shardings
from optax_mp.leafwise._program import Program

Step = Callable[[Any, Any], tuple[Any, Any]]
NOT_PACKED = "nothing in few bits"
TRANSFORMED = "within `vmap` or `grad`"
_ARRAY = object()  # stands for one


def obstacle_of(leaves: Sequence[Any]) -> str | None:
    """Return why a step of these arrays is taken as it is; None if it may be cut."""
    if not any(is_array(x) and is_packed(x) for x in leaves):
        return NOT_PACKED
    tracers = [x for x in leaves if is_traced(x)]
    if not tracers or not compiles():
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

    Numbers may be known there, and a step may look at them.
    """
    return any(is_traced(x) and not is_traced_by_jit(x) for x in leaves)


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A step as one equation: a call of `jit`.

    Its inputs are what `jit` traces. Arrays with numbers are constants of it, so that a
    rule may look at them.

    Attributes:
        closed: the jaxpr with this equation.
        arrays: the inputs of the jaxpr.
        outputs: the leaves of what the step returned, with a mark for each array.
        treedef: its structure.
        replaced: which output of the jaxpr takes the place of which input.
        known_shardings: of the inputs for which they are known.
    """

    closed: Any
    arrays: list[Any]
    outputs: list[Any]
    treedef: Any
    replaced: dict[int, int]
    known_shardings: dict[int, NamedSharding]

    @classmethod
    def of(
        cls,
        step: Step,
        given: Any,
        kept: Any,
        shardings: Sequence[NamedSharding | None] = (),
    ) -> "TracedStep":
        """Trace `step(given, kept)`.

        Args:
            step: returns what it makes, and what takes the place of `kept`.
            given: a pytree.
            kept: another.
            shardings: how the leaves of `kept` are sharded under `jit`, None where that
                is not known.
        """
        leaves, treedef = jax.tree.flatten((given, kept))
        inputs = _numbered(i for i, leaf in enumerate(leaves) if is_traced(leaf))
        # A step may return what is no array, such as a function or a name in a state.
        # The jaxpr has arrays alone; the others are noted while it is traced.
        results: list[Any] = []
        structures: list[Any] = []

        def flat_step(*arrays: Any) -> list[Any]:
            filled = [
                arrays[inputs[i]] if i in inputs else leaf
                for i, leaf in enumerate(leaves)
            ]
            made, new = step(*treedef.unflatten(filled))
            returned, structure = jax.tree.flatten((made, new))
            structures.extend((structure, jax.tree.structure(new)))
            # The arrays themselves must not outlive the trace.
            results.extend(_ARRAY if is_dynamic(x) else x for x in returned)
            return [x for x in returned if is_dynamic(x)]

        flat_step.__name__ = flat_step.__qualname__ = NAME
        # A call of `jit`, because JAX has all rules for one: it can be lowered as it
        # is, batched and differentiated, without evaluating its equations once more.
        arrays = [leaves[i] for i in inputs]
        closed = jax.make_jaxpr(jax.jit(flat_step))(*arrays)
        outputs = _numbered(i for i, x in enumerate(results) if x is _ARRAY)
        # `kept` is the last part of what goes in, and of what comes out.
        count = jax.tree.structure(kept).num_leaves
        old, new = len(leaves) - count, len(results) - count
        replaced = {}
        if structures[1] == jax.tree.structure(kept):
            replaced = {
                outputs[new + i]: inputs[old + i]
                for i in range(count)
                if new + i in outputs and old + i in inputs
            }
        known = {
            inputs[old + i]: sharding
            for i, sharding in enumerate(shardings)
            if sharding is not None and old + i in inputs
        }
        return cls(closed, arrays, results, structures[0], replaced, known)

    @property
    def obstacle(self) -> str | None:
        """Why it is not cut, or None."""
        # What nothing reads the result of, such as printing, would be lost.
        if any(map(_is_seen, self.closed.effects)):
            return "the update has effects"
        sizes = (n for x in self.arrays for n in jax.typeof(x).shape)
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

        arrays = iter(evaluate(self.closed, self.arrays, run_call))
        leaves = [next(arrays) if x is _ARRAY else x for x in self.outputs]
        return self.treedef.unflatten(leaves)

    @cached_property
    def call(self) -> Equation:
        """The equation."""
        (call,) = self.closed.jaxpr.eqns
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
            new, old = self.output(output), self.input(read)
            if new is not None and old is not None and self._are_alike(new, old):
                replaced[new] = old
        return cut(self.program, replaced)

    @cached_property
    def shardings(self) -> Shardings:
        """The shardings of the program's inputs, where they are known."""
        places = {self.input(i): x for i, x in self.known_shardings.items()}
        return {self.program.inputs[i]: x for i, x in places.items() if i is not None}

    def input(self, i: int) -> int | None:
        """Return which input of the program an input of the jaxpr is, if it is one."""
        return self._input_places.get(id(self.closed.jaxpr.invars[i]))

    def output(self, i: int) -> int | None:
        """Return which output of the program an output of the jaxpr is, if it is one.

        What the step returns as it got it is none.
        """
        return self._output_places.get(id(self.closed.jaxpr.outvars[i]))

    def args_of(self, end: End) -> list[Any]:
        """Return what an end reads; 0 for what is still to be computed."""
        jaxpr = self.closed.jaxpr
        variables = map(id, [*jaxpr.constvars, *jaxpr.invars])
        arrays = dict(zip(variables, [*self.closed.consts, *self.arrays], strict=True))
        inputs = [arrays.get(id(var), 0) for var in self.call.invars]
        known = dict(zip(self.program.inputs, inputs, strict=True))
        return [known.get(value, 0) for value in end.reads]

    @cached_property
    def _input_places(self) -> dict[int, int]:
        return {id(var): i for i, var in enumerate(self.call.invars)}

    @cached_property
    def _output_places(self) -> dict[int, int]:
        return {id(var): i for i, var in enumerate(self.call.outvars)}

    def _are_alike(self, new: int, old: int) -> bool:
        """Return whether an output can be written where an input is."""
        avals = self.program.outputs[new].aval, self.program.inputs[old].aval
        return len({(aval.shape, aval.dtype) for aval in avals}) == 1


def _numbered(places: Iterable[int]) -> dict[int, int]:
    """Return the number of each place among these."""
    return {place: i for i, place in enumerate(places)}


def _is_seen(effect: Any) -> bool:
    """Return whether an effect is more than to read the name of an axis of a mesh."""
    # By name, because this class is not in JAX's documented API.
    return type(effect).__name__ != "NamedAxisEffect"
