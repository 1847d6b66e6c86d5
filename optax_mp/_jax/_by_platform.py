"""A call of `jit` that is computed in another way on some platforms.

`jax.lax.platform_dependent` would put all ways into every program. Here a program holds
the call as it was traced, and what takes its place is made when it is lowered: only
then is it known for which platform, on how many devices, and whether it is exported.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from optax_mp._jax._jaxpr import Equation, bind

# Platforms that may have a way of their own, as JAX names them.
PLATFORMS: tuple[str, ...] = ("tpu", "cuda")
NAME = "optax_mp_step"

_call = Primitive(NAME)
_call.multiple_results = True


@dataclass(frozen=True)
class Target:
    """What a program is lowered for.

    Attributes:
        platform: one of `PLATFORMS`.
        device_count: on how many devices an array of the program may be. That is 1 in a
            program for one device, and inside of `shard_map` over all axes of a mesh.
        is_within_shard_map: whether it is a part of a program, where types name axes of
            a mesh.
        is_exported: whether it is to run on later versions, and on more devices.
    """

    platform: str
    device_count: int = 1
    is_within_shard_map: bool = False
    is_exported: bool = False

    @classmethod
    def of(cls, platform: str, module: Any) -> "Target":
        """Read it off the context in which JAX lowers an equation."""
        context = module.axis_context
        is_whole = hasattr(context, "num_devices")
        if is_whole:
            count = context.num_devices
        else:
            is_split = context.manual_axes == frozenset(context.mesh.axis_names)
            count = 1 if is_split else context.mesh.size
        return cls(platform, count, not is_whole, module.lowering_parameters.for_export)


# Takes the inputs, and by their places what some of them were widened from.
Function = Callable[[Sequence[Any], dict[int, Any]], Sequence[Any]]
Rewrite = Callable[[Target], Function | None]


def call_by_platform(
    call: Equation, inputs: Sequence[Any], rewrite: Rewrite
) -> list[Any]:
    """Return the outputs of a call of `jit`.

    Args:
        call: the equation.
        inputs: its inputs.
        rewrite: returns what takes the place of the call where a program is lowered for
            a target, or None for the call as it is.
    """
    # The jaxpr is for those who look into equations.
    jaxpr = call.params["jaxpr"]
    return _call.bind(*inputs, jaxpr=jaxpr, call=call, rewrite=rewrite)


@_call.def_impl
def _run(*inputs: Any, call: Equation, **params: Any) -> list[Any]:
    return bind(call, inputs)


@_call.def_abstract_eval
def _abstract(*avals: Any, call: Equation, **params: Any) -> list[Any]:
    return [var.aval for var in call.outvars]


# Batched or differentiated, it is the call as it was traced. By the rules of the call
# itself: what is not mapped stays so, and a tangent that is known to be zero does.
def _batched(
    axis: Any, inputs: Any, axes: Any, *, call: Equation, **params: Any
) -> Any:
    rule: Any = batching.fancy_primitive_batchers[call.primitive]
    return rule(axis, inputs, axes, **call.params)


def _jvp(primals: Any, tangents: Any, *, call: Equation, **params: Any) -> Any:
    return ad.primitive_jvps[call.primitive](primals, tangents, **call.params)


def _lower(
    context: Any,
    *inputs: Any,
    call: Equation,
    rewrite: Rewrite,
    platform: str | None = None,
    **params: Any,
) -> Any:
    function = platform and rewrite(Target.of(platform, context.module_context))
    if not function:
        # One equation: the jaxpr of the call is lowered as it is, and not traced again.
        as_it_is = functools.partial(_run, call=call)
        return mlir.lower_fun(as_it_is, multiple_results=True)(context, *inputs)
    narrow = {i: x for i, y in enumerate(inputs) if (x := _widened_from(y)) is not None}

    def run(*values: Any) -> Any:
        count = len(inputs)
        return function(values[:count], dict(zip(narrow, values[count:], strict=True)))

    avals = (context.avals_in[i].update(dtype=jnp.bfloat16) for i in narrow)
    context = context.replace(avals_in=[*context.avals_in, *avals])
    lowered = mlir.lower_fun(run, multiple_results=True)
    return lowered(context, *inputs, *narrow.values())


def _widened_from(value: Any) -> Any:
    """Return the bfloat16 array that was converted to a float32 one, if it was.

    Gradients are, where a loop or `value_and_grad` converts them. XLA would write the
    float32 array for a kernel, twice as large as what it was made from.
    """
    made_by: Any = getattr(value, "owner", None)
    if getattr(made_by, "name", None) != "stablehlo.convert":
        return None
    (source,) = made_by.operands
    types = [str(getattr(x.type, "element_type", "")) for x in (source, value)]
    return source if types == ["bf16", "f32"] else None


batching.fancy_primitive_batchers[_call] = _batched
ad.primitive_jvps[_call] = _jvp
mlir.register_lowering(_call, _lower)
for _platform in PLATFORMS:
    _lower_for = functools.partial(_lower, platform=_platform)
    # Not cacheable: JAX would lower it within a function, which hides what made inputs.
    mlir.register_lowering(_call, _lower_for, platform=_platform, cacheable=False)
