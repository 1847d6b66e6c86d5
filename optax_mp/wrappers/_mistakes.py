"""Errors and warnings for arguments and transforms in the wrong place.

A transform does not know which transforms are around it, or after it in a chain. The
state of the whole optimizer shows them, and `value_and_grad`, `scale_loss` and others
take that state.
"""

import difflib
import functools
import inspect
from collections.abc import Callable
from numbers import Integral, Number
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_map_with_path

from optax_mp._dtypes import bits
from optax_mp._warnings import warn
from optax_mp.trees._states import holds_state, nodes_of
from optax_mp.trees._tree import PyTree, is_array, is_floating, spell, summarize

_P = ParamSpec("_P")
_R = TypeVar("_R")


def explain_keywords(**foreign: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a public function: an unknown keyword raises and names the right one.

    Args:
        **foreign: keywords of other libraries, and what to do instead. For any other
            keyword the error names the parameter with the closest spelling.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        names = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in kwargs:
                if name not in names:
                    alike = difflib.get_close_matches(name, names, 1, cutoff=0.5)
                    remedy = f"pass `{alike[0]}`" if alike else "pass one of these"
                    raise TypeError(
                        f"{function.__name__}: expected keywords among "
                        f"{', '.join(names)}, got `{name}`; "
                        f"{foreign.get(name, remedy)}."
                    )
            return function(*args, **kwargs)

        return checked

    return decorate


def check_opt_state(opt_state: Any, caller: str) -> None:
    """Raise if `opt_state` is surely not the state of an optimizer.

    A state may be any pytree, so a tree of arrays always passes.
    """
    given = f"a {type(opt_state).__name__}"
    remedy = "pass what `tx.init(params)` returned"
    is_number = isinstance(opt_state, Number) and not is_array(opt_state)
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
    arrays = [x for x in jax.tree.leaves(opt_state) if is_array(x)]
    has_count = any(not (x.shape or is_floating(x)) for x in arrays)
    if has_count or _is_link(opt_state) or not any(map(is_floating, arrays)):
        return
    warn(
        f"{caller}: `opt_state` is {summarize(opt_state)}, in which nothing looks like "
        "an optimizer state or a loss scale; pass what `tx.init(params)` returned."
    )


def check_state_first(opt_state: Any, params: Any, caller: str, call: str) -> None:
    """Raise if `opt_state` is no state, or if state and params are swapped.

    Args:
        opt_state: what the user passed as the state.
        params: what the user passed as the params.
        caller: the public function that the user called.
        call: how it is called.
    """
    check_opt_state(opt_state, caller)
    if holds_state(params) and not holds_state(opt_state):
        raise TypeError(
            f"{caller}: expected the state first, got {summarize(params)}, which is an "
            f"optimizer state, as `params` and {summarize(opt_state)} as `opt_state`; "
            f"call `{call}`."
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


def check_bool(argument: str, value: Any) -> bool:
    """Return an argument that must be True or False, or raise."""
    caller, _, own = argument.partition(": ")
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{caller}: expected {own} to be True or False, got {value!r}.")
    return bool(value)


def check_init_params(params: Any, caller: str) -> Any:
    """Return the params that `init` was given, or raise if they cannot be trained.

    A Python float becomes an array, as under `jit`.
    """
    if isinstance(params, optax.GradientTransformation):
        raise TypeError(
            f"{caller}: expected `params` to be the params of a model, got "
            f"{summarize(params)}; call `tx.init(params)`."
        )

    def as_param(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, float | complex):
            return jnp.asarray(leaf, jnp.result_type(leaf))
        if is_array(leaf) or isinstance(leaf, Number):
            return leaf
        raise TypeError(
            f"{caller}: expected param {spell(path)} to be an array or a number, got "
            f"{leaf!r}; take it out of the params, as "
            "`equinox.filter(model, equinox.is_inexact_array)` does."
        )

    return tree_map_with_path(as_param, params)


# States of wrappers that belong inside of ours, and what each does around them.
_WRAPPERS = {
    optax.ApplyIfFiniteState: ("apply_if_finite", "hides overflows from the scale"),
    optax.MultiStepsState: ("MultiSteps", "adds overflows up, and is NaN from then on"),
    optax.LookaheadState: ("lookahead", "averages rounded params"),
}


def check_nesting(opt_state: PyTree, caller: str) -> None:
    """Raise or warn if `opt_state` belongs to transforms in an order that fails."""
    for path, node in reversed(list(nodes_of(opt_state))):
        at = f"opt_state{keystr(path)}"
        where = f"{caller}: {at} is of"
        ours, is_ours = "dynamic_loss_scale", _is_scale
        if isinstance(node, optax.LookaheadState):
            ours, is_ours = "mixed_precision", _is_masters
        for kind, (name, harm) in _WRAPPERS.items():
            if isinstance(node, kind) and _holds(is_ours, node):
                raise ValueError(
                    f"{caller}: expected `optax.{name}` inside of `{ours}`, got {at} "
                    f"of it outside, where it {harm}; use "
                    f"`optax_mp.{ours}(optax.{name}(...))`."
                )
        _warn_of_rounded(node, where)
        if type(node) is tuple:  # of a chain
            for i, link in enumerate(node):
                _check_before(node[:i], link, caller, at)
                _warn_if_followed(link, node[i + 1 :], where)


def _holds(test: Callable[[Any], bool], tree: PyTree) -> bool:
    """Return whether a test is true of a node of a tree that is no leaf."""
    return any(test(node) for _, node in nodes_of(tree))


# By their fields, because the modules of these states import this one.
def _is_scale(node: Any) -> bool:
    return "hysteresis_left" in getattr(type(node), "_fields", ())


def _is_masters(node: Any) -> bool:
    return "master_params" in getattr(type(node), "_fields", ())


def _is_link(state: Any) -> bool:
    """Return whether there is a NamedTuple in a state, as in all of optax's."""
    return _holds(lambda node: hasattr(node, "_fields"), state)


def _parts(links: tuple[Any, ...]) -> list[Any]:
    """Return the states of links that are not complete optimizers, as a chain is."""
    # A monitor only reads.
    return [x for x in links if type(x) not in (tuple, optax.MonitorState)]


def _ends_in_masters(state: Any) -> bool:
    """Return whether the updates of a transform come from a `mixed_precision`."""
    if type(state) is tuple:
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
    if scales and any(any(are_links) or not jax.tree.leaves(x) for x in _parts(before)):
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
    if others and not _holds(_is_masters, later):
        warn(
            f"{where} a chain in which `mixed_precision` is followed by a transform "
            f"(its state: {type(others[0]).__name__}). If that changes the updates, "
            "the next step undoes it or takes rounded params as masters; put it inside."
        )


def _warn_of_rounded(state: Any, where: str) -> None:
    """Warn if `optax.ema` or `inject_hyperparams` keeps its numbers in 16 bits."""
    is_average = isinstance(state, optax.EmaState)
    has_numbers = isinstance(state, optax.InjectStatefulHyperparamsState)
    kept = state.ema if is_average else has_numbers and state.hyperparams
    dtypes = [x.dtype for x in jax.tree.leaves(kept) if is_floating(x)]
    narrow = next((x for x in dtypes if bits(x) < 32), None)
    if narrow is not None and is_average:
        warn(
            f"{where} `optax.ema` that averages in {narrow}, which at a decay of 0.999 "
            "does not move; pass it `accumulator_dtype=jnp.float32`. To average "
            "weights, use `optax_mp.with_average`."
        )
    elif narrow is not None:
        warn(
            f"{where} `optax.inject_hyperparams` with numbers in {narrow}, in which "
            "b2=0.999 is 1.0 and Adam's loss becomes NaN; put it inside of "
            "`mixed_precision`, or pass it `hyperparam_dtype=jnp.float32`."
        )
