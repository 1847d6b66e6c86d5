"""release_gradients: loss, gradients and steps of stacked layers in one function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_mp._inner import as_transformation
from optax_mp._jax._jaxpr import evaluate
from optax_mp._jax._traced import TracedCall
from optax_mp.release._scan import ReleasedLayers, Stack
from optax_mp.scaling._gradients import differentiate


def release_gradients(
    fun: Callable[..., Any],
    tx: Any,
    *,
    has_aux: bool = False,
    by_layer: bool = False,
    param_shardings: Any = None,
) -> Callable[..., Any]:
    caller = "release_gradients"

    def is_tx(x: Any) -> bool:
        return isinstance(x, optax.GradientTransformation | optax.MultiSteps)

    def run(opt_state, layers, *args, **kwargs):
        def stack(tx, opt_state, layers):
            return Stack(as_transformation(tx, caller, "tx"), layers, opt_state, param_shardings)

        stacks = jax.tree.map(stack, tx, opt_state, layers, is_leaf=is_tx)
        released = jax.tree.map(lambda x: ReleasedLayers(jnp.zeros(()), x), stacks)
        def traced(*args, **kwargs):
            call = TracedCall.of(lambda x: fun(*x[0], **x[1]), (args, kwargs))
            return call.unflatten(evaluate(call.closed, call.arrays))

        value, (_, grads) = differentiate(
            traced, (0, 1), has_aux, None, (released, *args), kwargs, caller
        )
        results = jax.tree.map(Stack.result, stacks)
        new = [jax.tree.map(lambda _, x: x[i], stacks, results) for i in range(2)]
        return value, grads, *new

    return run
