"""Equations with jaxprs inside: what feeds what, and how to run them on other values.

A loop, a branch, a `jit`: whoever follows values through a jaxpr must know which input
of the equation feeds which input of the jaxpr inside, and where its outputs go. All of
that is said here. To support another primitive, give it an entry in `_KINDS`.

The jaxprs inside an equation are called its regions, as in MLIR.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import PartitionSpec

from optax_mp._jax._jaxpr import AnyJaxpr, Equation, bind, evaluate, trace_jaxpr

T = TypeVar("T")
Values = list[Any]
# Returns the new jaxpr of each region.
Convert = Callable[[], Sequence[ClosedJaxpr]]
# Returns the outputs of a region, and the log with whatever it adds.
Run = Callable[[Values, Any], tuple[Values, Any]]
Runs = Sequence[Run]
# Returns the array by which a value decides what runs.
Decide = Callable[[Any], jax.Array]


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
        """Return what feeds this region, given what feeds the equation."""
        return tuple(values[i] for i in self.inputs)


class Flow(NamedTuple):
    """What `Wiring.forward` finds.

    Attributes:
        inputs: for each input of the equation what holds in every turn.
        outputs: for each output.
        decisions: for each value that decides which region runs, or how often.
    """

    inputs: list[Any]
    outputs: list[Any]
    decisions: list[Any]


@dataclass(frozen=True)
class Wiring:
    """What feeds what in an equation with regions.

    Attributes:
        equation: the equation.
        regions: the jaxprs inside.
        carry: pairs of an output and an input of the equation: what one turn of a loop
            returns as this output, the next turn reads as this input.
        repeats: whether its regions run several times, or not at all.
        deciding: the inputs that decide which region runs.
        summed: the inputs that every turn reads, so that their gradients are summed
            over the turns. (A while has no gradients.)
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
    ) -> Flow:
        """Follow what is known of values from the inputs to the outputs.

        What holds of a carry must hold where the loop begins and after every turn, so
        the regions are asked again until nothing changes.

        Args:
            inputs: what is known of each input.
            through: returns what is known of the outputs of a region, given its inputs.
            join: returns what is known of a value that is one of several. It must only
                ever lose knowledge, or the search does not end.
        """
        inputs = list(inputs)
        while True:
            decisions = [inputs[i] for i in self.deciding]
            found: list[list[T]] = [[] for _ in self.equation.outvars]
            for region in self.regions:
                results = through(region, region.read(inputs))
                for i, result in zip(region.outputs, results, strict=True):
                    (decisions if i is None else found[i]).append(result)
            outputs = [x[0] if len(x) == 1 else join(x) for x in found]
            before = list(inputs)
            for output, i in self.carry:
                # The loop may return this, too: it may take no turn at all.
                inputs[i] = outputs[output] = join([inputs[i], outputs[output]])
            if inputs == before:
                return Flow(inputs, outputs, decisions)

    def backward(
        self,
        outputs: Sequence[T],
        through: Callable[[Region, tuple[T, ...]], Sequence[T]],
        join: Callable[[list[T]], T],
        unread: T,
    ) -> tuple[list[T], list[T]]:
        """Follow what is wanted of values from the outputs to the inputs.

        Args:
            outputs: what is wanted of each output.
            through: returns what a region wants of its inputs, given what is wanted of
                its outputs.
            join: returns what several readers want together; as in `forward`.
            unread: what is wanted of a value that nothing reads.

        Returns:
            What is wanted of the inputs; and of the outputs, those of a carry read by
            the next turn as well.
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


def has_regions(equation: Equation) -> bool:
    """Return whether an equation has jaxprs inside, wired in a way known here."""
    return equation.primitive.name in _KINDS


def wiring_of(equation: Equation) -> Wiring:
    """Return what feeds what in an equation that `has_regions`."""
    return _KINDS[equation.primitive.name].wire(equation)


def derivative_rule(equation: Equation) -> str | None:
    """Return "jvp" or "vjp" if an equation has such a rule of its own, or None."""
    return _DERIVATIVE_RULES.get(equation.primitive.name)


def bind_with(equation: Equation, inputs: Sequence[Any], convert: Convert) -> Values:
    """Return the outputs of an equation with other jaxprs inside, all else the same.

    Args:
        equation: an equation that `has_regions`.
        inputs: the values of its inputs.
        convert: returns the new jaxpr of each region. It is called where these run,
            because the axes of a shard_map have names only inside of it.
    """
    return _KINDS[equation.primitive.name].bind(equation, inputs, convert)


def replay(
    equation: Equation, inputs: Sequence[Any], runs: Runs, log: Any, decide: Decide
) -> tuple[Values, Any]:
    """Run an equation on other values, with a function in place of each region.

    Args:
        equation: an equation that `has_regions`, and is not sharded.
        inputs: a pytree for each input.
        runs: a function for each region.
        log: a pytree of arrays that is handed from one function, and from one turn, to
            the next. What a loop's condition adds to it is lost.
        decide: returns the array by which a pytree decides which region runs.

    Returns:
        A pytree for each output, and the log.
    """
    kind = _KINDS[equation.primitive.name]
    return kind.replay(equation, list(inputs), runs, log, decide)


def _jaxprs_of(equation: Equation) -> list[AnyJaxpr]:
    found = [equation.params[name] for name in _HOLDERS if name in equation.params]
    groups = (x if isinstance(x, tuple | list) else [x] for x in found)
    return [jaxpr for group in groups for jaxpr in group]


# The parameters that hold regions. In a while, the condition comes first.
_HOLDERS = (
    "cond_jaxpr", "body_jaxpr", "jaxpr", "call_jaxpr", "fun_jaxpr", "branches",
)  # fmt: skip


def _scan_counts(equation: Equation) -> tuple[int, int]:
    """Return how many inputs of a scan are constants, and how many its carry."""
    params = equation.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, *_ = params["ft_in"].unpack()  # JAX 0.11 and later
    return len(consts), len(carry)


def _while_counts(equation: Equation) -> tuple[int, int]:
    """Return how many inputs of a while are constants of its test and its body."""
    return equation.params["cond_nconsts"], equation.params["body_nconsts"]


def _wire_call(equation: Equation) -> Wiring:
    return Wiring(equation, (_only_region(equation),))


def _wire_shard_map(equation: Equation) -> Wiring:
    return Wiring(equation, (_only_region(equation),), is_sharded=True)


def _wire_scan(equation: Equation) -> Wiring:
    consts, count = _scan_counts(equation)
    carry = tuple((i, consts + i) for i in range(count))
    region, summed = _only_region(equation), tuple(range(consts))
    return Wiring(equation, (region,), carry, repeats=True, summed=summed)


def _only_region(equation: Equation) -> Region:
    """Return the region of an equation whose inputs and outputs are the region's."""
    (jaxpr,) = _jaxprs_of(equation)
    ins, outs = len(equation.invars), len(equation.outvars)
    return Region(jaxpr, tuple(range(ins)), tuple(range(outs)))


def _wire_while(equation: Equation) -> Wiring:
    test, body = _jaxprs_of(equation)
    of_test, of_body = _while_counts(equation)
    start = of_test + of_body
    state = range(start, len(equation.invars))
    outputs = range(len(equation.outvars))
    # Both read the whole carry; the constants come first, those of the test before.
    regions = (
        Region(test, (*range(of_test), *state), (None,)),
        Region(body, (*range(of_test, start), *state), tuple(outputs)),
    )
    carry = tuple(zip(outputs, state, strict=True))
    return Wiring(equation, regions, carry, repeats=True)


def _wire_cond(equation: Equation) -> Wiring:
    operands = tuple(range(1, len(equation.invars)))
    results = tuple(range(len(equation.outvars)))
    regions = tuple(Region(x, operands, results) for x in _jaxprs_of(equation))
    return Wiring(equation, regions, deciding=(0,))


def _bind_same(equation: Equation, inputs: Sequence[Any], convert: Convert) -> Values:
    """Bind the same primitive: shardings, donation, names and policies survive."""
    params, inputs, rest = dict(equation.params), list(inputs), iter(convert())
    for name in _HOLDERS:
        old = params.get(name)
        if isinstance(old, tuple | list):
            params[name] = tuple(next(rest) for _ in old)
        elif isinstance(old, ClosedJaxpr):
            params[name] = next(rest)
        elif isinstance(old, Jaxpr):
            # It has no room for constants, so they become inputs.
            new = next(rest)
            params[name] = _with_consts_as_inputs(new) if new.consts else new.jaxpr
            inputs = [*new.consts, *inputs]
    return bind(equation, inputs, params)


def _with_consts_as_inputs(closed: ClosedJaxpr) -> Jaxpr:
    consts = closed.jaxpr.constvars

    def run(*args: Any) -> list[Any]:
        filled = ClosedJaxpr(closed.jaxpr, args[: len(consts)])
        return evaluate(filled, args[len(consts) :])

    avals = [var.aval for var in (*consts, *closed.jaxpr.invars)]
    return trace_jaxpr(run, avals).jaxpr


def _bind_inline(equation: Equation, inputs: Sequence[Any], convert: Convert) -> Values:
    (closed,) = convert()
    return evaluate(closed, inputs)


def _bind_shard_map(
    equation: Equation, inputs: Sequence[Any], convert: Convert
) -> Values:
    """Map a function of the new jaxpr: its parameters differ too much to be edited."""
    params = equation.params

    def function(*args: Any) -> list[Any]:
        return _bind_inline(equation, args, convert)

    if "in_specs" in params:
        axes = params.get("newly_manual_axes") or params.get("manual_axes")
        return jax.shard_map(
            function,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=list(params["out_specs"]),
            check_vma=params["check_vma"],
            axis_names=set(axes),
        )(*inputs)
    # Up to JAX 0.6. Imported here because later versions warn of it.
    from jax.experimental.shard_map import shard_map

    def specs(names: Sequence[Any], atoms: Sequence[Any]) -> list[PartitionSpec]:
        return [
            PartitionSpec(*(axes.get(i) for i in range(atom.aval.ndim)))
            for axes, atom in zip(names, atoms, strict=True)
        ]

    return shard_map(
        function,
        mesh=params["mesh"],
        in_specs=tuple(specs(params["in_names"], equation.invars)),
        out_specs=specs(params["out_names"], equation.outvars),
        **{name: params[name] for name in ("check_rep", "auto")},
    )(*inputs)


def _replay_call(
    equation: Equation, inputs: Values, runs: Runs, log: Any, decide: Decide
) -> tuple[Values, Any]:
    (run,) = runs
    return run(inputs, log)


def _replay_scan(
    equation: Equation, inputs: Values, runs: Runs, log: Any, decide: Decide
) -> tuple[Values, Any]:
    (run,) = runs
    start, count = _scan_counts(equation)
    consts, carry, xs = _split(inputs, start, start + count)

    def turn(carry_and_log: Any, xs: list[Any]) -> Any:
        carry, log = carry_and_log
        outputs, log = run([*consts, *carry, *xs], log)
        return (outputs[:count], log), outputs[count:]

    length, reverse = equation.params["length"], equation.params["reverse"]
    (carry, log), ys = lax.scan(turn, (carry, log), xs, length, reverse)
    return [*carry, *ys], log


def _replay_while(
    equation: Equation, inputs: Values, runs: Runs, log: Any, decide: Decide
) -> tuple[Values, Any]:
    run_test, run_body = runs
    of_test, of_body = _while_counts(equation)
    test_consts, consts, carry = _split(inputs, of_test, of_test + of_body)

    def test(carry_and_log: Any) -> jax.Array:
        carry, log = carry_and_log
        # The condition returns nothing but a boolean, so what it logs is lost.
        (goes_on,), _ = run_test([*test_consts, *carry], log)
        return decide(goes_on)

    def turn(carry_and_log: Any) -> Any:
        carry, log = carry_and_log
        return run_body([*consts, *carry], log)

    return lax.while_loop(test, turn, (carry, log))


def _replay_cond(
    equation: Equation, inputs: Values, runs: Runs, log: Any, decide: Decide
) -> tuple[Values, Any]:
    index, *operands = inputs
    return lax.switch(decide(index), runs, operands, log)


def _split(values: Values, start: int, stop: int) -> tuple[Values, Values, Values]:
    return values[:start], values[start:stop], values[stop:]


class _Kind(NamedTuple):
    """How a primitive with regions is wired, bound and replayed."""

    wire: Callable[[Equation], Wiring]
    bind: Callable[[Equation, Sequence[Any], Convert], Values] = _bind_same
    replay: Callable[..., tuple[Values, Any]] = _replay_call


_CALL = _Kind(_wire_call)
_INLINE = _Kind(_wire_call, _bind_inline)
_KINDS = {
    "jit": _CALL,
    "pjit": _CALL,  # up to JAX 0.6
    "checkpoint": _CALL,
    "remat": _CALL,
    "remat2": _CALL,
    "closed_call": _INLINE,
    "eval_jaxpr": _INLINE,  # the former, from JAX 0.12
    "core_call": _INLINE,
    # Bound with other jaxprs, these keep their derivative rules as written.
    "custom_jvp_call": _CALL,
    "custom_vjp_call": _CALL,
    "custom_vjp_call_jaxpr": _CALL,  # up to JAX 0.5
    "scan": _Kind(_wire_scan, replay=_replay_scan),
    "while": _Kind(_wire_while, replay=_replay_while),
    "cond": _Kind(_wire_cond, replay=_replay_cond),
    "shard_map": _Kind(_wire_shard_map, _bind_shard_map),
}
_DERIVATIVE_RULES = {
    "custom_jvp_call": "jvp",
    "custom_vjp_call": "vjp",
    "custom_vjp_call_jaxpr": "vjp",
}
