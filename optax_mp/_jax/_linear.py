"""A linear function with a transpose of its own.

`jax.custom_derivatives.linear_call` is one, too, but it cannot be batched.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from optax_mp._jax._jaxpr import trace_jaxpr

Values = list[Any]


@dataclass(frozen=True, eq=False)
class Linear:
    """A function of constants and of one array, which it is linear in.

    It has no derivative by the constants.

    Attributes:
        forward: takes the constants and the array; returns a list of arrays.
        transpose: takes the constants, and a cotangent for each of these; returns the
            cotangent of the array.
        error: what to say if it is differentiated by a constant.
    """

    forward: Callable[..., Values]
    transpose: Callable[..., Any]
    error: str

    def __call__(self, constants: Sequence[Any], x: Any) -> Values:
        """Return the function of an array."""
        return _linear_p.bind(*constants, x, linear=self)


_linear_p = Primitive("optax_mp_linear")
_linear_p.multiple_results = True


@_linear_p.def_impl
def _run(*args: Any, linear: Linear) -> Values:
    return linear.forward(*args)


@_linear_p.def_abstract_eval
def _avals(*avals: Any, linear: Linear) -> Sequence[Any]:
    return trace_jaxpr(linear.forward, avals).out_avals


def _jvp(primals: Any, tangents: Any, *, linear: Linear) -> tuple[Values, Values]:
    *constants, x = primals
    *constants_dot, x_dot = tangents
    if not all(isinstance(each, ad.Zero) for each in constants_dot):
        raise NotImplementedError(linear.error)
    return linear(constants, x), linear(constants, x_dot)


def _transpose(cotangents: Any, *args: Any, linear: Linear) -> Values:
    *constants, x = args
    if not ad.is_undefined_primal(x):
        raise NotImplementedError(linear.error)
    zero = [isinstance(each, ad.Zero) for each in cotangents]
    result = (
        ad.Zero(x.aval)
        if all(zero)
        else linear.transpose(*constants, *map(ad.instantiate_zeros, cotangents))
    )
    return [None] * len(constants) + [result]


def _batch(args: Any, axes: Any, *, linear: Linear) -> tuple[Values, list[int]]:
    pairs = zip(args, axes, strict=True)
    size = next(x.shape[axis] for x, axis in pairs if axis is not None)
    *constants, x = args
    *constant_axes, axis = axes
    # Were it not batched, its cotangents would have to be summed over the batch.
    if axis is None:
        x = jnp.broadcast_to(x, (size, *x.shape))
    else:
        x = jnp.moveaxis(x, axis, 0)
    batched = _batched(linear, tuple(constant_axes), size)
    results = batched(constants, x)
    return results, [0] * len(results)


def _batched(linear: Linear, axes: tuple[Any, ...], size: int) -> Linear:
    def forward(*args: Any) -> Values:
        return jax.vmap(linear.forward, (*axes, 0), axis_size=size)(*args)

    def transpose(*args: Any) -> Any:
        given = (*axes, *[0] * (len(args) - len(axes)))
        return jax.vmap(linear.transpose, given, axis_size=size)(*args)

    return Linear(forward, transpose, linear.error)


ad.primitive_jvps[_linear_p] = _jvp
ad.primitive_transposes[_linear_p] = _transpose
batching.primitive_batchers[_linear_p] = _batch
mlir.register_lowering(_linear_p, mlir.lower_fun(_run, multiple_results=True))
