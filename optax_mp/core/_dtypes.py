"""Floating dtypes by name, and rounding to them."""

import reprlib
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from optax_mp.core.jax_api._arrays import constant_like

# NumPy reads "f8" as float64 and "f2" as float16; in this field "f8" means an 8-bit
# float. Only names that cannot be misread are accepted.
_ALIASES = {
    "bf16": "bfloat16",
    **dict.fromkeys(("f16", "fp16"), "float16"),
    **dict.fromkeys(("f32", "fp32", "full"), "float32"),
    "f64": "float64",
    **{f"f8_{x}": f"float8_{x}" for x in ("e4m3fn", "e5m2")},
    **{x: f"float8_{x}" for x in ("e4m3fn", "e5m2")},
}
_NAMES = ("bfloat16", "float16", "float32", "float64")
_MINI_FLOATS = ("float8_", "float6_", "float4_")


def half_dtype() -> jnp.dtype:
    """Return the 16-bit floating dtype that the default backend computes fastest.

    bfloat16 on TPUs, CPUs and GPUs from compute capability 8.0 on; float16 on older
    GPUs, which have no bfloat16 units. The call starts the backend.

    Example:
        >>> import optax_mp
        >>> optax_mp.half_dtype().name in ("bfloat16", "float16")
        True
    """
    if jax.default_backend() == "gpu":
        # A number such as "7.5" from NVIDIA. Other vendors name a chip: with bfloat16.
        capability = str(getattr(jax.devices()[0], "compute_capability", ""))
        major = capability.split(".")[0]
        if major.isdigit() and int(major) < 8:
            return jnp.dtype(jnp.float16)
    return jnp.dtype(jnp.bfloat16)


def floating_dtype(spec: DTypeLike, argument: str) -> jnp.dtype:
    """Return `spec` as a floating dtype; `argument` names it in the error."""
    meant: Any = spec
    if isinstance(spec, str):
        if spec == "half":
            return half_dtype()
        word = _ALIASES.get(spec, spec)
        is_name = word in _NAMES or word.startswith(_MINI_FLOATS)
        meant = getattr(jnp, word, None) if is_name else None
    try:
        # NumPy reads None as float64.
        dtype = None if meant is None else jnp.dtype(meant)
    except (TypeError, ValueError):
        dtype = None
    if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
        return dtype
    caller, _, name = argument.partition(": ")
    # JAX has float8_e4m3 as well, with infinities and half the range.
    is_e4m3 = isinstance(spec, str) and spec.endswith("e4m3")
    note = " Hardware means float8_e4m3fn by e4m3." if is_e4m3 else ""
    raise ValueError(
        f"{caller}: expected {name} to be a floating dtype such as bfloat16, got "
        f"{reprlib.repr(spec) if dtype is None else dtype.name}; short names are "
        f"{', '.join(sorted(_ALIASES))} and half.{note}"
    )


def check_available(dtype: DTypeLike, argument: str) -> jnp.dtype:
    """Return `dtype`; raise for float64 while JAX's 64-bit types are off.

    Call it where a dtype is used, not where it is declared: users may turn on 64-bit
    types in between.

    Args:
        dtype: a dtype.
        argument: what to call it in the error.
    """
    dtype = jnp.dtype(dtype)
    used = jax.dtypes.canonicalize_dtype(dtype)
    if used != dtype:
        raise ValueError(
            f"{argument} is {dtype.name}, but JAX's 64-bit types are off; turn them on "
            "first, with `jax.config.update('jax_enable_x64', True)`, or pass "
            f"{used.name}."
        )
    return dtype


# Cached, because a step asks for each leaf.
@cache
def bits(dtype: Any) -> int:
    """Return the width of a dtype in bits."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    return jnp.iinfo(dtype).bits if is_integer else 8 * dtype.itemsize


@cache
def at_least_float32(dtype: DTypeLike) -> jnp.dtype:
    """Return float32, or `dtype` if it is wider or complex."""
    # Not `jnp.promote_types`, which refuses 8-bit floats.
    is_wide = bits(dtype) > 32 or jnp.issubdtype(dtype, jnp.complexfloating)
    return jnp.dtype(dtype if is_wide else jnp.float32)


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Round `x` to the nearest value of a narrower floating `dtype`, without the cast.

    Ties go to even. Finite values out of range become the largest finite value.
    Infinities stay, unless `dtype` has none, and NaN stays NaN.

    Args:
        x: floating `[...]`.
        dtype: the narrower dtype.

    Returns:
        `[...]`, in the dtype of `x`, or float32 if that is wider. A cast of it to
        `dtype` is exact.
    """
    # Arithmetic and not a pair of casts, because XLA may drop a cast down and up again
    # within one program. `reduce_precision` with the exponent bits of `dtype` would
    # flush its subnormals to zero, so those are rounded to multiples of the smallest.
    wide = at_least_float32(x.dtype)
    info, wide_info = jnp.finfo(dtype), jnp.finfo(wide)
    x = lax.convert_element_type(x, wide)
    if info.nexp == wide_info.nexp:
        # bfloat16. A clamp brings infinity to the largest number. It is not used unless
        # something overflowed, since CPUs flush the smallest numbers in it to 0.
        rounded = lax.reduce_precision(x, info.nexp, info.nmant)
        overflows = lax.ne(lax.is_finite(rounded), lax.is_finite(x))
        largest = np.array(info.max, wide)
        return lax.select(overflows, lax.clamp(-largest, rounded, largest), rounded)
    x = saturate(x, dtype)
    rounded = lax.reduce_precision(x, wide_info.nexp, info.nmant)
    if float(info.smallest_normal) <= float(wide_info.smallest_normal):
        return rounded
    step = wide.type(info.smallest_subnormal)
    multiple = lax.round(x * (1 / step), lax.RoundingMethod.TO_NEAREST_EVEN)
    is_subnormal = jnp.abs(x) < wide.type(info.smallest_normal)
    return with_derivative_of(jnp.where(is_subnormal, multiple * step, rounded), x)


@jax.custom_jvp
def with_derivative_of(rounded: jax.Array, x: jax.Array) -> jax.Array:
    """Return `rounded`, with the derivative of `x`, from which it was rounded.

    Rounding is then the identity for derivatives. As JAX sees it, a step function and a
    bit cast have a derivative of zero.

    Args:
        rounded: floating `[...]`.
        x: floating `[...]`, of any dtype.
    """
    return rounded


@with_derivative_of.defjvp
def _derivative_of_rounding(
    primals: tuple[Any, Any], tangents: tuple[Any, Any]
) -> tuple[Any, Any]:
    rounded = with_derivative_of(*primals)
    return rounded, lax.convert_element_type(tangents[1], rounded.dtype)


def saturating_cast(x: Any, dtype: DTypeLike) -> jax.Array:
    """Cast floating `[...]`; finite values out of range become the largest one."""
    x = jnp.asarray(x)
    # 65504, the largest float16, is not a bfloat16.
    x = x.astype(at_least_float32(x.dtype))
    if jnp.finfo(dtype).nexp < jnp.finfo(x.dtype).nexp or bits(dtype) < bits(x.dtype):
        x = saturate(x, dtype)
    return x.astype(dtype)


def saturate(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Bring finite values of `x` into the range of `dtype`, but keep their own dtype.

    Infinities stay, unless `dtype` has none: then they also become its largest value.
    `x` and the result are floating `[...]`, of one dtype.
    """
    largest = constant_like(x, jnp.finfo(dtype).max)
    is_above, is_below = lax.gt(x, largest), lax.lt(x, -largest)
    if _has_infinity(dtype):
        is_finite = lax.is_finite(x)
        is_above, is_below = is_above & is_finite, is_below & is_finite
    # Not by a clamp: CPUs flush the smallest numbers to zero.
    return lax.select(is_above, largest, lax.select(is_below, -largest, x))


@cache
def _has_infinity(dtype: DTypeLike) -> bool:
    # `float8_e4m3fn`, for one, has none: its cast of an infinity is NaN.
    return bool(np.isinf(np.float32(np.inf).astype(dtype)))


def is_floating(leaf: Any) -> bool:
    """Return whether `leaf` is an array of real floating-point numbers."""
    # Not by `is_array`: a step asks this often.
    is_array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    return is_array and jnp.issubdtype(leaf.dtype, jnp.floating)


def is_inexact(leaf: Any) -> bool:
    """Return whether `leaf` is an array of real or complex floating-point numbers."""
    is_array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    return is_array and jnp.issubdtype(leaf.dtype, jnp.inexact)


def as_array(leaf: Any) -> Any:
    """Return an array `[]` for a Python float or complex number, as under `jit`."""
    return jnp.asarray(leaf) if isinstance(leaf, float | complex) else leaf
