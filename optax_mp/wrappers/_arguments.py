"""Errors for arguments in the wrong place, or of the wrong kind."""

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
from jax.tree_util import tree_map_with_path

from optax_mp._warnings import warn
from optax_mp.trees._states import holds_state, nodes_of
from optax_mp.trees._tree import is_array, is_floating, spell, summarize

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
    has_named_tuple = any(hasattr(node, "_fields") for _, node in nodes_of(opt_state))
    if has_count or has_named_tuple or not any(map(is_floating, arrays)):
        return
    warn(
        f"{caller}: `opt_state` is {summarize(opt_state)}, in which nothing looks "
        "like an optimizer state, and no loss scale is found; pass what "
        "`tx.init(params)` returned."
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
    caller, _, name = argument.partition(": ")
    if not isinstance(value, bool | np.bool_):
        raise TypeError(
            f"{caller}: expected {name} to be True or False, got {value!r}; leave it "
            "out for the default."
        )
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
