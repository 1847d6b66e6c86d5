"""Which arrays of an optimizer's state must stay in full precision, or nearly so.

Quantization changes every value a little at every step. In a moment the change fades,
or makes one step a little longer or shorter. In three kinds of arrays it does more
harm. A trace of the update finds them in any optimizer:

- A *history*: a step replaces some of its entries and copies the others, as L-BFGS does
  with its differences of params and of gradients. Copies would be rounded again at each
  step, and the new entries are small differences, which need all bits of their terms.
- A *position*: a sum over the run from which each step computes the params, as MADGRAD
  and COCOB do: the new params are the initial ones plus a function of such sums. An
  error in the sum moves the params, however small the learning rate is. Such a state
  has an *anchor*: the params at the start, or at some step.
- A *record*: an array that no update reads, but the user's loop does:
  `optax.value_and_grad_from_state` reads the gradient that a line search keeps.

If the trace does not decide, the array stays in full precision. That costs memory,
which `memory_report` shows; a wrong guess would cost accuracy, silently. An example is
Adagrad's sum in a chain that also pulls the params towards their initial values.

The `Flow` of an output of a traced function says which inputs it is `reached_by`, which
of those are `faded` (multiplied by a constant below 1, as in a moving average), and
which arrive `copied` entry by entry, or `joined` with entries of others.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.tree_util import tree_flatten_with_path

from optax_mp._jax._dataflow import Flow, flows
from optax_mp._jax._traced import TracedCall, is_dynamic
from optax_mp._tree import describe, is_array, spell
from optax_mp.compact._traced_update import TracedUpdate


def need_full_precision(init: TracedCall, update: TracedUpdate) -> list[bool]:
    """Return for each array of a state whether it must stay in full precision.

    Args:
        init: `inner.init`, from the params to the state.
        update: `inner.update`.
    """
    updates, new_state = update.split_outputs(flows(update.closed))
    # Arrays are numbered as inputs of the update, before and after it.
    numbers = update.state_inputs
    new = dict(zip(numbers, new_state, strict=True))
    # An average fades. A sum or a maximum lasts; so does a copy of the last params or
    # gradient, until the next step.
    lasting = {i for i in numbers if i not in new[i].faded}
    exact = _histories(new, lasting) | _records(updates, new, lasting)
    exact |= _positions(updates, new, lasting, _anchors(init, update, new))
    return [i in exact for i in numbers]


def reach_products(update: TracedUpdate) -> list[bool]:
    """Return for each array of a state whether a matrix product reads it.

    Muon's products, for example, read its momentum, and spread the error of each entry
    over whole rows and columns. (An inner product averages errors.)
    """
    found = {i for flow in flows(update.closed) for i in flow.multiplied}
    return [i in found for i in update.state_inputs]


def _histories(new: dict[int, Flow], lasting: set[int]) -> set[int]:
    """Return the histories, and the arrays that their entries are made of."""
    found: set[int] = set()
    for i, flow in new.items():
        # A history may also be several arrays, each of which is copied to the next.
        previous = flow.copied & new.keys() - {i}
        if previous or i in flow.joined:
            found |= {i} | previous
    # Arrays from which entries are computed, such as the last params, must be exact.
    while True:
        sources = {j for i in found for j in new[i].reached_by & lasting}
        if sources <= found:
            return found
        found |= sources


def _positions(
    updates: list[Flow], new: dict[int, Flow], lasting: set[int], anchors: set[int]
) -> set[int]:
    """Return the sums from which an update is computed together with an anchor."""
    sums = {i for i in lasting if i in new[i].reached_by}
    anchored = [flow.reached_by for flow in updates if flow.reached_by & anchors]
    return {i for read in anchored for i in read & sums}


def _records(updates: list[Flow], new: dict[int, Flow], lasting: set[int]) -> set[int]:
    """Return the arrays from which nothing else is computed."""
    others = [(None, flow) for flow in updates] + [*new.items()]
    read = {j for i, flow in others for j in flow.reached_by if j != i}
    return lasting - read


def _anchors(init: TracedCall, update: TracedUpdate, new: dict[int, Flow]) -> set[int]:
    """Return the arrays that start as the params, and that only params replace."""
    initial = dict(zip(new, flows(init.closed), strict=True))
    params = {*update.params_inputs}
    return {
        i for i in new if initial[i].reached_by and new[i].reached_by <= params | {i}
    }


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
    leaves = tree_flatten_with_path(state)[0]
    arrays = [(path, leaf) for path, leaf in leaves if is_dynamic(leaf)]
    for (path, leaf), is_large, initial in zip(
        arrays, large, flows(init.closed), strict=True
    ):
        if not is_large or not (initial.copied or leaf.size > largest):
            continue
        what = (
            "starts as a copy of a param"
            if initial.copied
            else "is larger than any param"
        )
        raise ValueError(
            f"low_bit_state: the state holds {describe(leaf)} at {spell(path)}, which "
            f"{what}, as in optimizers that need a part of their state in full "
            "precision (MADGRAD, L-BFGS). Expected an update that can be traced, to "
            "find that part, but `inner.update(grads, state, params)` raised "
            f"{type(error).__name__}: {error}; give its other arguments defaults, or "
            "put `low_bit_state` around the other parts of the chain."
        )
