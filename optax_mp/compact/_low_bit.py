"""low_bit_state: the large arrays of any optimizer's state in 8 or 16 bits."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_leaves_with_path, tree_map_with_path

from optax_mp.compact import _codes, _quantized
from optax_mp.compact._code_choice import choose_codes
from optax_mp.compact._rounding import check_seed
from optax_mp.compact._scales_in_boxes import box_scales
from optax_mp.core import _dtypes
from optax_mp.core._random_numbers import rounding_keys
from optax_mp.core._warnings import warn
from optax_mp.core.jax_api import _arrays
from optax_mp.core.trees import _boxes, _states, _tree
from optax_mp.core.trees._descriptions import place_like_params
from optax_mp.core.trees._typed import type_with
from optax_mp.core.wrappers import _arguments, _protocol
from optax_mp.core.wrappers._mistakes import check_whole_number

_CALLER = "low_bit_state"
# So that the random numbers differ from the numbers of `stochastic_rounding` with the
# same seed.
_SALT = 1
# Elements, 4 MB in float32: below that nobody needs the memory.
_LARGE_STATE = 2**20


@_states.own_state
class LowBitState(NamedTuple):
    """State of `low_bit_state`.

    Its structure, shapes and dtypes never change.

    Attributes:
        step_count: int32 `[]`, the number of updates. Stochastic rounding draws new
            random numbers at each one.
        inner_state: the state of the inner optimizer, with a `Quantized` in place of
            each large array. Its public fields, such as `hyperparams`, are attributes
            of this state.
        bits: the setting that made the state; a class attribute, not a leaf.

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
    bits = None
    __getattr__ = _states.inner_field


def low_bit_state(
    inner: optax.GradientTransformation,
    *,
    bits: int = 8,
    min_size: int = 4096,
    seed: int | jax.Array | None = 0,
) -> optax.GradientTransformationExtraArgs:
    """Quantize the large float32 arrays of `inner`'s state.

    Moments, traces and accumulators are decoded before the inner update and encoded
    after it, so `inner` can be any optimizer and computes in float32. Each line of a
    matrix has one scale, the largest value in it. A code is a root of the value divided
    by the scale. In 8 bits it is the fourth root, and the eighth for second moments:
    values down to 4e-9 of the largest in their line are told apart, and near the
    largest two neighbouring codes are 3% apart. In 16 bits it is the second root, and
    the fourth for second moments, and neighbouring codes are 6e-5 apart.

    A line goes along the last axis. If the last axis is more than 8 times longer than
    the axis before it, and that axis has at least 128 values, as in a head over a
    vocabulary, the line goes along that axis. Leading axes are batches: of layers,
    experts, heads. If lines would have fewer than 16 values, they go along the axis
    before, or along several. Arrays of one axis have one scale for 256 neighbours, and
    so have arrays of fewer than 128 rows of more than 8192 values.

    Rounding is at random, without bias. A moving average over a thousand steps changes
    by a thousandth per step, less than the distance between two codes, and would never
    move if it were rounded to nearest. The random numbers are a hash of position, step
    and `seed`, so a run can be reproduced, under `jit` on any number of devices. Under
    `shard_map` each rank counts positions in its own part; call `init` outside of it.
    Ranks that share a line share its scale, if types say which ranks these are: with
    `check_vma=False` each rank must have whole lines.

    Codes have no derivative. `jax.grad` through several updates misses the effect of a
    gradient on later steps through the moments. Through three steps of Adam, the
    derivative of the loss with respect to the learning rate is right within 1%, but the
    derivative with respect to the first gradient is wrong: compute it without
    `low_bit_state`.

    An infinite or NaN value makes its whole line NaN, even if the optimizer itself
    could go on. A loss scale around it skips steps with such gradients.

    A trace of the update decides which arrays are quantized:

    - An array under a root by itself, such as a second moment, gets unsigned codes, and
      a value above 0 stays above 0.
    - An array that decays, such as a first moment, gets signed codes.
    - An array that reaches a matrix product or a factorization, as Muon's momentum and
      the factors of Shampoo do, gets 16 bits.
    - All others stay unchanged: histories, positions, counts, weights; both arrays of a
      difference under a root, as in a centered second moment; arrays of fewer than
      `min_size` elements; arrays that are not float32, such as the moments of 16-bit
      params outside of `mixed_precision`. If the update cannot be traced, all arrays
      stay unchanged, with a warning.

    Args:
        inner: any optax optimizer or chain.
        bits: 8 or 16.
        min_size: the number of elements that an array needs to be quantized.
        seed: an integer for the random numbers, traced if each member of a `vmap` needs
            its own. None rounds to nearest: averages then stop where a step is less
            than half the distance between two codes, and the largest value of a line
            never decays.

    Returns:
        The transformation, for use with or without `mixed_precision` around it.

    Raises:
        TypeError: if `inner` is not a gradient transformation, or `seed` or `min_size`
            is not an integer.
        ValueError: if `bits` is not 8 or 16.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> adamw = optax_mp.low_bit_state(optax.adamw(1e-3))
        >>> tx = optax_mp.mixed_precision(adamw, storage=optax_mp.Split(bits=8))
        >>> params = {"w": jnp.ones((1024, 256), jnp.bfloat16)}
        >>> report = optax_mp.memory_report(tx.init(params), params)
        >>> round(report.bytes_per_weight, 3)
        5.016

    References:
        Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022,
        https://arxiv.org/abs/2110.02861
    """
    inner = _protocol.as_transformation(inner, _CALLER)
    update = partial(_protocol.update_inner, inner, _CALLER)
    if check_whole_number("low_bit_state: `bits`", bits) not in (8, 16):
        raise ValueError(
            f"low_bit_state: expected `bits` to be 8 or 16, got {bits}; pass 8 for the "
            "smallest state, 16 for the more exact one."
        )
    make_state = type_with(LowBitState, "bits", int(bits))
    check_seed(seed, _CALLER, ", or None to round to nearest")
    check_whole_number("low_bit_state: `min_size`", min_size, least=0)

    def init_fn(params: optax.Params) -> LowBitState:
        state = place_like_params(inner.init(params), params)
        chosen = choose_codes(inner, params, state, bits, min_size)
        slots, treedef = _boxes.flatten_slots(state)
        for i, code in enumerate(chosen):
            if code is not None:
                slots[i] = _quantize_slot(slots[i], code)
        _warn_if_mostly_wide(state, slots, min_size)
        # Placed again, because zeros depend on nothing.
        state = place_like_params(treedef.unflatten(slots), params)
        return make_state(jnp.zeros((), jnp.int32), _tree.copy_shared(state, params))

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, LowBitState]:
        _arguments.check_own_state(state, LowBitState, _CALLER, bits=bits)
        _arguments.check_gradients(params, updates, _CALLER)
        before = jax.tree.map(
            _codes.decode, state.inner_state, is_leaf=_quantized.is_quantized
        )
        updates, after = update(updates, before, params, **extra_args)
        inner_state = _encode_again(after, state, seed)
        count = jnp.asarray(optax.safe_increment(state.step_count))
        return updates, make_state(count, inner_state)

    return _protocol.Transformation.of(_CALLER, init_fn, update_fn)


def _warn_if_mostly_wide(
    state: _tree.PyTree, slots: Sequence[Any], min_size: int
) -> None:
    """Warn if less than half of a large state is stored in codes.

    Args:
        state: the state of the inner optimizer.
        slots: what is stored in place of each of its leaves.
        min_size: the number of elements that an array needs for that.
    """
    leaves = tree_leaves_with_path(state)
    sizes = [leaf.size if _dtypes.is_floating(leaf) else 0 for _, leaf in leaves]
    wide = [i for i, slot in enumerate(slots) if not _quantized.is_quantized(slot)]
    total = sum(sizes)
    coded = total - sum(sizes[i] for i in wide)
    if total < _LARGE_STATE or 2 * coded >= total:
        return
    path, leaf = leaves[max(wide, key=sizes.__getitem__)]
    warn(
        f"low_bit_state: {coded / total:.0%} of the {total:,} numbers of the state are "
        f"stored in codes, and {_tree.spell(path)} {_arrays.describe(leaf)} is not; "
        f"only float32 moments of `min_size` ({min_size}) elements or more can be."
    )


def _quantize_slot(slot: Any, code: _quantized.Code) -> Any:
    """Return an array of a state in codes; both codes and scales in boxes like its own.

    Args:
        slot: the array, in its box if it has one.
        code: how it is quantized.
    """
    leaf = _boxes.unbox(slot)
    zeros = _codes.zeros_in(code, leaf)
    # Without the barrier XLA computes all of these constants while it compiles a jitted
    # `init`, which takes seconds for a million values.
    leaf, zeros = jax.lax.optimization_barrier((leaf, zeros))
    codes, scales = _codes.encode(leaf, zeros, None)
    return _quantized.new_quantized(
        code, _boxes.in_box_like(slot, codes), box_scales(slot, scales)
    )


def _encode_again(after: _tree.PyTree, state: LowBitState, seed: Any) -> _tree.PyTree:
    """Return the new inner state, in codes where the one in `state` is."""
    # By path: a state may gain leaves at the first step, as the state of
    # `optax.monitor` does.
    nodes = tree_leaves_with_path(state.inner_state, is_leaf=_quantized.is_quantized)
    old = {path: node for path, node in nodes if _quantized.is_quantized(node)}
    keys = {}
    if seed is not None:
        all_keys = rounding_keys(len(old), seed, _SALT, state.step_count)
        keys = dict(zip(old, all_keys, strict=True))

    def encode_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
        return _codes.encode(leaf, old[path], keys.get(path)) if path in old else leaf

    return tree_map_with_path(encode_leaf, after, is_leaf=_boxes.is_box)
