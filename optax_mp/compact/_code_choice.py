"""Which arrays of a state are quantized, and how.

`low_bit_state` decides this at `init`, by a trace of the optimizer's update. Codes
change every value a little at every step. In a moment the change fades, or makes one
step a little longer or shorter. In other arrays it does harm. A history of L-BFGS is
copied at each step, and would be rounded each time. If params are computed from a sum,
as in MADGRAD and COCOB, an error of the sum moves the params, however small the
learning rate is. So an array is quantized if the trace shows that it

- is under a root by itself, as second moments and the sums of Adagrad are: then it is
  never negative, since the root would be NaN; or
- decays: its old value is multiplied by a constant below 1, as in a moving average, or
  by a number of the state that starts below 1, as `optax.inject_hyperparams` keeps it.

Errors could make a difference of two arrays negative. If it is under a root, as a
centered second moment is, both arrays stay in float32, as do all others. That costs
memory, which `memory_report` shows; a wrong guess would cost accuracy, silently.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_leaves_with_path

from optax_mp.compact import _flows
from optax_mp.compact._quantized import Code, choose_lines
from optax_mp.core._dtypes import is_floating
from optax_mp.core._warnings import warn
from optax_mp.core.jax_api import _jaxpr
from optax_mp.core.jax_api._arrays import is_array
from optax_mp.jaxprs._dependence import depending_outputs


def choose_codes(
    inner: Any, params: Any, state: Any, bits: int, min_size: int
) -> list[Code | None]:
    """Return how to quantize each leaf of `inner`'s state; None to leave it."""
    leaves = jax.tree.leaves(state)
    chosen: list[Code | None] = [None] * len(leaves)
    # Only these are outputs of `init`.
    arrays = [i for i, leaf in enumerate(leaves) if _jaxpr.is_dynamic(leaf)]
    large = [_is_large(leaves[i], min_size) for i in arrays]
    if not any(large):
        return chosen
    init = _jaxpr.TracedCall.of(inner.init, params).closed
    # Masters, averages and other arrays that start as the params are not moments.
    as_params = depending_outputs(init)
    # Hyperparameters that are injected are numbers of the state.
    pairs = zip(arrays, _flows.flows(init), strict=True)
    below_one = [flow.shrinks and _is_number(leaves[i]) for i, flow in pairs]
    update = trace_update(inner, params, state, below_one)
    if isinstance(update, Exception):
        warn(
            "low_bit_state: nothing is stored in codes, because `inner.update(grads, "
            f"state, params)` raised {type(update).__name__}: {update}. Give its other "
            "arguments defaults."
        )
        return chosen
    of_updates, of_state = update
    whole = _flows.union_of([*of_updates, *of_state.values()])
    starts = {n for n, starts in zip(of_state, as_params, strict=True) if starts}
    # If the params are computed from their start, as in MADGRAD, sums are positions.
    anchored = [flow.reached_by for flow in of_updates if flow.reached_by & starts]
    positions = frozenset().union(*anchored)
    pairs = (pair for pair in whole.differences if pair[1] in of_state)
    stay = starts.union(*pairs)
    for i, (n, flow), is_large in zip(arrays, of_state.items(), large, strict=True):
        decays, is_rooted = n in flow.decayed, n in whole.rooted
        is_moment = decays or is_rooted and n not in positions
        if is_large and is_moment and n not in stay:
            # A product such as Muon's, a factorization or a solver spreads the error of
            # an entry over whole rows and columns.
            is_wide = n in whole.multiplied | whole.factored
            width = 16 if is_wide else bits
            dtype = f"uint{width}" if is_rooted else f"int{width}"
            chosen[i] = Code(dtype, *choose_lines(leaves[i].shape))
    return chosen


def _is_large(leaf: Any, min_size: int) -> bool:
    # Decoded values are float32, and `inner` may expect the dtype that it made.
    is_float32 = is_array(leaf) and leaf.dtype == jnp.float32
    return is_float32 and leaf.ndim > 0 and leaf.size >= min_size


def _is_number(leaf: Any) -> bool:
    return is_floating(leaf) and not leaf.shape


class TracedUpdate(NamedTuple):
    """How arrays flow through one update of an optimizer.

    Attributes:
        of_updates: the flows of the updates.
        of_state: for each array of the state, by its number among the inputs of the
            update, the flow of its new value.
    """

    of_updates: Sequence[_flows.Flow]
    of_state: dict[int, _flows.Flow]


def trace_update(
    inner: Any, params: Any, state: Any, below_one: Sequence[bool]
) -> TracedUpdate | Exception:
    """Trace `inner.update`, or return the error that it raised.

    An optimizer that needs extra arguments gets those that optax's own optimizers take.
    Only the caller of `update` knows any others.

    Args:
        inner: the optimizer.
        params: its params.
        state: its state.
        below_one: for each array of the state, whether it is a number below 1.
    """
    # Codes must not depend on this setting. Strict promotion is an error in `update`.
    with jax.numpy_dtype_promotion("standard"):
        try:
            return _trace(inner, params, state, below_one, {})
        except Exception as error:  # of any type: `inner` may be a user's code
            try:
                extra_args = _made_up_arguments(params)
                return _trace(inner, params, state, below_one, extra_args)
            except Exception:
                return error


def _trace(
    inner: Any,
    params: Any,
    state: Any,
    below_one: Sequence[bool],
    extra_args: dict[str, Any],
) -> TracedUpdate:
    def update(args: Any) -> Any:
        gradients, state, params = args
        updates, new_state = inner.update(gradients, state, params, **extra_args)
        # By path: a state may gain leaves at the first step, as `optax.monitor` does.
        new_leaves = dict(tree_leaves_with_path(new_state))
        return updates, [new_leaves[path] for path, _ in tree_leaves_with_path(state)]

    traced = _jaxpr.TracedCall.of(update, (params, state, params))
    before = sum(map(_jaxpr.is_dynamic, jax.tree.leaves(params)))
    numbers = range(before, len(traced.arrays) - before)
    if sum(map(_jaxpr.is_output, traced.unflatten_outputs()[1])) != len(numbers):
        raise ValueError("its new state has other arrays")
    shrinking = [n for n, is_below in zip(numbers, below_one, strict=True) if is_below]
    found = _flows.flows(traced.closed, _flows.own_flows(traced.closed, shrinking))
    split = len(found) - len(numbers)
    return TracedUpdate(found[:split], dict(zip(numbers, found[split:], strict=True)))


def _made_up_arguments(params: optax.Params) -> dict[str, Any]:
    # Optax's line searches refuse an argument that their `value_fn` does not name.
    def loss(params: Any, *_: Any, obj_fn: Any = None, grad_fn: Any = None) -> Any:
        leaves = [x for x in jax.tree.leaves(params) if is_floating(x)]
        return sum((jnp.sum(jnp.square(x)) for x in leaves), jnp.zeros(()))

    arguments = {"value": jnp.zeros(()), "grad": params, "value_fn": loss}
    return arguments | {"obj_fn": loss, "grad_fn": lambda params, *_: params}
