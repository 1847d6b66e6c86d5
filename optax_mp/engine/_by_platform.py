"""A call of `jit` with another implementation on some platforms.

`jax.lax.platform_dependent` would trace all implementations into every program. Here a
program holds the call as it was traced, and another implementation is made when it is
lowered. Only then are the platform and the number of devices known, and whether the
program is exported.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from optax_mp._jax._control_flow import STEP
from optax_mp._jax._jaxpr import Equation, bind
from optax_mp._jax._primitives import Primitive, ad, batching, ir, mlir
from optax_mp._warnings import warn_once
from optax_mp.engine._lowered import sharding_of, widened_from

# Platforms that may have kernels, and all that may have another program, by JAX's name.
PLATFORMS: tuple[str, ...] = ("tpu", "cuda")
_ALL = *PLATFORMS, "cpu"

_call = Primitive(STEP)
_call.multiple_results = True


@dataclass(frozen=True)
class Target:
    """The platform and devices that a program is lowered for.

    Attributes:
        platform: one of `PLATFORMS`, or a CPU.
        device_count: on how many devices an array may be: 1 in a program for one
            device, and inside of `shard_map` over all axes of a mesh.
        is_within_shard_map: whether it is inside of `shard_map`, where types name axes
            of a mesh.
        is_exported: whether the program may run on later versions, or on more devices.
        kind: of the devices, as JAX names it; empty if it is not known.
        device: one of the devices; None if this process has none of them.
    """

    platform: str
    device_count: int = 1
    is_within_shard_map: bool = False
    is_exported: bool = False
    kind: str = ""
    device: Any = None

    @classmethod
    def of(cls, context: Any) -> "Target | None":
        """Read it off the context where JAX lowers an equation.

        None if that is for another platform, for several, or within `compute_on`.
        """
        module, axes = context.module_context, context.module_context.axis_context
        platform, *others = module.platforms
        is_placed = context.jaxpr_eqn_ctx.compute_type is not None
        if others or platform not in _ALL or is_placed:
            return None
        exported = module.lowering_parameters.for_export
        device = _device_of(platform, module.backend)
        if hasattr(axes, "num_devices"):
            return cls(platform, axes.num_devices, False, exported, *device)
        is_split = axes.manual_axes == frozenset(axes.mesh.axis_names)
        count = 1 if is_split else axes.mesh.size
        return cls(platform, count, True, exported, *device)


def kind_here(platform: str) -> str:
    """Return the kind of a platform's devices in this process; empty for none."""
    try:
        return jax.local_devices(backend=platform)[0].device_kind
    except RuntimeError:
        return ""


def _device_of(platform: str, client: Any) -> tuple[str, Any]:
    """Return the kind of a client's devices, and one that this process has, if any."""
    names = (platform, "gpu") if platform == "cuda" else (platform,)
    if client is None or client.platform not in names:
        return "", None  # lowered for a platform that only has a name
    kind = client.devices()[0].device_kind
    devices = jax.local_devices(backend=platform) if kind_here(platform) else []
    return kind, next((x for x in devices if x.client == client), None)


# Takes the inputs, and by their index the arrays that some of them were widened from,
# and their shardings, where known.
Function = Callable[
    [Sequence[Any], Mapping[int, Any], Mapping[int, NamedSharding]], Sequence[Any]
]
Rewrite = Callable[[Target], Function | None]


def call_by_platform(
    call: Equation, inputs: Sequence[Any], rewrite: Rewrite
) -> list[Any]:
    """Return the outputs of a call of `jit`.

    Args:
        call: the equation.
        inputs: its inputs.
        rewrite: returns a function that replaces the call when a program is lowered
            for a target, or None to keep the call. It is kept as well if the function
            fails.
    """
    # The jaxpr is for code that searches the parameters of equations.
    jaxpr = call.params["jaxpr"]
    return _call.bind(*inputs, jaxpr=jaxpr, equation=call, rewrite=rewrite)


def run_by_platform(function: Callable[..., Any], rewrite: Rewrite, *args: Any) -> Any:
    """Return the array `function(*args)`; see `call_by_platform`."""
    (call,) = jax.make_jaxpr(jax.jit(function))(*args).eqns
    return call_by_platform(call, args, rewrite)[0]


@_call.def_impl
def _run(*inputs: Any, equation: Equation, **params: Any) -> list[Any]:
    return bind(equation, inputs)


_call.def_abstract_eval(lambda *_, equation, **__: [x.aval for x in equation.outvars])


# Batched or differentiated, it is the call as it was traced. The rules of the call
# itself apply, so inputs that are not mapped stay so, and zero tangents stay zero.
def _batched(
    axis: Any, inputs: Any, axes: Any, *, equation: Equation, **params: Any
) -> Any:
    rule: Any = batching.fancy_primitive_batchers[equation.primitive]
    return rule(axis, inputs, axes, **equation.params)


def _jvp(primals: Any, tangents: Any, *, equation: Equation, **params: Any) -> Any:
    return ad.primitive_jvps[equation.primitive](primals, tangents, **equation.params)


def _lower(
    context: Any, *inputs: Any, equation: Equation, rewrite: Rewrite, **params: Any
) -> Any:
    try:
        target = Target.of(context)
        if target and (function := rewrite(target)):
            return _lower_function(function, target, context, inputs)
    except Exception as error:
        warn_once(
            "optax_mp: a low-bit step could not be lowered leaf by leaf. XLA compiles "
            "it as it is written: 1.5 to 8 times as many bytes move. On TPUs and GPUs "
            f"OPTAX_MP_KERNELS=0 turns kernels and this warning off. {explain(error)}"
        )
    # One equation: the jaxpr of the call is lowered as it is, without another trace.
    run = functools.partial(_run, equation=equation)
    return mlir.lower_fun(run, multiple_results=True)(context, *inputs)


def explain(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _lower_function(
    function: Function, target: Target, context: Any, inputs: Sequence[Any]
) -> Any:
    """Lower a function in the place of a call, or erase what was lowered and raise."""
    wide = _widened(target, inputs)
    places, sources, dtypes = ([found[k] for found in wide] for k in range(3))
    shardings = _shardings_of(target, context, inputs)

    def run(*values: Any) -> Any:
        count = len(inputs)
        widened_from = dict(zip(places, values[count:], strict=True))
        return function(values[:count], widened_from, shardings)

    avals = map(lambda i, x: context.avals_in[i].update(dtype=x), places, dtypes)
    context = context.replace(avals_in=[*context.avals_in, *avals])
    lowered = mlir.lower_fun(run, multiple_results=True)
    here: Any = ir.InsertionPoint.current
    block, body = here.block, context.module_context.module.body
    counts = len(block.operations), len(body.operations)
    try:
        return lowered(context, *inputs, *sources)
    except Exception:
        # The lowered operations are not used, and a half-made function would be no
        # program.
        for made in reversed(list(block.operations)[counts[0] :]):
            made.erase()
        for made in list(body.operations)[counts[1] :]:
            if not _is_finished(made):
                context.module_context.symbol_table.erase(made)
        raise


def _widened(target: Target, inputs: Sequence[Any]) -> list[tuple[int, Any, Any]]:
    """Return the inputs that were widened: their indices, and `widened_from`."""
    if target.platform not in PLATFORMS:
        return []
    wide = [(i, *found) for i, x in enumerate(inputs) if (found := widened_from(x))]
    if target.platform == "tpu":  # no kernel there reads float16
        wide = [found for found in wide if found[2] != "float16"]
    return wide


def _shardings_of(
    target: Target, context: Any, inputs: Sequence[Any]
) -> dict[int, NamedSharding]:
    """Return the shardings of inputs that are arguments of the program, by index."""
    # Types say them, or they may be others.
    is_typed = any(aval.sharding.mesh.explicit_axes for aval in context.avals_in)
    is_other = is_typed or target.is_within_shard_map or target.is_exported
    if target.device_count == 1 or is_other or target.platform not in PLATFORMS:
        return {}
    shardings = {}
    for i, value in enumerate(inputs):
        sizes, spec = sharding_of(value) or ({}, ())
        if sizes and (mesh := _mesh_with(sizes)) is not None:
            shardings[i] = NamedSharding(mesh, PartitionSpec(*spec))
    return shardings


def _is_finished(operation: Any) -> bool:
    """Return whether a function returns; what is none does not have to."""
    blocks = [block for region in operation.regions for block in region.blocks]
    if operation.operation.name != "func.func" or not blocks:
        return True
    last = list(blocks[-1].operations)[-1:]
    return bool(last) and last[0].operation.name == "func.return"


def _mesh_with(sizes: Mapping[str, int]) -> AbstractMesh | None:
    """Return the mesh that `shard_map` can use, with axes of these sizes.

    None if the context has another mesh, which `shard_map` would have to use.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:  # it may know the kind of device
        types = (AxisType.Auto,) * len(sizes)
        return mesh.update(tuple(sizes.values()), tuple(sizes), types)
    # The text of a sharding leaves out axes of size 1.
    shape = [(name, n) for name, n in mesh.shape.items() if n > 1 or name in sizes]
    return mesh if shape == list(sizes.items()) else None


batching.fancy_primitive_batchers[_call] = _batched
ad.primitive_jvps[_call] = _jvp
# Not cacheable: JAX would lower it within a function, which hides the conversions. And
# one rule for all platforms, because JAX fails to choose among such rules in a program
# for several platforms.
mlir.register_lowering(_call, _lower, cacheable=False)
