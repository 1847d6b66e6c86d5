"""amp: any JAX function, with its matrix products in 16 bits."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_mp._jaxpr import AnyJaxpr, evaluate, jaxprs_within, opened, rebind
from optax_mp._traced import Traced
from optax_mp.amp._rules import STOP, Rule, Rules, default_amp_rules, unknown_places
from optax_mp.amp._run import Interpreter
from optax_mp.amp._states import Plan, written

Function = TypeVar("Function", bound=Callable[..., Any])


def amp(
    fun: Function,
    *,
    compute_dtype: DTypeLike = jnp.bfloat16,
    rules: Mapping[Any, Rule] = default_amp_rules,
) -> Function:
    """Run a function that is written for float32 in mixed precision.

    Matrix products and convolutions run in the compute dtype, forward and backward;
    exponentials, logarithms, norms and sums in float32; what is between follows its
    inputs. Like `jax.jit` and `jax.vmap` it takes a function and returns one with the
    same signature, output dtypes and gradient dtypes, and composes with them. Params
    stay float32: each use of a weight has a cast of its own, so that the gradients of
    its uses add up in float32.

    Casts that the function makes itself are honoured, as is `precision=HIGHEST`; what
    amp does not know runs as written. A function with nothing to change is left alone.

    Args:
        fun: any function that JAX can trace. As under `jax.vmap`, arrays among its
            arguments are traced, and everything else is handed on.
        compute_dtype: bfloat16, or float16; for that scale the loss
            (`optax_mp.dynamic_loss_scale`).
        rules: how each operation runs, `default_amp_rules` or others. A key is a
            primitive (`jax.lax.tanh_p`, or its name `"tanh"`), the name of a
            `jax.named_scope`, or a source line such as `"model.py:12"`;
            `"amp_default"` stands for primitives not listed. A value is a word:

            - `"low"`: in the compute dtype;
            - `"f32"`: in float32, inputs and outputs (float64 stays float64);
            - `"f32_if_f16"`: as `"f32"` for float16, as `"widest"` for bfloat16;
            - `"widest"`: in the widest dtype of the inputs; literals follow the others;
            - `"rounded"`: the same, and the result in the compute dtype;
            - `"own"`: each input, and the output that belongs to it, in its own dtype;
            - `"as_written"`: as without amp;

            or a function `(compute_dtype, original_dtypes, *invars, **bind_params) ->
            (invars, bind_params)`, which returns what the primitive is bound with. A
            scope's rule wins over an operation's, the outermost scope's over others.

    Returns:
        The function in mixed precision.

    Raises:
        TypeError: if `fun` is not callable, or `rules` not a mapping of such keys.
        ValueError: if `compute_dtype` is not a 16-bit float, or a rule not known; when
            called, if a name in `rules` is neither a primitive nor a place in `fun`.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> loss = lambda w, x: jnp.mean(jax.nn.softmax(x @ w) ** 2)
        >>> w, x = jnp.eye(4), jnp.ones((2, 4))
        >>> jax.grad(optax_mp.amp(loss))(w, x).dtype.name
        'float32'
        >>> "bf16[2,4] = dot_general" in str(jax.make_jaxpr(optax_mp.amp(loss))(w, x))
        True

    References:
        Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740),
        2018.
    """
    if not callable(fun):
        raise TypeError(
            f"amp: `fun` is {fun!r}, expected a function; to decorate with settings "
            "use functools.partial(optax_mp.amp, compute_dtype=...)."
        )
    interpreter = Interpreter(Rules(rules, compute_dtype))

    @functools.wraps(fun, updated=())
    def autocast(*args: Any, **kwargs: Any) -> Any:
        traced, plan = planned(interpreter, fun, args, kwargs)
        if not plan.changed:
            return traced.filled(evaluate(traced.closed, traced.arrays, rebind))
        values = interpreter.run(traced.closed, plan, traced.arrays)
        outvars = traced.closed.jaxpr.outvars
        return traced.filled(interpreter.cast_all(values, written(outvars), outvars))

    return autocast  # pyright: ignore[reportReturnType]


def planned(
    interpreter: Interpreter, fun: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Traced, Plan]:
    """Return a call of `fun`, traced, and what becomes of it."""
    traced = Traced.of(lambda given: fun(*given[0], **given[1]), (args, kwargs))
    jaxpr = traced.closed.jaxpr
    named = interpreter.rules.named_places
    if named and not named <= (seen := set(_places_in(jaxpr, interpreter.rules))):
        seen.update(_places_in(_derivative(traced.closed), interpreter.rules))
        if not named <= seen:
            raise unknown_places(named - seen, seen)
    return traced, interpreter.plan(jaxpr, written(jaxpr.invars))


def _places_in(jaxpr: AnyJaxpr, rules: Rules) -> Iterator[str]:
    for equation in opened(jaxpr)[0].eqns:
        yield from rules.places(equation)
        for inner in jaxprs_within(equation):
            yield from _places_in(inner, rules)


def _derivative(closed: Any) -> AnyJaxpr:
    """Return the jaxpr of a gradient, where the scopes of derivative rules show."""
    inputs, outputs = (
        [i for i, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]
        for avals in (closed.in_avals, closed.out_avals)
    )

    def gradient(*args: Any) -> Any:
        def call(*moved: Any) -> list[Any]:
            filled = list(args)
            for i, x in zip(inputs, moved, strict=True):
                filled[i] = x
            values = evaluate(closed, filled, rebind)
            return [values[i] for i in outputs]

        returned, pull = jax.vjp(call, *(args[i] for i in inputs))
        return pull(returned)

    return jax.make_jaxpr(gradient)(*closed.in_avals)


def amp_stop(fun: Any = None) -> Any:
    """Leave a part of a function as it is written, in float32, under `amp`.

    The mark is a `jax.named_scope`: it reaches into everything called inside, and into
    the backward pass. Without `amp` around it does nothing.

    Args:
        fun: the function to leave alone. Without one, `with amp_stop():` leaves a block
            alone.

    Returns:
        The function, or a context manager.

    Raises:
        TypeError: if `fun` is given and not callable.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> @optax_mp.amp
        ... def logits(x, w, router):
        ...     with optax_mp.amp_stop():
        ...         gate = x @ router
        ...     return (x @ w) * gate
        >>> x, w = jnp.ones((2, 4)), jnp.eye(4)
        >>> text = str(jax.make_jaxpr(logits)(x, w, w))
        >>> "f32[2,4] = dot_general" in text, "bf16[2,4] = dot_general" in text
        (True, True)
    """
    if fun is None:
        return jax.named_scope(STOP)
    if not callable(fun):
        raise TypeError(
            f"amp_stop: `fun` is {fun!r}, expected a function, or nothing: as a "
            "decorator @amp_stop, as a context `with amp_stop():`."
        )

    @functools.wraps(fun, updated=())
    def stopped(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(STOP):
            return fun(*args, **kwargs)

    return stopped
