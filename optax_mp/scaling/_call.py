"""Checks of a call of what `value_and_grad` returns: f(opt_state, params, ...)."""

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import jax

from optax_mp._arguments import check_opt_state, may_be_state
from optax_mp._float16 import Event, counts
from optax_mp._states import holds_state
from optax_mp._tree import is_array, is_inexact, summarize
from optax_mp._warnings import warn


def check_state_argument(
    fun: Callable[..., Any],
    opt_state: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Raise if the optimizer state is missing or in another place; warn if it may be.

    Args:
        fun: the user's function.
        opt_state: the first argument of the call.
        args: those for `fun`.
        kwargs: keyword arguments for `fun`.
    """
    check_opt_state(opt_state, "value_and_grad")
    if holds_state(opt_state):
        return
    problem = (
        f"value_and_grad: `opt_state` is {summarize(opt_state)}, expected the state of "
        "an optimizer; call as f(opt_state, params, ...)"
    )
    later = [x for x in (*args, *kwargs.values()) if holds_state(x)]
    if later:
        raise TypeError(f"{problem}. A later argument is {summarize(later[0])}.")
    takes_all = _takes(fun, (opt_state, *args), kwargs)
    if not args or (takes_all and not _takes(fun, args, kwargs)):
        raise TypeError(
            f"{problem}. The state comes before all arguments of the function itself; "
            "without an optimizer use `jax.value_and_grad`."
        )
    # The function can be called with what is left, as if it has defaults.
    if not may_be_state(opt_state):
        warn(f"{problem}. Nothing in it looks like a state.")


def _takes(fun: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether `fun` can be called with these arguments, as far as is known."""
    try:
        inspect.signature(fun).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a function without a signature
        return True
    return True


def check_argnums(chosen: Sequence[int], args: Sequence[Any], caller: str) -> None:
    """Raise unless the chosen arguments exist and hold an array to differentiate."""
    has_state = caller == "value_and_grad"
    call = "f(opt_state, params, ...)" if has_state else "f(params, ...)"
    after = " after `opt_state`" if has_state else ""
    for i in chosen:
        if not -len(args) <= i < len(args):
            raise ValueError(
                f"{caller}: `argnums` has {i}, but {len(args)} positional arguments "
                f"were given{after}; call as {call}."
            )
    leaves = jax.tree.leaves([args[i] for i in chosen])
    if any(map(is_array, leaves)) and not any(map(is_inexact, leaves)):
        shown = " and ".join(summarize(args[i]) for i in chosen)
        raise TypeError(
            f"{caller}: the argument to differentiate is {shown}, expected floating "
            f"arrays in it; call as {call}, or choose another argument by `argnums`."
        )


def check_function(fun: Any, argnums: Any, has_aux: Any, caller: str) -> None:
    """Raise unless `fun` can be called, and the others are settings."""
    if not callable(fun):
        raise TypeError(
            f"{caller}: `fun` is {summarize(fun)}, expected a function that returns "
            "the loss; pass the function itself, and its arguments to the result."
        )
    numbers = argnums if isinstance(argnums, Sequence) else (argnums,)
    are_integers = all(isinstance(i, Integral) for i in numbers)
    if not (isinstance(has_aux, bool) and are_integers):
        raise TypeError(
            f"{caller}: `argnums` is {summarize(argnums)} and `has_aux` is "
            f"{summarize(has_aux)}, expected integers and a bool; pass arguments of "
            f"the function to the result: `{caller}(fun)(opt_state, params, ...)`."
        )


def warn_if_unscaled(before: Counter[Event], known_events: set[Event]) -> None:
    """Warn once if a function computes in float16, and nothing scales its loss.

    Args:
        before: what had been counted before this call of the function.
        known_events: what happened in earlier calls, because what is jitted inside
            reports when it is traced only; what happened in this one is added.
    """
    events = set(counts() - before)
    is_new = "computes in float16" in events - known_events
    known_events |= events
    if is_new and "scales its loss" not in known_events:
        warn(
            "value_and_grad: gradients are computed in float16, and `opt_state` holds "
            "no loss scale, so that values below 6e-8 become 0; put "
            "`optax_mp.dynamic_loss_scale` around the optimizer, or use bfloat16. If "
            "the loss is scaled in another way, ignore this warning "
            "(`optax_mp.MixedPrecisionWarning`)."
        )
