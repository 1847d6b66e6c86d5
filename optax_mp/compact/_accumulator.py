"""gradient_accumulator: sums of gradients over the micro-batches of one step."""

from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_leaves_with_path
from jax.typing import DTypeLike

from optax_mp._dtypes import at_least_float32, check_available, floating_dtype
from optax_mp._tree import (
    PyTree,
    all_finite,
    describe,
    is_array,
    is_floating,
    is_inexact,
    spell,
    summarize,
)
from optax_mp.compact._random_numbers import round_stochastically, rounding_keys

_CALLER = "gradient_accumulator"


class AccumulatedGradients(NamedTuple):
    """What `gradient_accumulator` makes of the gradients of all micro-batches.

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


class _Sums(NamedTuple):
    """The sums over the micro-batches so far, and how many were kept and dropped."""

    sums: PyTree
    kept_count: jax.Array
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
    count on to `tx.update` as `dropped_count`: a dynamic loss scale then shrinks, as
    after a skipped step. If all are dropped, the gradients are NaN, so that a loss
    scale skips the step.

    For `optax.microbatching.micro_grad` the gradients of a micro-batch's examples are
    summed in float32 first.

    Args:
        dtype: of the sums and of the result: float32, float64 or bfloat16. Complex
            gradients keep their dtype.
        use_grad_mean: whether to return the mean over the micro-batches that were not
            dropped; otherwise their sum.
        seed: for the random numbers that bfloat16 needs. Pass the number of the step,
            so that each step draws others.

    Returns:
        The accumulator. Its result is `AccumulatedGradients`.

    Raises:
        ValueError: if `dtype` is none of these; when used, if a leaf is neither
            floating nor complex.
        TypeError: if `seed` is no integer, or missing for bfloat16.

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
        (-0.1, 128.0)
    """
    dtype = _check_settings(dtype, seed)
    is_narrow = dtype == jnp.bfloat16

    def rounded(tree: PyTree, like: PyTree, index: Any) -> PyTree:
        """Return wide numbers in the dtypes of sums."""
        leaves, treedef = jax.tree.flatten(tree)
        targets = [x.dtype for x in jax.tree.leaves(like)]
        if is_narrow:
            keys = rounding_keys(len(leaves), seed, index)
            leaves = [
                round_stochastically(x, dtype, key) if is_floating(x) else x
                for x, key in zip(leaves, keys, strict=True)
            ]
        pairs = zip(leaves, targets, strict=True)
        return treedef.unflatten([x.astype(target) for x, target in pairs])

    def init(grads: PyTree) -> _Sums:
        _check_leaves(grads)
        sums = jax.tree.map(
            lambda g: jnp.zeros_like(g, dtype=dtype if is_floating(g) else g.dtype),
            grads,
        )
        # Under shard_map the type of a count says that it differs from rank to rank.
        zero = all_finite(sums).astype(jnp.int32) * 0
        return _Sums(sums, zero, zero)

    def update(carry: _Sums, grads: PyTree, index: Any) -> _Sums:
        finite = all_finite(grads)
        sums = jax.tree.map(lambda x, g: _widen(x) + _widen(g), carry.sums, grads)
        sums = rounded(sums, carry.sums, index)
        # Not by `lax.cond`, which would keep the old sums beside the new ones.
        sums = jax.tree.map(lambda x, old: jnp.where(finite, x, old), sums, carry.sums)
        count = finite.astype(jnp.int32)
        return _Sums(sums, carry.kept_count + count, carry.dropped_count + 1 - count)

    def finalize(carry: _Sums) -> AccumulatedGradients:
        kept, dropped = carry.kept_count, carry.dropped_count
        divisor = kept if use_grad_mean else jnp.minimum(kept, 1)
        # 0 * inf is NaN. Not a division: see `divide`.
        factor = 1 / divisor.astype(jnp.float32)
        grads = jax.tree.map(
            lambda x: _widen(x) * factor.astype(_widen(x).dtype), carry.sums
        )
        return AccumulatedGradients(rounded(grads, carry.sums, kept + dropped), dropped)

    def aggregate(grads: PyTree) -> PyTree:
        reduce = jnp.mean if use_grad_mean else jnp.sum
        return jax.tree.map(lambda g: reduce(_widen(g), axis=0), grads)

    return optax.microbatching.Accumulator(init, update, finalize, aggregate)


def _check_settings(dtype: Any, seed: Any) -> jnp.dtype:
    """Return the dtype of sums, or raise."""
    argument = f"{_CALLER}: `dtype`"
    dtype = check_available(floating_dtype(dtype, argument), argument)
    if dtype not in (jnp.bfloat16, jnp.float32, jnp.float64):
        raise ValueError(
            f"{argument} is {dtype.name}, expected float32, float64 or bfloat16, whose "
            "range holds sums of gradients; pass float32."
        )
    is_integer = isinstance(seed, Integral)
    if is_array(seed):
        is_integer = seed.shape == () and jnp.issubdtype(seed.dtype, jnp.integer)
    if not (is_integer or seed is None and dtype != jnp.bfloat16):
        raise TypeError(
            f"{_CALLER}: `seed` is {summarize(seed)}, expected an integer, traced or "
            "not, for sums in bfloat16, which are rounded stochastically; pass the "
            "number of the step."
        )
    return dtype


def _check_leaves(grads: PyTree) -> None:
    for path, leaf in tree_leaves_with_path(grads):
        if not is_inexact(leaf):
            raise ValueError(
                f"{_CALLER}: leaf {spell(path)} is {describe(leaf)}, expected floating "
                "or complex arrays; give each part of the result its own accumulator, "
                "as in `accumulator=(optax.microbatching.AccumulationType.SUM, "
                f"optax_mp.{_CALLER}())`."
            )


def _widen(x: jax.Array) -> jax.Array:
    return x.astype(at_least_float32(x.dtype))
