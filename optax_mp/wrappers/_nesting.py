"""Errors and warnings for transforms in the wrong order.

A transform does not know which transforms are around it, or after it in a chain. The
state of the whole optimizer shows them, and `value_and_grad`, `scale_loss` and others
take that state.
"""

from typing import Any

import jax
import optax
from jax.tree_util import keystr

from optax_mp._dtypes import bits
from optax_mp._warnings import warn
from optax_mp.trees._states import nodes_of
from optax_mp.trees._tree import PyTree, is_floating

# States of wrappers that change or drop gradients before a loss scale inside sees them.
_WRAPPERS = {
    optax.ApplyIfFiniteState: (
        "optax.apply_if_finite",
        "hides overflows from it, so that the scale never falls",
    ),
    optax.MultiStepsState: (
        "optax.MultiSteps",
        "adds overflows to its accumulator, which is NaN from then on",
    ),
}


def check_nesting(opt_state: PyTree, caller: str) -> None:
    """Raise or warn if `opt_state` belongs to transforms in an order that fails."""
    for path, node in reversed(list(nodes_of(opt_state))):
        at = f"opt_state{keystr(path)}"
        where = f"{caller}: {at} is of"
        for kind, (name, harm) in _WRAPPERS.items():
            if isinstance(node, kind) and any(_is_scale(x) for _, x in nodes_of(node)):
                raise ValueError(
                    f"{caller}: expected the loss scale around `{name}`, got {at} of "
                    f"`{name}` around the loss scale: the wrapper {harm}; use "
                    f"`optax_mp.dynamic_loss_scale({name}(...))`."
                )
        if isinstance(node, optax.LookaheadState) and any(
            _is_masters(x) for _, x in nodes_of(node)
        ):
            raise ValueError(
                f"{caller}: expected `optax.lookahead` inside of `mixed_precision`, "
                f"got {at} of `optax.lookahead` around it, which averages rounded "
                "params; use `optax_mp.mixed_precision(optax.lookahead(...))`."
            )
        if isinstance(node, optax.InjectStatefulHyperparamsState):
            _warn_of_rounded_hyperparams(node, where)
        if isinstance(node, optax.EmaState):
            _warn_of_rounded_average(node, where)
        if _is_chain(node):
            for i, link in enumerate(node):
                _check_before(node[:i], link, caller, at)
                _warn_if_followed(link, node[i + 1 :], where)


# By their fields, because the modules of these states import this one.
def _is_scale(node: Any) -> bool:
    return "hysteresis_left" in getattr(type(node), "_fields", ())


def _is_masters(node: Any) -> bool:
    return "master_params" in getattr(type(node), "_fields", ())


def _is_link(state: Any) -> bool:
    """Return whether there is a NamedTuple in a state, as in all of optax's."""
    return any(hasattr(node, "_fields") for _, node in nodes_of(state))


def _is_chain(node: Any) -> bool:
    """Return whether a node may be the state of `optax.chain`."""
    return type(node) is tuple


def _parts(links: tuple[Any, ...]) -> list[Any]:
    """Return the states of links that are not complete optimizers."""
    # A monitor only reads.
    no_parts = optax.MonitorState
    return [x for x in links if not (_is_chain(x) or isinstance(x, no_parts))]


def _ends_in_masters(state: Any) -> bool:
    """Return whether the updates of a transform come from a `mixed_precision`."""
    if _is_chain(state):
        return bool(state) and _ends_in_masters(state[-1])
    if _is_scale(state):
        return _ends_in_masters(state.inner_state)
    return _is_masters(state)


def _check_before(before: tuple[Any, ...], link: Any, caller: str, at: str) -> None:
    """Raise or warn if a transform before a loss scale in a chain should be inside."""
    scales = [node for _, node in nodes_of(link) if _is_scale(node)]
    # One with an optimizer inside may be beside the masters, as of another model.
    are_links = [isinstance(x.inner_state, optax.EmptyState) for x in scales]
    if any(are_links) and any(map(_ends_in_masters, before)):
        raise ValueError(
            f"{caller}: expected the loss scale before `mixed_precision`, got {at} of "
            "a chain with it after, where it divides the updates by the scale; put "
            "`optax_mp.dynamic_loss_scale` around the whole optimizer."
        )
    # Transforms such as clipping keep no state. A link that has one may be the
    # optimizer of another model, but not before a link.
    others = _parts(before)
    if scales and any(any(are_links) or not jax.tree.leaves(x) for x in others):
        warn(
            f"{caller}: {at} is of a chain with a transform before a loss scale. The "
            "transform, such as clipping, sees scaled gradients; put it inside, as "
            "`optax_mp.dynamic_loss_scale(optax.chain(clip, ...))`."
        )


def _warn_if_followed(link: Any, later: tuple[Any, ...], where: str) -> None:
    """Warn if a transform follows on masters in a chain."""
    if not _ends_in_masters(link):
        return
    others = [x for x in _parts(later) if _is_link(x) and not _is_scale(x)]
    names = [type(x).__name__ for x in others]
    if names and not any(_is_masters(node) for _, node in nodes_of(later)):
        warn(
            f"{where} a chain in which `mixed_precision` is followed by a transform "
            f"(its state: {names[0]}). If that changes the updates, the next step "
            "undoes it or takes the rounded params as masters; put it inside, as "
            "`optax_mp.mixed_precision(optax.chain(...))`."
        )


def _warn_of_rounded_average(state: Any, where: str) -> None:
    """Warn if `optax.ema` averages in 16 bits: most of its steps round to nothing."""
    for leaf in jax.tree.leaves(state.ema):
        if is_floating(leaf) and bits(leaf.dtype) < 32:
            warn(
                f"{where} `optax.ema` that averages in {leaf.dtype}, which at a decay "
                "of 0.999 does not move; pass it `accumulator_dtype=jnp.float32`. To "
                "average weights, use `optax_mp.with_average`."
            )
            return


def _warn_of_rounded_hyperparams(state: Any, where: str) -> None:
    """Warn if `inject_hyperparams` keeps its numbers in 16 bits: b2 is then 1.0."""
    for name, value in state.hyperparams.items():
        if is_floating(value) and bits(value.dtype) < 32:
            warn(
                f"{where} `optax.inject_hyperparams` with {name} in {value.dtype}, in "
                "which b2=0.999 is 1.0 and Adam's loss becomes NaN; put it inside, as "
                "`optax_mp.mixed_precision(optax.inject_hyperparams(optax.adamw)(...))`"
                ", or pass it `hyperparam_dtype=jnp.float32`."
            )
            return
