"""Orders of transforms that do not work, as an optimizer's state shows them.

A transform does not know what is around it, or after it in a chain. But the state of
the whole optimizer does, and `value_and_grad`, `scale_loss` and others are given that.
"""

from collections.abc import Iterator
from typing import Any

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey, keystr

from optax_mp._dtypes import bits
from optax_mp._jax._memory import is_on_host
from optax_mp._states import Path, find_states, holds_state
from optax_mp._tree import PyTree, is_floating
from optax_mp._warnings import warn

# By name, because the modules of these states import this one.
_SCALE, _MASTERS = "LossScaleState", "MixedPrecisionState"
_WRAP_ALL = "put `optax_mp.dynamic_loss_scale` around the whole optimizer"
# States of wrappers that decide over gradients before a loss scale in them sees these.
_WRAPPERS = {
    "ApplyIfFiniteState": (
        "optax.apply_if_finite",
        "hides overflows from it, so that the scale never falls",
    ),
    "MultiStepsState": (
        "optax.MultiSteps",
        "adds overflows to its accumulator, which is NaN from then on",
    ),
    "ConditionallyTransformState": (
        "optax.conditionally_transform",
        "hands on gradients that are still scaled when it does not run it",
    ),
}


def check_nesting(opt_state: PyTree, caller: str) -> None:
    """Raise or warn if `opt_state` is that of transforms in an order that fails."""
    for path, scale in find_states(opt_state, _SCALE):
        # One with an optimizer inside may be beside the masters, as of another model.
        is_link = type(scale.inner_state).__name__ == "EmptyState"
        for at, node, key in _ancestors(opt_state, path):
            where = f"{caller}: opt_state{keystr(at)} is of"
            _check_wrapper(type(node).__name__, where)
            before = node[: key.idx] if is_link and _is_chain(node) else ()
            if any(map(_ends_in_masters, before)):
                raise ValueError(
                    f"{where} a chain with a loss scale after `mixed_precision`, which "
                    "divides the updates by the scale, expected it before; "
                    f"{_WRAP_ALL}."
                )
    _warn_of_rounded_hyperparams(opt_state, caller)
    for path, _ in find_states(opt_state, _MASTERS):
        _warn_if_followed(opt_state, path, caller)
    for path, state in find_states(opt_state, "MultiStepsState"):
        _warn_if_around_offload(state, f"{caller}: opt_state{keystr(path)} is of")


def _warn_of_rounded_hyperparams(opt_state: PyTree, caller: str) -> None:
    """Warn if `inject_hyperparams` keeps its numbers in 16 bits: b2 is then 1.0."""
    for path, state in find_states(opt_state, "InjectStatefulHyperparamsState"):
        for name, value in state.hyperparams.items():
            if is_floating(value) and bits(value.dtype) < 32:
                warn(
                    f"{caller}: opt_state{keystr(path)} is of "
                    f"`optax.inject_hyperparams` with {name} in {value.dtype}, the "
                    "dtype of the params, in which b2=0.999 is 1.0 and Adam's loss "
                    "becomes NaN. Put it inside, as `optax_mp.mixed_precision("
                    "optax.inject_hyperparams(optax.adamw)(...))`, or pass "
                    "`hyperparam_dtype=jnp.float32` to it."
                )
                return


def _check_wrapper(name: str, where: str) -> None:
    """Raise or warn if a state of this name must not be around a loss scale."""
    if name in _WRAPPERS:
        wrapper, harm = _WRAPPERS[name]
        raise ValueError(
            f"{where} `{wrapper}` around a loss scale, expected the loss scale "
            f"outside: `{wrapper}` {harm}. Put it inside, as "
            f"`optax_mp.dynamic_loss_scale({wrapper}(...))`."
        )
    if name == "ConditionallyMaskState":
        # Its condition may be of the step alone, and nothing is wrong with that.
        warn(
            f"{where} `optax.conditionally_mask` around a loss scale. If its condition "
            "reads the gradients, it hides overflows from the loss scale, and the "
            f"scale never falls; {_WRAP_ALL}."
        )


def _warn_if_around_offload(state: Any, where: str) -> None:
    """Warn if a `MultiSteps` chooses between arrays in host memory."""
    inner, sums = map(jax.tree.leaves, (state.inner_opt_state, state.acc_grads))
    if any(map(is_on_host, inner)) and not any(map(is_on_host, sums)):
        warn(
            f"{where} `optax.MultiSteps` around `offload`, which XLA does not compile "
            "for TPUs (its error: output index is already aliased), and which copies "
            "the state elsewhere: it chooses between whole arrays in host memory. Sum "
            "the gradients of micro-batches in your step, or put `offload` outside: "
            "`optax_mp.offload(optax.MultiSteps(...))`."
        )


def _warn_if_followed(opt_state: PyTree, path: Path, caller: str) -> None:
    for at, node, key in _ancestors(opt_state, path):
        is_link = _is_chain(node) and _ends_in_masters(node[key.idx])
        later = list(node[key.idx + 1 :]) if is_link else []
        # A whole optimizer is that of another model.
        links = [x for x in later if not _is_chain(x) and type(x).__name__ != _SCALE]
        names = [type(link).__name__ for link in links if holds_state(link)]
        if names and not any(find_states(link, _MASTERS) for link in later):
            warn(
                f"{caller}: opt_state{keystr(at)} is of a chain in which "
                "`mixed_precision` is followed by a transform (its state: "
                f"{names[0]}). If that changes the updates, as weight decay does, the "
                "next step undoes it or, with float32 updates, takes params that were "
                "rounded as masters: put the chain inside, as "
                "`optax_mp.mixed_precision(optax.chain(...))`."
            )
            return


def _ancestors(tree: PyTree, path: Path) -> Iterator[tuple[Path, Any, Any]]:
    """Yield (path, node, key of the next node) from the root of `tree` down `path`."""
    for depth, key in enumerate(path):
        yield path[:depth], tree, key
        if isinstance(key, GetAttrKey):
            tree = getattr(tree, key.name)
        elif isinstance(key, SequenceKey | DictKey):
            tree = tree[key.idx if isinstance(key, SequenceKey) else key.key]
        else:
            return  # a node whose children have no keys, such as a box of Flax


def _is_chain(node: Any) -> bool:
    """Return whether a node may be the state of `optax.chain`."""
    return type(node) is tuple


def _ends_in_masters(state: Any) -> bool:
    """Return whether the updates of a transform are those of a `mixed_precision`."""
    if _is_chain(state):
        return bool(state) and _ends_in_masters(state[-1])
    if type(state).__name__ == _SCALE:
        return _ends_in_masters(state.inner_state)
    return type(state).__name__ == _MASTERS
