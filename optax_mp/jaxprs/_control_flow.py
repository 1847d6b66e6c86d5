"""Equations with jaxprs inside: which values go where, and how to bind them again.

To follow values through a loop, a branch or a `jit`, one must know which input of the
equation feeds which input of the jaxpr inside, and the same of outputs: its `Wiring`.
Only this module knows that. To support another primitive, add it to `WITH_REGIONS`.

The jaxprs inside an equation are called its regions, as in MLIR.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import jax

from optax_mp.core.jax_api import _jaxpr
from optax_mp.core.jax_api._extend import ClosedJaxpr, Jaxpr
from optax_mp.jaxprs import _hidden
from optax_mp.jaxprs._primitives import is_product
from optax_mp.jaxprs._search import jaxprs_within

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

    jaxpr: _jaxpr.AnyJaxpr
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]

    def read(self, values: Sequence[T]) -> tuple[T, ...]:
        """Return the values for the inputs of this region, from the equation's."""
        return tuple(values[i] for i in self.inputs)

    def take(self, values: Sequence[T]) -> tuple[T | None, ...]:
        """Return the values of the outputs of this region, from the equation's."""
        return tuple(None if i is None else values[i] for i in self.outputs)


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
    """

    equation: _jaxpr.Equation
    regions: tuple[Region, ...]
    carry: tuple[tuple[int, int], ...] = ()
    repeats: bool = False
    deciding: tuple[int, ...] = ()
    summed: tuple[int, ...] = ()

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


def hides_product(
    equation: _jaxpr.Equation,
    counts: Callable[[_jaxpr.Equation], bool] = lambda product: True,
) -> bool:
    """Return whether an equation is not a product, and has one inside.

    Without a jaxpr inside, its name tells.

    Args:
        equation: the equation.
        counts: which products count; by default, all.
    """
    if is_product(equation):
        return False
    jaxprs = inner_jaxprs(equation)
    if not jaxprs:
        return any(word in equation.primitive.name for word in _CLOSED)
    inside = chain.from_iterable(_jaxpr.open_jaxpr(x)[0].eqns for x in jaxprs)
    return any(counts(x) if is_product(x) else hides_product(x, counts) for x in inside)


Values = list[Any]
# Returns the new jaxpr of each region.
Convert = Callable[[], Sequence[ClosedJaxpr]]


def has_regions(equation: _jaxpr.Equation) -> bool:
    """Return whether it is known how an equation uses the jaxprs inside.

    It is of a primitive that is listed below, or an operation that can be expanded.
    """
    return (
        equation.primitive.name in WITH_REGIONS
        or _hidden.hidden_jaxpr(equation) is not None
    )


def inner_jaxprs(equation: _jaxpr.Equation) -> list[_jaxpr.AnyJaxpr]:
    """Return all jaxprs inside an equation, whether or not their use is known."""
    hidden = _hidden.hidden_jaxpr(equation)
    return jaxprs_within(equation) if hidden is None else [hidden]


def wiring_of(equation: _jaxpr.Equation) -> Wiring:
    """Return the wiring of an equation that `has_regions`."""
    params, name = equation.params, equation.primitive.name
    inputs, outputs = range(len(equation.invars)), range(len(equation.outvars))
    if name == "while":
        # The inputs: condition constants, body constants, carry.
        count = params["cond_nconsts"]
        carried = inputs[count + params["body_nconsts"] :]
        condition = Region(params["cond_jaxpr"], (*inputs[:count], *carried), (None,))
        body = Region(params["body_jaxpr"], (*inputs[count:],), (*outputs,))
        carry = tuple(zip(outputs, carried, strict=True))
        return Wiring(equation, (condition, body), carry, repeats=True)
    if name == "cond":
        branches = [Region(x, (*inputs[1:],), (*outputs,)) for x in params["branches"]]
        return Wiring(equation, tuple(branches), deciding=(0,))
    (jaxpr,) = inner_jaxprs(equation)
    regions = (Region(jaxpr, (*inputs,), (*outputs,)),)
    if name != "scan":
        return Wiring(equation, regions)
    if "num_consts" in params:
        consts, carried = params["num_consts"], params["num_carry"]
    else:  # JAX 0.11 and later
        consts, carried = map(len, params["ft_in"].unpack()[:2])
    carry = tuple((i, consts + i) for i in range(carried))
    return Wiring(equation, regions, carry, repeats=True, summed=(*range(consts),))


def can_convert(equation: _jaxpr.Equation) -> bool:
    """Return whether an equation can be bound with other jaxprs inside.

    A custom_vmap, a linear_call or a hidden operation of an unknown class would keep
    its rule as written.
    """
    return has_regions(equation) and _hidden.call_kind(equation) not in (
        "",
        *_KEEPS_RULE,
    )


def bind_with(
    equation: _jaxpr.Equation, inputs: Sequence[Any], convert: Convert
) -> Values:
    """Return the outputs of an equation with other jaxprs inside.

    Args:
        equation: an equation that `has_regions`.
        inputs: the values of its inputs.
        convert: returns the new jaxpr of each region. It is called inside of a
            shard_map, because only there its axis names exist.
    """
    name = equation.primitive.name
    is_hidden = _hidden.operation_of(equation) is not None
    if name not in _INLINED and name != "shard_map" and not is_hidden:
        return _bind_same(equation, inputs, convert())

    def run_inline(*args: Any) -> Values:
        (closed,) = convert()
        return _jaxpr.evaluate(closed, args)

    if name in _INLINED:
        return run_inline(*inputs)
    if is_hidden:
        return _hidden.bind_again(equation, run_inline, inputs)
    # Called again, because its parameters differ among versions of JAX.
    params = equation.params
    return jax.shard_map(
        run_inline,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=_manual_axes(params),
    )(*inputs)


def run_count(equation: _jaxpr.Equation) -> int | None:
    """Return how often the regions of an equation run; None if that is not known.

    The shards of a shard_map run once each. Of several branches only one runs.
    """
    params = equation.params
    match equation.primitive.name:
        case "while":
            return None
        case "scan":
            return params["length"]
        case "shard_map":
            return math.prod(params["mesh"].shape[x] for x in _manual_axes(params))
    return 1


def _bind_same(
    equation: _jaxpr.Equation, inputs: Sequence[Any], new: Sequence[Any]
) -> Values:
    """Bind the same primitive: it keeps shardings, donation, names and policies."""
    regions = wiring_of(equation).regions
    new_of = {id(x.jaxpr): y for x, y in zip(regions, new, strict=True)}
    params = dict(equation.params)
    for name, old in equation.params.items():
        if name == "branches":
            params[name] = tuple(new_of[id(x)] for x in old)
        elif id(old) in new_of:
            params[name] = closed = new_of[id(old)]
            if not isinstance(old, ClosedJaxpr):
                # A `Jaxpr` has no constants, so they become inputs.
                params[name] = _with_consts_as_inputs(closed)
                inputs = [*closed.consts, *inputs]
    return _jaxpr.bind(equation, inputs, params)


def _with_consts_as_inputs(closed: ClosedJaxpr) -> Jaxpr:
    jaxpr, _ = _jaxpr.open_jaxpr(closed)
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def _manual_axes(params: dict[str, Any]) -> set[Any]:
    """Return the axes of the mesh that a shard_map shards over."""
    return set(params.get("newly_manual_axes") or params["manual_axes"])


# In the names of operations that multiply matrices, and show no jaxpr.
_CLOSED = ("dot", "matmul", "attention", "gemm", "ffi_call")
# Bound with other jaxprs, the custom and the linear calls keep their rules as written.
# So would hidden operations of unknown classes, which have no name here.
_KEEPS_RULE = ("custom_vmap_call", "linear_call")
# From JAX 0.12 on, a `closed_call` is an `eval_jaxpr`. A `remat_opt` is the forward
# rule of a custom_vjp with `optimize_remat`.
_INLINED = ("closed_call", "eval_jaxpr", "call", "remat_opt")
# An `xla_metadata_call` is of `scheduling_group`.
WITH_REGIONS = frozenset(_INLINED).union(
    ["jit", "scan", "while", "cond", "shard_map", "custom_jvp_call", "custom_vjp_call"],
    ["remat2", "compute_on", "fused_call", "xla_metadata_call"],
    _KEEPS_RULE,
)
