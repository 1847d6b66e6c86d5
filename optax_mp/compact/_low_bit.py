"""low_bit_state: the large arrays of any optimizer's state in 8 or 16 bits."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_leaves_with_path, tree_map_with_path
from jax.typing import DTypeLike

from optax_mp._warnings import warn
from optax_mp.compact._blocks import dequantize, quantize, quantized_zeros
from optax_mp.compact._code_choice import BFLOAT16, CodeFormat, choose_codes
from optax_mp.compact._random_numbers import check_seed, rounding_keys
from optax_mp.trees._boxes import flatten_slots, is_box, put, put_resized, unbox
from optax_mp.trees._descriptions import divides_names, place_like_params
from optax_mp.trees._quantized import Code, is_quantized, new_quantized
from optax_mp.trees._states import inner_field
from optax_mp.trees._tree import PyTree, copy_shared, describe, is_floating, spell
from optax_mp.trees._typed import type_with
from optax_mp.wrappers._context import Transformation
from optax_mp.wrappers._inner import (
    as_transformation,
    check_gradients,
    check_own_state,
    update_inner,
)
from optax_mp.wrappers._mistakes import check_whole_number

_CALLER = "low_bit_state"
# So that the random numbers differ from the numbers of `stochastic_rounding` with the
# same seed.
_SALT = 1
# Elements, 4 MB in float32: below that nobody needs the memory.
_LARGE_STATE = 2**20


class LowBitState(NamedTuple):
    """State of `low_bit_state`.

    Its structure, shapes and dtypes never change.

    Attributes:
        step_count: int32 scalar, the number of updates. Stochastic rounding draws new
            random numbers at each one.
        inner_state: the state of the inner optimizer, with a `Quantized` in place of
            each large array. Its public fields, such as `hyperparams`, are attributes
            of this state.
        code_format: the settings that made the state; a class attribute, not a leaf.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jnp.ones((256, 256)), "norm": jnp.ones(256)}
        >>> state = optax_mp.low_bit_state(optax.adam(1e-3)).init(params)
        >>> nu = state.inner_state[0].nu
        >>> type(nu["w"]).__name__, nu["norm"].dtype.name
        ('Quantized', 'float32')
    """

    step_count: jax.Array
    inner_state: optax.OptState
    # Not annotated: an annotation would make a field of it, and so a leaf.
    code_format = None
    __getattr__ = inner_field


def low_bit_state(
    inner: optax.GradientTransformation,
    *,
    bits: int = 8,
    block_size: int = 32,
    dtype: DTypeLike | None = None,
    min_size: int = 4096,
    seed: int | jax.Array | None = 0,
    product_bits: int | None = None,
    column_scales: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Quantize the large float32 arrays of `inner`'s state.

    Moments, traces and accumulators are dequantized before the inner update and
    quantized after it, so `inner` can be any optimizer and computes in float32. A value
    is stored as the square root of its share of the largest value in a block of
    `block_size` neighbours. Arrays that are never negative, such as second moments, get
    unsigned codes and stay positive: a value has at least 1.5e-5 of the largest in its
    block (2.3e-10 in 16 bits). They are found by tracing the optimizer's update. If it
    cannot be traced, the arrays are stored in bfloat16.

    Columns may differ by any size. If all values of a column in a group of 128 rows are
    under a fourth of the largest in their blocks, they are stored times a power of two.
    Columns of one size keep their codes. Every matrix has such groups; they are smaller
    if shards would split them.

    Rounding is stochastic: up or down at random, right on average. A moving average
    over a thousand steps changes by a thousandth per step, less than the distance
    between two codes, and would never move if it were rounded to nearest. The random
    numbers are a hash of position, step and `seed`, so a run can be reproduced, under
    `jit` on any number of devices. (Under `shard_map` each rank counts positions in its
    own part.) An infinite or NaN value makes its block NaN, also where the optimizer
    itself would go on: a loss scale around it skips steps with such gradients.

    Arrays that reach a factorization, as the factors of SOAP and Shampoo do, get 16
    bits. In 8 bits Muon's momentum, which reaches matrix products, costs 0.03% of the
    loss of a small transformer; `product_bits=16` gives such arrays 16. They also have
    16 bits without column scales, since this figure depends on them.

    These arrays are not quantized:

    - arrays of fewer than `min_size` elements: norms, biases, factored moments of small
      matrices;
    - arrays that are not float32, such as counts, or the moments of 16-bit params
      outside of `mixed_precision`;
    - arrays that start as the params, such as masters and averages of the params;
    - arrays that an optimizer computes the params themselves from, not a step;
      histories of params or gradients; and arrays that the optimizer does not read
      itself. These are in the states of MADGRAD, COCOB and L-BFGS, and the gradient
      that a line search keeps. Tracing the update finds them in any optimizer.

    Args:
        inner: any optax optimizer or chain.
        bits: 8 or 16.
        block_size: how many values share a scale of 2 bytes; a power of two. Smaller
            where 2, 4 or 8 shards would split a block: 16 along an axis of 128, 8 along
            one of 2880. Larger along a few axes, up to an eighth: 257 of 2056, where
            nothing else divides.
        dtype: bfloat16, to store arrays in that instead of in blocks of codes.
        min_size: the number of elements that an array needs to be quantized.
        seed: for stochastic rounding; None rounds to nearest. An integer, traced where
            each member of a `vmap` needs its own random numbers.
        product_bits: at least this many bits for arrays that reach a matrix product;
            None for `bits`, or 16 without column scales.
        column_scales: whether small columns are stored times a power of two. It takes a
            byte for each column of a group of rows, 0.016 bytes per weight for Adam.
            Without, small columns between large ones are lost, and the state has the
            form of older checkpoints.

    Returns:
        The transformation, for use with or without `mixed_precision` around it.

    Raises:
        TypeError: if `inner` is not a gradient transformation, `seed` or `min_size` is
            not an integer, or `column_scales` is not a bool.
        ValueError: if `bits`, `block_size`, `dtype` or `product_bits` is none of the
            above. `init` raises it if the state may hold a history, but the update
            needs arguments that optax does not know, so that it cannot be traced.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> adamw = optax_mp.low_bit_state(optax.adamw(1e-3))
        >>> tx = optax_mp.mixed_precision(adamw, storage=optax_mp.Split(bits=8))
        >>> params = {"w": jnp.ones((1024, 256), jnp.bfloat16)}
        >>> report = optax_mp.memory_report(tx.init(params), params)
        >>> round(report.bytes_per_weight, 3)
        5.141

    References:
        Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022,
        https://arxiv.org/abs/2110.02861
    """
    inner = as_transformation(inner, _CALLER)
    update = partial(update_inner, inner, _CALLER)
    code_format = CodeFormat.from_settings(
        bits, block_size, dtype, product_bits, column_scales
    )
    make_state = type_with(LowBitState, "code_format", code_format)
    check_seed(seed, _CALLER, ", or None to round to nearest")
    check_whole_number("low_bit_state: `min_size`", min_size, least=0)

    def init_fn(params: optax.Params) -> LowBitState:
        state = place_like_params(inner.init(params), params)
        chosen = choose_codes(inner, params, state, code_format, min_size)
        _warn_if_mostly_wide(state, chosen, min_size)
        slots, treedef = flatten_slots(state)
        for i, (path, _) in enumerate(tree_leaves_with_path(state)):
            if (code := chosen[i]) is not None:
                slots[i] = _quantize_slot(slots[i], code, spell(path))
        # Placed again, because zeros depend on nothing.
        state = place_like_params(treedef.unflatten(slots), params)
        return make_state(jnp.zeros((), jnp.int32), copy_shared(state, params))

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, LowBitState]:
        check_own_state(state, LowBitState, _CALLER, code_format=code_format)
        check_gradients(params, updates, _CALLER)
        before = jax.tree.map(dequantize, state.inner_state, is_leaf=is_quantized)
        updates, after = update(updates, before, params, **extra_args)
        inner_state = _quantize_again(after, state, seed)
        count = jnp.asarray(optax.safe_increment(state.step_count))
        return updates, make_state(count, inner_state)

    return Transformation.around(_CALLER, inner, init_fn, update_fn, is_leafwise=True)


def _warn_if_mostly_wide(
    state: PyTree, chosen: Sequence[Code | None], min_size: int
) -> None:
    """Warn if less than half of a large state is stored in codes.

    Args:
        state: the state of the inner optimizer.
        chosen: how each of its leaves is quantized, or None.
        min_size: the number of elements that an array needs for that.
    """
    leaves = tree_leaves_with_path(state)
    sizes = [leaf.size if is_floating(leaf) else 0 for _, leaf in leaves]
    wide = [i for i, code in enumerate(chosen) if code is None]
    total = sum(sizes)
    coded = total - sum(sizes[i] for i in wide)
    if total < _LARGE_STATE or 2 * coded >= total:
        return
    path, leaf = leaves[max(wide, key=sizes.__getitem__)]
    warn(
        f"low_bit_state: {coded / total:.0%} of the {total:,} numbers of the state are "
        f"stored in codes; the largest array that is not is {spell(path)} "
        f"{describe(leaf)}. Arrays of fewer than `min_size` ({min_size}) elements, "
        "other dtypes than float32, histories and weights stay as they are."
    )


def _quantize_slot(slot: Any, code: Code, where: str) -> Any:
    """Return an array of a state in codes; both codes and scales in boxes like its own.

    If a box takes no array of another shape, the array is stored in bfloat16.

    Args:
        slot: the array, in its box if it has one.
        code: how it is quantized.
        where: its path.
    """
    leaf = unbox(slot)
    zeros = quantized_zeros(leaf, code)
    # Without the barrier XLA computes all of these constants while it compiles a jitted
    # `init`, which takes seconds for a million values.
    leaf, zeros = jax.lax.optimization_barrier((leaf, zeros))
    codes, *others = quantize(leaf, zeros, None)
    divides = divides_names(slot)
    try:
        boxed = [x if x is None else put_resized(slot, x, divides) for x in others]
    except (ValueError, TypeError, AssertionError) as error:
        warn(
            f"low_bit_state: expected {where}, {describe(leaf)}, in a pytree node that "
            f"takes any shape, got a {type(slot).__name__}, which takes no scales "
            f"{describe(others[0])} ({error}), so it is stored in bfloat16."
        )
        return _quantize_slot(slot, BFLOAT16, where)
    return new_quantized(code, put(slot, codes), *boxed)


def _quantize_again(after: PyTree, state: LowBitState, seed: Any) -> PyTree:
    """Return the new inner state, quantized where the one in `state` is."""
    # By path: a state may gain leaves at the first step, as the state of
    # `optax.monitor` does.
    nodes = tree_leaves_with_path(state.inner_state, is_leaf=is_quantized)
    old = {path: node for path, node in nodes if is_quantized(node)}
    keys = {}
    if seed is not None:
        all_keys = rounding_keys(len(old), seed, _SALT, state.step_count)
        keys = dict(zip(old, all_keys, strict=True))

    def quantize_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
        return quantize(leaf, old[path], keys.get(path)) if path in old else leaf

    return tree_map_with_path(quantize_leaf, after, is_leaf=is_box)
