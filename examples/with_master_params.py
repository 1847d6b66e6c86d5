"""The smallest form of masters, as it could be `optax.contrib.with_master_params`.

It imports JAX and optax only. `docs/design/rfc.md` proposes it to optax;
`tests/project/test_rfc.py` shows that it is `optax_mp.mixed_precision` bit for bit.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike


class WithMasterParamsState(NamedTuple):
    """State of `with_master_params`.

    Attributes:
        master_params: a tree like the params, with a master for each leaf that is
            narrower than `master_dtype`, and `MaskedNode()` for every other leaf.
        inner_state: the state of the inner optimizer, over the masters.
    """

    master_params: optax.Params
    inner_state: optax.OptState


def with_master_params(
    inner: optax.GradientTransformation, master_dtype: DTypeLike = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """Run `inner` on high-precision masters of low-precision params.

    A bfloat16 weight of 1.0 ignores every update of less than 0.002: the sum is rounded
    back to 1.0. Here updates add up in a master in the optimizer state, and the param
    follows as the master rounded to the param's dtype. The inner optimizer sees
    masters, gradients and state in `master_dtype`.

    A leaf that is as wide as `master_dtype` or wider, or not floating, has no master
    and is passed to `inner` as it is. Updates have the dtype of the gradients, and
    `optax.apply_updates` applies them. Put this wrapper around a chain, or last in one.

    Args:
        inner: the optimizer to wrap.
        master_dtype: the dtype of masters.

    Returns:
        A :class:`optax.GradientTransformationExtraArgs`.

    Example:
        >>> params = jnp.ones(2, jnp.bfloat16)
        >>> tx = with_master_params(optax.sgd(1.0))
        >>> state = tx.init(params)
        >>> for _ in range(100):
        ...     grads = jnp.full(2, 0.001, jnp.bfloat16)
        ...     updates, state = tx.update(grads, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> params.dtype.name, round(float(params[0]), 2)
        ('bfloat16', 0.9)

    References:
        Micikevicius et al., `Mixed Precision Training
        <https://arxiv.org/abs/1710.03740>`_, 2018
    """
    inner = optax.with_extra_args_support(inner)
    master_dtype = jnp.dtype(master_dtype)

    def init_master(param: Any) -> Any:
        if not _is_narrower(param, master_dtype):
            return optax.MaskedNode()
        if isinstance(param, jax.ShapeDtypeStruct):
            return param.update(dtype=master_dtype)
        return jnp.asarray(param, master_dtype)

    def init_fn(params: optax.Params) -> WithMasterParamsState:
        stored = jax.tree.map(init_master, params)
        return WithMasterParamsState(stored, inner.init(_masters(params, stored)))

    def update_fn(
        updates: optax.Updates,
        state: WithMasterParamsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, WithMasterParamsState]:
        if params is None:
            raise ValueError("with_master_params: call `update` with `params`.")
        masters = _masters(params, state.master_params)
        grads = jax.tree.map(_cast_like, updates, masters)
        changes, inner_state = inner.update(
            grads, state.inner_state, masters, **extra_args
        )

        def advance(_: Any, stored: Any, change: Any) -> Any:
            if isinstance(stored, optax.MaskedNode):
                return stored
            return optax.apply_updates(stored, change)

        def update(param: Any, master: Any, change: Any, grad: Any) -> Any:
            # To the param as it is, not to the last master rounded: an update in 16
            # bits can miss its target, and the next one makes up for it.
            if not isinstance(master, optax.MaskedNode):
                change = _difference(_round(master, param.dtype), param)
            return _cast_like(change, grad)

        new_masters = jax.tree.map(advance, params, state.master_params, changes)
        updates = jax.tree.map(update, params, new_masters, changes, updates)
        return updates, WithMasterParamsState(new_masters, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _masters(params: optax.Params, stored: optax.Params) -> optax.Params:
    """Return what `inner` sees as params: masters, and leaves that have none."""
    return jax.tree.map(
        lambda param, master: param if isinstance(master, optax.MaskedNode) else master,
        params,
        stored,
    )


def _is_narrower(param: Any, dtype: jnp.dtype) -> bool:
    is_floating = jnp.issubdtype(param.dtype, jnp.floating)
    return is_floating and jnp.finfo(param.dtype).bits < jnp.finfo(dtype).bits


def _cast_like(x: jax.Array, like: jax.Array) -> jax.Array:
    both_float = all(jnp.issubdtype(a.dtype, jnp.floating) for a in (x, like))
    return x.astype(like.dtype) if both_float else x


def _round(master: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Round to the values of a narrower dtype; the result has the master's dtype.

    By arithmetic, because XLA may drop a cast to 16 bits and back.
    """
    info, wide = jnp.finfo(dtype), jnp.finfo(master.dtype)
    # A finite master stays finite. An infinite one, of a mask, stays infinite.
    clipped = jnp.clip(master, -float(info.max), float(info.max))
    master = jnp.where(jnp.isfinite(master), clipped, master)
    rounded = jax.lax.reduce_precision(master, wide.nexp, info.nmant)
    if info.smallest_normal <= wide.smallest_normal:
        return rounded
    # Subnormals, as float16 has them, are multiples of the smallest.
    step = float(info.smallest_subnormal)
    is_subnormal = jnp.abs(master) < float(info.smallest_normal)
    return jnp.where(is_subnormal, jnp.round(master / step) * step, rounded)


def _difference(target: jax.Array, param: jax.Array) -> jax.Array:
    """Return what to add to a param; nothing to an infinite one, as of a mask."""
    change = target - param.astype(target.dtype)
    return jnp.where(jnp.isfinite(param) | jnp.isnan(target), change, 0)


def main() -> None:
    """Train a weight by updates that bfloat16 alone ignores."""
    for name, wrap in {"plain": lambda tx: tx, "masters": with_master_params}.items():
        tx = wrap(optax.sgd(1.0))
        params = jnp.ones(2, jnp.bfloat16)
        state = tx.init(params)
        for _ in range(100):
            grads = jnp.full(2, 0.001, jnp.bfloat16)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        print(f"{name}: 1.0 after 100 updates of -0.001 is {float(params[0])}")
        print(f"    state: {[x.dtype.name for x in jax.tree.leaves(state)]}")


if __name__ == "__main__":
    main()
