"""Take a step, or skip it entirely: the one mechanism for every wrapper that skips.

The step runs in any case, and each leaf of its result is chosen afterwards. A TPU or
GPU reads the old values anyway, so a choice between them and the new ones costs nothing
there, whereas `lax.cond` copies its operands.

An extra argument tells the step whether it is taken. Most transforms ignore it, because
the results of a skipped step are dropped. Two transforms read it:

- `optax_mp.offload`: a choice between two arrays in host memory would copy both to the
  device. It does not change them in a skipped step.
- `mixed_precision` with full copies: it makes the same choice between masters before it
  rounds the param, and XLA merges both choices. Otherwise XLA would store the new
  master beside the chosen one.
"""

from collections.abc import Callable
from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_mp._jax._arrays import is_array, is_traced
from optax_mp._jax._memory import is_on_host, to_device, to_host
from optax_mp._jax._traced import is_dynamic
from optax_mp._leaves import Leaves

# Whether to take a step: a plain bool if it is not traced.
Choice = jax.Array | bool
# Takes the state before the step and extra arguments for the optimizer within, and
# returns (updates, state after it).
StepFunction = Callable[[Any, dict[str, Any]], tuple[Any, Any]]
# The extra argument that tells a step whether it is taken. Transforms hand on unknown
# arguments, so it is passed only to optimizers that read it.
PROCEED = "optax_mp_proceed"
# The states of chains and groups, which hand it on.
_PARTED = (tuple, dict, optax.PartitionState, optax.MaskedState)


def choose_step(
    proceed: Choice, step: StepFunction, state: Any, extra_args: dict[str, Any]
) -> tuple[Any, Any]:
    """Return the result of `step`; if not `proceed`, negative zeros and the old state.

    Results can differ from those of the step alone by rounding, because XLA may fuse
    the operations differently.
    """
    if proceed is True:
        return step(state, extra_args)
    choice = read_choice(extra_args) & proceed
    updates, new_state = step(state, extra_args | {PROCEED: choice})
    before = Leaves.of(
        state, caller="optax_mp", name="the state that `inner` was given"
    )
    before.match_arrays(new_state, "the state that it returned")
    if is_traced(proceed) or proceed:
        state = jax.tree.map(
            lambda new, old: _choose_leaf(proceed, new, old), new_state, state
        )
    return jax.tree.map(lambda x: or_negative_zeros(proceed, x), updates), state


def read_choice(extra_args: dict[str, Any]) -> Choice:
    """Return whether the wrappers around a transform take the step."""
    choice = extra_args.get(PROCEED, True)
    # `optax.masked` may mask extra arguments.
    return True if isinstance(choice, optax.MaskedNode) else choice


def pass_choice(extra_args: dict[str, Any], state: Any) -> dict[str, Any]:
    """Return the extra arguments of a step, for an inner optimizer with that state."""
    if _has_masters(state) or any(map(is_on_host, jax.tree.leaves(state))):
        return extra_args
    return {name: x for name, x in extra_args.items() if name != PROCEED}


def _has_masters(state: Any) -> bool:
    """Return whether a state is of `mixed_precision`, in a chain or group or not."""
    parts = jax.tree.leaves(state, is_leaf=lambda x: type(x) not in _PARTED)
    # By the field, because the module of that state imports this one.
    return any("master_params" in getattr(type(x), "_fields", ()) for x in parts)


def or_negative_zeros(proceed: Choice, value: Any) -> Any:
    """Return an update, or negative zeros if the step is skipped.

    Adding negative zero changes no param, not even one of -0.0. Integers have only one
    zero. Leaves that are not numbers are always returned as they are.
    """
    value = jnp.asarray(value) if _is_plain(value) else value
    if not (is_dynamic(value) and jnp.issubdtype(value.dtype, jnp.number)):
        return value
    is_complex = jnp.issubdtype(value.dtype, jnp.complexfloating)
    zero = complex(-0.0, -0.0) if is_complex else -0.0
    return select(proceed, value, lax.full_like(value, zero))


def select(proceed: Choice, new: Any, old: Any) -> jax.Array:
    """Return the new value if a step is taken, else the old one."""
    # Some optimizers widen their state at the first step.
    if new.dtype != old.dtype:
        old = old.astype(new.dtype)
    return lax.select(proceed, new, old)


def _choose_leaf(proceed: Choice, new: Any, old: Any) -> Any:
    """Return a leaf of the new state, or of the old one."""
    if _is_plain(new):  # a rule may reset a count to a plain 0
        new = jnp.asarray(new, jnp.result_type(old, new))
    if new is old or not is_dynamic(new) or is_on_host(old):
        return new
    if is_on_host(new):  # a state that was restored into device memory
        return to_host(select(proceed, to_device(new), old))
    return select(proceed, new, jnp.asarray(old))


def _is_plain(x: Any) -> bool:
    return isinstance(x, Number) and not is_array(x)
