"""Keep the large arrays of an optimizer state in the memory of the host."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_leaves_with_path

from optax_mp._jax._arrays import (
    HOST_KIND,
    KNOWS_MEMORIES,
    bytes_on_device,
    compiles,
    has_tracers,
    is_on_host,
    is_traced,
    kinds_of_memory,
    split_traced,
    to_host,
    with_explicit_memory_kind,
)
from optax_mp._jax._jaxpr import NOT_TRACEABLE, TracedCall
from optax_mp._warnings import warn
from optax_mp.devices._shardings import like_params
from optax_mp.trees._descriptions import place_like_params, spread_shardings
from optax_mp.trees._tree import copy_shared, describe, is_array, spell
from optax_mp.wrappers._context import (
    Choice,
    Plan,
    Transformation,
    context_of,
    with_context,
    without_context,
)
from optax_mp.wrappers._inner import as_transformation
from optax_mp.wrappers._mistakes import check_whole_number

_CALLER = "offload"


def offload(
    inner: optax.GradientTransformation,
    *,
    memory_kind: str | None = "pinned_host",
    chunk_bytes: int = 2**26,
    min_size: int = 2**16,
    param_shardings: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Keep the large arrays of an optimizer's state in the memory of the host.

    The device then holds params, gradients, and a part of the state at a time.
    Elementwise rules run chunk by chunk: a chunk is copied to the device, updated, and
    copied back. If a rule needs a whole array, as Muon's products and the norms of LAMB
    do, that leaf is copied whole. The results are `inner`'s own, except that
    XLA may contract the same operations differently. The structure of the state is the
    same as without `offload`.

    - Put it around all other transformations:
      `offload(dynamic_loss_scale(mixed_precision(tx)))`. A loss scale around `offload`
      gives the same numbers, but its unscaled gradients are whole float32 arrays on
      the device. `optax.MultiSteps` around it does not compile for TPUs, because it
      chooses between whole arrays in host memory.
    - Put the whole step into one `jax.jit`, and donate the params and the state:
      otherwise each step copies all of the state within host memory. The step must
      return them in the order it takes them. JAX matches outputs with donated
      inputs by shape and dtype, in order. With another order it may write an
      array of the device into host memory, and on CPUs the process then aborts.
    - If you pass `out_shardings` for the state, give them its `memory_kind`. Otherwise
      the state moves to the device; with a `SingleDeviceSharding` even without a
      warning. `memory_report` of the new state shows it.
    - A step that a loss scale directly around `offload` skips copies nothing. With a
      chain or `MultiSteps` of optax between the two, it copies all of the state.
    - `take_step` steps the params chunk by chunk as well, and makes no updates, unless
      a transform of optax is around `offload`.
    - L-BFGS needs `jax.value_and_grad` in the step: JAX cannot run
      `optax.value_and_grad_from_state`, which reads gradients in host memory.
    - There is no `jax.vmap` of, and no gradient through, a step with arrays in host
      memory: JAX has no rules for them.
    - Under `jit`, params that are sharded over several devices need `param_shardings`
      for chunks; without it each leaf is copied as a whole. With explicit sharding,
      within `jax.shard_map` and within `zero1` nothing is needed.

    Args:
        inner: any optax optimizer or chain.
        memory_kind: `"pinned_host"`; with None, `offload` has no effect.
        chunk_bytes: how many bytes of the state are on the device at a time. Codes
            count as numbers of 32 bits, which they become there. In a step a chunk is
            of one param, and XLA may copy a second chunk meanwhile; in `init` it is one
            or several whole arrays.
        min_size: arrays with fewer elements stay on the device.
        param_shardings: how the params are sharded under `jit`: a tree of shardings
            like the params, or a prefix of one, such as
            `jax.tree.map(lambda p: p.sharding, params)`. The state of a param must be
            sharded as the param is, as `init` makes it.

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
    inner = as_transformation(inner, _CALLER)
    min_size = check_whole_number("offload: `min_size`", min_size)
    chunk_bytes = check_whole_number("offload: `chunk_bytes`", chunk_bytes)
    if memory_kind is None:
        return inner
    check_kind(memory_kind, _CALLER)
    plan = Plan(min_size, chunk_bytes)

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        if compiles() and not has_tracers((updates, state, params, extra_args)):
            warn(
                "offload: expected `update` within `jax.jit`, got one outside, which "
                "copies all of the state; use `jax.jit(step, donate_argnums=...)`."
            )
            given = (updates, state, params), extra_args
            return TracedCall.of(lambda x: update_fn(*x[0], **x[1]), given).run()
        from optax_mp.engine import run_on_device, step_from_host

        _warn_if_on_device(state, min_size)
        context = context_of(extra_args)
        traced, known = split_traced(without_context(extra_args))
        if isinstance(inner, Transformation):
            known = with_context(known, is_in_take_step=True)

        def step(given: Any, kept: Any) -> tuple[Any, Any]:
            grads, params, traced = given
            return inner.update(grads, kept, params, **traced, **known)

        def step_between(given: Any, kept: Any, proceed: Choice = True) -> Any:
            updates, new = run_on_device(step, given, kept, proceed)
            return updates, on_host(new, min_size)

        given, state = (updates, params, traced), on_host(state, min_size)
        if context.is_in_take_step:
            return run_on_device(step, given, state, context.proceed)
        parts = context.part_shardings
        of_params = spread_shardings(params, param_shardings, _CALLER, parts)
        known_plan = plan._replace(shardings=like_params(state, params, of_params))
        result = step_from_host(step_between, given, state, known_plan, context.proceed)
        return result or step_between(given, state, context.proceed)

    init_fn = partial(_init, inner, plan)
    made = Transformation.around(_CALLER, inner, init_fn, update_fn, is_leafwise=False)
    made.offloaded = plan, param_shardings
    return made


def check_kind(memory_kind: Any, caller: str) -> None:
    """Raise for an unsupported `memory_kind`."""
    if memory_kind != HOST_KIND:
        raise ValueError(
            f"{caller}: expected `memory_kind` to be {HOST_KIND!r}, or None for no "
            f"effect, got {memory_kind!r}."
        )
    if not KNOWS_MEMORIES:
        raise RuntimeError(
            f"{caller}: expected JAX 0.10 or later, got JAX {jax.__version__}; update "
            "JAX, or pass `memory_kind=None` for no effect."
        )


def check_memory_of(params: Any, caller: str) -> None:
    """Raise if a param is on a device that has no memory of the host."""
    for path, leaf in tree_leaves_with_path(params):
        if isinstance(leaf, jax.Array) and not is_traced(leaf):
            device = min(leaf.devices(), key=lambda device: device.id)
            if HOST_KIND not in (kinds := kinds_of_memory(device)):
                raise ValueError(
                    f"{caller}: expected param {spell(path)} on a device with the "
                    f"memory {HOST_KIND!r}, got {device} of the {device.platform!r} "
                    f"backend with {kinds}; pass `memory_kind=None` for no effect."
                )


def _is_misplaced(x: Any, min_size: int) -> bool:
    """Return whether an array of a state belongs in host memory, and is not there."""
    is_number = is_array(x) and jnp.issubdtype(x.dtype, jnp.number)
    return is_number and x.size >= min_size and not is_on_host(x)


def on_host(state: Any, min_size: int) -> Any:
    """Return a state with its large arrays in host memory."""
    return jax.tree.map(
        lambda x: to_host(x) if _is_misplaced(x, min_size) else x, state
    )


def _init(inner: Any, plan: Plan, params: Any) -> Any:
    """Return the state of `inner` with its large arrays in host memory.

    They are computed a few at a time, so that the device never holds all of them.
    """
    check_memory_of(params, _CALLER)
    # In one program XLA does not free an array once it is copied. For 24 leaves of 8192
    # x 8192 on a TPU v5e it would take 2.5 GiB of temporaries for AdamW with masters,
    # and 7.3 for compact state of 4.7 GiB; by loops of one iteration 11.8 and 13.5.

    def init(params: Any) -> Any:
        return place_like_params(inner.init(params), params)

    if has_tracers(params):
        return on_host(init(params), plan.min_size)
    try:
        traced = TracedCall.of(init, params)
    except NOT_TRACEABLE:
        # A rule that looks at the numbers of the params.
        return on_host(inner.init(params), plan.min_size)
    from optax_mp.engine import compute_in_groups

    groups = _groups(traced.closed.out_avals, plan)
    state = compute_in_groups(traced, groups, lambda x: on_host(x, plan.min_size))
    state = jax.tree.map(with_explicit_memory_kind, state)
    # `jit` does not copy arrays that it hands on as they are.
    return copy_shared(state, params)


def _groups(avals: Sequence[Any], plan: Plan) -> list[list[int]]:
    """Return the outputs of `init` in groups: all small ones, then chunk by chunk."""
    groups: list[list[int]] = [[]]
    room = 0
    for i, aval in enumerate(avals):
        if not _is_misplaced(aval, plan.min_size):
            groups[0].append(i)
            continue
        if (size := bytes_on_device(aval)) > room:
            groups.append([])
            room = plan.chunk_bytes
        groups[-1].append(i)
        room -= size
    return groups


def _warn_if_on_device(state: Any, min_size: int) -> None:
    """Warn if a large array of a state is not in host memory."""
    for path, leaf in tree_leaves_with_path(state):
        if _is_misplaced(leaf, min_size):
            warn(
                f"offload: expected {spell(path)} of the state in host memory, got "
                f"{describe(leaf)} in device memory, so this step moves it; restore "
                "checkpoints into `tx.init(params)`, give shardings and descriptions "
                '`memory_kind="pinned_host"`, move what a loop or a branch carries '
                "before it, with `jax.device_put`, and put no `offload` into another."
            )
            return
