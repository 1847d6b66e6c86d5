"""amp: any JAX function, with its matrix products in 16 bits."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_mp.autocast import _rules
from optax_mp.autocast._changes import check_function, pure_call
from optax_mp.autocast._lattice import full_precisions
from optax_mp.autocast._run import Interpreter
from optax_mp.core._warnings import record_event, warn
from optax_mp.core.jax_api._jaxpr import open_jaxpr

Function = TypeVar("Function", bound=Callable[..., Any])


def amp(
    fun: Function,
    *,
    compute_dtype: DTypeLike = jnp.bfloat16,
    rules: Mapping[Any, _rules.Rule] = _rules.default_amp_rules,
) -> Function:
    """Run a function that is written for float32 in mixed precision.

    Matrix products and convolutions run in the compute dtype, forward and backward;
    exponentials, logarithms, norms and sums run in float32; other operations have the
    precision of their inputs. Like `jax.jit` and `jax.vmap`, `amp` takes a function and
    returns one with the same signature, output dtypes and gradient dtypes, and composes
    with them.

    Params stay float32. Every use of a weight casts it again, so that the gradients of
    its uses are summed in float32. Casts in the function itself are honoured, and so is
    `precision=HIGHEST`. Operations that amp does not know run as written, with a
    warning if they have products inside. A function with nothing to change runs
    unchanged.

    Args:
        fun: any function that JAX can trace. Arrays among its arguments are traced;
            everything else is passed through.
        compute_dtype: bfloat16 or float16. With float16, scale the loss
            (`optax_mp.dynamic_loss_scale`).
        rules: how each operation runs: a mapping that replaces `default_amp_rules`, or
            extends them by `|`. A key is a primitive (`jax.lax.tanh_p`, or its name
            `"tanh"`) or the name of a `jax.named_scope`. `"amp_default"` stands for
            primitives that are not listed. A name that occurs nowhere raises a
            warning. A value is one of these words,

            - `"low"`: in the compute dtype;
            - `"f32"`: in float32, inputs and outputs (float64 stays float64);
            - `"f32_if_f16"`: `"f32"` for float16, `"widest"` for bfloat16;
            - `"widest"`: in the widest dtype of the inputs; literals follow the others;
            - `"rounded"`: as `"widest"`, with the result in the compute dtype;
            - `"own"`: each input, and the output that belongs to it, in its own dtype;
            - `"as_written"`: as without amp. Operations with a function among their
              parameters (scatters, reductions by a function, kernels) always do this;

            or a function `(compute_dtype, original_dtypes, *invars, **bind_params) ->
            (new_invars, new_bind_params)`. It gets the original dtypes of the inputs;
            the inputs, each in its original dtype or in the compute dtype; and the
            parameters of the primitive. It returns the inputs, in the floating dtypes
            that it wants, and the parameters. A result of 16 bits or less continues in
            the compute dtype, any other in the dtype as written. The function is
            traced, more than once. It is called for operations on float32; an operation
            whose inputs are all integers or 16-bit floats runs as written. As the rule
            of a scope it is called only for operations that `default_amp_rules` lists.
            In the derivative rule of a `jax.custom_jvp` it must be linear, because JAX
            transposes it.

            The rule of a scope wins over the rule of an operation, and the outermost
            scope over inner ones.

    Returns:
        The function in mixed precision.

    Raises:
        TypeError: if `fun` is not callable, or `rules` is not a mapping of such keys;
            when called, if a function in `rules` returns anything else.
        ValueError: if `compute_dtype` is not a 16-bit float, or if a rule is unknown.

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
        Micikevicius et al., Mixed Precision Training, 2018,
        https://arxiv.org/abs/1710.03740
    """
    check_function(fun, "amp")
    checked_rules = _rules.Rules(rules, compute_dtype)
    interpreter = Interpreter(checked_rules)

    @functools.wraps(fun, updated=())
    def autocast(*args: Any, **kwargs: Any) -> Any:
        if checked_rules.compute_dtype == jnp.float16:
            record_event("computes in float16")
        call = pure_call(fun, args, kwargs, "amp")
        traced, plan, warnings = interpreter.trace(call)
        for text in warnings:
            warn(f"amp: {text}")
        values = interpreter.run(traced.closed, plan, traced.arrays)
        outvars = open_jaxpr(traced.closed)[0].outvars
        values = interpreter.cast_all(values, full_precisions(outvars), outvars)
        result, changes = traced.unflatten(values)
        call.write_back(changes)
        return result

    return autocast  # pyright: ignore[reportReturnType]


def amp_stop(fun: Any = None) -> Any:
    """Keep `amp` out of a part of a function, which then runs as written, in float32.

    It is a `jax.named_scope`, so it applies to everything called inside, and to the
    backward pass. Without `amp` it has no effect.

    Args:
        fun: the function that runs as written. Without it, write `with amp_stop():`
            around a block of code.

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
        return jax.named_scope(_rules.STOP)
    check_function(fun, "amp_stop")
    return functools.wraps(fun, updated=())(jax.named_scope(_rules.STOP)(fun))
