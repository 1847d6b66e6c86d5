"""One update of an optimizer as a jaxpr, which `low_bit_state` analyses at `init`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_leaves_with_path

from optax_mp._jax._traced import TracedCall, is_dynamic, is_output
from optax_mp._tree import is_floating


class TracedUpdate(NamedTuple):
    """One update, from (gradients, state, params) to (updates, new state).

    Attributes:
        closed: the jaxpr.
        param_count: how many arrays the gradients have, and the params.
        state_count: how many arrays the state has.
        is_exact: False if the update was given a made-up loss. Dependences are the same
            with any loss, but signs may differ.
    """

    closed: Any
    param_count: int
    state_count: int
    is_exact: bool

    @property
    def state_inputs(self) -> range:
        """The indices of the state among the inputs."""
        return range(self.param_count, self.param_count + self.state_count)

    @property
    def params_inputs(self) -> range:
        """The indices of the params among the inputs."""
        return range(self.state_inputs.stop, self.state_inputs.stop + self.param_count)

    def split_outputs(self, values: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return the values for the updates and those for the new state."""
        update_count = len(values) - self.state_count
        return values[:update_count], values[update_count:]


def trace_update(
    inner: optax.GradientTransformationExtraArgs,
    params: optax.Params,
    state: optax.OptState,
) -> TracedUpdate | Exception:
    """Trace `inner.update`, or return the error that it raised.

    An optimizer that needs extra arguments gets those that optax's own optimizers take.
    Only the caller of `update` knows any others.
    """
    try:
        return _trace(inner, params, state, {})
    except Exception as error:  # of any type: `inner` may be a user's code
        try:
            return _trace(inner, params, state, _made_up_arguments(params))
        except Exception:
            return error


def _trace(
    inner: optax.GradientTransformationExtraArgs,
    params: optax.Params,
    state: optax.OptState,
    extra_args: dict[str, Any],
) -> TracedUpdate:
    def update(args: Any) -> Any:
        gradients, state, params = args
        updates, new_state = inner.update(gradients, state, params, **extra_args)
        # By path: a state may gain leaves at the first step, as `optax.monitor` does.
        new_leaves = dict(tree_leaves_with_path(new_state))
        return updates, [new_leaves[path] for path, _ in tree_leaves_with_path(state)]

    traced = TracedCall.of(update, (params, state, params))
    param_count = sum(map(is_dynamic, jax.tree.leaves(params)))
    state_count = sum(map(is_dynamic, jax.tree.leaves(state)))
    if sum(map(is_output, traced.unflatten_outputs()[1])) != state_count:
        raise ValueError("its new state has other arrays")
    return TracedUpdate(traced.closed, param_count, state_count, not extra_args)


def _made_up_arguments(params: optax.Params) -> dict[str, Any]:
    # Optax's line searches refuse an argument that their `value_fn` does not name.
    def loss(params: Any, *_: Any, obj_fn: Any = None, grad_fn: Any = None) -> Any:
        leaves = [x for x in jax.tree.leaves(params) if is_floating(x)]
        return sum((jnp.sum(jnp.square(x)) for x in leaves), jnp.zeros(()))

    def gradient(params: Any, *_: Any) -> Any:
        return params

    return {
        "value": jnp.zeros(()),
        "grad": params,
        "value_fn": loss,
        "obj_fn": loss,
        "grad_fn": gradient,
    }
