"""amp: any JAX function, with its matrix products in 16 bits."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_mp._traced import Traced
from optax_mp.amp._rules import (
    STOP,
    Rule,
    Rules,
    default_amp_rules,
)
from optax_mp.amp._run import Interpreter
from optax_mp.amp._states import written

Function = TypeVar("Function", bound=Callable[..., Any])


def amp(
    fun: Function,
    *,
    compute_dtype: DTypeLike = jnp.bfloat16,
    rules: Mapping[Any, Rule] = default_amp_rules,
) -> Function:
    if not callable(fun):
        raise TypeError(
            f"amp: `fun` is {fun!r}, expected a function; with settings, use "
            "functools.partial(amp, compute_dtype=...) as the decorator."
        )
    read = Rules(rules, compute_dtype)
    interpreter = Interpreter(read)

    @functools.wraps(fun, updated=())
    def autocast(*args: Any, **kwargs: Any) -> Any:
        traced = Traced.of(lambda given: fun(*given[0], **given[1]), (args, kwargs))
        jaxpr = traced.closed.jaxpr
        plan = interpreter.plan(jaxpr, written(jaxpr.invars))
        values = interpreter.run(traced.closed, plan, traced.arrays)
        values = interpreter.cast_all(values, written(jaxpr.outvars), jaxpr.outvars)
        return traced.filled(values)

    return autocast


def amp_stop(fun=None):
    scope = jax.named_scope(STOP)
    return scope if fun is None else scope(fun)
