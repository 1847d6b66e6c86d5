"""The wiring of an equation with jaxprs inside, and searches along it.

`_control_flow.wiring_of` makes the `Wiring` of an equation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from optax_mp._jax._jaxpr import AnyJaxpr, Equation

T = TypeVar("T")


@dataclass(frozen=True)
class Region:
    """One jaxpr inside an equation.

    Attributes:
        jaxpr: the jaxpr.
        inputs: for each of its inputs, the input of the equation that feeds it.
        outputs: for each of its outputs, the output of the equation that it becomes, or
            None if it only decides whether a loop goes on.
    """

    jaxpr: AnyJaxpr
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]

    def read(self, values: Sequence[T]) -> tuple[T, ...]:
        """Return the values for the inputs of this region, from the equation's."""
        return tuple(values[i] for i in self.inputs)


class ForwardResult(NamedTuple):
    """The facts that `Wiring.forward` finds.

    Attributes:
        inputs: the fact of each input of the equation, true in every iteration.
        outputs: the fact of each output.
        decisions: the facts of values that decide which region runs, or how often.
    """

    inputs: list[Any]
    outputs: list[Any]
    decisions: list[Any]


@dataclass(frozen=True)
class Wiring:
    """The inputs and outputs of an equation with regions, and how values flow.

    Attributes:
        equation: the equation.
        regions: the jaxprs inside.
        carry: pairs of an output and an input of the equation: the next iteration of a
            loop reads this output as this input.
        repeats: whether the regions are the body of a loop, run any number of times.
        deciding: the inputs that decide which region runs.
        summed: the inputs that every iteration reads, so that their gradients are
            summed over the iterations. (A while loop has no gradients.)
        is_sharded: whether the regions see only a shard of each value.
    """

    equation: Equation
    regions: tuple[Region, ...]
    carry: tuple[tuple[int, int], ...] = ()
    repeats: bool = False
    deciding: tuple[int, ...] = ()
    summed: tuple[int, ...] = ()
    is_sharded: bool = False

    def forward(
        self,
        inputs: Sequence[T],
        through: Callable[[Region, tuple[T, ...]], Sequence[T]],
        join: Callable[[list[T]], T],
    ) -> ForwardResult:
        """Follow facts of values from the inputs to the outputs.

        A fact of a carry must be true before the first iteration and after each one, so
        the regions are visited again until nothing changes.

        Args:
            inputs: the fact of each input.
            through: returns the facts of the outputs of a region, from its inputs'.
            join: returns the fact of a value that may be any of several. It must never
                be more precise than they are, or the search does not end.
        """
        inputs = list(inputs)
        while True:
            decisions = [inputs[i] for i in self.deciding]
            results: list[list[T]] = [[] for _ in self.equation.outvars]
            for region in self.regions:
                values = through(region, region.read(inputs))
                for i, value in zip(region.outputs, values, strict=True):
                    (decisions if i is None else results[i]).append(value)
            outputs = [x[0] if len(x) == 1 else join(x) for x in results]
            before = list(inputs)
            for output, i in self.carry:
                # The loop returns its input if it has no iteration.
                inputs[i] = outputs[output] = join([inputs[i], outputs[output]])
            if inputs == before:
                return ForwardResult(inputs, outputs, decisions)

    def backward(
        self,
        outputs: Sequence[T],
        through: Callable[[Region, tuple[T, ...]], Sequence[T]],
        join: Callable[[list[T]], T],
        unread: T,
    ) -> tuple[list[T], list[T]]:
        """Follow wants of values from the outputs to the inputs.

        Args:
            outputs: the want of each output.
            through: returns the wants of the inputs of a region, from its outputs'.
            join: returns what several readers want together; as in `forward`.
            unread: the want of a value that nothing reads.

        Returns:
            The wants of the inputs, and of the outputs. The want of a carry's output
            includes the want of the next iteration.
        """
        outputs = list(outputs)
        while True:
            reads: list[list[T]] = [[] for _ in self.equation.invars]
            for region in self.regions:
                wanted = (unread if i is None else outputs[i] for i in region.outputs)
                wants = through(region, tuple(wanted))
                for i, want in zip(region.inputs, wants, strict=True):
                    reads[i].append(want)
            inputs = [join(read) if read else unread for read in reads]
            before = list(outputs)
            for output, i in self.carry:
                outputs[output] = inputs[i] = join([outputs[output], inputs[i]])
            if outputs == before:
                return inputs, outputs
