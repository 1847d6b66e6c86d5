"""gradient_accumulator: sums of gradients over the micro-batches of one step."""

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_leaves_with_path
from jax.typing import DTypeLike

from optax_mp._dtypes import at_least_float32, check_available, floating_dtype
from optax_mp._random_numbers import (
    check_seed,
    round_stochastically,
    rounding_keys,
)
from optax_mp._warnings import count_event
from optax_mp.trees._tree import PyTree, all_finite, describe, is_floating, spell
from optax_mp.wrappers._mistakes import check_bool

_CALLER = "gradient_accumulator"


class AccumulatedGradients(NamedTuple):
    """The result of `gradient_accumulator` over all micro-batches.

    Attributes:
        grads: their mean, or their sum, in the dtype of the accumulator.
        dropped_count: int32 scalar, how many micro-batches were dropped because their
            gradients were not finite.

    Example:
        >>> import jax.numpy as jnp
        >>> from optax_mp.compact import AccumulatedGradients
        >>> AccumulatedGradients({"w": jnp.ones(2)}, jnp.int32(0)).grads["w"].tolist()
        [1.0, 1.0]
    """

    grads: PyTree
    dropped_count: jax.Array


def gradient_accumulator(
    dtype: DTypeLike = jnp.float32,
    *,
    use_grad_mean: bool = True,
    seed: int | jax.Array | None = None,
) -> optax.microbatching.Accumulator:
    """Sum gradients over micro-batches in float32: for `optax.microbatch`.

    Optax's own accumulators sum in the dtype of the gradients: bfloat16 sums lose what
    is under 1/256 of them. This one adds them to a sum in `dtype`. In bfloat16 each
    addition is rounded stochastically: 2 bytes per weight, and right on average.

    A micro-batch whose gradients are not all finite is dropped, and counted. Hand the
    count on to `tx.update` as `dropped_count`: a dynamic loss scale then does not grow.
    If all are dropped, the gradients are NaN, so that a loss scale skips the step and
    shrinks.

    For `optax.microbatching.micro_grad` the gradients of a micro-batch's examples are
    summed in float32 first.

    Args:
        dtype: of the sums and of the result: float32, float64 or bfloat16.
        use_grad_mean: whether to return the mean over the micro-batches that were not
            dropped; otherwise their sum.
        seed: for the random numbers that bfloat16 needs. Pass the number of the step,
            so that each step draws others.

    Returns:
        The accumulator. Its result is `AccumulatedGradients`.

    Raises:
        ValueError: if `dtype` is none of these; when used, if a leaf is not floating.
        TypeError: if `seed` is no integer, or missing for bfloat16, or `use_grad_mean`
            is not a bool.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> masters = optax_mp.mixed_precision(optax.sgd(0.1))
        >>> tx = optax_mp.dynamic_loss_scale(masters, init_scale=256.0)
        >>> params = {"w": jnp.ones(4, jnp.float16)}
        >>> opt_state = tx.init(params)
        >>> def loss(params, x):
        ...     return jnp.mean((x @ params["w"]).astype(jnp.float32))
        >>> grad = optax.microbatch(
        ...     optax_mp.value_and_grad(loss),
        ...     argnums=2,
        ...     microbatch_size=2,
        ...     accumulator=optax_mp.gradient_accumulator(),
        ... )
        >>> x = jnp.ones((8, 4), jnp.float16).at[5].set(jnp.inf)
        >>> (value, grads), dropped_count = grad(opt_state, params, x)
        >>> float(value), grads["w"].dtype.name, int(dropped_count)
        (4.0, 'float32', 1)
        >>> updates, opt_state = tx.update(
        ...     grads, opt_state, params, dropped_count=dropped_count
        ... )
        >>> round(float(updates["w"][0]), 3), float(opt_state.scale)
        (-0.1, 256.0)
    """
    use_grad_mean = check_bool(f"{_CALLER}: `use_grad_mean`", use_grad_mean)
    argument = f"{_CALLER}: `dtype`"
    dtype = check_available(floating_dtype(dtype, argument), argument)
    if dtype not in (jnp.bfloat16, jnp.float32, jnp.float64):
        raise ValueError(
            f"{_CALLER}: expected `dtype` to be float32, float64 or bfloat16, whose "
            f"range holds sums of gradients, got {dtype.name}; pass float32."
        )
    # Sums in bfloat16 are rounded stochastically.
    or_none = "" if dtype == jnp.bfloat16 else ", or None"
    check_seed(seed, _CALLER, or_none, "; pass the number of the step")
    wide = at_least_float32(dtype)

    def as_sums(tree: PyTree, index: Any) -> PyTree:
        """Return wide numbers in the dtype of sums."""
        if dtype == wide:
            return tree
        leaves, treedef = jax.tree.flatten(tree)
        keys = rounding_keys(len(leaves), cast(Any, seed), index)
        rounded = map(lambda x, key: round_stochastically(x, dtype, key), leaves, keys)
        return treedef.unflatten([x.astype(dtype) for x in rounded])

    def init(grads: PyTree) -> Any:
        for path, leaf in tree_leaves_with_path(grads):
            if not is_floating(leaf):
                raise ValueError(
                    f"{_CALLER}: expected leaf {spell(path)} to be a floating array, "
                    f"got {describe(leaf)}; give each part of the result its own "
                    "accumulator, as in `(optax.microbatching.AccumulationType.SUM, "
                    f"{_CALLER}())`."
                )
        sums = jax.tree.map(lambda g: jnp.zeros_like(g, dtype=dtype), grads)
        # Under shard_map the type of a count says that it differs from rank to rank.
        zero = all_finite(sums).astype(jnp.int32) * 0
        return sums, zero, zero

    def update(carry: Any, grads: PyTree, index: Any) -> Any:
        old, kept_count, dropped_count = carry
        finite = all_finite(grads)
        new = jax.tree.map(lambda x, g: x.astype(wide) + g.astype(wide), old, grads)
        # Not by `lax.cond`, which would keep the old sums beside the new ones.
        sums = jax.tree.map(partial(jnp.where, finite), as_sums(new, index), old)
        return sums, kept_count + finite, dropped_count + ~finite

    def finalize(carry: Any) -> AccumulatedGradients:
        sums, kept_count, dropped_count = carry
        count_event("drops micro-batches")
        divisor = kept_count if use_grad_mean else jnp.minimum(kept_count, 1)
        # 0 * inf is NaN. Not a division: see `scaling._unscale.divide`.
        factor = 1 / divisor.astype(wide)
        grads = jax.tree.map(lambda x: x.astype(wide) * factor, sums)
        grads = as_sums(grads, kept_count + dropped_count)
        return AccumulatedGradients(grads, dropped_count)

    def aggregate(grads: PyTree) -> PyTree:
        reduce = jnp.mean if use_grad_mean else jnp.sum
        return jax.tree.map(lambda g: reduce(g, axis=0, dtype=wide), grads)

    return optax.microbatching.Accumulator(init, update, finalize, aggregate)
