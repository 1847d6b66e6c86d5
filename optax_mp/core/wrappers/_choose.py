"""Take a step, or skip it entirely: the one mechanism for every wrapper that skips.

The step always runs. Each array of the new state is chosen where the step computes
it, so that the rest of the step reads the array that is stored. If the choice came
after the step, XLA would keep both: on a TPU a second master, on a CPU copies of all of
the old state. A TPU or GPU reads the old values anyway, so that a choice costs nothing
there, whereas `lax.cond` copies its operands.

A choice between two arrays in host memory would copy both to the device. So the context
tells `optax_mp.offload` whether the step is taken, and it does not change these arrays
in a skipped step.

A link of `optax.chain` cannot stop those that follow. It hands them negative zeros:
numerically zero for every optimizer, and real gradients are hardly ever all negative
zeros. If a later `mixed_precision` finds nothing but negative zeros, it skips the step.

The search for the mark reads all gradients once more, and needs a collective if they
are sharded. So optimizers search only after a link has run its first update in this
process. No other call to this package changes the effect of a later one.
docs/design/mark.md says what follows from that, and which other marks were tried.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp.core._dtypes import bits, is_inexact
from optax_mp.core.jax_api import _arrays, _jaxpr
from optax_mp.core.jax_api._contact import varying_axes
from optax_mp.core.trees import _tree
from optax_mp.core.trees._leaves import Leaves
from optax_mp.core.wrappers import _protocol, _updates

# Takes the state before the step and extra arguments for the optimizer within, and
# returns (updates, state after it).
StepFn = Callable[[Any, dict[str, Any]], tuple[Any, Any]]


def choose_step(
    proceed: _updates.Choice, step: StepFn, state: Any, extra_args: dict[str, Any]
) -> tuple[Any, Any]:
    """Return the result of `step`; if not `proceed`, negative zeros and the old state.

    `proceed` is bool `[]`, or a plain bool. Results can differ from the bare step by
    rounding, because XLA may fuse the operations differently.
    """
    if proceed is True:
        return step(state, extra_args)
    choice = _protocol.context_of(extra_args).proceed & proceed
    extra_args = _protocol.with_context(extra_args, _protocol.Context(choice))

    def choose(given: tuple[_updates.Choice, Any]) -> tuple[Any, Any]:
        proceed, state = given
        updates, new_state = step(state, extra_args)
        if _arrays.is_traced(proceed) or proceed:
            state = _choose_state(proceed, new_state, state)
        return jax.tree.map(
            lambda x: _updates.or_negative_zeros(proceed, x), updates
        ), state

    if not _arrays.is_traced(proceed):
        return choose((proceed, state))

    def run_call(call: _jaxpr.Equation, inputs: list[Any]) -> list[Any]:
        # Constants that `step` reads are in front of its arguments.
        at = len(inputs) - len(traced.arrays)
        jaxpr = _choose_where_computed(call.params["jaxpr"], at)
        return _jaxpr.bind(call, inputs, {**call.params, "jaxpr": jaxpr})

    traced = _jaxpr.TracedCall.of(
        choose, (proceed, state), _arrays.is_traced, jit_name="choose_step"
    )
    return traced.unflatten(_jaxpr.evaluate(traced.closed, traced.arrays, run_call))


def _choose_where_computed(closed: Any, at: int) -> Any:
    """Return a jaxpr with its choices moved to where values are computed.

    A choice is a `select_n` between another input and a value that is chosen once. It
    chooses by the input `at`, or by a value that is computed from it alone. All later
    equations read the chosen value.
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


def _choose_state(proceed: _updates.Choice, new_state: Any, state: Any) -> Any:
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


def _choose_leaf(proceed: _updates.Choice, new: Any, old: Any) -> Any:
    """Return a leaf of the new state, or of the old one."""
    # A rule may reset a count to a plain 0.
    if isinstance(new, int | float | complex):
        new = jnp.asarray(new, jnp.result_type(old, new))
    if new is old or not _jaxpr.is_dynamic(new) or _arrays.is_on_host(old):
        return new
    if _arrays.is_on_host(new):  # a state that was restored into device memory
        return _arrays.to_host(_updates.select(proceed, _arrays.to_device(new), old))
    return _updates.select(proceed, new, jnp.asarray(old))


# Whether a link has run. Never reset: the garbage collector would decide how long one
# exists, and a link that `optax.inject_hyperparams` makes lives for one call.
_a_link_ran = threading.Event()
# Whether a link may be in front of the optimizers that are traced.
_may_be_marked: ContextVar[bool] = ContextVar("may_be_marked", default=True)


@contextmanager
def no_link_before() -> Iterator[None]:
    """Keep optimizers from looking for a mark: their gradients come from a loss.

    This is not an extra argument, because wrappers of other packages around the
    optimizers would not pass it on.
    """
    token = _may_be_marked.set(False)
    try:
        yield
    finally:
        _may_be_marked.reset(token)


def hand_on(finite: jax.Array, unscaled: _tree.PyTree) -> _tree.PyTree:
    """Return gradients for the links that follow: negative zeros in a skipped step.

    `finite` is bool `[]`, whether the step is taken.
    """
    _a_link_ran.set()
    return jax.tree.map(lambda x: _updates.or_negative_zeros(finite, x), unscaled)


def is_unmarked(grads: _tree.PyTree, extra_args: Mapping[str, Any]) -> _updates.Choice:
    """Return whether to take the step, as bool `[]`; True if there cannot be a mark.

    A link hands on float32 or wider gradients, so 16-bit gradients have no mark. There
    is also no mark if the wrapper directly around decides which steps are skipped.
    """
    may_be_marked = _a_link_ran.is_set() and _may_be_marked.get()
    if not may_be_marked or _protocol.context_of(extra_args).proceed is not True:
        return True
    leaves = [x for x in jax.tree.leaves(grads) if is_inexact(x) and x.size]
    # Under shard_map a rank sees only its own part of such gradients, and values that
    # are equal on all ranks must not depend on that part.
    if not leaves or any(bits(x.dtype) < 32 or varying_axes(x) for x in leaves):
        return True
    return ~_tree.all_true([_is_negative_zero(leaf) for leaf in leaves])


def _is_negative_zero(x: Any) -> jax.Array:
    """Return whether all of `x` `[...]` is negative zero, as bool `[]`."""
    if jnp.iscomplexobj(x):
        return _is_negative_zero(jnp.real(x)) & _is_negative_zero(jnp.imag(x))
    return lax.reduce_and((x == 0) & jnp.signbit(x), range(x.ndim))
