"""Keep the large arrays of an optimizer state in the memory of the host."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.tree_util import tree_leaves_with_path

from optax_mp.core._warnings import warn
from optax_mp.core.jax_api import _arrays
from optax_mp.core.jax_api._contact import varying_axes
from optax_mp.core.jax_api._jaxpr import TracedCall, is_dynamic
from optax_mp.core.trees import _tree
from optax_mp.core.trees._descriptions import place_like_params
from optax_mp.core.wrappers import _protocol, _updates
from optax_mp.core.wrappers._mistakes import check_whole_number

_CALLER = "offload"


def offload(
    inner: optax.GradientTransformation,
    *,
    memory_kind: str | None = "pinned_host",
    min_size: int = 2**16,
) -> optax.GradientTransformationExtraArgs:
    """Keep the large arrays of an optimizer's state in the memory of the host.

    Between steps the device then holds only params and small arrays. A step copies the
    state to the device, updates it there, and copies it back. The device needs room for
    all of it at the end of the step, when the activations are freed, and XLA may hold
    the old and the new state at once. So this saves memory where activations are far
    larger than the state. The results are those of `inner`, and the state has the same
    structure.

    - Put it around all other transformations:
      `offload(dynamic_loss_scale(mixed_precision(tx)))`. A loss scale around `offload`
      gives the same numbers. `optax.MultiSteps` around it does not compile for TPUs,
      because it chooses between whole arrays in host memory.
    - Put the whole step into one `jax.jit`, and donate the params and the state:
      otherwise each step copies all of the state within host memory. The step must
      return them in the order it takes them. JAX matches outputs with donated
      inputs by shape and dtype, in order. With another order it may write an
      array of the device into host memory, and on CPUs the process then aborts.
    - If you pass `out_shardings` for the state, give them its `memory_kind`. Otherwise
      the state moves to the device; with a `SingleDeviceSharding` even without a
      warning. `memory_report` of the new state shows it.
    - L-BFGS needs `jax.value_and_grad` in the step: JAX cannot run
      `optax.value_and_grad_from_state`, which reads gradients in host memory.
    - A step with arrays in host memory cannot run under `jax.vmap` or be
      differentiated: JAX has no rules for that.

    Args:
        inner: any optax optimizer or chain.
        memory_kind: `"pinned_host"`; with None, `offload` has no effect.
        min_size: arrays with fewer elements stay on the device.

    Returns:
        The transformation.

    Raises:
        ValueError: if `memory_kind` is another one; at `init`, if the device has no
            such memory.
        RuntimeError: if this version of JAX cannot move arrays between memories.
        TypeError: if `inner` is not a gradient transformation.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> has_kinds = jax.__version_info__ >= (0, 10)
        >>> tx = optax_mp.offload(
        ...     optax_mp.mixed_precision(optax.adamw(0.1)),
        ...     memory_kind="pinned_host" if has_kinds else None,
        ... )
        >>> params = {"w": jnp.ones((512, 256), jnp.bfloat16)}
        >>> opt_state = tx.init(params)
        >>> def step(params, opt_state, grads):
        ...     updates, opt_state = tx.update(grads, opt_state, params)
        ...     return optax.apply_updates(params, updates), opt_state
        >>> step = jax.jit(step, donate_argnums=(0, 1))
        >>> params, opt_state = step(params, opt_state, {"w": jnp.ones((512, 256))})
        >>> float(params["w"][0, 0])
        0.8984375
    """
    inner = _protocol.as_transformation(inner, _CALLER)
    min_size = check_whole_number("offload: `min_size`", min_size)
    if memory_kind is None:
        return inner
    _check_kind(memory_kind)

    def init_fn(params: optax.Params) -> Any:
        _check_memory_of(params)

        def init_on_host(params: optax.Params) -> Any:
            state = place_like_params(inner.init(params), params)
            return _large_to_host(state, min_size)

        # One program of `jit` puts counts on the mesh of the params, where a step
        # returns them: it would be compiled once more for its second call.
        state = TracedCall.of(init_on_host, params).run()
        # `jit` does not copy arrays that it hands on unchanged.
        return _tree.copy_shared(jax.tree.map(with_explicit_memory_kind, state), params)

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        if _arrays.compiles() and not has_tracers((updates, state, params, extra_args)):
            warn(
                "offload: expected `update` within `jax.jit`, got one outside, which "
                "copies the whole state; use `jax.jit(step, donate_argnums=...)`."
            )
            given = (updates, state, params), extra_args
            return TracedCall.of(lambda x: update_fn(*x[0], **x[1]), given).run()
        _warn_if_on_device(state, min_size)
        on_device = _to_device(state, updates)
        args = updates, on_device, params
        updates, new = _protocol.update_inner(inner, _CALLER, *args, **extra_args)
        if jax.tree.structure(new) == jax.tree.structure(state):
            move_back = partial(_move_back, _protocol.context_of(extra_args).proceed)
            new = jax.tree.map(move_back, new, on_device, state)
        return updates, _large_to_host(new, min_size)

    return _protocol.Transformation.of(_CALLER, init_fn, update_fn)


def _check_kind(memory_kind: Any) -> None:
    """Raise for an unsupported `memory_kind`."""
    if memory_kind != _arrays.HOST_KIND:
        raise ValueError(
            f"offload: expected `memory_kind` to be {_arrays.HOST_KIND!r}, or None for "
            f"no effect, got {memory_kind!r}."
        )
    if not _arrays.KNOWS_MEMORIES:
        raise RuntimeError(
            f"offload: expected JAX 0.10 or later, got JAX {jax.__version__}; update "
            "JAX, or pass `memory_kind=None` for no effect."
        )


def _check_memory_of(params: Any) -> None:
    """Raise if a param is on a device that has no memory of the host."""
    for path, leaf in tree_leaves_with_path(params):
        if isinstance(leaf, jax.Array) and not _arrays.is_traced(leaf):
            device = min(leaf.devices(), key=lambda device: device.id)
            if _arrays.HOST_KIND not in (kinds := kinds_of_memory(device)):
                raise ValueError(
                    f"offload: expected param {_tree.spell(path)} on a device with "
                    f"memory {_arrays.HOST_KIND!r}, got {device} of the "
                    f"{device.platform!r} backend with {kinds}; pass "
                    "`memory_kind=None`."
                )


def _is_misplaced(x: Any, min_size: int) -> bool:
    """Return whether an array of a state belongs in host memory, and is not there."""
    is_number = _arrays.is_array(x) and jnp.issubdtype(x.dtype, jnp.number)
    return is_number and x.size >= min_size and not _arrays.is_on_host(x)


def _large_to_host(state: Any, min_size: int) -> Any:
    """Return a state with its large arrays in host memory."""
    return jax.tree.map(
        lambda x: _arrays.to_host(x) if _is_misplaced(x, min_size) else x, state
    )


def _to_device(state: Any, updates: Any) -> Any:
    """Return a state on the device, copied there once the gradients are known.

    XLA copies as early as it can, and all of the state would be on the device beside
    the activations: for 8 layers of 4096 x 4096 on a TPU v5e, 3.3 GiB in place of 2.5.
    """
    leaves, treedef = jax.tree.flatten(state)
    places = [i for i, x in enumerate(leaves) if _arrays.is_on_host(x)]
    grads = list(filter(is_dynamic, jax.tree.leaves(updates)))
    held = [leaves[i] for i in places]
    _, held = lax.optimization_barrier((grads, held))
    for i, x in zip(places, held, strict=True):
        leaves[i] = (
            _codes_to_device(x) if x.dtype.itemsize == 1 else _arrays.to_device(x)
        )
    return treedef.unflatten(leaves)


def _codes_to_device(x: jax.Array) -> jax.Array:
    """Return an array of 8-bit numbers in the memory of its device.

    XLA for TPUs stores them there in other tiles than on the host, and fails to compile
    the copy ("Source and destination buffers in CopyDone", libtpu 0.0.42), except in a
    loop. The loop has one iteration. XLA cannot know that, or it would remove the loop.
    """

    def in_a_loop(x: jax.Array) -> jax.Array:
        start = _arrays.reshard_like(jnp.zeros(x.shape, x.dtype), x)
        if axes := varying_axes(x):
            start = lax.pcast(start, tuple(axes), to="varying")
        rounds = lax.optimization_barrier(jnp.int32(1))

        def body(k: Any, _: jax.Array) -> jax.Array:
            return _arrays.to_device(lax.optimization_barrier((k, x))[1])

        return lax.fori_loop(jnp.int32(0), rounds, body, start)

    return lax.platform_dependent(x, tpu=in_a_loop, default=_arrays.to_device)


def _move_back(proceed: _updates.Choice, new: Any, before: Any, old: Any) -> Any:
    """Return a leaf of the new state, in host memory if the old one was there.

    Args:
        proceed: whether the step is taken. If not, an array in host memory stays as it
            is here: a choice around `offload` would copy both to the device.
        new: the leaf after the step.
        before: the leaf that the step was given, on the device.
        old: the same in the memory that it was in.
    """
    if not _arrays.is_on_host(old):
        return new
    if new is before:
        return old
    return _arrays.to_host(
        new if proceed is True else _updates.select(proceed, new, before)
    )


def _warn_if_on_device(state: Any, min_size: int) -> None:
    """Warn if a large array of a state is not in host memory."""
    for path, leaf in tree_leaves_with_path(state):
        if _is_misplaced(leaf, min_size):
            warn(
                f"offload: expected {_tree.spell(path)} of the state in host memory, "
                f"got {_arrays.describe(leaf)} in device memory, which this step "
                "moves; restore into `tx.init(params)`, and give shardings a "
                "`memory_kind`."
            )
            return


def has_tracers(tree: Any) -> bool:
    """Return whether any leaf of a pytree is a tracer."""
    return any(map(_arrays.is_traced, jax.tree.leaves(tree)))


def kinds_of_memory(device: Any) -> list[str]:
    """Return the kinds of memory that a device can address."""
    return sorted(memory.kind for memory in device.addressable_memories())


def with_explicit_memory_kind(x: jax.Array) -> jax.Array:
    """Return an array with a sharding that shows its memory in descriptions of it.

    With a `SingleDeviceSharding`, the type of a `ShapeDtypeStruct`, or of an array that
    Orbax restores, does not show it.
    """
    if _arrays.is_traced(x) or not _arrays.is_on_host(x):
        return x
    if not isinstance(x.sharding, SingleDeviceSharding):
        return x
    mesh = Mesh(list(x.devices()), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=_arrays.HOST_KIND)
    return jax.device_put(x, sharding)
