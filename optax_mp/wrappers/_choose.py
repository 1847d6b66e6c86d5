"""Take a step, or skip it entirely: the one mechanism for every wrapper that skips.

And what a wrapper adds to a param in a step, and in one that is skipped.

The step always runs. Each array of the new state is chosen where the step computes
it, so that the rest of the step reads the array that is stored. If the choice came
after the step, XLA would keep both: on a TPU a second master, on a CPU copies of all of
the old state. A TPU or GPU reads the old values anyway, so that a choice costs nothing
there, whereas `lax.cond` copies its operands.

A choice between two arrays in host memory would copy both to the device. So the context
tells `optax_mp.offload` whether the step is taken, and it does not change these arrays
in a skipped step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp._jax._arrays import is_on_host, is_traced, to_device, to_host
from optax_mp._jax._jaxpr import Equation, TracedCall, bind, evaluate, is_dynamic
from optax_mp.trees._leaves import Leaves
from optax_mp.wrappers._context import Choice, context_of, with_context

# Takes the state before the step and extra arguments for the optimizer within, and
# returns (updates, state after it).
StepFn = Callable[[Any, dict[str, Any]], tuple[Any, Any]]


def choose_step(
    proceed: Choice, step: StepFn, state: Any, extra_args: dict[str, Any]
) -> tuple[Any, Any]:
    """Return the result of `step`; if not `proceed`, negative zeros and the old state.

    Results can differ from the bare step by rounding, because XLA may fuse
    the operations differently.
    """
    if proceed is True:
        return step(state, extra_args)
    choice = context_of(extra_args).proceed & proceed
    extra_args = with_context(extra_args, proceed=choice)

    def choose(given: tuple[Choice, Any]) -> tuple[Any, Any]:
        proceed, state = given
        updates, new_state = step(state, extra_args)
        if is_traced(proceed) or proceed:
            state = _choose_state(proceed, new_state, state)
        return jax.tree.map(lambda x: or_negative_zeros(proceed, x), updates), state

    if not is_traced(proceed):
        return choose((proceed, state))

    def run_call(call: Equation, inputs: list[Any]) -> list[Any]:
        # Constants that `step` reads are in front of its arguments.
        at = len(inputs) - len(traced.arrays)
        jaxpr = _choose_where_computed(call.params["jaxpr"], at)
        return bind(call, inputs, {**call.params, "jaxpr": jaxpr})

    traced = TracedCall.of(choose, (proceed, state), is_traced, jit_name="choose_step")
    return traced.unflatten(evaluate(traced.closed, traced.arrays, run_call))


def _choose_where_computed(closed: Any, at: int) -> Any:
    """Return a jaxpr with its choices moved to where values are computed.

    A choice is a `select_n` by the input `at`, or by what is made of only that, between
    another input and a value that is chosen once. All later equations read the
    chosen value.
    """
    # Variables by `id`, since not every literal among the inputs has a hash.
    jaxpr = closed.jaxpr
    arguments = set(map(id, jaxpr.invars))
    made = {id(variable) for x in jaxpr.eqns for variable in x.outvars}
    predicates, equations, choices = {id(jaxpr.invars[at])}, [], {}
    for equation in jaxpr.eqns:
        invars = equation.invars
        if len(invars) == 1 and id(invars[0]) in predicates:
            predicates.add(id(equation.outvars[0]))
            equations.append(equation)  # in front of all others
        elif equation.primitive.name == "select_n" and len(invars) == 3:
            which, old, new = map(id, invars)
            if which in predicates and old in arguments and new in made:
                choices.setdefault(new, []).append(equation)
    early = {new: made[0] for new, made in choices.items() if len(made) == 1}
    placed = set(map(id, (*equations, *early.values())))
    chosen: dict[int, Any] = {}

    def read(variables: Sequence[Any]) -> list[Any]:
        return [chosen.get(id(x), x) for x in variables]

    for equation in jaxpr.eqns:
        if id(equation) in placed:
            continue
        if not chosen.keys().isdisjoint(map(id, equation.invars)):
            equation = equation.replace(invars=read(equation.invars))
        equations.append(equation)
        for variable in equation.outvars:
            if (choice := early.get(id(variable))) is not None:
                equations.append(choice)
                chosen[id(variable)] = choice.outvars[0]
    outputs = read(jaxpr.outvars)
    return closed.replace(jaxpr=jaxpr.replace(eqns=equations, outvars=outputs))


def _choose_state(proceed: Choice, new_state: Any, state: Any) -> Any:
    """Return the new state, or the old one."""
    old, treedef = jax.tree.flatten(state)
    new, new_treedef = jax.tree.flatten(new_state)
    if treedef != new_treedef or _types_of(new) != _types_of(old):
        before = Leaves.of(state, caller="optax_mp", name="the state given to `inner`")
        before.match_arrays(new_state, "the state that it returned")
        old = new_treedef.flatten_up_to(state)
    both = zip(new, old, strict=True)
    return new_treedef.unflatten([_choose_leaf(proceed, x, y) for x, y in both])


def _types_of(leaves: Sequence[Any]) -> list[Any]:
    return [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves]


def or_negative_zeros(proceed: Choice, value: Any) -> Any:
    """Return an update, or negative zeros if the step is skipped.

    Adding negative zero changes no param, not even one of -0.0. Integers have only one
    zero. Leaves that are not numbers are always returned as they are.
    """
    if isinstance(value, int | float | complex):
        value = jnp.asarray(value)
    if not (is_dynamic(value) and jnp.issubdtype(value.dtype, jnp.number)):
        return value
    is_complex = jnp.issubdtype(value.dtype, jnp.complexfloating)
    zero = complex(-0.0, -0.0) if is_complex else -0.0
    return select(proceed, value, lax.full_like(value, zero))


def difference(target: jax.Array, start: jax.Array) -> jax.Array:
    """Return what to add to `start` for it to become `target`, in their common dtype.

    An infinite `start` stays: what to add is 0, because no sum would make it finite. If
    `target` is NaN, so is the difference. To NaN anything may be added.
    """
    change = lax.sub(target, start)
    # inf - inf would be NaN. Not by a clamp, which takes a CPU a fifth of a step.
    moves = lax.bitwise_or(lax.is_finite(start), lax.ne(target, target))
    # XLA would merge an array of zeros with the one that a loop begins with to sum
    # gradients, and so keep that one beside the sums: 4 bytes per weight.
    zero = lax.convert_element_type(moves, change.dtype)  # where it is read
    return lax.select(moves, change, zero)


def select(proceed: Choice, new: Any, old: Any) -> jax.Array:
    """Return the new value if a step is taken, else the old one."""
    # Some optimizers widen their state at the first step.
    if new.dtype != old.dtype:
        old = old.astype(new.dtype)
    return lax.select(proceed, new, old)


def _choose_leaf(proceed: Choice, new: Any, old: Any) -> Any:
    """Return a leaf of the new state, or of the old one."""
    # A rule may reset a count to a plain 0.
    if isinstance(new, int | float | complex):
        new = jnp.asarray(new, jnp.result_type(old, new))
    if new is old or not is_dynamic(new) or is_on_host(old):
        return new
    if is_on_host(new):  # a state that was restored into device memory
        return to_host(select(proceed, to_device(new), old))
    return select(proceed, new, jnp.asarray(old))


def choose_if_on_host(proceed: Choice, new: Any, old: Any) -> Any:
    """Return a leaf of a new state; if it was in host memory, chosen on the device."""
    if not is_on_host(old):
        return new
    new = to_device(new) if is_on_host(new) else new
    return to_host(select(proceed, new, to_device(old)))
