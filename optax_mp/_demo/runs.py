"""The ways to train that the demo compares: dtypes of params by forms of storage."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from optax_mp._demo.model import LossFunction
from optax_mp._tree import cast_floating
from optax_mp.compact._low_bit import low_bit_state
from optax_mp.compact._stochastic import stochastic_rounding
from optax_mp.loss_scale import dynamic_loss_scale, value_and_grad
from optax_mp.masters import Split, mixed_precision

Transform = Callable[[optax.GradientTransformation], optax.GradientTransformation]
GradFunction = Callable[
    [optax.OptState, optax.Params, jax.Array], tuple[jax.Array, optax.Updates]
]


@dataclass(frozen=True)
class Run:
    """One way to train the model.

    Attributes:
        name: what the table calls it.
        param_dtype: what the params are kept in.
        compute_dtype: what the model computes in.
        transform: makes the run's optimizer from the AdamW that all runs share.
        value_and_grad: makes the run's gradient function from the loss function.
    """

    name: str
    param_dtype: str
    compute_dtype: str
    transform: Transform
    value_and_grad: Callable[[LossFunction], GradFunction]


def unchanged(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `inner`: plain optax."""
    return inner


def split16(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `inner` on masters that are stored as the param and 16 more bits."""
    return mixed_precision(inner, storage=Split(bits=16))


def split8(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `inner` on masters that are stored as the param and 8 more bits."""
    return mixed_precision(inner, storage=Split(bits=8))


def compact(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `inner` with 8-bit moments, on masters of 24 bits.

    The default `min_size` is for larger models. This one includes all matrices of the
    demo's model, and excludes its norms.
    """
    return split8(low_bit_state(inner, min_size=128))


def float8_masters(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Return `inner` on masters of float8 params, with float8 updates.

    JAX adds no other dtype to an 8-bit float.
    """
    return mixed_precision(inner, update_dtype="params")


def with_loss_scale(transform: Transform) -> Transform:
    """Return `transform` with a loss scale around it.

    The scale grows sooner than by default, so that it overflows in a short run as well.
    """
    return lambda inner: dynamic_loss_scale(transform(inner), growth_interval=100)


def unscaled_value_and_grad(loss: LossFunction) -> GradFunction:
    """Return JAX's own value and gradient, which do not need the state."""
    return lambda opt_state, params, batch: jax.value_and_grad(loss)(params, batch)


def bfloat16_value_and_grad(loss: LossFunction) -> GradFunction:
    """Return value and gradient at a bfloat16 copy: in float8 most gradients are 0."""
    grad = jax.value_and_grad(loss)
    return lambda opt_state, params, batch: grad(
        cast_floating(params, jnp.bfloat16), batch
    )


# By their names on the command line; "full" stands for float32 masters.
DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "e4m3fn": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}
STORAGES: Mapping[str, Transform] = {
    "full": mixed_precision,
    "split16": split16,
    "split8": split8,
    "compact": compact,
    "stochastic": stochastic_rounding,
}
DEFAULT_DTYPES = ("bf16", "f16")
# What is compared if the command line names no storage.
DEFAULT_STORAGES = {
    "bf16": ("full", "compact"),
    "f16": ("full",),
    "e4m3fn": ("full",),
    "e5m2": ("full",),
}
FLOAT32 = Run("float32", "float32", "float32", unchanged, unscaled_value_and_grad)


def runs_of(dtypes: Sequence[str], storages: Sequence[str] | None) -> tuple[Run, ...]:
    """Return the run in float32, and for each dtype a naive run and one per storage.

    Raises:
        ValueError: if a storage cannot hold a dtype.
    """
    runs = [FLOAT32]
    for dtype in dict.fromkeys(dtypes):
        runs.append(naive_run(dtype))
        for storage in dict.fromkeys(storages or DEFAULT_STORAGES[dtype]):
            runs.append(run_with_storage(dtype, storage))
    return tuple(runs)


def naive_run(dtype: str) -> Run:
    """Return the run of plain optax on params of a dtype."""
    return Run(
        f"{dtype} naive",
        DTYPES[dtype],
        compute_dtype_of(dtype),
        unchanged,
        unscaled_value_and_grad,
    )


def run_with_storage(dtype: str, storage: str) -> Run:
    """Return the run on params of a dtype with one storage of masters, or none."""
    transform, grad_function = STORAGES[storage], unscaled_value_and_grad
    if is_8_bit(dtype):
        if storage != "full":
            raise ValueError(
                f"--storage {storage} cannot hold {dtype} params: its updates are "
                "float32, which JAX does not add to an 8-bit float; use --storage full "
                f"with --dtype {dtype}, or --dtype bf16 f16."
            )
        transform, grad_function = float8_masters, bfloat16_value_and_grad
    elif dtype == "f16":
        transform, grad_function = with_loss_scale(transform), value_and_grad
    title = "+ masters" if storage == "full" else storage
    return Run(
        f"{dtype} {title}",
        DTYPES[dtype],
        compute_dtype_of(dtype),
        transform,
        grad_function,
    )


def is_8_bit(dtype: str) -> bool:
    """Return whether the model only stores a dtype, and computes in another."""
    return DTYPES[dtype].startswith("float8")


def compute_dtype_of(dtype: str) -> str:
    """Return what the model computes in. Activations in 8 bits would need scales."""
    return "bfloat16" if is_8_bit(dtype) else DTYPES[dtype]
