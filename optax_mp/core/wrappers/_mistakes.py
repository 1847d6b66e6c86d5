"""Errors for arguments of the wrong kind, and for transforms in the wrong order.

A transform does not know which transforms are around it, or after it in a chain. The
state of the whole optimizer shows them, and `value_and_grad`, `scale_loss` and others
take that state.
"""

from collections.abc import Callable
from numbers import Integral, Number
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import (
    DictKey,
    GetAttrKey,
    keystr,
    tree_leaves_with_path,
    tree_map_with_path,
)

from optax_mp.core import _dtypes
from optax_mp.core._warnings import warn
from optax_mp.core.jax_api import _arrays
from optax_mp.core.trees import _tree
from optax_mp.core.trees._states import holds_state, nodes_of

# The collection of these leaves, `flax.linen.fp8_ops.OVERWRITE_WITH_GRADIENT`.
_COLLECTION = "_overwrite_with_gradient"
_OVERWRITTEN: frozenset[Any] = frozenset(
    (DictKey(_COLLECTION), GetAttrKey(_COLLECTION))
)


def refuse_overwritten(tree: _tree.PyTree, caller: str) -> None:
    """Raise if `tree` has leaves that a step overwrites, instead of adding to them.

    An fp8 layer of Flax returns the next value of its scales and histories in the place
    of their gradients. To scale, sum or average these values, or to make a step of
    them, would give the layer wrong scales, without an error.
    """
    for path, _ in tree_leaves_with_path(tree):
        if not _OVERWRITTEN.isdisjoint(path):
            raise ValueError(
                f"{caller}: expected weights and their gradients, got an fp8 scale at "
                f"{_tree.spell(path)}, whose gradient is its next value; keep it from "
                "the optimizer, as Flax's `TrainState` does."
            )


def check_opt_state(opt_state: Any, caller: str) -> None:
    """Raise if `opt_state` is surely not the state of an optimizer.

    A state may be any pytree, so a tree of arrays always passes.
    """
    given = f"a {type(opt_state).__name__}"
    remedy = "pass what `tx.init(params)` returned"
    is_number = isinstance(opt_state, Number) and not _arrays.is_array(opt_state)
    # A callable may hold a state, as an Equinox module does.
    is_function = callable(opt_state) and jax.tree_util.all_leaves([opt_state])
    if isinstance(opt_state, optax.GradientTransformation | optax.MultiSteps):
        given += ", the optimizer itself"
    elif hasattr(opt_state, "adjust") and hasattr(opt_state, "unscale"):
        remedy = "pass a loss scale that is a value to `dynamic_scale_value_and_grad`"
    elif not (is_function or is_number or isinstance(opt_state, str)):
        return
    raise TypeError(
        f"{caller}: expected `opt_state` to be an optimizer state, got {given}; "
        f"{remedy}."
    )


def warn_unless_state(opt_state: Any, caller: str) -> None:
    """Warn if nothing in `opt_state` looks like the state of an optimizer.

    A state holds a NamedTuple, as optax's do, or a count of steps, or no
    floating arrays at all. Params rarely do.
    """
    arrays = [x for x in jax.tree.leaves(opt_state) if _arrays.is_array(x)]
    has_count = any(not (x.shape or _dtypes.is_floating(x)) for x in arrays)
    is_state = _holds(lambda node: hasattr(node, "_fields"), opt_state)
    if has_count or is_state or not any(map(_dtypes.is_floating, arrays)):
        return
    warn(
        f"{caller}: `opt_state` is {_tree.summarize(opt_state)}, in which nothing "
        "looks like an optimizer state; pass what `tx.init(params)` returned."
    )


def check_state_first(opt_state: Any, params: Any, caller: str, call: str) -> None:
    """Raise if `opt_state` is not a state, or if state and params are swapped.

    Args:
        opt_state: what the user passed as the state.
        params: what the user passed as the params.
        caller: the public function that the user called.
        call: how it is called.
    """
    check_opt_state(opt_state, caller)
    if holds_state(params) and not holds_state(opt_state):
        raise TypeError(
            f"{caller}: expected the state first, got {_tree.summarize(params)}, which "
            f"is an optimizer state, as `params` and {_tree.summarize(opt_state)} as "
            f"`opt_state`; call `{call}`."
        )


def check_whole_number(argument: str, value: Any, least: int = 1) -> int:
    """Return an argument that must be an integer from `least` on, or raise."""
    caller, _, name = argument.partition(": ")
    expected = f"{caller}: expected {name} to be an integer"
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{expected}, got {value!r}.")
    if value < least:
        raise ValueError(f"{expected} greater than {least - 1}, got {value}.")
    return int(value)


def check_init_params(params: Any, caller: str) -> Any:
    """Return the params that `init` was given, or raise if they cannot be trained.

    A Python float becomes an array `[]`, as under `jit`.
    """
    refuse_overwritten(params, caller)
    if isinstance(params, optax.GradientTransformation):
        raise TypeError(
            f"{caller}: expected `params` to be the params of a model, got "
            f"{_tree.summarize(params)}; call `tx.init(params)`."
        )

    def as_param(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, float | complex):
            return jnp.asarray(leaf, jnp.result_type(leaf))
        if _arrays.is_array(leaf) or isinstance(leaf, Number):
            return leaf
        raise TypeError(
            f"{caller}: expected param {_tree.spell(path)} to be an array or a number, "
            f"got {leaf!r}; take it out, as `equinox.filter(model, "
            "equinox.is_inexact_array)` does."
        )

    return tree_map_with_path(as_param, params)


# Wrappers that must not be around a loss scale: their states, and what each does there.
_NOT_AROUND_SCALES = {
    optax.ApplyIfFiniteState: ("apply_if_finite", "hides overflows from the scale"),
    optax.MultiStepsState: ("MultiSteps", "adds overflows up, and is NaN from then on"),
}


def check_nesting(opt_state: _tree.PyTree, caller: str) -> None:
    """Raise if `opt_state` belongs to transforms in an order that fails."""
    for path, node in reversed(list(nodes_of(opt_state))):
        at = f"opt_state{keystr(path)}"
        name, harm = _NOT_AROUND_SCALES.get(type(node), ("", ""))
        if name and _holds(_is_scale, node):
            raise ValueError(
                f"{caller}: expected `optax.{name}` inside of `dynamic_loss_scale`, "
                f"got {at} of it outside, where it {harm}; use "
                f"`optax_mp.dynamic_loss_scale(optax.{name}(...))`."
            )
        if type(node) is tuple:  # of a chain
            _check_order(node, caller, at)


def _check_order(links: tuple[Any, ...], caller: str, at: str) -> None:
    """Raise if a loss scale comes after masters in a chain."""
    for i, link in enumerate(links):
        # A loss scale with an optimizer inside may be beside the masters: it is that of
        # another model.
        scales = [node for _, node in nodes_of(link) if _is_scale(node)]
        is_link = any(isinstance(x.inner_state, optax.EmptyState) for x in scales)
        if is_link and any(map(_ends_in_masters, links[:i])):
            raise ValueError(
                f"{caller}: expected the loss scale before `mixed_precision`, got it "
                f"after, in the chain {at}; put `optax_mp.dynamic_loss_scale` around "
                "the whole optimizer."
            )


def _ends_in_masters(state: Any) -> bool:
    """Return whether the updates of a transform come from a `mixed_precision`."""
    if type(state) is tuple:
        return bool(state) and _ends_in_masters(state[-1])
    fields = getattr(type(state), "_fields", ())
    # Other wrappers hand on the updates of what is inside. A masked transform has its
    # own params.
    if "master_params" in fields or isinstance(state, optax.MaskedState):
        return "master_params" in fields
    return "inner_state" in fields and _ends_in_masters(state.inner_state)


# By its fields, because the module of this state imports this one.
def _is_scale(node: Any) -> bool:
    return "hysteresis_left" in getattr(type(node), "_fields", ())


def _holds(test: Callable[[Any], bool], tree: _tree.PyTree) -> bool:
    """Return whether `test` is true of some node of a tree that is not a leaf."""
    return any(test(node) for _, node in nodes_of(tree))
