"""Trace functions of arrays to jaxprs that go inside an equation."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax

from optax_mp.core.jax_api import _extend
from optax_mp.core.jax_api._extend import ClosedJaxpr


def is_shaped(aval: Any) -> bool:
    """Return whether an abstract value is a plain array: no token and no reference."""
    return isinstance(aval, _extend.ShapedArray)


def with_dtype(aval: Any, dtype: Any) -> Any:
    """Return an abstract value with another dtype and all else as it was."""
    # If the dtype is the same, as of a random key, so is the weak type.
    return aval if aval.dtype == dtype else aval.update(dtype=dtype, weak_type=False)


def trace_jaxpr(function: Callable[..., Any], avals: Sequence[Any]) -> ClosedJaxpr:
    """Return the jaxpr of a function of arrays, to be put inside an equation.

    Its named scopes start empty, because the equation's are put before them.
    """
    with _extend.source_info_util.reset_name_stack():
        return jax.make_jaxpr(function)(*avals)


def cache_by_jaxpr(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with a cache, keyed by a jaxpr and further arguments.

    An entry lives only as long as its jaxpr, which may hold arrays: `functools.cache`
    would never free them.
    """
    cache: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    def cached(jaxpr: Any, *args: Any) -> Any:
        results = cache.setdefault(jaxpr, {})
        if args not in results:
            results[args] = function(jaxpr, *args)
        return results[args]

    return cached
