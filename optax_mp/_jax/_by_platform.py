"""An operation that runs in another way on some platforms, with the same result.

`jax.lax.platform_dependent` would put all ways into every program. Here a program is
written in the way that all platforms know; which one runs is decided when it is
lowered. Only then is it known whether arrays are sharded, too.
"""

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from optax_mp._jax._arrays import compiles, has_explicit_axes
from optax_mp._jax._dependence import depending_outputs
from optax_mp._warnings import warn

Function = Callable[..., list[Any]]
# Platforms that have a way of their own, as JAX names them.
_PLATFORMS = ("tpu", "cuda", "cpu")

_HAS_KERNELS = hasattr(jax, "shard_map")

_by_platform = Primitive("optax_mp_by_platform")
_by_platform.multiple_results = True


class Way:
    """A function of arrays for one platform, which perhaps cannot be lowered there.

    Several calls of one are lowered once in a program.

    Attributes:
        function: the function.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self._jitted = jax.jit(function)
        self._errors: dict[str, Exception | None] = {}

    def shared(self, platform: str, avals: Sequence[Any]) -> Function:
        """Return the function as one that is lowered once, or raise if it cannot be.

        A failure would leave half of a function in a program. So it is tried in another
        program first.
        """
        if platform not in self._errors:
            args = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
            try:
                self._jitted.trace(*args).lower(lowering_platforms=(platform,))
                self._errors[platform] = None
            except Exception as error:
                self._errors[platform] = error
        error = self._errors[platform]
        if error is not None:
            raise error
        return self._jitted


def by_platform(
    anywhere: Function,
    kernels: dict[str, Way],
    without_kernel: dict[str, Callable[..., list[Any]]],
    *args: Any,
) -> list[Any]:
    """Return `anywhere(*args)`, or the same computed in the way of a platform.

    Args:
        anywhere: takes and returns arrays.
        kernels: by platform, what does the same on one device. If it cannot be lowered,
            a warning says what that costs.
        without_kernel: by platform, what does the same where there is no kernel. It
            takes the number of devices that may hold shards of the arrays, then these.
        args: the arrays, of the same shapes in all calls with these functions.
    """
    if not _HAS_KERNELS:  # and shard_map asks for a rule
        return anywhere(*args)
    # With the axes over which they vary under shard_map, and shardings in types.
    avals = tuple(jax.make_jaxpr(anywhere)(*args).out_avals)
    ways = tuple((kernels.get(x), without_kernel.get(x)) for x in _PLATFORMS)
    return _by_platform.bind(*args, anywhere=anywhere, ways=ways, avals=avals)


@_by_platform.def_impl
def _run(*args: Any, **params: Any) -> list[Any]:
    if not compiles():
        return params["anywhere"](*args)
    return jax.jit(functools.partial(_by_platform.bind, **params))(*args)


@_by_platform.def_abstract_eval
def _abstract(*args: Any, avals: Sequence[Any], **params: Any) -> list[Any]:
    return list(avals)


def _batched(args: Any, axes: Any, *, anywhere: Function, **params: Any) -> Any:
    """Return the outputs, and the axis of each; None for what is the same for all."""
    is_mapped = [axis is not None for axis in axes]
    one_of_each = [
        jnp.take(x, 0, axis) if mapped else x
        for x, axis, mapped in zip(args, axes, is_mapped, strict=True)
    ]
    reached = _outputs_of(anywhere, one_of_each, is_mapped)
    out_axes = [0 if each else None for each in reached]
    outputs = jax.vmap(anywhere, in_axes=tuple(axes), out_axes=out_axes)(*args)
    return outputs, out_axes


def _jvp(primals: Any, tangents: Any, *, anywhere: Function, **params: Any) -> Any:
    """Return the outputs and their tangents.

    A tangent that is known to be zero stays so: as an array of zeros it would become
    NaN at a square root of zero.
    """
    is_live = [type(tangent) is not ad.Zero for tangent in tangents]
    live = [i for i, each in enumerate(is_live) if each]

    def of_live(*values: Any) -> list[Any]:
        args = dict(enumerate(primals)) | dict(zip(live, values, strict=True))
        return anywhere(*args.values())

    outputs, moved = jax.jvp(
        of_live, [primals[i] for i in live], [tangents[i] for i in live]
    )
    reached = _outputs_of(anywhere, primals, is_live)
    return outputs, [
        tangent if each else ad.Zero(jax.typeof(x).to_tangent_aval())
        for x, tangent, each in zip(outputs, moved, reached, strict=True)
    ]


def _outputs_of(
    function: Function, args: Sequence[Any], which: Sequence[bool]
) -> list[bool]:
    """Return which outputs of a function are computed from some of its arguments."""
    return depending_outputs(jax.make_jaxpr(function)(*args), which)


batching.primitive_batchers[_by_platform] = _batched
ad.primitive_jvps[_by_platform] = _jvp


def _lower(context: Any, *args: Any, anywhere: Function, **params: Any) -> Any:
    return mlir.lower_fun(anywhere, multiple_results=True)(context, *args)


def _lower_on(platform: int, context: Any, *args: Any, **params: Any) -> Any:
    (way, without_kernel) = params["ways"][platform]
    module, name = context.module_context, _PLATFORMS[platform]
    if way is not None and _may_have_kernels(module, name):
        try:
            with warnings.catch_warnings():
                # JAX 0.12 deprecates kernels in Triton.
                warnings.simplefilter("ignore", DeprecationWarning)
                # Types inside of shard_map name its axes, which exist nowhere else.
                is_whole_program = hasattr(module.axis_context, "num_devices")
                function = (
                    way.shared(name, context.avals_in)
                    if is_whole_program
                    else way.function
                )
                return mlir.lower_fun(function, multiple_results=True)(context, *args)
        except Exception as error:
            _warn_once(f"{type(error).__name__}: {error}".splitlines()[0])
    if without_kernel is not None and _may_be_cut(module, name, context.avals_in):
        function = functools.partial(without_kernel, _device_count(module.axis_context))
        return mlir.lower_fun(function, multiple_results=True)(context, *args)
    return _lower(context, *args, **params)


@functools.cache
def _warn_once(error: str) -> None:
    warn(
        "optax_mp: this version of JAX could not make a kernel for a leaf that is "
        "stored in few bits, and XLA alone compiles its step. That takes more "
        "operations on a TPU, and moves 1.5 times as many bytes on a GPU. Another "
        "version of JAX may do better; OPTAX_MP_KERNELS=0 makes no kernels, and no "
        f"warning. {error}"
    )


@functools.cache
def may_compile_for_tpus() -> bool:
    """Return whether this process can compile programs for TPUs."""
    has_compiler = find_spec("libtpu") or os.environ.get("TPU_LIBRARY_PATH")
    return _HAS_KERNELS and bool(has_compiler)


def compiles_for_cpus() -> bool:
    """Return whether a CPU is what this process compiles for, if nothing is said.

    To ask JAX for its default backend would start it.
    """
    chosen = getattr(jax.config, "jax_platforms", None)
    return chosen.split(",")[0] == "cpu" if chosen else not _has_plugins()


@functools.cache
def _has_plugins() -> bool:
    """Return whether there are plugins of JAX, as for GPUs."""
    return bool(entry_points(group="jax_plugins"))


def kernel_obstacle() -> str | None:
    """Return why there are no kernels in any program; None if there may be."""
    if not _HAS_KERNELS:
        return "JAX before 0.6"
    if os.environ.get("OPTAX_MP_KERNELS") == "0":
        return "OPTAX_MP_KERNELS=0"
    return None


def _may_have_kernels(module: Any, platform: str) -> bool:
    """Return whether there may be kernels in a program."""
    if kernel_obstacle() is not None:
        return False
    if platform == "tpu" and _is_old_tpu():
        return False
    # An exported program is to run on later versions, too. Kernels do not.
    if module.lowering_parameters.for_export:
        return False
    return _device_count(module.axis_context) == 1


def _may_be_cut(module: Any, platform: str, avals: Sequence[Any]) -> bool:
    """Return whether types say nothing of devices, which would be wrong for parts."""
    # An exported program for one device may be called on several. A CPU would gather.
    if platform == "cpu" and module.lowering_parameters.for_export:
        return False
    is_whole_program = hasattr(module.axis_context, "num_devices")
    meshes = [getattr(getattr(x, "sharding", None), "mesh", None) for x in avals]
    return is_whole_program and not any(map(has_explicit_axes, meshes))


@functools.cache
def _is_old_tpu() -> bool:
    """Return whether this machine has TPUs for which Mosaic compiles no such kernel."""
    try:
        kind = jax.local_devices(backend="tpu")[0].device_kind
    except RuntimeError:
        return False
    return kind in ("TPU v2", "TPU v3")


def _device_count(context: Any) -> int:
    """Return on how many devices an array of a part of a program may be.

    That is 1 in a program for one device, and inside of shard_map over all axes.
    Kernels are not partitioned: an array that is sharded would be gathered for one.
    """
    if hasattr(context, "num_devices"):
        return context.num_devices
    is_split = context.manual_axes == frozenset(context.mesh.axis_names)
    return 1 if is_split else context.mesh.size


mlir.register_lowering(_by_platform, _lower)
for _i, _name in enumerate(_PLATFORMS):
    mlir.register_lowering(
        _by_platform, functools.partial(_lower_on, _i), platform=_name
    )
