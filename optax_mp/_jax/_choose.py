"""Take a step, or skip it entirely: the one mechanism for every wrapper that skips."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp._jax._arrays import is_traced
from optax_mp._jax._jaxpr import bind, evaluate, is_literal
from optax_mp._jax._memory import is_on_host
from optax_mp._jax._traced import TracedCall, is_dynamic, is_output
from optax_mp._tree import describe, is_array, spell

# Whether to take a step: a plain bool if that is known while tracing.
Choice = jax.Array | bool
# Takes the state before the step, and returns (updates, state after it).
StepFunction = Callable[[Any], tuple[Any, Any]]


def choose_step(proceed: Choice, step: StepFunction, state: Any) -> tuple[Any, Any]:
    """Return `step(state)`; if not `proceed`, negative zeros and the old state.

    The choice is made value by value within the step, without a `lax.cond`: a TPU or
    GPU reads the old values anyway, so choosing between them and the new ones costs
    nothing, whereas `lax.cond` copies its operands. Results can differ from those of
    the step alone by rounding, because XLA may fuse the operations differently.
    """
    if is_traced(proceed):
        with _only_if(proceed) as choice:
            traced = _TracedStep.of(step, state)
        return traced.choose(proceed, choice.is_obeyed)
    if proceed:
        return step(state)
    return _TracedStep.of(step, state).skipped_updates(), state


@dataclass
class _OuterChoice:
    """What a step that is being traced has been told by those around it.

    Attributes:
        proceed: whether it is to be taken.
        is_obeyed: whether something in it keeps the arrays that it has in host memory
            as they are, if not.
    """

    proceed: Choice
    is_obeyed: bool = False


_outer_choice: ContextVar[_OuterChoice | None] = ContextVar("choice", default=None)


@contextmanager
def _only_if(proceed: Choice) -> Iterator[_OuterChoice]:
    outer = _outer_choice.get()
    choice = _OuterChoice(proceed if outer is None else outer.proceed & proceed)
    token = _outer_choice.set(choice)
    try:
        yield choice
    finally:
        _outer_choice.reset(token)
        if outer is not None:
            outer.is_obeyed |= choice.is_obeyed


def obey_outer_choice() -> Choice:
    """Return whether those around the step that is being traced take it.

    The caller must then keep arrays in host memory as they are, if they do not: no
    choice can be made between such arrays without a copy of both.
    """
    choice = _outer_choice.get()
    if choice is None:
        return True
    choice.is_obeyed = True
    return choice.proceed


def or_negative_zeros(proceed: Choice, value: Any) -> Any:
    """Return an update, or negative zeros if the step is skipped.

    Adding negative zero changes no param, not even one of -0.0. Integers have only one
    zero. Leaves that are not numbers are always returned as they are.
    """
    if proceed is True or not _is_number(value):
        return value
    return select(proceed, value, _negative_zeros(value))


def _negative_zeros(like: Any) -> jax.Array:
    return lax.full_like(like, _negative_zero(like.dtype))


def _negative_zero(dtype: Any) -> complex:
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    is_real = jnp.issubdtype(dtype, jnp.floating)
    return complex(-0.0, -0.0) if is_complex else -0.0 if is_real else 0


@dataclass(frozen=True)
class _TracedStep:
    """One step as a jaxpr, and the old value of each of its outputs.

    Attributes:
        traced: the step, from the state to (updates, state).
        previous: for each array among the outputs the array of the state that it
            replaces, or None for an update.
    """

    traced: TracedCall
    previous: list[Any]

    @classmethod
    def of(cls, step: StepFunction, state: Any) -> "_TracedStep":
        traced = TracedCall.of(lambda before: _with_arrays(step(before), before), state)
        updates, new_state = traced.unflatten_outputs()
        _check_stable(state, new_state)
        arrays = iter(traced.arrays)
        before = [next(arrays) if is_dynamic(x) else x for x in jax.tree.leaves(state)]
        replaced = [None] * len(jax.tree.leaves(updates)) + before
        both = zip(traced.outputs, replaced, strict=True)
        return cls(traced, [old for leaf, old in both if is_output(leaf)])

    def skipped_updates(self) -> Any:
        """Return negative zeros in the place of the updates."""
        avals = self.traced.closed.out_avals
        values = [
            jnp.full(aval.shape, _negative_zero(aval.dtype), aval.dtype)
            if old is None and _is_number(aval)
            else old
            for old, aval in zip(self.previous, avals, strict=True)
        ]
        return self.traced.unflatten(values)[0]

    def choose(self, proceed: Choice, keeps_host_memory: bool) -> Any:
        """Return (updates, state), chosen value by value.

        A choice after the step would need the old state and the new one at once, for
        which XLA's CPU kernels, with one output each, copy the old state. So each value
        is chosen where it is computed: what follows in the step reads the chosen value,
        and the old one can be overwritten.
        """
        jaxpr = self.traced.closed.jaxpr
        # The index of the output that a variable is. State outputs come first: if a
        # value is both a state and an update, the rest of the step reads the state.
        given = {*jaxpr.invars, *jaxpr.constvars}
        output_of: dict[Any, int] = {}
        count = len(self.previous)
        for i in sorted(range(count), key=lambda i: self.previous[i] is None):
            var = jaxpr.outvars[i]
            if not is_literal(var) and var not in given:
                output_of.setdefault(var, i)

        # One array for all updates of a type: hundreds take long to trace.
        zeros: dict[Any, jax.Array] = {}

        def choose_output(i: int, new: Any) -> Any:
            old = self.previous[i]
            if old is None:
                if not _is_number(new):
                    return new
                if new.aval not in zeros:
                    zeros[new.aval] = _negative_zeros(new)
                old = zeros[new.aval]
            if is_on_host(new) and new is not old:
                _check_keeps_host_memory(keeps_host_memory, new)
                return new
            return new if new is old else select(proceed, new, old)

        def run(equation: Any, inputs: list[Any]) -> list[Any]:
            values = bind(equation, inputs)
            for at, var in enumerate(equation.outvars):
                if var not in output_of:
                    continue
                chosen = choose_output(output_of[var], values[at])
                if chosen.aval == values[at].aval:
                    values[at] = chosen
                else:
                    # Under shard_map the choice can make the value differ from rank to
                    # rank, but the rest of the step is traced for equal values. So it
                    # reads the new value, and the choice is made at the end.
                    del output_of[var]
            return values

        values = evaluate(self.traced.closed, self.traced.arrays, run)
        # The outputs not chosen yet: inputs and constants of the step, repeated
        # variables, and the exceptions above.
        for i, var in enumerate(jaxpr.outvars):
            if is_literal(var) or output_of.get(var) != i:
                values[i] = choose_output(i, values[i])
        return self.traced.unflatten(values)


def _with_arrays(result: tuple[Any, Any], before: Any) -> tuple[Any, Any]:
    """Return what a step returned, with arrays for the numbers to choose between.

    A rule may reset a count to a plain 0. Numbers that are what they were stay as they
    are, since a rule may use them in an `if`.
    """
    updates, after = result
    updates = jax.tree.map(lambda x: jnp.asarray(x) if _is_plain(x) else x, updates)
    leaves, treedef = jax.tree.flatten(after)
    old_leaves, old_def = jax.tree.flatten(before)
    if treedef == old_def:
        leaves = list(map(_as_array, leaves, old_leaves))
    return updates, treedef.unflatten(leaves)


def _as_array(new: Any, old: Any) -> Any:
    if not _is_plain(new) or (_is_plain(old) and new == old):
        return new
    if not is_array(old) or jnp.result_type(old, new) != old.dtype:
        return jnp.asarray(new)
    return jnp.asarray(new, old.dtype)


def _is_plain(x: Any) -> bool:
    return isinstance(x, Number) and not is_array(x)


def select(proceed: Choice, new: Any, old: Any) -> jax.Array:
    """Return the new value if a step is taken, else the old one."""
    old = jnp.asarray(old, new.dtype) if _is_plain(old) else old
    # Some optimizers widen their state at the first step.
    if new.dtype != old.dtype:
        old = old.astype(new.dtype)
    return lax.select(proceed, new, old)


def _is_number(x: Any) -> bool:
    return is_array(x) and jnp.issubdtype(x.dtype, jnp.number)


def _check_keeps_host_memory(keeps_host_memory: bool, x: Any) -> None:
    """Raise if a skipped step would change an array in host memory."""
    if not keeps_host_memory:
        raise ValueError(
            f"optax_mp: the state of `inner` has {describe(x)} in host memory, where "
            "a step cannot be skipped; expected arrays in device memory, or in host "
            "memory by `optax_mp.offload`. Put `offload` around `inner`."
        )


def _check_stable(before: Any, after: Any) -> None:
    """Raise unless a step keeps the structure and shapes of the state."""
    old, old_def = jax.tree_util.tree_flatten_with_path(before)
    new, new_def = jax.tree.flatten(after)
    if old_def != new_def:
        raise ValueError(
            "optax_mp: `inner` was given a state of the structure "
            f"{old_def} and returned one of {new_def}, expected the same, because a "
            "skipped step returns the old state; call `init` again with the params "
            "that the gradients belong to."
        )
    for (path, a), b in zip(old, new, strict=True):
        if is_array(a) and is_array(b) and a.shape != b.shape:
            raise ValueError(
                f"optax_mp: `inner` was given {describe(a)} in its state at "
                f"{spell(path)} and returned {describe(b)}, expected the same shape; "
                "call `init` again with the params that the gradients belong to."
            )
