"""Run a step on a CPU: one large leaf after another, and some functions not inlined.

XLA for CPUs starts all that it can at once. The float32 values of all leaves would
exist together, in fresh memory, whose page faults take longer than the arithmetic. If
each leaf waits for the one before, it gets the memory of that.
"""

import functools
from collections import ChainMap
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_mp._jax._contact import varying_axes
from optax_mp._jax._control_flow import STEP
from optax_mp._jax._experimental import bind_outlined, is_outlined, outlined_here
from optax_mp._jax._jaxpr import Equation, bind, is_shaped, locations
from optax_mp.engine._by_platform import Target
from optax_mp.engine._program import (
    Program,
    Value,
    backward_slice,
    read_inputs,
    read_output,
    reads_of,
    values_in,
)
from optax_mp.engine._tails import split_tails

# Elements. The values of smaller leaves need no new pages.
_LARGE = 2**16


def run_in_turn(
    call: Equation, target: Target, inputs: Sequence[Any], *unused: Any
) -> list[Any]:
    """Return the outputs of a call of `jit`.

    Args:
        call: the equation.
        target: leaves wait for each other on one device. Several would have to send
            each other an element of each leaf.
        inputs: its inputs.
        *unused: what kernels use; see `call_by_platform`.
    """
    program = Program.of(call.params["jaxpr"], _may_hold_leaves)
    values = program.constants | dict(zip(program.inputs, inputs, strict=True))
    done = None
    for tail in split_tails(program, {}) if target.device_count == 1 else ():
        codes = [x for x in tail.outputs if _is_large(x, jnp.integer)]
        if codes:
            # With what only this tail needs, such as a product before it.
            _compute(tail.outputs, values, done)
            # A leaf is done when its codes are. XLA may add its updates to the params
            # later.
            with outlined_here():
                found = [false_once_done(values[x]) for x in codes]
            done = functools.reduce(lax.bitwise_or, found)
    _compute(values_in(program.outputs), values, None)
    return [read_output(values, value) for value in program.outputs]


def _may_hold_leaves(equation: Equation, inputs: Sequence[Any]) -> bool:
    """Return whether to open a call, which may be of several leaves."""
    # The others stay calls: to open all takes three times as long.
    name, several = equation.primitive.name, len(equation.outvars) > 1
    return name == STEP or (name == "jit" and several and not is_outlined(equation))


def _compute(targets: Sequence[Value], values: dict[Value, Any], done: Any) -> None:
    """Add targets that are not in `values` yet, computed once `done` is."""
    missing = [x for x in targets if x not in values]
    nodes = backward_slice(missing, values.__contains__)
    # Not what is outlined: the array that it waits with would be written for it.
    outlined = {node for node in nodes if is_outlined(node.equation)}
    late = {
        x: wait_for(done, values[x])
        for x in reads_of([node for node in nodes if node not in outlined])
        if done is not None
        and x in values
        and _is_large(x, jnp.floating)
        # In `shard_map`, waiting for a varying value would make `x` vary.
        and varying_axes(done) <= varying_axes(values[x])
    }
    waiting = ChainMap(late, values)
    with locations() as located:
        for node in nodes:
            run, given = bind, waiting
            if node in outlined:
                run, given = bind_outlined, values
            with located(node.equation):
                made = run(node.equation, read_inputs(given, node))
            values.update(zip(node.outputs, made, strict=True))


def _is_large(value: Value, kind: Any) -> bool:
    """Return whether a value is a large array of a kind of numbers."""
    is_array = is_shaped(value.aval) and jnp.issubdtype(value.aval.dtype, kind)
    return is_array and value.aval.size >= _LARGE


@jax.jit
def false_once_done(codes: jax.Array) -> jax.Array:
    """Return False, computed so that XLA has to compute `codes` first."""
    first = lax.slice(codes, (0,) * codes.ndim, (1,) * codes.ndim)
    number = lax.convert_element_type(lax.reshape(first, ()), jnp.int32)
    # More ones than there are bits. XLA knows what `&` and `>` make of each other.
    return lax.gt(lax.population_count(number), np.int32(32))


@jax.jit
def wait_for(false: jax.Array, x: jax.Array) -> jax.Array:
    """Return `x`, once `false` is computed."""
    return lax.select(false, lax.full_like(x, 0), x)
