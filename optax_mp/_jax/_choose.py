"""Doing a step or nothing at all: the choice, and the mark that hands it on."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_mp._dtypes import bits
from optax_mp._jax._arrays import is_traced, varies
from optax_mp._jax._jaxpr import bind, evaluate, is_computed
from optax_mp._jax._traced import Traced, is_dynamic, is_output
from optax_mp._tree import PyTree, all_hold, describe, is_array, is_inexact, place

Choice = jax.Array | bool
# From the state before to (updates, state after).
Step = Callable[[Any], tuple[Any, Any]]


# Whether a loss scale around decides what is skipped, so that no mark need be sought.
_decided_outside: ContextVar[bool] = ContextVar("decided_outside", default=False)


@contextlib.contextmanager
def decided_outside() -> Iterator[None]:
    """Spare what runs inside the look for the mark."""
    token = _decided_outside.set(True)
    try:
        yield
    finally:
        _decided_outside.reset(token)


def is_marked(updates: PyTree) -> Choice:
    """Return whether `updates` are a skipped step: negative zero everywhere.

    That is how a loss scale that is a link in a chain hands it on: zero to every rule,
    and hardly ever a gradient by itself. Only float32 and wider can carry the mark: for
    gradients with 16-bit leaves, or without any, the answer is a plain False.
    """
    leaves = [x for x in jax.tree.leaves(updates) if is_inexact(x) and x.size]
    if _decided_outside.get() or any(bits(leaf.dtype) < 32 for leaf in leaves):
        return False
    # Under shard_map a rank could only say whether its own part is marked, and what is
    # the same on all ranks must not depend on that.
    if not leaves or any(map(varies, leaves)):
        return False
    # The smallest leaf tells in almost every step; only after it are all of them read.
    smallest = min(leaves, key=lambda leaf: leaf.size)
    suspicious = _is_negative_zero(smallest)

    def look_at_all() -> jax.Array:
        return all_hold([_is_negative_zero(leaf) for leaf in leaves])

    if not is_traced(suspicious):
        return suspicious and look_at_all()
    return lax.cond(suspicious, look_at_all, lambda: suspicious)


def _is_negative_zero(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    if jnp.iscomplexobj(x):
        return _is_negative_zero(x.real) & _is_negative_zero(x.imag)
    # By its bits, since on CPU the smallest numbers compare equal to zero, too.
    unsigned = jnp.dtype(f"uint{bits(x.dtype)}")
    sign = unsigned.type(1 << (bits(x.dtype) - 1))
    return (lax.bitcast_convert_type(x, unsigned) == sign).all()


def unless_held(proceed: Choice, value: Any) -> Any:
    """Return an update, or negative zeros where the step is held.

    Added to a param, negative zero leaves even a param of -0.0 as it is. (An integer
    has one zero; what is no number is returned in any case.)
    """
    if proceed is True or not _is_number(value):
        return value
    return _select(proceed, value, negative_zeros(value))


def negative_zeros(like: Any, dtype: Any = None) -> jax.Array:
    """Return negative zeros of the shape of `like`, placed as it is."""
    return jnp.full_like(like, _negative_zero(dtype or like.dtype), dtype)


def _negative_zero(dtype: Any) -> complex:
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    is_real = jnp.issubdtype(dtype, jnp.floating)
    return complex(-0.0, -0.0) if is_complex else -0.0 if is_real else 0


def step_where(proceed: Choice, step: Step, state: Any) -> tuple[Any, Any]:
    """Return `step(state)`, or negative zeros for updates and the state as it was.

    The choice is made inside the step, value by value: no copies, and no control flow
    for an accelerator to wait for. But values are rounded as XLA then fuses them.
    """
    if is_traced(proceed):
        return _TracedStep.of(step, state).where(proceed)
    if proceed:
        return step(state)
    return _TracedStep.of(step, state).held_updates(), state


def step_if(proceed: Choice, step: Callable[[Any], Any], state: Any) -> Any:
    """Return `step(state)`, or the state as it was: by a `lax.cond` around the step.

    Within it values are rounded as they are without a choice. Gradients become whole
    arrays at its border; the state is overwritten in place.
    """
    if not is_traced(proceed):
        # An eager `lax.cond` would be compiled anew at every call.
        return step(state) if proceed else state
    step_traced = _TracedStep.of(lambda state: ((), step(state)), state)
    traced, held = step_traced.traced, step_traced.held
    avals = traced.closed.out_avals
    same_types = [old.aval for old in held] == list(avals)

    def typed(values: Iterable[Any]) -> list[Any]:
        if same_types:
            return list(values)
        # Under shard_map a value may be the same on all ranks in one branch only. A
        # choice by `proceed`, even of one thing, differs among ranks as that does.
        cast = [jnp.asarray(x, a.dtype) for x, a in zip(values, avals, strict=True)]
        return [_select(proceed, x, x) for x in cast]

    chosen = lax.cond(
        proceed,
        lambda: typed(evaluate(traced.closed, traced.arrays)),
        lambda: typed(held),
    )
    return traced.filled(chosen)[1]


@dataclass(frozen=True)
class _TracedStep:
    """One step as a jaxpr, with what each of its outputs is where it is not taken.

    Attributes:
        traced: the step, from the state to (updates, state).
        held: for each array among the outputs the array of the state that it replaces,
            or None for an update.
    """

    traced: Traced
    held: list[Any]

    @classmethod
    def of(cls, step: Step, state: Any) -> "_TracedStep":
        traced = Traced.of(step, state)
        updates, new_state = traced.treedef.unflatten(traced.outputs)
        _check_stable(state, new_state)
        arrays = iter(traced.arrays)
        before = [next(arrays) if is_dynamic(x) else x for x in jax.tree.leaves(state)]
        replaced = [None] * len(jax.tree.leaves(updates)) + before
        both = zip(traced.outputs, replaced, strict=True)
        return cls(traced, [old for leaf, old in both if is_output(leaf)])

    def held_updates(self) -> Any:
        """Return negative zeros in the place of the updates."""
        values = [
            jnp.full(aval.shape, _negative_zero(aval.dtype), aval.dtype)
            if old is None and _is_number(aval)
            else old
            for old, aval in zip(self.held, self.traced.closed.out_avals, strict=True)
        ]
        return self.traced.filled(values)[0]

    def where(self, proceed: jax.Array) -> Any:
        """Return (updates, state), chosen value by value.

        A choice after the step would need the old state and the new one at once. It is
        made right where a new value is computed: what follows in the step reads the
        chosen value, so that the old one can be overwritten.
        """
        jaxpr = self.traced.closed.jaxpr
        # Which output a variable is, where it is computed; the state comes first, as a
        # value that is both a state and an update is read on as the state.
        owner: dict[Any, int] = {}
        order = sorted(range(len(self.held)), key=lambda i: self.held[i] is None)
        for i in order:
            if is_computed(jaxpr.outvars[i], jaxpr):
                owner.setdefault(jaxpr.outvars[i], i)

        def choose(i: int, value: Any) -> Any:
            old = self.held[i]
            if old is None:
                return unless_held(proceed, value)
            return value if value is old else _select(proceed, value, old)

        def run(equation: Any, inputs: list[Any]) -> list[Any]:
            values = bind(equation, inputs)
            for at, (var, value) in enumerate(
                zip(equation.outvars, values, strict=True)
            ):
                if var in owner:
                    values[at] = choose(owner[var], value)
                    if values[at].aval != value.aval:
                        # Under shard_map the choice may differ from rank to rank, where
                        # what follows expects the same value: choose at the end.
                        values[at] = value
                        del owner[var]
            return values

        values = evaluate(self.traced.closed, self.traced.arrays, run)
        for i, var in enumerate(jaxpr.outvars):
            if not is_computed(var, jaxpr) or owner.get(var) != i:
                values[i] = choose(i, values[i])
        return self.traced.filled(values)


def _select(proceed: Choice, new: Any, old: Any) -> jax.Array:
    new = jnp.asarray(new)
    return lax.select(jnp.asarray(proceed), new, jnp.asarray(old, new.dtype))


def _is_number(x: Any) -> bool:
    return is_array(x) and jnp.issubdtype(x.dtype, jnp.number)


def _check_stable(before: Any, after: Any) -> None:
    """Raise unless a step keeps structure and shapes of the state."""
    old, old_def = jax.tree_util.tree_flatten_with_path(before)
    new, new_def = jax.tree.flatten(after)
    if old_def != new_def:
        raise ValueError(
            "optax_mp: `inner` was given a state of the structure "
            f"{old_def} and returned one of {new_def}, expected the same, or a skipped "
            "step could not keep it; call `init` again with the params that the "
            "gradients belong to."
        )
    for (path, a), b in zip(old, new, strict=True):
        if is_array(a) and is_array(b) and a.shape != b.shape:
            raise ValueError(
                f"optax_mp: `inner` was given {describe(a)} in its state at "
                f"{place(path)} and returned {describe(b)}, expected the same shape; "
                "call `init` again with the params that the gradients belong to."
            )
