"""Which arrays of an optimizer's state must stay in full precision, or nearly.

Quantization changes every value a little at every step. In a moment the change fades,
or makes one step a little longer or shorter. In three kinds of arrays it does more
harm. A trace of the update finds them in any optimizer:

- A *history*: a step replaces some of its entries and copies the others, as L-BFGS does
  with its differences of params and of gradients. Copies would be rounded again at each
  step, and the new entries are small differences, which need all bits of their terms.
- A *position*: a sum over the run that each step computes the params from, as MADGRAD
  and COCOB do: the new params are the initial ones plus a function of such sums. An
  error in the sum moves the params, however small the learning rate is. Such a state
  has an *anchor*: the params at the start, or at some step.
- A *record*: an array that no update reads, but the user's loop does:
  `optax.value_and_grad_from_state` reads the gradient that a line search keeps.

If the trace does not decide, the array stays in full precision. That costs memory,
which `memory_report` shows; a wrong guess would cost accuracy, silently. An example is
Adagrad's sum in a chain that also pulls the params towards their initial values.

The `Flow` of an output of a traced function says which inputs it is `reached_by`, which
of those are `decayed` (multiplied by a constant below 1, as in a moving average), and
which arrive `copied` entry by entry, or `concatenated` with entries of others.
"""

from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_leaves_with_path

from optax_mp._jax._dataflow import Flow, flows, union_of
from optax_mp._jax._jaxpr import TracedCall, is_dynamic, is_output
from optax_mp.trees._tree import describe, is_array, is_floating, spell


class Uses(NamedTuple):
    """The readers of an array of a state.

    Attributes:
        in_product: a matrix product, as Muon's. (An inner product averages errors.)
        in_factorization: one such as SOAP's, or a solver. It spreads the error of each
            entry over whole rows and columns, and may divide by small differences.
        in_root: a root, so the array is never negative, even if that cannot be proved:
            the root would be NaN.
    """

    in_product: bool = False
    in_factorization: bool = False
    in_root: bool = False


class TracedUpdate(NamedTuple):
    """One update of an optimizer, from (gradients, state, params) to (updates, state).

    Attributes:
        closed: the jaxpr.
        param_count: how many arrays the gradients have, and the params.
        state_inputs: the indices of the state among the inputs.
        is_exact: False if the update was given a made-up loss. Dependences are the same
            with any loss, but signs may differ.
    """

    closed: Any
    param_count: int
    state_inputs: range
    is_exact: bool


def trace_update(inner: Any, params: Any, state: Any) -> TracedUpdate | Exception:
    """Trace `inner.update`, or return the error that it raised.

    An optimizer that needs extra arguments gets those that optax's own optimizers take.
    Only the caller of `update` knows any others.
    """
    # Codes must not depend on this setting. Strict promotion is an error in `update`.
    with jax.numpy_dtype_promotion("standard"):
        try:
            return _trace(inner, params, state, {})
        except Exception as error:  # of any type: `inner` may be a user's code
            try:
                return _trace(inner, params, state, _made_up_arguments(params))
            except Exception:
                return error


def _trace(
    inner: Any, params: Any, state: Any, extra_args: dict[str, Any]
) -> TracedUpdate:
    def update(args: Any) -> Any:
        gradients, state, params = args
        updates, new_state = inner.update(gradients, state, params, **extra_args)
        # By path: a state may gain leaves at the first step, as `optax.monitor` does.
        new_leaves = dict(tree_leaves_with_path(new_state))
        return updates, [new_leaves[path] for path, _ in tree_leaves_with_path(state)]

    traced = TracedCall.of(update, (params, state, params))
    before = sum(map(is_dynamic, jax.tree.leaves(params)))
    inputs = range(before, len(traced.arrays) - before)
    if sum(map(is_output, traced.unflatten_outputs()[1])) != len(inputs):
        raise ValueError("its new state has other arrays")
    return TracedUpdate(traced.closed, before, inputs, not extra_args)


def _made_up_arguments(params: optax.Params) -> dict[str, Any]:
    # Optax's line searches refuse an argument that their `value_fn` does not name.
    def loss(params: Any, *_: Any, obj_fn: Any = None, grad_fn: Any = None) -> Any:
        leaves = [x for x in jax.tree.leaves(params) if is_floating(x)]
        return sum((jnp.sum(jnp.square(x)) for x in leaves), jnp.zeros(()))

    arguments = {"value": jnp.zeros(()), "grad": params, "value_fn": loss}
    return arguments | {"obj_fn": loss, "grad_fn": lambda params, *_: params}


def need_full_precision(init: TracedCall, update: TracedUpdate) -> list[bool]:
    """Return for each array of a state whether it must stay in full precision.

    Args:
        init: `inner.init`, from the params to the state.
        update: `inner.update`.
    """
    # Arrays are numbered as inputs of the update, before and after it.
    numbers, results = update.state_inputs, flows(update.closed)
    updates = results[: len(results) - len(numbers)]
    new = dict(zip(numbers, results[len(updates) :], strict=True))
    # An average fades. A sum or a maximum lasts; so does a copy of the last params or
    # gradient, until the next step.
    lasting = {i for i in numbers if i not in new[i].decayed}
    exact = _histories(new, lasting) | _records(updates, new, lasting)
    exact |= _positions(updates, new, lasting, _anchors(init, update, new))
    return [i in exact for i in numbers]


def state_uses(update: TracedUpdate) -> list[Uses]:
    """Return what an update does with each array of the state."""
    flow = union_of(flows(update.closed))
    fields = flow.multiplied, flow.factored, flow.rooted
    return [Uses(*(i in field for field in fields)) for i in update.state_inputs]


def _histories(new: dict[int, Flow], lasting: set[int]) -> set[int]:
    """Return the histories, and the arrays that their entries are made of."""
    histories: set[int] = set()
    for i, flow in new.items():
        # A history may also be several arrays, each copied to the next.
        previous = flow.copied & new.keys() - {i}
        if previous or i in flow.concatenated:
            histories |= {i} | previous
    # Arrays that entries are computed from, such as the last params, must be exact.
    while True:
        sources = {j for i in histories for j in new[i].reached_by & lasting}
        if sources <= histories:
            return histories
        histories |= sources


def _positions(
    updates: list[Flow], new: dict[int, Flow], lasting: set[int], anchors: set[int]
) -> set[int]:
    """Return the sums that, together with an anchor, give an update."""
    sums = {i for i in lasting if i in new[i].reached_by}
    anchored = [flow.reached_by for flow in updates if flow.reached_by & anchors]
    return {i for read in anchored for i in read & sums}


def _records(updates: list[Flow], new: dict[int, Flow], lasting: set[int]) -> set[int]:
    """Return the arrays that nothing else is computed from."""
    others = [(None, flow) for flow in updates] + [*new.items()]
    read = {j for i, flow in others for j in flow.reached_by if j != i}
    return lasting - read


def _anchors(init: TracedCall, update: TracedUpdate, new: dict[int, Flow]) -> set[int]:
    """Return the arrays that start as the params, and that only params replace."""
    params = set(range(update.state_inputs.stop, len(update.closed.in_avals)))
    initial = zip(new, flows(init.closed), strict=True)
    start_as_params = [i for i, flow in initial if flow.reached_by]
    return {i for i in start_as_params if new[i].reached_by <= params | {i}}


def check_without_update(
    init: TracedCall, large: Sequence[bool], state: Any, params: Any, error: Exception
) -> None:
    """Raise if a state may have such arrays, but its update could not be traced.

    Args:
        init: `inner.init`.
        large: for each array of its state whether it might be quantized.
        state: the result of `init`.
        params: its argument.
        error: why the update could not be traced.
    """
    # A position needs an anchor, and a history holds several params or gradients.
    largest = max((x.size for x in jax.tree.leaves(params) if is_array(x)), default=0)
    arrays = [x for x in tree_leaves_with_path(state) if is_dynamic(x[1])]
    pairs = zip(arrays, flows(init.closed), strict=True)
    for (path, leaf), flow in compress(pairs, large):
        if flow.copied:
            what = "starts as a copy of a param"
        elif leaf.size > largest:
            what = "is larger than any param"
        else:
            continue
        raise ValueError(
            "low_bit_state: expected an update that can be traced, because the state "
            f"holds {describe(leaf)} at {spell(path)}, which {what}, as in optimizers "
            "that need a part of their state in full precision (MADGRAD, L-BFGS), got "
            f"{type(error).__name__} from `inner.update(grads, state, params)`: "
            f"{error}; give its other arguments defaults, or put `low_bit_state` "
            "around the other parts of the chain."
        )
